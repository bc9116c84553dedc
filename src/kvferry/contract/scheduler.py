"""The scheduler half of a connector: decides what to load and save; never sees a tensor.

Runs in: the scheduler's process, one thread, inside `schedule()` and the handling of outputs. No
method may block, do I/O or hold a lock across either; every method is bookkeeping in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from kvferry.contract.messages import FREE_NOW, FinishResult, LookupResult, Plan, WorkerOutput
from kvferry.contract.promises import Promises
from kvferry.types import BlockTable, RequestView, StepView


class SchedulerRole(ABC):
    """The scheduler role of a connector, one per engine. Call order per request: `on_new_request`,
    `lookup` (any number of times), `update_after_alloc`, `build_plan` (every step),
    `request_finished` (once).

    Attributes:
        rules: what the guard remembers of the role's promises. By these, async loads and delayed
            frees are refused: a role that has them names others, as its worker role does.
    """

    rules: type[Promises] = Promises

    def on_new_request(self, request: RequestView) -> None:  # noqa: B027 - optional
        """The host queued a request. Bookkeeping only; hosts before vLLM 0.27 never call it, so
        `lookup` must work without."""

    @abstractmethod
    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        """How many tokens beyond `num_local_tokens` can be loaded. No side effect on the host.

        Called on every scan of the waiting queue until the request is admitted, again after
        preemption (then `request.all_token_ids` includes generated tokens) and again after a failed
        load. The answer may be thrown away, so nothing irrevocable may happen here.

        Rules the host enforces or dies by:
        - The count is >= 0 (a negative one silently corrupts vLLM's scheduler).
        - `num_local_tokens + count` is at most `len(all_token_ids)`, and at most one less for a
          sync load: the last token is always computed.
        - The count is a multiple of the block size.
        - `(0, True)` is illegal.
        - `None` means that a hit is on its way, or that it is still being found out whether there
          is one. Never without a deadline of the connector's own: nothing else bounds the retries.
        """

    @abstractmethod
    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        """Blocks for `request` were allocated. Mutates.

        Called after every successful allocation of a waiting request, also with 0 external tokens,
        and once more with 0 when an async load has ended. Decide on `num_external_tokens` only,
        never on emptiness of `block_ids`.

        Args:
            request: the request that was admitted.
            block_ids: all its blocks, local hit included, per KV group.
            num_external_tokens: what the last `lookup` promised, or 0.
        """

    @abstractmethod
    def build_plan(self, step: StepView) -> Plan:
        """Make the plan of this step. Mutates the connector's state, never `step`.

        Called exactly once at the end of every `schedule()`, also with nothing scheduled. With
        overlapping batches the plan of step N+1 is built before the output of step N arrives.
        """

    def empty_plan(self) -> Plan:
        """A plan that asks the workers for nothing. Side-effect free.

        It replaces a plan that could not be built, so it must be of the type that the worker role
        expects. Called once, at construction of the guard.
        """
        return Plan()

    @property
    def is_idle(self) -> bool:
        """Whether a step that begins, resumes, preempts and ends no request and adds no block would
        get the empty plan. The driver may then skip this role in such steps until it calls another
        hook of the role."""
        return False

    @abstractmethod
    def update_output(self, output: WorkerOutput) -> None:
        """Learn what the workers reported, aggregated over all ranks. Mutates."""

    def request_finished(self, request: RequestView, block_ids: BlockTable) -> FinishResult:
        """A request ended: stopped, aborted or failed. Mutates. Exactly once per request.

        Also called for requests that never ran (no blocks) and for requests aborted while loading.
        The worker must still report the end of such a load, so `delay_free` must be False: two
        reports for one id kill the host. Not called on preemption.
        """
        return FREE_NOW

    def take_events(self) -> Iterable[Any]:
        """Drain the KV events gathered since the last call."""
        return ()

    def take_stats(self) -> Mapping[str, float] | None:
        """Drain the counters of this role since the last call; None if nothing happened."""
        return None

    def has_work(self) -> bool:
        """True while the host must keep stepping for this connector although no request is
        scheduled (a prefetch or a delayed free under way). Always True: the engine never idles."""
        return False

    def reset(self) -> bool:
        """Forget what was stored (weights changed). True on success; saves under way must not
        bring old content back."""
        return True

    def close(self) -> None:  # noqa: B027 - optional
        """Release everything. Idempotent; bounded in time."""
