"""vLLM's connector utilities under their own names; those that move tensors are in `block_copies`.

`KVOutputAggregator` folds the reports of all ranks. `TpKVTopology` follows vLLM 0.14: KV counts as
replicated if the tensor-parallel size is *at least* the number of kv heads (later releases differ),
and target ranks are all that hold wanted heads, also where several hold the same. Queries of a host
take arguments where vLLM reads a global configuration. Where vLLM asserts, an error names values.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self, TypeVar

from kvferry.contract.fold import WorkerOutputFold
from kvferry.contract.messages import EMPTY_OUTPUT
from kvferry.errors import ConfigError, ContractError, LayoutError, TopologyError
from kvferry.layout.spec import ALIASES, MEMORY_ORDERS
from kvferry.observe import Observer
from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.types import KVConnectorOutput, from_v1_output, to_v1_output

# --- reports of all ranks -------------------------------------------------------------------------


class RunnerOutput(Protocol):
    """What a host's model runner returns. Only this attribute is read, and set on a copy."""

    kv_connector_output: Any


_Output = TypeVar("_Output", bound=RunnerOutput)


class KVOutputAggregator:
    """Folds the `kv_connector_output` of all ranks' model-runner outputs.

    As in vLLM, workers may say in their output how many reports to expect per id
    (`expected_finished_count`), once they know. Here a new count holds for all ids, also for ids
    that some ranks have reported already: with the old count, these would wait for ever for ranks
    that do not report.

    The rest is as in `WorkerOutputFold`.
    """

    def __init__(self, expected_finished_count: int, *, observer: Observer | None = None) -> None:
        """Begin with no report; arguments and errors as for `WorkerOutputFold`."""
        self._fold = WorkerOutputFold(expected_finished_count, observer=observer)
        self._held = EMPTY_OUTPUT  # folded reports that no output carried yet

    @classmethod
    def from_connector(cls, connector: KVConnectorBase_V1, world_size: int) -> Self:
        """Make an aggregator for the connector's own count of reports, by default one per rank.

        Raises:
            ConfigError: more reports than there are ranks, or a count that is not at least 1.
        """
        count = connector.get_finished_count() or world_size
        if count > world_size:
            raise ConfigError(
                f"{type(connector).__name__}.get_finished_count says {count}, but there are "
                f"{world_size} ranks and each reports an id once: nothing would ever be released"
            )
        return cls(count)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._fold!r}>"

    def aggregate(self, outputs: Sequence[_Output | None], output_rank: int = 0) -> _Output | None:
        """Return the output of `output_rank`, copied, with the folded reports of all ranks.

        Args:
            outputs: one per rank, in rank order; None for a rank that returned nothing.
            output_rank: the rank whose output goes to the scheduler.

        Returns:
            A shallow copy with its own `kv_connector_output`. None if `output_rank` returned
            nothing: all reports then come with the next output that it returns.

        Raises:
            ContractError: `output_rank` is not one of the ranks.
        """
        if not 0 <= output_rank < len(outputs):
            raise ContractError(f"output_rank is {output_rank}, there are {len(outputs)} outputs")
        reports = [_report_of(output) for output in outputs]
        counts = [report.expected_finished_count for report in reports if report is not None]
        if (count := max(counts, default=0)) > 0:
            # If ranks disagree, the larger count releases late, but the smaller one too early.
            self._fold.expected_reports = count
        folded = self._fold.fold(
            [None if report is None else from_v1_output(report) for report in reports]
        )
        self._held = self._fold.append(self._held, folded)
        output = outputs[output_rank]
        if output is None:
            return None
        result = copy.copy(output)  # may be one object shared by all empty steps
        result.kv_connector_output = to_v1_output(self._held)
        result.kv_connector_output.expected_finished_count = self._fold.expected_reports
        self._held = EMPTY_OUTPUT
        return result


def _report_of(output: RunnerOutput | None) -> KVConnectorOutput | None:
    """Return the report in an output, if any; convert a host's own class to ours. Hosts before 0.32
    have fewer of the fields."""
    report = None if output is None else output.kv_connector_output
    if report is None or isinstance(report, KVConnectorOutput):
        return report
    values = {field.name: getattr(report, field.name, None) for field in fields(KVConnectorOutput)}
    return KVConnectorOutput(**{name: v for name, v in values.items() if v is not None})


# --- ranks of two engines -------------------------------------------------------------------------

EngineId = str


@dataclass
class TpKVTopology:
    """How the tensor-parallel ranks of a local engine and of remote ones map onto each other.

    Attributes:
        tp_rank: tensor-parallel rank of this worker.
        remote_tp_size: tensor-parallel size by engine, this one included. Engines may be added
            later.
        is_mla: True for multi-head latent attention: one latent, the same on each rank.
        total_num_kv_heads: kv heads of the model, over all ranks.
        attn_backend: the attention backend's class, which knows the shape of a layer's KV tensor
            (`get_kv_cache_shape`).
        engine_id: id of this engine.
        remote_block_size: tokens per block by engine, this one included.
    """

    tp_rank: int
    remote_tp_size: dict[EngineId, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backend: type[Any]
    engine_id: EngineId
    remote_block_size: dict[EngineId, int]

    def __post_init__(self) -> None:
        if self.total_num_kv_heads < 1:
            raise TopologyError(
                f"total_num_kv_heads is {self.total_num_kv_heads}: a model has at least 1, with "
                "MLA exactly 1"
            )
        # One block, so that 1 in front is the block axis and 2 is the axis of K and V.
        shape = self.attn_backend.get_kv_cache_shape(
            num_blocks=1, block_size=16, num_kv_heads=1, head_size=1
        )
        self._is_kv_layout_blocks_first = len(shape) == 5 and shape[0] == 1

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """True for `[num_blocks, 2, ...]`, False for `[2, num_blocks, ...]` and for MLA."""
        return self._is_kv_layout_blocks_first

    @property
    def split_k_and_v(self) -> bool:
        """Whether K and V are two memory regions per layer."""
        return not (self.is_mla or self.is_kv_layout_blocks_first)

    @property
    def tp_size(self) -> int:
        return _of_engine(self.remote_tp_size, self.engine_id, "tensor-parallel size")

    @property
    def block_size(self) -> int:
        return _of_engine(self.remote_block_size, self.engine_id, "block size")

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank. Where the remote engine has more ranks, remote ranks per
        local rank, as a negative number.

        Raises:
            TopologyError: neither size is a multiple of the other.
        """
        local = self.tp_size
        _require_positive(remote_tp_size, "remote tensor-parallel size")
        if local >= remote_tp_size and local % remote_tp_size == 0:
            return local // remote_tp_size
        if local < remote_tp_size and remote_tp_size % local == 0:
            return -(remote_tp_size // local)
        raise TopologyError(
            f"tensor-parallel sizes {local} (local) and {remote_tp_size} (remote) do not divide: "
            "choose sizes of which one is a multiple of the other"
        )

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block.

        Raises:
            TopologyError: the local block size is no multiple of the remote one.
        """
        local = self.block_size
        _require_positive(remote_block_size, "remote block size")
        if local % remote_block_size:
            raise TopologyError(
                f"local block size {local} is not a multiple of the remote block size "
                f"{remote_block_size}: choose one that is, or equal ones"
            )
        return local // remote_block_size

    def tp_ratio_from_engine_id(self, remote_engine_id: EngineId) -> int:
        """`tp_ratio` to an engine of `remote_tp_size`."""
        return self.tp_ratio(self._tp_size_of(remote_engine_id))

    def block_size_ratio_from_engine_id(self, remote_engine_id: EngineId) -> int:
        """`block_size_ratio` to an engine of `remote_block_size`."""
        size = _of_engine(self.remote_block_size, remote_engine_id, "block size")
        return self.block_size_ratio(size)

    def is_kv_replicated(self, engine_id: EngineId) -> bool:
        """Whether an engine has at least as many ranks as there are kv heads.

        True also where both are equal and nothing is stored twice, as in vLLM 0.14.
        """
        return self._tp_size_of(engine_id) // self.total_num_kv_heads >= 1

    def replicates_kv_cache(self, remote_engine_id: EngineId) -> bool:
        """`is_kv_replicated`, or MLA, whose latent every rank holds in full."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks that hold what this rank holds, replicas of one head included.

        Raises:
            TopologyError: sizes that do not divide, or a `tp_rank` outside this engine.
        """
        ratio = self.tp_ratio(remote_tp_size)
        if not 0 <= self.tp_rank < self.tp_size:
            raise TopologyError(
                f"tp_rank is {self.tp_rank}, engine {self.engine_id!r} has {self.tp_size} ranks"
            )
        if ratio > 0:
            return [self.tp_rank // ratio]
        return [self.tp_rank * -ratio + i for i in range(-ratio)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: EngineId) -> list[int]:
        """`get_target_remote_ranks` of an engine of `remote_tp_size`."""
        return self.get_target_remote_ranks(self._tp_size_of(remote_engine_id))

    def _tp_size_of(self, engine_id: EngineId) -> int:
        return _of_engine(self.remote_tp_size, engine_id, "tensor-parallel size")


def _of_engine(sizes: Mapping[EngineId, int], engine_id: EngineId, what: str) -> int:
    if engine_id not in sizes:
        known = ", ".join(map(repr, sizes)) or "none"
        raise TopologyError(f"no {what} of engine {engine_id!r} is known (known: {known})")
    _require_positive(sizes[engine_id], f"{what} of engine {engine_id!r}")
    return sizes[engine_id]


def _require_positive(size: int, what: str) -> None:
    if size < 1:
        raise TopologyError(f"{what} is {size}: it must be at least 1")


# --- queries of a host ----------------------------------------------------------------------------

DEFAULT_CACHE_LAYOUT = "NHD"

CACHE_LAYOUTS = (*ALIASES, *MEMORY_ORDERS)
"""Layouts that hosts know: two names, and since vLLM 0.32 the orders in memory."""


def get_kv_connector_cache_layout(
    vllm_config: Any = None,  # noqa: ANN401 - the host's
    connector_class: Any | None = None,  # noqa: ANN401 - the same
) -> str:
    """Return the KV layout that the connector wants; "NHD" without a connector or a wish.

    Args:
        vllm_config: the host's configuration; its `kv_transfer_config` names the connector.
        connector_class: the connector's class, with a class method
            `get_required_kvcache_layout(vllm_config)`. None: import it from the configured module.

    Raises:
        ConfigError: a connector is named, but its class is not found.
        LayoutError: the connector wants a layout that no host knows.
    """
    if vllm_config is None or vllm_config.kv_transfer_config is None:
        return DEFAULT_CACHE_LAYOUT
    found = connector_class or _named_class(vllm_config.kv_transfer_config)
    layout: str | None = found.get_required_kvcache_layout(vllm_config)
    if layout is None:
        return DEFAULT_CACHE_LAYOUT
    if layout not in CACHE_LAYOUTS:
        raise LayoutError(
            f"the connector wants KV layout {layout!r}; known: {', '.join(CACHE_LAYOUTS)}"
        )
    return layout


def _named_class(kv_transfer_config: Any) -> Any:  # noqa: ANN401 - the host's
    name = kv_transfer_config.kv_connector
    path = getattr(kv_transfer_config, "kv_connector_module_path", None)
    if not path:
        raise ConfigError(
            f"connector {name!r} is named without kv_connector_module_path: set it, or pass "
            "connector_class"
        )
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"connector {name!r} is not in {path!r}: {error}") from error


def get_current_attn_backend(
    vllm_config: Any,  # noqa: ANN401 - the host's
) -> type[Any]:
    """Return the attention backend's class of the first attention layer.

    Args:
        vllm_config: the host's configuration; `compilation_config.static_forward_context` has every
            layer of the model by name.

    Raises:
        LayoutError: there is no attention layer.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        if hasattr(layer, "get_attn_backend"):
            backend: type[Any] = layer.get_attn_backend()
            return backend
    raise LayoutError(
        f"none of the {len(layers)} layers in static_forward_context has an attention backend: "
        "ask after the model was built"
    )


def resumed_flags(cached: Any) -> Sequence[bool]:  # noqa: ANN401 - the host's, of any version
    """Whether each continuing request of a step resumes after a preemption."""
    resumed_ids = getattr(cached, "resumed_req_ids", None)  # since vLLM 0.12; flags before
    if resumed_ids is None:
        flags: Sequence[bool] = cached.resumed_from_preemption
        return flags
    return [request_id in resumed_ids for request_id in cached.req_ids]


def yield_req_data(
    scheduler_output: Any,  # noqa: ANN401 - the host's, of any version
) -> Iterator[tuple[str, tuple[list[int], ...] | None, bool]]:
    """Yield the requests of a step with the blocks they got.

    Args:
        scheduler_output: a `SchedulerOutput` of ours or of any host.

    Yields:
        Request id; new block ids per KV group, None if no block was added; whether the request was
        preempted and now resumes, so that the new blocks replace those it had. (vLLM 0.33 says True
        for new requests, too: their blocks are the whole table.)

    Raises:
        ContractError: parallel lists of the step differ in length.
    """
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids, False
    cached = scheduler_output.scheduled_cached_reqs
    request_ids = cached.req_ids
    resumed = resumed_flags(cached)
    if not len(request_ids) == len(cached.new_block_ids) == len(resumed):
        raise ContractError(
            f"a step names {len(request_ids)} continuing requests, {len(cached.new_block_ids)} "
            f"lists of new blocks and {len(resumed)} flags: they must be parallel"
        )
    yield from zip(request_ids, cached.new_block_ids, resumed, strict=True)
