"""One of our roles, shown to a host as a V1 connector.

A connector of ours for such hosts is a subclass that builds its role and passes it on:

    class MyConnector(RolesAsV1):
        def __init__(self, vllm_config, role, kv_cache_config=None):
            scheduler, worker = build(vllm_config, role)
            super().__init__(vllm_config, role, kv_cache_config, scheduler=scheduler, worker=worker)

A connector for a host that requires its own base class inherits from `OneRole` and that class, and
returns the host's own types. Both roles run behind the guard (`kvferry.contract.guard`). Such hosts
drive the steps themselves, so the rules of `kvferry.contract.reports` are applied here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerMeta, WorkerOutput
from kvferry.contract.reports import ReportRules
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import IDLE_WAIT_SECONDS, SupportsLayerwise, WorkerRole
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Observer
from kvferry.v1.base import (
    CarriedMeta,
    CounterStats,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    PlanMetadata,
    V1Blocks,
    V1Config,
    V1ForwardContext,
    V1Request,
    V1SchedulerOutput,
)
from kvferry.v1.host import HostRequests, ReadableStep

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LATER_FIELDS = ("failed_recving", "kv_cache_events", "kv_connector_worker_meta")
"""Fields of a report that hosts before 0.13, 0.18 or 0.30 do not have."""


def _results(sending: set[str], recving: set[str], failed: set[str]) -> object:
    return KVConnectorOutput(
        finished_sending=sending, finished_recving=recving, failed_recving=failed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTypes:
    """The host's own types for the values that a connector returns.

    Attributes:
        make_stats: makes stats from counters and, on hosts without a carrier for worker metadata,
            the metadata that travels with them.
        make_results: makes the answer of `get_transfer_results` from sending, recving and failed
            ids.
        no_results: a shared, immutable answer for steps in which nothing ended; None for a new one
            each time.
        carries_worker_meta: whether the host asks for `build_connector_worker_meta`.
    """

    make_stats: Callable[[dict[str, float], CarriedMeta | None], Any] = lambda counts, _meta: (
        CounterStats(counts)
    )
    make_results: Callable[[set[str], set[str], set[str]], Any] = _results
    no_results: Any = None
    carries_worker_meta: bool = True


class SchedulerHalf:
    """The state of an instance in the scheduler's process.

    Attributes:
        role: behind its guard.
        requests: the host's requests, as our views.
        quiet: the metadata of steps in which nothing changes, with tokens and without.
        tells_empty: whether the host's reports have `is_empty`.
    """

    def __init__(
        self,
        role: SchedulerRole,
        requests: HostRequests,
        block_size: int,
        observer: Observer | None,
    ) -> None:
        self.role = GuardedScheduler(role, observer, block_size=block_size)
        self.requests = requests
        self._later_fields: frozenset[str] | None = None
        self.tells_empty = False
        empty = self.role.empty_plan()
        self.quiet = (
            PlanMetadata(empty, has_tokens=True, is_quiet=True),
            PlanMetadata(empty, has_tokens=False, is_quiet=True),
        )

    def plan(self, output: V1SchedulerOutput) -> tuple[PlanMetadata, bool]:
        """The step's metadata, and whether the role `is_idle`: the host can then leave it out of
        all steps until one brings a change."""
        step = self.requests.step(output)
        plan = self.role.build_plan(step)
        # An unreadable step also gives the empty plan, but the next step may be readable.
        is_empty = plan is self.quiet[0].plan and isinstance(step, ReadableStep)
        metadata = PlanMetadata(plan, output.total_num_scheduled_tokens > 0)
        return metadata, is_empty and self.role.is_idle

    def learn(self, output: KVConnectorOutput) -> None:
        """Pass the workers' report to the role."""
        self.role.update_output(self.read_output(output))

    def read_output(self, output: KVConnectorOutput) -> WorkerOutput:
        """The host's report as a value of ours. The first one shows which fields the host has."""
        if self._later_fields is None:
            self._later_fields = frozenset(name for name in _LATER_FIELDS if hasattr(output, name))
            self.tells_empty = hasattr(output, "is_empty")
        later = {
            name: getattr(output, name) if name in self._later_fields else None
            for name in _LATER_FIELDS
        }
        stats = output.kv_connector_stats
        carried = later["kv_connector_worker_meta"] or getattr(stats, "carried_meta", None)
        return WorkerOutput(
            finished_sending=frozenset(output.finished_sending or ()),
            finished_recving=frozenset(output.finished_recving or ()),
            failed_recving=frozenset(later["failed_recving"] or ()),
            invalid_block_ids=frozenset(output.invalid_block_ids or ()),
            stats=None if stats is None else stats.data,
            events=later["kv_cache_events"],
            meta=carried.meta if isinstance(carried, CarriedMeta) else None,
        )


class WorkerHalf:
    """The state of an instance in a worker process: the role, and its report on the step.

    Hosts ask for the parts of a report one by one; the role returns it once, so it is kept from the
    first question to the end of the step.

    Attributes:
        role: behind its guard.
        layers: the role, if it works around layers.
        output: the report on this step.
    """

    def __init__(self, role: WorkerRole, observer: Observer | None) -> None:
        self.role = GuardedWorker(role, observer)
        self.layers = self.role if isinstance(self.role, SupportsLayerwise) else None
        self.output: WorkerOutput = EMPTY_OUTPUT
        self._rules = ReportRules(observer or Observer())
        self._metadata: PlanMetadata | None = None
        self._saved = False
        self._saw_foreign = False

    def begin(self, metadata: object) -> bool:
        """Take a step's plan. False if another connector's scheduler half made it: this half then
        does nothing in the step, and its reports wait for the next one."""
        if not isinstance(metadata, PlanMetadata):
            if not self._saw_foreign:
                self._saw_foreign = True
                logger.warning(
                    "the host bound a %s, which the other half of this connector did not make: "
                    "nothing is loaded or saved in such steps",
                    type(metadata).__name__,
                )
            return False
        self._saved = False
        self.output = EMPTY_OUTPUT
        self._metadata = metadata
        self.role.begin_step(metadata.plan)
        self._rules.begin(self.role.planned_recving(metadata.plan))
        return True

    def save(self) -> None:
        self._saved = True
        self.role.save()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        metadata = self._metadata
        if metadata is None:
            return EMPTY_OUTPUT
        if not self._saved and not metadata.has_tokens:
            # Hosts before 0.30 do not call wait_for_save in steps without tokens. (In steps with
            # tokens, a host that decodes speculatively may ask for results before it saves.)
            self.save()
        if not metadata.has_tokens:
            self.role.wait(IDLE_WAIT_SECONDS)
        output = self.role.collect(finished_request_ids)
        self.output = self._rules.admit(
            output, finished_request_ids, lambda: self.role.planned_blocks(metadata.plan)
        )
        return self.output

    def end(self) -> bool:
        """End the step. True if nothing is under way: steps without a change can be left out."""
        self._metadata = None
        self.output = EMPTY_OUTPUT
        self.role.end_step()
        return self.role.is_idle and not self._rules.holds_reports


class OneRole:
    """The methods of a V1 connector over one of our roles, for any base class. `attach` comes
    first and brings a scheduler role or a worker role, never both.

    A subclass whose roles handle several KV groups adds the host's `SupportsHMA` to its bases; the
    method that it requires is here.
    """

    host_types: ClassVar[HostTypes] = HostTypes()

    _connector_metadata: Any
    """Base classes read it in `has_connector_metadata`, which hosts call around each layer."""
    _quiet: PlanMetadata
    _quiet_without_tokens: PlanMetadata

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - the host's
        # A forward between two steps evicts the CPU's caches, so every object that a hook reads
        # costs. In a quiet step hooks read little more than these attributes, which lie side by
        # side, and the step itself.
        #
        # _worker_idle: the worker role has nothing under way and needs no quiet steps.
        # _step: the worker half, during a step that concerns it.
        # _scheduler_idle: the scheduler role has nothing under way, and no hook has brought it a
        # change since.
        # _error_before: the exception that the caller was handling when the step began; a host may
        # run steps inside an `except` block.
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
        """Take the role that the host asks for.

        Args:
            role_name: "SCHEDULER" or "WORKER".
            scheduler: the role for "SCHEDULER", else None.
            worker: the role for "WORKER", else None.
            block_size: in tokens; hits are multiples of it.
            observer: receives counts of faults and violations.

        Raises:
            ConfigError: any other combination of roles.
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
        """The identity of a LoRA adapter's content. None: its requests are not cached."""
        return None

    def _item_identity(self, identifier: str) -> str | None:
        """The identity of a multimodal item's content, from the host's name for the item. None:
        its requests are not cached."""
        return identifier

    @property
    def _scheduler(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise ContractError("a scheduler-side method was called on a connector built as WORKER")
        return self._scheduler_half

    @property
    def _awake(self) -> SchedulerHalf:
        """The scheduler half, for a hook that brings it a change."""
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
            return  # without bound metadata, hosts skip the hooks around layers
        half = self._worker
        self._worker_idle = False
        if self._step is not None:  # the host did not end it
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
        # Hosts also call this after a forward that raised: its blocks hold arbitrary bytes.
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
        return half.role.lookup(view, num_computed_tokens)[:2] if view.may_read else (0, False)

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
            # A change: a request begins, gets blocks, is preempted or has ended. Read here and not
            # in `HostRequests`, because the call would take a third of this hook's time.
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
    """A scheduler role or a worker role as a V1 connector, for hosts that accept our base class."""

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
        """Show one role to the host; arguments as for `OneRole.attach`.

        Raises:
            ConfigError: not exactly the role that the host asks for.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        size = vllm_config.cache_config.block_size
        self.attach(role.name, scheduler, worker, block_size=size, observer=observer)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return CounterStats(dict(data or {}))
