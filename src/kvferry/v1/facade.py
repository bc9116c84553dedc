"""Adapts one of our roles to vLLM's V1 connector interface.

A connector of ours for V1 hosts is a subclass that builds the role of its half and passes it on:

    class MyConnector(RolesAsV1):
        def __init__(self, vllm_config, role, kv_cache_config=None):
            scheduler, worker = build(vllm_config, role)
            super().__init__(vllm_config, role, kv_cache_config, scheduler=scheduler, worker=worker)

For a host that requires its own base class, a connector inherits from `OneRole` and that class, and
returns the host's own types. A scheduler role runs behind its guard
(`kvferry.contract.guard_scheduler`); a driver (`kvferry.contract.driver`) takes a worker role
through its steps.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import EMPTY_OUTPUT
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Observer
from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.host import HostRequests, has_answer, only_continues
from kvferry.v1.types import (
    CounterStats,
    ForwardContext,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    PlanMetadata,
    SchedulerOutput,
    V1Blocks,
    V1Config,
    V1Request,
    from_v1_output,
)

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class SchedulerHalf(NamedTuple):
    """The state of an instance in the scheduler's process."""

    role: GuardedScheduler
    requests: HostRequests
    quiet: PlanMetadata
    """The metadata of all steps that bring nothing new to an idle role."""


class OneRole:
    """The methods of a V1 connector over one of our roles, for any base class. Call `attach` first:
    it takes a scheduler role or a worker role, never both.

    A subclass whose roles handle several KV groups adds the host's `SupportsHMA` to its bases.
    """

    _connector_metadata: Any
    """Base classes read it in `has_connector_metadata`, which hosts call around each layer."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - the host's
        self._half: SchedulerHalf | StepDriver | None = None
        self._step: StepDriver | None = None  # during a step that concerns the worker role
        self._quiet: PlanMetadata | None = None  # for quiet steps while the role has nothing new
        self._is_skipped = False  # the worker role was idle, and no plan but quiet ones came since
        self._saw_foreign = False
        # The exception that the caller was handling when the step began: a host may run steps
        # inside an `except` block.
        self._error_before: BaseException | None = None
        self._connector_metadata = None
        self._no_results: Any = None
        super().__init__(*args)

    def attach(
        self,
        role: SchedulerRole | WorkerRole,
        *,
        block_size: int,
        observer: Observer | None,
        requests: HostRequests | None = None,
    ) -> None:
        """Take the role that this instance shows to the host.

        Args:
            role: the scheduler role in the scheduler's process, the worker role in a worker.
            block_size: number of tokens; hits are multiples of it.
            observer: receives counts of faults and violations.
            requests: reads the host's requests for a scheduler role; None: as hosts without LoRA
                adapters and drafts have them.
        """
        if isinstance(role, SchedulerRole):
            # Quiet steps are not shown to the role.
            guarded = GuardedScheduler(role, observer, block_size=block_size, checks_host=False)
            quiet = PlanMetadata(guarded.empty_plan(), has_tokens=True, is_empty=True)
            self._half = SchedulerHalf(guarded, requests or HostRequests(), quiet)
        else:
            self._half = StepDriver(role, observer)

    def make_results(
        self, sending: AbstractSet[str], recving: AbstractSet[str], failed: AbstractSet[str]
    ) -> Any:  # noqa: ANN401
        """Make what `get_transfer_results` returns, in the host's type, from the ids."""
        return KVConnectorOutput(
            finished_sending=set(sending),
            finished_recving=set(recving),
            failed_recving=set(failed),
        )

    @property
    def _scheduler(self) -> SchedulerHalf:
        if not isinstance(self._half, SchedulerHalf):
            raise ContractError("a scheduler-side method was called on a connector built as WORKER")
        return self._half

    @property
    def _worker(self) -> StepDriver:
        if not isinstance(self._half, StepDriver):
            raise ContractError("a worker-side method was called on a connector built as SCHEDULER")
        return self._half

    def _woken(self) -> SchedulerHalf:
        """The scheduler half, for a hook that may give its role something to do."""
        self._quiet = None
        return self._scheduler

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.role.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        driver = self._worker
        if self._step is not None:  # the host did not end the last step
            self._step.end()
        self._step = self._connector_metadata = None
        if not isinstance(connector_metadata, PlanMetadata):
            if not self._saw_foreign:
                self._saw_foreign = True
                logger.warning(
                    "the host bound a %s, which the other half of this connector did not make: "
                    "nothing is loaded or saved in such steps",
                    type(connector_metadata).__name__,
                )
            return
        self._is_skipped = connector_metadata.is_empty and (self._is_skipped or driver.is_idle)
        if self._is_skipped:
            return
        driver.begin(connector_metadata.plan, has_tokens=connector_metadata.has_tokens)
        self._step, self._error_before = driver, sys.exc_info()[1]
        # Without bound metadata, hosts skip the hooks around layers.
        if driver.layerwise is not None:
            self._connector_metadata = connector_metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        if self._step is not None:
            self._step.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        layers = None if self._step is None else self._step.layerwise
        if layers is not None:
            layers.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - the host's
        **kwargs: Any,  # noqa: ANN401 - the host's
    ) -> None:
        layers = None if self._step is None else self._step.layerwise
        if layers is not None:
            layers.save_layer(layer_name, kv_layer, attn_metadata)

    def wait_for_save(self) -> None:
        # Hosts also call this after a forward that raised; its blocks then hold arbitrary bytes.
        if self._step is not None and sys.exc_info()[1] in (None, self._error_before):
            self._step.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._step is None:
            return None, None
        output = self._step.collect(finished_req_ids)
        return set(output.finished_sending) or None, set(output.finished_recving) or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401 - the host's
        output = EMPTY_OUTPUT if self._step is None else self._step.collect(finished_req_ids)
        if output is EMPTY_OUTPUT:
            if self._no_results is None:
                none: frozenset[str] = frozenset()  # shared by all steps
                self._no_results = self.make_results(none, none, none)
            return self._no_results
        return self.make_results(
            set(output.finished_sending), set(output.finished_recving), set(output.failed_recving)
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._step is None else set(self._step.output.invalid_block_ids)

    def get_kv_connector_stats(self) -> Any:  # noqa: ANN401 - the host's
        if isinstance(self._half, SchedulerHalf):
            counts = self._half.role.take_stats()
        else:
            counts = None if self._step is None else self._step.output.stats
        return CounterStats(dict(counts)) if counts else None

    def get_kv_connector_kv_cache_events(self) -> object | None:
        return None if self._step is None else self._step.output.events

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._step is None else self._step.output.meta

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None
        if self._step is not None:
            self._step.end()
            self._step = self._error_before = None

    # Scheduler side.

    def on_new_request(self, request: V1Request) -> None:
        role, requests, _ = self._woken()
        role.on_new_request(requests.view(request))

    def get_num_new_matched_tokens(
        self, request: V1Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        role, requests, _ = self._woken()
        view = requests.view(request, is_lookup=True)
        return (None, False) if requests.waits(view) else role.lookup(view, num_computed_tokens)[:2]

    def update_state_after_alloc(
        self, request: V1Request, blocks: V1Blocks, num_external_tokens: int
    ) -> None:
        role, requests, _ = self._woken()
        view = requests.view(request)
        table = requests.allocated(view, blocks.get_block_ids(), num_external_tokens)
        role.update_after_alloc(view, table, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self._quiet is not None and only_continues(scheduler_output):
            return self._quiet
        role, requests, quiet = self._woken()
        if role.is_idle and only_continues(scheduler_output):
            self._quiet = quiet
            return quiet
        plan = role.build_plan(requests.step(scheduler_output))
        return PlanMetadata(plan, scheduler_output.total_num_scheduled_tokens > 0)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        output = from_v1_output(connector_output)
        if output is not EMPTY_OUTPUT:
            self._woken().role.update_output(output)

    def request_finished(
        self, request: V1Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: V1Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` for several KV groups; see `SupportsHMA`."""
        role, requests, _ = self._woken()
        result = role.request_finished(requests.view(request), block_ids)
        requests.forget(request.request_id)
        params = result.params if has_answer(request) else None
        return result.delay_free, None if params is None else dict(params)

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.role.take_events()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.role.has_work()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def reset_cache(self) -> bool | None:
        return self._woken().role.reset()

    def shutdown(self) -> None:
        if isinstance(self._half, SchedulerHalf):
            self._half.role.close()
        elif self._half is not None:
            self._half.close()


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
        """Show `scheduler` or `worker` to the host, the one that `role` names; the other is None.
        The observer receives counts of faults and violations.

        Raises:
            ConfigError: not exactly the role that the host asks for.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        wanted, other = (scheduler, worker) if role.name == "SCHEDULER" else (worker, scheduler)
        if wanted is None or other is not None:
            raise ConfigError(
                f"the host asks for the {role.name} half; given: scheduler={scheduler!r}, "
                f"worker={worker!r}. Build that half, and only that"
            )
        self.attach(wanted, block_size=vllm_config.cache_config.block_size, observer=observer)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return CounterStats(dict(data or {}))
