"""A connector of the one-class shape, driven as our two roles.

Hosts of ours know two roles; `V1SchedulerRole` and `V1WorkerRole` are those of a connector written
against `KVConnectorBase_V1`. They translate and decide nothing; wrap them in the guards, which hold
the connector to the rules and catch what it raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvferry.contract.messages import (
    FinishResult,
    LookupResult,
    Plan,
    WorkerOutput,
)
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from kvferry.contract.v1_messages import from_v1_output, to_v1_output
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError, ContractError
from kvferry.runner.v1_views import (
    ForwardContext,
    HostBlocks,
    HostRequest,
    SchedulerOutput,
    StepHistory,
)
from kvferry.types import BlockTable, RequestView, StepView

if TYPE_CHECKING:
    import torch


class V1Plan(Plan, frozen=True, kw_only=True):
    """A connector's metadata, and what our contract wants to know of it.

    Attributes:
        metadata: what `build_connector_meta` returned; picklable if the connector is sound.
        has_tokens: False in a step without a forward.
        blocks: blocks that the step's loads fill.
        recving: requests whose async load starts; None if whoever built the plan does not know.
        preempted: requests that lost their blocks in this step.
    """

    metadata: Any
    has_tokens: bool = True
    blocks: frozenset[int] = frozenset()
    recving: frozenset[str] | None = frozenset()
    preempted: frozenset[str] = frozenset()


def require_role(connector: KVConnectorBase_V1, role: KVConnectorRole) -> None:
    """Refuse the wrong half of a connector.

    Raises:
        ConfigError: it was built for the other role.
    """
    if connector.role is not role:
        raise ConfigError(
            f"{type(connector).__name__} was built as {connector.role.name}, {role.name} is needed:"
            f" pass KVConnectorRole.{role.name} to its constructor"
        )


class V1SchedulerRole(SchedulerRole):
    """The scheduler half of a V1 connector. Runs in: scheduler."""

    def __init__(self, connector: KVConnectorBase_V1, *, block_size: int | None = None) -> None:
        """Drive `connector`.

        Args:
            connector: an instance built for `KVConnectorRole.SCHEDULER`.
            block_size: tokens per block; None: as the connector's configuration says.

        Raises:
            ConfigError: a connector for the other role.
        """
        require_role(connector, KVConnectorRole.SCHEDULER)
        self._connector = connector
        self._hma = connector if isinstance(connector, SupportsHMA) else None
        self._block_size = block_size or connector._vllm_config.cache_config.block_size
        self._requests: dict[str, HostRequest] = {}
        self._history = StepHistory()
        self._promised: dict[str, tuple[int, bool]] = {}  # last hit: local tokens, is it async
        self._blocks: set[int] = set()  # to be filled by loads of the next plan
        self._recving: set[str] = set()  # async loads that the next plan starts
        self._has_sync_loads = False  # the next plan has others
        self._empty_plan: V1Plan | None = None

    def _request(self, view: RequestView) -> HostRequest:
        request = self._requests.get(view.request_id)
        if request is None:
            request = self._requests[view.request_id] = HostRequest(view)
        request.view = view
        return request

    def on_new_request(self, request: RequestView) -> None:
        self._connector.on_new_request(self._request(request))

    def lookup(self, request: RequestView, num_local_tokens: int) -> LookupResult:
        count, is_async = self._connector.get_num_new_matched_tokens(
            self._request(request), num_local_tokens
        )
        if count is None:
            return LookupResult(None, False)
        self._promised[request.request_id] = (num_local_tokens, bool(is_async))
        return LookupResult(count, bool(is_async))

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        local, is_async = self._promised.pop(request.request_id, (0, False))
        if num_external_tokens > 0:
            size = self._block_size
            end = -(-(local + num_external_tokens) // size)
            for group in block_ids:
                self._blocks.update(group[local // size : end])
            if is_async:
                self._recving.add(request.request_id)
            else:
                self._has_sync_loads = True
        self._connector.update_state_after_alloc(
            self._request(request), HostBlocks(block_ids), num_external_tokens
        )

    def build_plan(self, step: StepView) -> Plan:
        for scheduled in step.scheduled:
            self._request(scheduled.request)
        described = self._history.describe(step, self._requests)
        described.has_sync_kv_loads = self._has_sync_loads
        self._has_sync_loads = False
        blocks, recving = frozenset(self._blocks), frozenset(self._recving)
        self._blocks.clear()
        self._recving.clear()
        metadata = self._connector.build_connector_meta(described)
        if metadata is None:
            raise ContractError(
                f"{type(self._connector).__name__}.build_connector_meta returned None: return a "
                "KVConnectorMetadata in every step, an empty one if there is nothing to do"
            )
        return V1Plan(
            metadata=metadata,
            has_tokens=described.total_num_scheduled_tokens > 0,
            blocks=blocks,
            recving=recving,
            preempted=frozenset(described.preempted_req_ids),
        )

    def empty_plan(self) -> Plan:
        """The plan of a step in which nothing happens. The connector is asked at the first call,
        which must come before the first request: it takes the call for a step."""
        if self._empty_plan is None:
            metadata = self._connector.build_connector_meta(SchedulerOutput())
            self._empty_plan = V1Plan(metadata=metadata, has_tokens=False)
        return self._empty_plan

    def update_output(self, output: WorkerOutput) -> None:
        self._connector.update_connector_output(to_v1_output(output))

    def request_finished(self, request: RequestView, block_ids: BlockTable) -> FinishResult:
        host_request = self._request(request)
        del self._requests[request.request_id]
        self._promised.pop(request.request_id, None)
        self._history.forget(request.request_id)
        groups = HostBlocks(block_ids).get_block_ids()
        if self._hma is not None:
            delay_free, params = self._hma.request_finished_all_groups(host_request, groups)
        else:
            blocks = groups[0] if groups else []
            delay_free, params = self._connector.request_finished(host_request, blocks)
        return FinishResult(bool(delay_free), params)

    def take_events(self) -> Iterable[Any]:
        return self._connector.take_events()

    def take_stats(self) -> Mapping[str, float] | None:
        stats = self._connector.get_kv_connector_stats()
        return None if stats is None or stats.is_empty() else stats.reduce()

    def has_pending_work(self) -> bool:
        return self._connector.has_pending_push_work()

    def reset(self) -> bool:
        return self._connector.reset_cache() is not False

    def close(self) -> None:
        self._connector.shutdown()


class V1WorkerRole(WorkerRole):
    """The worker half of a V1 connector, layer hooks included. Runs in: worker.

    If the forward raises, `wait_for_save` is not called: a connector that saves in bulk there would
    store what was never computed. One whose background copies still read the blocks is told of
    their end by nothing but `clear_connector_metadata`.
    """

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        """Drive `connector`, an instance built for `KVConnectorRole.WORKER`.

        Raises:
            ConfigError: a connector for the other role.
        """
        require_role(connector, KVConnectorRole.WORKER)
        self._connector = connector
        self._context = ForwardContext({})
        self._attn_metadata: dict[str, object] = {}
        # vLLM 0.14 hands over the preempted ids, later hosts the metadata; both use this name.
        parameters = inspect.signature(connector.handle_preemptions).parameters
        self._wants_preempted_ids = any("req" in name for name in parameters)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._context = ForwardContext(kv_caches)
        self._attn_metadata = {name: object() for name in kv_caches}
        self._connector.register_kv_caches(dict(kv_caches))

    def handshake_metadata(self) -> object:
        """Picklable value for the scheduler half, or None."""
        return self._connector.get_handshake_metadata()

    def planned_blocks(self, plan: Plan) -> frozenset[int]:
        return plan.blocks if isinstance(plan, V1Plan) else frozenset()

    def planned_recving(self, plan: Plan) -> frozenset[str] | None:
        return plan.recving if isinstance(plan, V1Plan) else frozenset()

    def begin_step(self, plan: Plan) -> None:
        if not isinstance(plan, V1Plan):
            raise ContractError(
                f"the plan is a {type(plan).__name__}, not a V1Plan: a V1 connector's worker half "
                "takes the plans of its scheduler half (V1SchedulerRole)"
            )
        if not self._wants_preempted_ids:
            self._connector.handle_preemptions(plan.metadata)
        elif plan.preempted:
            self._connector.handle_preemptions(set(plan.preempted))
        self._context.attn_metadata = self._attn_metadata if plan.has_tokens else None
        self._connector.bind_connector_metadata(plan.metadata)

    def start_load(self) -> None:
        self._connector.start_load_kv(self._context)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the load of this layer is done."""
        self._connector.wait_for_layer_load(layer_name)

    def save_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Take this layer's new KV."""
        self._connector.save_kv_layer(layer_name, kv_layer, attn_metadata)

    def save(self) -> None:
        self._connector.wait_for_save()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        connector = self._connector
        results = connector.get_transfer_results(set(finished_request_ids))
        invalid = connector.get_block_ids_with_load_errors()
        if invalid:
            results.invalid_block_ids = results.invalid_block_ids | invalid
        results.kv_connector_stats = connector.get_kv_connector_stats()
        results.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        results.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return from_v1_output(results)

    def end_step(self) -> None:
        self._connector.clear_connector_metadata()

    def close(self) -> None:
        self._connector.shutdown()
