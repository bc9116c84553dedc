"""Adapts a vLLM V1 connector to kvferry's scheduler and worker roles.

    config = v1_config(block_size=16, options={"shared_storage_path": "/var/cache/kv"})
    with LLM("path/to/model", roles=v1_roles(MyConnector, config, release="0.32")) as llm: ...

`V1SchedulerRole` and `V1WorkerRole` only translate. The guard of one and the driver of the other
enforce the contract and catch the connector's exceptions. Releases of vLLM name the fields of
requests and steps differently; a connector sees all these names. KV memory differs more; see
`Release`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from kvferry.contract.asynchronous import AsyncPromises, AsyncReports
from kvferry.contract.messages import FinishResult, LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import Roles
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ConfigError, ContractError, LayoutError
from kvferry.types import NULL_BLOCK, BlockTable, RequestView, StepView
from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.types import (
    AttentionMetadata,
    ForwardContext,
    KVConnectorOutput,
    KVConnectorRole,
    NewRequestData,
    SchedulerOutput,
    SupportsHMA,
    V1Blocks,
    V1CacheConfig,
    V1Config,
    V1ModelConfig,
    V1Request,
    V1TransferConfig,
    from_v1_output,
    to_v1_output,
)

if TYPE_CHECKING:
    import torch

Release = Literal["0.14", "0.32"]
"""The release of vLLM whose worker-side interface a connector is written for.

"0.32": a layer's `kv_cache` is the tensor that the host registered; the embedded engine registers
views `[blocks, heads, tokens, content]`, with K and V side by side in the content.

"0.14" and before: `kv_cache[virtual_engine]` is a contiguous tensor `[2, blocks, tokens, heads,
dim]`. Those connectors reshape it in place, which a view of the engine's memory does not support.
They get a second pool, and the worker role copies blocks between the pools.
"""

# --- KV memory, as connectors reach it ------------------------------------------------------------


class KVMemory:
    """KV memory in the layout of release 0.32: engine and connector share the tensors.

    Attributes:
        tensors: the connector's KV tensors by layer name.
        context: what the connector gets as the context of each forward.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(kv_caches)
        self.context = ForwardContext(kv_caches)

    def show(
        self, layer_name: str, kv_layer: torch.Tensor, block_ids: Collection[int]
    ) -> torch.Tensor:
        """Return the tensor in which the connector finds what the engine wrote to `kv_layer`."""
        return kv_layer

    def copy_back(self, layer_name: str, block_ids: Collection[int]) -> None:
        """Make the engine see blocks that the connector wrote."""


class CopiedMemory(KVMemory):
    """KV memory for release 0.14: the connector has its own tensors, with K and V separate."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        super().__init__({})
        self._engine = kv_caches
        for name, kv in kv_caches.items():
            if kv.dim() != 4 or kv.shape[3] % 2:
                raise LayoutError(
                    f"layer {name} has the shape {tuple(kv.shape)}; release 0.14 needs [blocks, "
                    'heads, tokens, content] with an even content: use release="0.32"'
                )
            blocks, heads, tokens, content = kv.shape
            self.tensors[name] = kv.new_zeros((2, blocks, tokens, heads, content // 2))
        self.context = ForwardContext({name: [kv] for name, kv in self.tensors.items()})
        self.context.virtual_engine = 0

    def show(
        self, layer_name: str, kv_layer: torch.Tensor, block_ids: Collection[int]
    ) -> torch.Tensor:
        ids = list(block_ids)
        blocks = kv_layer[ids]
        halves = blocks.reshape(*blocks.shape[:3], 2, -1)  # [n, heads, tokens, 2, dim]
        copied = self.tensors[layer_name]
        copied[:, ids] = halves.permute(3, 0, 2, 1, 4)
        return copied

    def copy_back(self, layer_name: str, block_ids: Collection[int]) -> None:
        ids = list(block_ids)
        halves = self.tensors[layer_name][:, ids]  # [2, n, tokens, heads, dim]
        self._engine[layer_name][ids] = halves.permute(1, 3, 2, 0, 4).flatten(3)


# --- the roles ------------------------------------------------------------------------------------


class V1Plan(Plan, frozen=True, kw_only=True):
    """A plan that holds a connector's metadata and the facts of the step that our contract needs.

    Attributes:
        metadata: the result of `build_connector_meta`; picklable if the connector is sound.
        has_tokens: False in a step without a forward.
        blocks: block ids that the step's loads fill.
        recving: block ids by request of the async loads that start; None if unknown.
        preempted: requests that lost their blocks in this step.
        written: block ids that the forward writes.
    """

    metadata: Any
    has_tokens: bool = True
    blocks: frozenset[int] = frozenset()
    recving: Mapping[str, frozenset[int]] | None = {}
    preempted: frozenset[str] = frozenset()
    written: frozenset[int] = frozenset()

    def filled_blocks(self) -> frozenset[int]:
        return self.blocks

    def started_loads(self) -> frozenset[str] | None:
        return None if self.recving is None else frozenset(self.recving)


def _describe(output: SchedulerOutput, request: V1Request, block_ids: BlockTable) -> None:
    """Add a request to a vLLM step: a new request in full, a known one with its new blocks only."""
    num_shown = request.num_shown
    request.num_shown = tuple(len(group) for group in block_ids)
    if num_shown is None:
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                prefill_token_ids=list(request.all_token_ids),
                block_ids=tuple(list(group) for group in block_ids),
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        return
    cached = output.scheduled_cached_reqs
    is_resumed = not num_shown
    if is_resumed:
        cached.resumed_req_ids.add(request.request_id)
        cached.all_token_ids[request.request_id] = list(request.all_token_ids)
        num_shown = (0,) * len(block_ids)
    added = tuple(list(group[n:]) for group, n in zip(block_ids, num_shown, strict=True))
    cached.req_ids.append(request.request_id)
    cached.resumed_from_preemption.append(is_resumed)
    cached.new_token_ids.append([])
    cached.new_block_ids.append(added if any(added) else None)
    cached.num_computed_tokens.append(request.num_computed_tokens)
    cached.num_output_tokens.append(request.num_output_tokens)


def _require_role(connector: KVConnectorBase_V1, role: KVConnectorRole) -> None:
    if connector.role.name != role.name:  # vLLM's classes have a role of vLLM's
        raise ConfigError(
            f"{type(connector).__name__} was built as {connector.role.name}, {role.name} is needed:"
            f" pass KVConnectorRole.{role.name} to its constructor"
        )


class V1SchedulerRole(SchedulerRole):
    """The scheduler half of a V1 connector. Runs in: scheduler."""

    rules = AsyncPromises

    def __init__(self, connector: KVConnectorBase_V1) -> None:
        """Drive a connector that was built for `KVConnectorRole.SCHEDULER`.

        Raises:
            ConfigError: a connector for the other role.
        """
        _require_role(connector, KVConnectorRole.SCHEDULER)
        self._connector = connector
        self._block_size = connector._vllm_config.cache_config.block_size
        self._requests: dict[str, V1Request] = {}
        self._promised: dict[str, tuple[int, bool]] = {}  # last hit: local tokens, is it async
        self._sync_blocks: set[int] = set()  # to be filled by sync loads of the next plan
        self._recving: dict[str, frozenset[int]] = {}  # async loads that the next plan starts

    def _request(self, view: RequestView) -> V1Request:
        request = self._requests.get(view.request_id)
        if request is None:
            request = self._requests[view.request_id] = V1Request(view)
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
        return LookupResult(int(count), bool(is_async))

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        local, is_async = self._promised.pop(request.request_id, (0, False))
        if num_external_tokens > 0:
            loaded = self._blocks_of(block_ids, local, local + num_external_tokens)
            if is_async:
                self._recving[request.request_id] = loaded
            else:
                self._sync_blocks |= loaded
        self._connector.update_state_after_alloc(
            self._request(request), V1Blocks(block_ids), num_external_tokens
        )

    def _blocks_of(self, table: BlockTable, start: int, stop: int) -> frozenset[int]:
        """The blocks of tokens `[start, stop)`, in all groups; never the null block."""
        size = self._block_size
        return frozenset(
            block for group in table for block in group[start // size : -(-stop // size)]
        ) - {NULL_BLOCK}

    def build_plan(self, step: StepView) -> Plan:
        output = SchedulerOutput(
            finished_req_ids=set(step.finished_request_ids),
            preempted_req_ids=set(step.preempted_request_ids),
            has_sync_kv_loads=bool(self._sync_blocks),
        )
        for request_id in output.preempted_req_ids & self._requests.keys():
            if self._requests[request_id].num_shown is not None:
                self._requests[request_id].num_shown = ()
        written: set[int] = set()
        for scheduled in step.scheduled:
            request = self._request(scheduled.request)
            request.num_computed_tokens = start = scheduled.num_computed_tokens
            stop = start + scheduled.num_scheduled_tokens
            _describe(output, request, scheduled.block_ids)
            output.num_scheduled_tokens[request.request_id] = scheduled.num_scheduled_tokens
            output.total_num_scheduled_tokens += scheduled.num_scheduled_tokens
            written |= self._blocks_of(scheduled.block_ids, start, stop)
        metadata = self._metadata(output)
        blocks, recving = frozenset(self._sync_blocks).union(*self._recving.values()), self._recving
        # Not before: a connector that raised may plan these loads in the next step.
        self._sync_blocks, self._recving = set(), {}
        return V1Plan(
            metadata=metadata,
            has_tokens=output.total_num_scheduled_tokens > 0,
            blocks=blocks,
            recving=recving,
            preempted=frozenset(output.preempted_req_ids),
            written=frozenset(written),
        )

    def _metadata(self, output: SchedulerOutput) -> Any:  # noqa: ANN401 - the connector's
        try:
            metadata = self._connector.build_connector_meta(output)
            if metadata is None:
                raise ContractError(
                    f"{type(self._connector).__name__}.build_connector_meta returned None: return "
                    "a KVConnectorMetadata in every step, an empty one if there is nothing to do"
                )
        except Exception:
            # It may have taken in any part of the step. So the next one shows it these requests as
            # new or resumed, with all their blocks in place of those that it knows.
            for new in output.scheduled_new_reqs:
                self._requests[new.req_id].num_shown = None
            for request_id in output.scheduled_cached_reqs.req_ids:
                self._requests[request_id].num_shown = ()
            raise
        return metadata

    def empty_plan(self) -> Plan:
        """The plan of an empty step, which the connector sees: call only before any request."""
        metadata = self._connector.build_connector_meta(SchedulerOutput())
        return V1Plan(metadata=metadata, has_tokens=False)

    def update_output(self, output: WorkerOutput) -> None:
        self._connector.update_connector_output(to_v1_output(output))

    def request_finished(self, request: RequestView, block_ids: BlockTable) -> FinishResult:
        driven = self._request(request)
        del self._requests[request.request_id]
        self._promised.pop(request.request_id, None)
        groups = V1Blocks(block_ids).get_block_ids()
        if isinstance(self._connector, SupportsHMA):
            delay_free, params = self._connector.request_finished_all_groups(driven, groups)
        else:
            blocks = groups[0] if groups else []
            delay_free, params = self._connector.request_finished(driven, blocks)
        if params is not None and not isinstance(params, Mapping):
            raise TypeError(f"parameters are a mapping or None, not {params!r}")
        return FinishResult(bool(delay_free), params)

    def take_events(self) -> Iterable[Any]:
        return self._connector.take_events()

    def take_stats(self) -> Mapping[str, float] | None:
        stats = self._connector.get_kv_connector_stats()
        return None if stats is None or stats.is_empty() else stats.reduce()

    def has_work(self) -> bool:
        return self._connector.has_pending_push_work()

    def reset(self) -> bool:
        return self._connector.reset_cache() is not False

    def close(self) -> None:
        self._connector.shutdown()


class V1WorkerRole(WorkerRole):
    """The worker half of a V1 connector, layer hooks included. Runs in: worker.

    After a forward that raised, `wait_for_save` is not called: a connector that saves in bulk there
    would store blocks that were never computed.
    """

    rules = AsyncReports

    def __init__(self, connector: KVConnectorBase_V1, *, release: Release = "0.32") -> None:
        """Drive a connector that was built for `KVConnectorRole.WORKER` and written for `release`.

        Raises:
            ConfigError: a connector for the other role, or an unknown release.
        """
        _require_role(connector, KVConnectorRole.WORKER)
        if release not in get_args(Release):
            raise ConfigError(f"release is {release!r}; known: {', '.join(get_args(Release))}")
        self._connector = connector
        self._make_memory = CopiedMemory if release == "0.14" else KVMemory
        self._memory = KVMemory({})
        self._attn_metadata: dict[str, AttentionMetadata] = {}
        self._plan = V1Plan(metadata=None)
        self._recving: dict[str, frozenset[int]] = {}  # blocks of async loads under way
        # vLLM 0.14 passes preempted request ids, later releases pass metadata, to the same method.
        parameters = inspect.signature(connector.handle_preemptions).parameters
        self._wants_preempted_ids = any("req" in name for name in parameters)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Pass the KV tensors to the connector, in the layout of its release.

        Raises:
            LayoutError: these tensors have no such layout.
        """
        self._memory = self._make_memory(kv_caches)
        self._attn_metadata = {name: AttentionMetadata() for name in kv_caches}
        self._connector.register_kv_caches(dict(self._memory.tensors))

    def begin_step(self, plan: Plan) -> None:
        if not isinstance(plan, V1Plan):
            raise ContractError(
                f"the plan is a {type(plan).__name__}, not a V1Plan: a V1 connector's worker half "
                "takes the plans of its scheduler half (V1SchedulerRole)"
            )
        self._plan = plan
        if not self._wants_preempted_ids:
            self._connector.handle_preemptions(plan.metadata)
        elif plan.preempted:
            self._connector.handle_preemptions(set(plan.preempted))
        self._memory.context.attn_metadata = self._attn_metadata if plan.has_tokens else None
        self._connector.bind_connector_metadata(plan.metadata)

    def start_load(self) -> None:
        self._connector.start_load_kv(self._memory.context)
        # Not before: loads whose start failed are over for the host, and must not be copied back.
        self._recving.update(self._plan.recving or {})

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._connector.wait_for_layer_load(layer_name)
        sync_blocks = self._plan.blocks.difference(*(self._plan.recving or {}).values())
        self._memory.copy_back(layer_name, sync_blocks)

    def save_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        shown = self._memory.show(layer_name, kv_layer, self._plan.written)
        self._connector.save_kv_layer(layer_name, shown, attn_metadata)

    def save(self) -> None:
        self._connector.wait_for_save()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        connector = self._connector
        results: Any = connector.get_transfer_results(set(finished_request_ids))
        if not isinstance(results, KVConnectorOutput):  # vLLM's, with fewer fields
            results = KVConnectorOutput(**vars(results))
        for request_id in results.finished_recving or ():
            loaded = self._recving.pop(request_id, frozenset())
            for name in self._memory.tensors:
                self._memory.copy_back(name, loaded)
        invalid = connector.get_block_ids_with_load_errors() or set()
        results.invalid_block_ids = results.invalid_block_ids | invalid
        results.kv_connector_stats = connector.get_kv_connector_stats()
        results.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        results.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return from_v1_output(results)

    def end_step(self) -> None:
        self._connector.clear_connector_metadata()

    def close(self) -> None:
        self._connector.shutdown()


# --- a connector of one's own in the embedded engine ----------------------------------------------


def v1_roles(
    connector_class: Callable[..., KVConnectorBase_V1],
    config: V1Config,
    *,
    release: Release = "0.32",
) -> Roles:
    """Both halves of a V1 connector, for an engine with one rank. `connector_class` is called once
    for each half, with `config`, the role and, if it takes `kv_cache_config`, None for it."""
    takes_groups = "kv_cache_config" in inspect.signature(connector_class).parameters
    groups = {"kv_cache_config": None} if takes_groups else {}
    scheduler = connector_class(config, KVConnectorRole.SCHEDULER, **groups)
    worker = connector_class(config, KVConnectorRole.WORKER, **groups)
    return Roles(V1SchedulerRole(scheduler), V1WorkerRole(worker, release=release))


def v1_config(
    *,
    block_size: int,
    options: Mapping[str, Any] | None = None,
    model: str = "",
    dtype: str = "auto",
) -> V1Config:
    """Make a configuration for the constructors of V1 connectors, with what they commonly read.

    Args:
        block_size: tokens per block, the same as the engine's.
        options: the connector's own options (`kv_connector_extra_config`).
        model: path or name of the model.
        dtype: dtype of the model.
    """
    return V1Config(
        kv_transfer_config=V1TransferConfig(
            kv_role="kv_both", kv_connector_extra_config=dict(options or {})
        ),
        cache_config=V1CacheConfig(block_size=block_size),
        model_config=V1ModelConfig(model=model, dtype=dtype),
    )
