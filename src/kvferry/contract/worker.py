"""The worker half of a connector: moves bytes; makes no decision.

Runs in: one worker process per rank, on the model runner's thread. A worker never raises into the
host: a load that fails is reported as block ids or request ids in its output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.contract.promises import Reports

if TYPE_CHECKING:
    import torch


IDLE_WAIT_SECONDS = 0.01
"""Longest `wait` of a worker in a step without tokens. Hosts repeat such a step after about a
millisecond, and each time take the interpreter's lock from the threads that read. A request that
arrives meanwhile waits no longer than this, which is about a decode step."""


class WorkerRole(ABC):
    """The worker role of a connector, one per rank.

    Per step: `begin_step`, `start_load`, forward, `save`, `collect`, `end_step`.

    Hosts differ in when `start_load` comes (vLLM 0.32: after the forward if nothing in the step
    needs a sync load), so whatever `save` needs is prepared in `begin_step`.

    Attributes:
        rules: what the reports of the role must obey. By these, reports of requests are dropped: a
            role with async loads or delayed frees names others, as its scheduler role does.
    """

    rules: type[Reports] = Reports

    @abstractmethod
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Receive the engine's KV tensors in layer order: once, and again after
        `unregister_kv_caches`.

        Args:
            kv_caches: layer name to tensor; shapes by the connector's configured layout.

        Raises:
            LayoutError: a shape, stride or dtype that the layout does not allow.
        """

    def unregister_kv_caches(self) -> None:  # noqa: B027 - optional
        """Wait for copies under way and drop the engine's tensors. Their memory goes away; until
        they are registered again, loads fail and nothing is saved. Called between steps;
        idempotent. A role that keeps tensors must override it.

        Raises:
            TransferError: copies did not end in time, so the memory must stay.
        """

    @abstractmethod
    def begin_step(self, plan: Plan) -> None:
        """Bind the plan of this step, before any of its blocks is written. After this call the role
        does not touch blocks that the plan no longer owns (preempted, finished)."""

    @abstractmethod
    def start_load(self) -> None:
        """Load what the plan promised. Sync loads are complete when this returns, or reported as
        failed; async work is only started. A role that is `SupportsLayerwise` may leave the loads
        of a layer to its hook, if the host is known to call that. Runs in steps without tokens as
        well. An async load ends, or fails, within a deadline of the role, and writes to no blocks
        after it. If this raises, nothing that it started may write to engine blocks any more."""

    @abstractmethod
    def save(self) -> None:
        """Take what the plan wants saved out of the engine's blocks, after the forward. When this
        returns, the blocks may be overwritten or freed.

        Not called if the forward raised: the blocks then do not hold what the plan expects, and
        `end_step` without `save` abandons the saves of this step, those of layer hooks included.
        Nor may a role save what was computed in this step on top of a load that failed.
        """

    def wait(self, seconds: float) -> None:  # noqa: B027 - optional
        """Return when `collect` has something to report that a request waits for, when nothing of
        the kind is under way, or after `seconds`. Called in steps without tokens, before
        `collect`."""

    def note_failed_loads(self) -> None:  # noqa: B027 - optional
        """Note that loads of this step are reported as failed which the role may not know of: of a
        plan that was lost, or by a fault in one of its hooks. The host may have planned the next
        step before it hears of that, on blocks that were never filled: what such a step computes
        must not be saved. Called before `collect`, or after it if that raised."""

    @abstractmethod
    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Report and forget what ended since the last call. Each id is reported once.

        Args:
            finished_request_ids: every request that ended since the last step, including ids this
                connector never saw.
        """

    @property
    def is_idle(self) -> bool:
        """Whether, with the empty plan, no hook would do anything and `collect` would report
        nothing. The driver may then skip this role until a step has another plan."""
        return False

    @abstractmethod
    def end_step(self) -> None:
        """Unbind the plan."""

    @abstractmethod
    def close(self) -> None:
        """Stop. Idempotent; bounded in time even if an operation hangs; leaves no thread that can
        touch engine memory."""


@runtime_checkable
class SupportsLayerwise(Protocol):
    """A worker role that works around each attention layer. Needs eager or piecewise graphs."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the load of this layer is complete. Runs in: worker, before attention."""

    def save_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Take this layer's new KV. Runs in: worker, after attention."""
