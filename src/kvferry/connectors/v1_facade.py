"""One of our roles, shown to a host as a connector of the one-class shape.

A connector of ours for such hosts is a subclass that builds its role and hands it over:

    class MyConnector(RolesAsV1):
        def __init__(self, vllm_config, role, kv_cache_config=None):
            scheduler, worker = build(vllm_config, role)
            super().__init__(vllm_config, role, kv_cache_config, scheduler=scheduler, worker=worker)

Both roles run behind the guard (`kvferry.contract.guard`), and what the worker reports is held to
the rules of `kvferry.contract.reports`, since these hosts drive the steps themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from kvferry.connectors.v1_host import HostRequests
from kvferry.contract.abilities import SupportsLayerwise
from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerOutput
from kvferry.contract.reports import ReportRules
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
from kvferry.contract.v1_messages import CarriedMeta, CounterStats, PlanMetadata, to_v1_output
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Observer

if TYPE_CHECKING:
    import torch


class RolesAsV1(KVConnectorBase_V1):
    """A scheduler role or a worker role as a V1 connector; never both in one instance.

    A subclass whose roles handle several KV groups adds `SupportsHMA` to its bases; the method it
    asks for is here.
    """

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
        """Show one role to the host.

        Args:
            vllm_config: the host's configuration.
            role: which half the host asks for.
            kv_cache_config: the host's KV groups, or None.
            scheduler: the role for `KVConnectorRole.SCHEDULER`, else None.
            worker: the role for `KVConnectorRole.WORKER`, else None.
            observer: receives counts of faults and violations.

        Raises:
            ConfigError: not exactly the role that was asked for.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        given = (scheduler is not None, worker is not None)
        if given != (role is KVConnectorRole.SCHEDULER, role is KVConnectorRole.WORKER):
            raise ConfigError(
                f"the host asks for the {role.name} half; given: scheduler={scheduler!r}, "
                f"worker={worker!r}. Build that half, and only that"
            )
        self._scheduler_half = (
            None
            if scheduler is None
            else _SchedulerHalf(self, scheduler, vllm_config.cache_config.block_size, observer)
        )
        self._worker_half = None if worker is None else _WorkerHalf(worker, observer)

    def _lora_identity(self, lora_request: object) -> str | None:
        """The identity of an adapter's content; None, as here: requests under it are not cached."""
        return None

    @property
    def _scheduler(self) -> _SchedulerHalf:
        if self._scheduler_half is None:
            raise ContractError("a scheduler-side method was called on a connector built as WORKER")
        return self._scheduler_half

    @property
    def _worker(self) -> _WorkerHalf:
        if self._worker_half is None:
            raise ContractError("a worker-side method was called on a connector built as SCHEDULER")
        return self._worker_half

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.role.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, PlanMetadata):
            raise ContractError(
                f"the metadata is a {type(connector_metadata).__name__}, not a PlanMetadata: both "
                "halves of the connector must be of one class"
            )
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: V1ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        self._worker.role.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        layers = self._worker.layers
        if layers is not None and self._connector_metadata is not None:
            layers.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - the host's
        **kwargs: Any,  # noqa: ANN401 - the host's
    ) -> None:
        layers = self._worker.layers
        if layers is not None and self._connector_metadata is not None:
            layers.save_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        self._worker.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        output = self._worker.collect(finished_req_ids)
        return set(output.finished_sending) or None, set(output.finished_recving) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        return to_v1_output(self._worker.collect(finished_req_ids))

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._worker.output.invalid_block_ids)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._scheduler_half is None:
            return to_v1_output(self._worker.output).kv_connector_stats
        counts = self._scheduler_half.role.take_stats()
        return CounterStats(dict(counts)) if counts else None

    def get_kv_connector_kv_cache_events(self) -> object | None:
        events: object | None = self._worker.output.events
        return events

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return to_v1_output(self._worker.output).kv_connector_worker_meta

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.end()

    # Scheduler side.

    def on_new_request(self, request: V1Request) -> None:
        half = self._scheduler
        half.role.on_new_request(half.requests.view(request))

    def get_num_new_matched_tokens(
        self, request: V1Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        half = self._scheduler
        return half.role.lookup(half.requests.view(request), num_computed_tokens)

    def update_state_after_alloc(
        self, request: V1Request, blocks: V1Blocks, num_external_tokens: int
    ) -> None:
        half = self._scheduler
        view = half.requests.view(request)
        table = half.requests.allocated(
            view.request_id, blocks.get_block_ids(), num_external_tokens
        )
        half.role.update_after_alloc(view, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: V1SchedulerOutput) -> KVConnectorMetadata:
        half = self._scheduler
        plan = half.role.build_plan(half.requests.step(scheduler_output))
        return PlanMetadata(plan, scheduler_output.total_num_scheduled_tokens > 0)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        half = self._scheduler
        half.role.update_output(half.read_output(connector_output))

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
        half = self._scheduler
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
        return self._scheduler.role.reset()

    def shutdown(self) -> None:
        if self._scheduler_half is not None:
            self._scheduler_half.role.close()
        if self._worker_half is not None:
            self._worker_half.role.close()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return CounterStats(dict(data or {}))


_LATER_FIELDS = ("failed_recving", "kv_cache_events", "kv_connector_worker_meta")
"""Fields of an output that hosts before 0.13 or 0.32 do not have."""


class _SchedulerHalf:
    """What an instance in the scheduler's process holds."""

    def __init__(
        self,
        connector: RolesAsV1,
        role: SchedulerRole,
        block_size: int,
        observer: Observer | None,
    ) -> None:
        self.role = GuardedScheduler(role, observer, block_size=block_size)
        self.requests = HostRequests(connector._lora_identity)
        self._later_fields: frozenset[str] | None = None

    def read_output(self, output: KVConnectorOutput) -> WorkerOutput:
        """The host's output as a value of ours. Which of the later fields this host has is seen at
        the first one."""
        if self._later_fields is None:
            self._later_fields = frozenset(name for name in _LATER_FIELDS if hasattr(output, name))
        later = {
            name: getattr(output, name) if name in self._later_fields else None
            for name in _LATER_FIELDS
        }
        carried = later["kv_connector_worker_meta"]
        stats = output.kv_connector_stats
        return WorkerOutput(
            finished_sending=frozenset(output.finished_sending or ()),
            finished_recving=frozenset(output.finished_recving or ()),
            failed_recving=frozenset(later["failed_recving"] or ()),
            invalid_block_ids=frozenset(output.invalid_block_ids or ()),
            stats=None if stats is None else stats.data,
            events=later["kv_cache_events"],
            meta=carried.meta if isinstance(carried, CarriedMeta) else None,
        )


class _WorkerHalf:
    """What an instance in a worker process holds: the role, and its report on the step.

    These hosts ask for the parts of a report one by one; the role gives it once, and it stands
    from the first question to the end of the step.
    """

    def __init__(self, role: WorkerRole, observer: Observer | None) -> None:
        self.role = GuardedWorker(role, observer)
        self.layers = self.role if isinstance(self.role, SupportsLayerwise) else None
        self.output: WorkerOutput = EMPTY_OUTPUT
        self._rules = ReportRules(observer or Observer())
        self._metadata: PlanMetadata | None = None
        self._saved = False

    def begin(self, metadata: PlanMetadata) -> None:
        self._metadata = metadata
        self._saved = False
        self.output = EMPTY_OUTPUT
        self.role.begin_step(metadata.plan)
        self._rules.begin(self.role.planned_recving(metadata.plan))

    def save(self) -> None:
        self._saved = True
        self.role.save()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        metadata = self._metadata
        if metadata is None:
            raise ContractError("results were asked for outside of a step: bind metadata first")
        if not self._saved and not metadata.has_tokens:
            # Hosts before 0.32 leave wait_for_save out of steps without tokens. (With tokens, a
            # host that decodes speculatively may ask for results first and save later.)
            self.save()
        output = self.role.collect(finished_request_ids)
        self.output = self._rules.admit(
            output, finished_request_ids, lambda: self.role.planned_blocks(metadata.plan)
        )
        return self.output

    def end(self) -> None:
        self._metadata = None
        self.role.end_step()
