"""One of our roles, shown to a host as a connector of the one-class shape.

A connector of ours for such hosts is a subclass that builds its role and hands it over:

    class MyConnector(RolesAsV1):
        def __init__(self, vllm_config, role, kv_cache_config=None):
            scheduler, worker = build(vllm_config, role)
            super().__init__(vllm_config, role, kv_cache_config, scheduler=scheduler, worker=worker)

A host that wants its own base class gets `OneRole` mixed into that, with the host's own types.
Both roles run behind the guard (`kvferry.contract.guard`), and what the worker reports is held to
the rules of `kvferry.contract.reports`, since these hosts drive the steps themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.connectors.v1_halves import SchedulerHalf, WorkerHalf
from kvferry.connectors.v1_host import HostRequests
from kvferry.contract.messages import EMPTY_OUTPUT, MISS, WorkerMeta
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.v1 import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    V1Blocks,
    V1Config,
    V1ForwardContext,
    V1Request,
    V1SchedulerOutput,
)
from kvferry.contract.v1_messages import CarriedMeta, CounterStats, PlanMetadata
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Observer

if TYPE_CHECKING:
    import torch


def _results(sending: set[str], recving: set[str], failed: set[str]) -> object:
    return KVConnectorOutput(
        finished_sending=sending, finished_recving=recving, failed_recving=failed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTypes:
    """The classes of which a host wants what a connector returns.

    Attributes:
        make_stats: from counters and, on hosts that carry no worker metadata of its own, the
            metadata that rides along.
        make_results: from sending, recving and failed ids: the answer of `get_transfer_results`.
        no_results: the answer of most steps, one for all of them, which nobody can write ids into;
            None: a new one each time.
        carries_worker_meta: whether the host asks for `build_connector_worker_meta`.
    """

    make_stats: Callable[[dict[str, float], CarriedMeta | None], Any] = lambda counts, _meta: (
        CounterStats(counts)
    )
    make_results: Callable[[set[str], set[str], set[str]], Any] = _results
    no_results: Any = None
    carries_worker_meta: bool = True


class OneRole:
    """What a connector of the one-class shape does, whatever its base class: holds a scheduler role
    or a worker role, never both, and translates. `attach` comes first.

    A subclass whose roles handle several KV groups adds the host's `SupportsHMA` to its bases; the
    method it asks for is here.
    """

    host_types: ClassVar[HostTypes] = HostTypes()

    _connector_metadata: Any
    """Base classes answer `has_connector_metadata` from it, which hosts ask around each layer."""
    _quiet: PlanMetadata
    _quiet_without_tokens: PlanMetadata

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - the host's
        # Hooks run with cold caches, since a forward lies between two steps: every object they look
        # at costs 0.1 to 0.5 us. In a step without news, as most are, they look at little more than
        # these attributes, which lie side by side, and at what the step brings.
        #
        # _worker_idle: nothing is under way in the worker role: quiet steps are not for it.
        # _step: the worker half, in a step in which it has a part.
        # _scheduler_idle: the last step told the scheduler role nothing, nothing did since, and
        # nothing is under way in it.
        # _error_before: what the caller was handling when the step began; hosts may do that in an
        # error's handler.
        self._worker_idle = False
        self._step: WorkerHalf | None = None
        self._no_results = self.host_types.no_results
        self._scheduler_idle = self._tells_preempted = self._tells_empty = False
        self._connector_metadata = None
        self._error_before: BaseException | None = None
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        super().__init__(*args)

    def attach(
        self,
        role_name: str,
        scheduler: SchedulerRole | None,
        worker: WorkerRole | None,
        *,
        block_size: int,
        observer: Observer | None,
    ) -> None:
        """Take the role that the host asked for.

        Args:
            role_name: "SCHEDULER" or "WORKER".
            scheduler: the role for the former, else None.
            worker: the role for the latter, else None.
            block_size: promises are multiples of it, in tokens.
            observer: receives counts of faults and violations.

        Raises:
            ConfigError: not exactly the role that was asked for.
        """
        given = (scheduler is not None, worker is not None)
        if given != (role_name == "SCHEDULER", role_name == "WORKER"):
            raise ConfigError(
                f"the host asks for the {role_name} half; given: scheduler={scheduler!r}, "
                f"worker={worker!r}. Build that half, and only that"
            )
        if scheduler is not None:
            self._scheduler_half = SchedulerHalf(
                scheduler,
                HostRequests(self._lora_identity, self._item_identity),
                block_size,
                observer,
            )
            self._quiet, self._quiet_without_tokens = self._scheduler_half.quiet
        if worker is not None:
            self._worker_half = WorkerHalf(worker, observer)

    def _lora_identity(self, lora_request: object) -> str | None:
        """The identity of an adapter's content; None, as here: requests under it are not cached."""
        return None

    def _item_identity(self, identifier: str) -> str | None:
        """The identity of a multimodal item from the host's name for it, here that name; None:
        requests with it are not cached."""
        return identifier

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise ContractError("a scheduler-side method was called on a connector built as WORKER")
        return self._scheduler_half

    @property
    def _awake(self) -> SchedulerHalf:
        """The scheduler half, for a hook that tells it something."""
        self._scheduler_idle = False
        return self._scheduler

    @property
    def _worker(self) -> WorkerHalf:
        if self._worker_half is None:
            raise ContractError("a worker-side method was called on a connector built as SCHEDULER")
        return self._worker_half

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.role.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        if (
            self._worker_idle
            and isinstance(connector_metadata, PlanMetadata)
            and connector_metadata.is_quiet
        ):
            return  # bound to nothing, for which hosts leave out the hooks around layers
        half = self._worker
        self._worker_idle = False
        if self._step is not None:  # never ended by the host
            self._step.end()
            self._step = self._error_before = None
        self._error_before = sys.exc_info()[1]
        self._step = half if half.begin(connector_metadata) else None
        self._connector_metadata = connector_metadata

    def start_load_kv(self, forward_context: V1ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        if self._step is not None:
            self._step.role.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._step is not None and self._step.layers is not None:
            self._step.layers.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - the host's
        **kwargs: Any,  # noqa: ANN401 - the host's
    ) -> None:
        if self._step is not None and self._step.layers is not None:
            self._step.layers.save_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        # Hosts call this on their way out of a forward that raised, too: its blocks hold anything.
        if self._step is not None and sys.exc_info()[1] in (None, self._error_before):
            self._step.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._step is None:
            return None, None
        output = self._step.collect(finished_req_ids)
        return set(output.finished_sending) or None, set(output.finished_recving) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401 - the host's
        if self._step is None:
            if self._no_results is not None:
                return self._no_results
            return self.host_types.make_results(set(), set(), set())
        output = self._step.collect(finished_req_ids)
        return self.host_types.make_results(
            set(output.finished_sending), set(output.finished_recving), set(output.failed_recving)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._step is None else set(self._step.output.invalid_block_ids)

    def get_kv_connector_stats(self) -> Any:  # noqa: ANN401 - the host's
        meta: WorkerMeta | None = None
        if self._scheduler_half is not None:
            counts = self._scheduler_half.role.take_stats()
        else:
            output = EMPTY_OUTPUT if self._step is None else self._step.output
            counts = output.stats
            meta = None if self.host_types.carries_worker_meta else output.meta
        if not counts and meta is None:
            return None
        carried = None if meta is None else CarriedMeta(meta)
        return self.host_types.make_stats(dict(counts or {}), carried)

    def get_kv_connector_kv_cache_events(self) -> object | None:
        return None if self._step is None else self._step.output.events

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        meta = None if self._step is None else self._step.output.meta
        return None if meta is None else CarriedMeta(meta)

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None
        if self._step is not None:
            self._worker_idle = self._step.end()
            self._step = self._error_before = None

    # Scheduler side.

    def on_new_request(self, request: V1Request) -> None:
        half = self._awake
        half.role.on_new_request(half.requests.view(request))

    def get_num_new_matched_tokens(
        self, request: V1Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._awake
        view = half.requests.view(request)
        return half.role.lookup(view, num_computed_tokens) if view.may_read else MISS

    def update_state_after_alloc(
        self, request: V1Request, blocks: V1Blocks, num_external_tokens: int
    ) -> None:
        half = self._awake
        view = half.requests.view(request)
        table = half.requests.allocated(
            view.request_id, blocks.get_block_ids(), num_external_tokens
        )
        half.role.update_after_alloc(view, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: V1SchedulerOutput) -> KVConnectorMetadata:
        step: Any = scheduler_output  # not every host names preempted requests
        if self._scheduler_idle:
            # News: a request begins, goes on with other blocks, is preempted or has ended. Asked
            # here and not in `HostRequests`, as the call alone takes a third of this hook.
            added = step.scheduled_cached_reqs.new_block_ids
            if not (
                step.scheduled_new_reqs
                or step.finished_req_ids
                or added.count(None) != len(added)
                or (self._tells_preempted and step.preempted_req_ids)
            ):
                has_tokens = step.total_num_scheduled_tokens > 0
                return self._quiet if has_tokens else self._quiet_without_tokens
        half = self._scheduler
        metadata, self._scheduler_idle = half.plan(step)
        self._tells_preempted = half.requests.tells_preempted
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._scheduler_idle and self._tells_empty and connector_output.is_empty():
            return
        half = self._awake
        half.learn(connector_output)
        self._tells_empty = half.tells_empty

    def request_finished(
        self, request: V1Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: V1Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` for several KV groups; see `SupportsHMA`."""
        return self._request_finished(request, block_ids)

    def _request_finished(
        self, request: V1Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        half = self._awake
        result = half.role.request_finished(half.requests.view(request), block_ids)
        half.requests.forget(request.request_id)
        return result.delay_free, None if result.params is None else dict(result.params)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.role.take_events()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.role.has_pending_work()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def reset_cache(self) -> bool | None:
        return self._awake.role.reset()

    def shutdown(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.role.close()
        if self._worker_half is not None:
            self._worker_half.role.close()


class RolesAsV1(OneRole, KVConnectorBase_V1):
    """A scheduler role or a worker role as a V1 connector; never both in one instance."""

    def __init__(
        self,
        vllm_config: V1Config,
        role: KVConnectorRole,
        kv_cache_config: object | None = None,
        *,
        scheduler: SchedulerRole | None = None,
        worker: WorkerRole | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Show one role to the host; arguments as `OneRole.attach`.

        Raises:
            ConfigError: not exactly the role that was asked for.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        size = vllm_config.cache_config.block_size
        self.attach(role.name, scheduler, worker, block_size=size, observer=observer)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return CounterStats(dict(data or {}))
