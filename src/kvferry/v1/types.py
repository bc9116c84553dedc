"""vLLM's types around the connector class, and what carries our roles' messages in V1 hosts.

Configuration, requests and steps have the attributes that connectors read; in a host, connectors
get that host's own objects instead. "(0.32)" marks names of the later releases.
"""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerMeta, WorkerOutput
from kvferry.types import BlockTable, RequestView

if TYPE_CHECKING:
    import torch

Layers = dict[str, "torch.Tensor"]
CopyBlocksOp = Callable[[Layers, Layers, list[int], list[int], Literal["h2d", "d2h"]], None]
"""Copies blocks between two sets of layers. Arguments: source layers, destination layers, source
block ids, destination block ids, direction."""

# --- configuration --------------------------------------------------------------------------------


@dataclass(kw_only=True)
class V1TransferConfig:
    """`vllm_config.kv_transfer_config`: the operator's settings of the connector.

    Attributes:
        kv_role: "kv_producer", "kv_consumer" or "kv_both".
        kv_connector_extra_config: the connector's own options.
        engine_id: new for each configuration object, so never part of a stored key.
    """

    kv_role: str | None
    kv_connector_extra_config: dict[str, Any]
    kv_connector: str | None = None
    engine_id: str | None = None

    def get_from_extra_config(self, key: str, default: Any) -> Any:  # noqa: ANN401 - free-form
        """Return one of the connector's own options."""
        return self.kv_connector_extra_config.get(key, default)


@dataclass(kw_only=True)
class V1CacheConfig:
    """`vllm_config.cache_config`."""

    block_size: int
    cache_dtype: str = "auto"


@dataclass(kw_only=True)
class V1ModelConfig:
    """`vllm_config.model_config`; in hosts, `dtype` is a `torch.dtype`."""

    model: str
    dtype: Any


@dataclass(kw_only=True)
class V1ParallelConfig:
    """`vllm_config.parallel_config`."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    world_size: int = 1
    rank: int = 0


@dataclass(kw_only=True)
class V1Config:
    """The part of a host's configuration that a V1 constructor reads."""

    kv_transfer_config: V1TransferConfig | None
    cache_config: V1CacheConfig
    model_config: V1ModelConfig
    parallel_config: V1ParallelConfig = field(default_factory=V1ParallelConfig)


# --- requests -------------------------------------------------------------------------------------


class V1Request:
    """A request as scheduler-side methods see it. Read only; one object for the request's life.

    Attributes of features that the embedded engine lacks have neutral values.

    Attributes:
        view: the request as our roles see it.
        num_computed_tokens: tokens whose KV is in the blocks.
        num_shown: blocks per group that the connector has heard of; None before the first step, ()
            after a preemption.
    """

    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache = False
    mm_features: Sequence[Any] = ()

    def __init__(self, view: RequestView) -> None:
        self.view = view
        self.request_id = view.request_id
        self.num_prompt_tokens = view.num_prompt_tokens
        self.prompt_token_ids: list[int] | None = list(view.all_token_ids[: view.num_prompt_tokens])
        self.cache_salt = view.extra_keys.cache_salt
        self.num_computed_tokens = 0
        self.num_shown: tuple[int, ...] | None = None

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.view.all_token_ids

    @property
    def num_tokens(self) -> int:
        """The length of `all_token_ids`, generated tokens included."""
        return len(self.view.all_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.view.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class V1Blocks:
    """The blocks of one request."""

    def __init__(self, block_ids: BlockTable) -> None:
        self._block_ids = block_ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per KV group, in token order; new lists."""
        return tuple(list(group) for group in self._block_ids)


# --- one step, as vLLM describes it ---------------------------------------------------------------


@dataclass(kw_only=True)
class NewRequestData:
    """A request in its first step; on some hosts also one that resumes after a preemption.

    Attributes:
        block_ids: blocks of all tokens up to the last one of this step; later chunks add more.
    """

    req_id: str
    prompt_token_ids: list[int] | None
    prefill_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    mm_features: Sequence[Any] = ()
    lora_request: Any = None
    prompt_embeds: Any = None


@dataclass(kw_only=True)
class CachedRequestData:
    """Requests after their first step; parallel lists.

    `new_block_ids[i]` is None if the request got no block, else a list per KV group. The blocks are
    appended to the request's table, or replace it if the request was resumed: see `resumed_req_ids`
    (since 0.12) or `resumed_from_preemption` (before).
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(kw_only=True)
class SchedulerOutput:
    """One step of vLLM's scheduler. Connectors see the host's own object, which has some of these
    fields; earlier hosts lack `preempted_req_ids`, and on later hosts it may be None."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    kv_connector_metadata: Any = None


class AttentionMetadata:
    """One layer's entry of `attn_metadata`. Connectors may look up its type, nothing else."""


class MLACommonMetadata(AttentionMetadata):
    """The type by which connectors recognise latent attention. No entry of ours has it: latents
    reach a connector in the same form as K and V, with one head."""


class ForwardContext:
    """What a connector can know of a forward.

    Attributes:
        attn_metadata: an entry per layer; None in steps without tokens, which may have loads to do.
            Other hosts have a list or a dict, and None also in warm-up runs and replayed graphs.
        no_compile_layers: the attention layers by name. The attribute `kv_cache` of each is its KV
            tensor, for release 0.14 a list of such tensors by virtual engine.
        virtual_engine: the index into that list; for release 0.14 only.
    """

    virtual_engine: int

    def __init__(self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> None:
        self.attn_metadata: dict[str, AttentionMetadata] | None = None
        self.no_compile_layers = {
            name: SimpleNamespace(kv_cache=kv_cache) for name, kv_cache in kv_caches.items()
        }


# --- values that connectors return ----------------------------------------------------------------


class KVConnectorRole(enum.Enum):
    """The half of a connector that an instance is. The halves share no memory."""

    SCHEDULER = 0
    """One instance in the scheduler's process, made before KV memory exists."""
    WORKER = 1
    """One instance per worker process, made before KV memory is allocated."""


class KVConnectorMetadata(ABC):  # noqa: B024 - a mark; connectors put in what they need
    """The scheduler half's message to the worker halves for a step. It is pickled, so it must hold
    no device tensors."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - likewise
    """A worker's message to its peers before the first transfer. It is pickled."""


class KVConnectorWorkerMetadata(ABC):
    """A worker half's message to the scheduler half after one step, beyond the common fields
    (0.32). Earlier hosts carry no such message: a connector must work, if less well, without."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Merge another rank's message into this one. Hosts do not check that the types agree."""


KVConnectorWorkerMetadata.register(WorkerMeta)  # as hosts' own types of this name do, see adapters


@dataclass
class KVConnectorStats(ABC):
    """Counters of one interval. They cross processes as the dict `data`. Hosts change them, so
    return a new object or a `clone` each time."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None: ...

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of another rank or interval. Hosts assert that the types agree."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """The numbers of a log line."""

    def is_empty(self) -> bool:
        return not self.data

    def to_dict(self) -> dict[str, Any]:
        """The form that crosses processes; `build_kv_connector_stats` makes an object of it."""
        return dict(self.data)

    def clone(self) -> KVConnectorStats:
        return copy.deepcopy(self)


@dataclass
class KVConnectorOutput:
    """The report of the worker halves after a step: one per rank, merged for the scheduler.

    The fields are those of `WorkerOutput`; `failed_recving` and `kv_connector_worker_meta` are new
    in 0.32. The only other field, `expected_finished_count`, is the number of reports per id to
    wait for; 0 leaves it as it is.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: KVConnectorStats | None = None
    kv_cache_events: Any = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0
    failed_recving: set[str] = field(default_factory=set)
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None

    def is_empty(self) -> bool:
        """True if the report holds nothing for the scheduler."""
        return from_v1_output(self) is EMPTY_OUTPUT


class SupportsHMA(ABC):
    """A connector for models with several KV groups. For any other connector hosts switch the
    hybrid memory allocator off, or refuse to start if the operator asked for that allocator."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: V1Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished`, with block ids per group. Hosts call one of the two, never both.

        With more than one group, failed loads must be reported in `failed_recving`, not by
        `get_block_ids_with_load_errors`.
        """


def supports_hma(connector: object) -> bool:
    """Whether a connector is a `SupportsHMA`. Hosts without an instance ask the class."""
    return issubclass(connector if isinstance(connector, type) else type(connector), SupportsHMA)


# --- values of our roles, wrapped for V1 hosts ----------------------------------------------------


@dataclass(frozen=True)
class PlanMetadata(KVConnectorMetadata):
    """A plan on its way to the workers."""

    plan: Plan
    has_tokens: bool
    """Whether the step computes anything."""
    is_empty: bool = False
    """Whether the plan is the empty one and no request ends. Idle workers skip such a step."""


class CounterStats(KVConnectorStats):
    """Counters by name; `aggregate` adds them up."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> CounterStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)


def from_v1_output(output: Any) -> WorkerOutput:  # noqa: ANN401 - of any release
    """Convert a V1 report to ours; `EMPTY_OUTPUT` itself if it holds nothing.

    Reports of vLLM before 0.30 lack some fields; without a field for workers' messages, the stats
    carry them. Stats and messages of another connector stay as they are.
    """
    if not any(vars(output).values()):
        return EMPTY_OUTPUT
    stats = output.kv_connector_stats
    if isinstance(stats, KVConnectorStats) and stats.is_empty():
        stats = None
    meta = getattr(output, "kv_connector_worker_meta", None)
    if meta is None:
        meta = getattr(stats, "carried_meta", None)
    found = WorkerOutput(
        finished_sending=frozenset(output.finished_sending or ()),
        finished_recving=frozenset(output.finished_recving or ()),
        failed_recving=frozenset(getattr(output, "failed_recving", None) or ()),
        invalid_block_ids=frozenset(output.invalid_block_ids or ()),
        stats=stats.data if isinstance(stats, CounterStats) else stats,
        events=getattr(output, "kv_cache_events", None),
        meta=meta,
    )
    return EMPTY_OUTPUT if found.is_empty() else found


def to_v1_output(output: WorkerOutput) -> KVConnectorOutput:
    """The inverse of `from_v1_output`. Hosts expect None in place of an empty set of ended work."""
    stats = output.stats
    return KVConnectorOutput(
        finished_sending=set(output.finished_sending) or None,
        finished_recving=set(output.finished_recving) or None,
        failed_recving=set(output.failed_recving),
        invalid_block_ids=set(output.invalid_block_ids),
        kv_connector_stats=CounterStats(dict(stats)) if isinstance(stats, Mapping) else stats,
        kv_cache_events=output.events,
        kv_connector_worker_meta=output.meta,
    )
