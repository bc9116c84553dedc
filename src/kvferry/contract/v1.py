# ruff: noqa: B027 - optional methods of an abstract base class are what this shape consists of
"""The one-class connector shape of vLLM, under its own names: for connectors written against it,
and for hosts that drive it.

A connector written for vLLM's V1 base class runs here after a change of its import line:

    from kvferry.contract.v1 import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

Each docstring says when hosts call the method, what they require, and what happens to whoever does
not comply ("the engine dies": an assertion in the scheduler's process, every request lost). Hosts
meant are vLLM 0.10 to 0.32; "0.32" marks what only the later of them do, and all of that has a
default here. `kvferry.runner` drives such a connector as our two roles, behind the same guard.

This file is one class for two processes because the shape is: exempt from the size and role rules
that hold elsewhere. Nothing in it moves bytes or decides anything.
"""

from __future__ import annotations

import copy
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from kvferry.errors import ConfigError, ContractError

if TYPE_CHECKING:
    import torch

    CopyBlocksOp = Callable[
        [
            dict[str, torch.Tensor],
            dict[str, torch.Tensor],
            list[int],
            list[int],
            Literal["h2d", "d2h"],
        ],
        None,
    ]
    """Copies blocks between two sets of layers: source layers, destination layers, source block
    ids, destination block ids, direction."""
else:
    CopyBlocksOp = Callable[..., None]

# --- what hosts hand over ------------------------------------------------------------------------


class V1TransferConfig(Protocol):
    """`vllm_config.kv_transfer_config`: what the operator said about the connector."""

    @property
    def kv_connector(self) -> str | None: ...
    @property
    def kv_role(self) -> str | None:
        """One of "kv_producer", "kv_consumer", "kv_both"."""

    @property
    def engine_id(self) -> str | None:
        """Drawn anew for each configuration object: never part of a key that is kept."""

    @property
    def kv_connector_extra_config(self) -> dict[str, Any]: ...

    def get_from_extra_config(self, key: str, default: Any) -> Any:  # noqa: ANN401 - free-form
        """An option of the connector's own."""


class V1CacheConfig(Protocol):
    """`vllm_config.cache_config`."""

    @property
    def block_size(self) -> int: ...
    @property
    def cache_dtype(self) -> str: ...


class V1ModelConfig(Protocol):
    """`vllm_config.model_config`."""

    @property
    def model(self) -> str: ...
    @property
    def dtype(self) -> Any: ...  # noqa: ANN401 - the host's


class V1ParallelConfig(Protocol):
    """`vllm_config.parallel_config`."""

    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rank(self) -> int: ...


class V1Config(Protocol):
    """The configuration that a V1 constructor reads. Hosts' objects hold much more."""

    @property
    def kv_transfer_config(self) -> V1TransferConfig | None: ...
    @property
    def cache_config(self) -> V1CacheConfig: ...
    @property
    def model_config(self) -> V1ModelConfig: ...
    @property
    def parallel_config(self) -> V1ParallelConfig: ...


class V1Request(Protocol):
    """A request as scheduler-side methods see it. Read only.

    `num_tokens` is the length of `all_token_ids` and counts generated tokens, so for a request that
    was preempted it is more than the prompt.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...


class V1Blocks(Protocol):
    """The blocks of one request."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per KV group, in token order."""


class V1NewRequest(Protocol):
    """A request that runs for the first time; on some hosts also one resumed after preemption."""

    @property
    def req_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int] | None: ...
    @property
    def block_ids(self) -> tuple[list[int], ...]:
        """So far only those of the tokens scheduled now: a later chunk brings more."""

    @property
    def num_computed_tokens(self) -> int: ...


class V1CachedRequests(Protocol):
    """Requests that run on; parallel lists.

    `new_block_ids[i]` is None if no block was added, else per KV group: appended to what the
    request has, or, if it was resumed, in place of it. Which ones were resumed is said by the set
    `resumed_req_ids` (vLLM 0.12 and later) or the list `resumed_from_preemption` (before).
    """

    @property
    def req_ids(self) -> list[str]: ...
    @property
    def new_block_ids(self) -> list[tuple[list[int], ...] | None]: ...
    @property
    def num_computed_tokens(self) -> list[int]: ...


class V1SchedulerOutput(Protocol):
    """One scheduler step. `preempted_req_ids` is there on later hosts, set or None."""

    @property
    def scheduled_new_reqs(self) -> Sequence[V1NewRequest]: ...
    @property
    def scheduled_cached_reqs(self) -> V1CachedRequests: ...
    @property
    def num_scheduled_tokens(self) -> dict[str, int]: ...
    @property
    def total_num_scheduled_tokens(self) -> int: ...
    @property
    def finished_req_ids(self) -> set[str]: ...


class V1ForwardContext(Protocol):
    """What the forward runs in. `attn_metadata` may be None, a list or a dict: do not build on it.

    None stands for a step without tokens, a warm-up run or a replayed graph, and loads may well be
    due in such a step.
    """

    @property
    def attn_metadata(self) -> Any: ...  # noqa: ANN401 - the host's
    @property
    def no_compile_layers(self) -> Mapping[str, Any]: ...


# --- what connectors hand back -------------------------------------------------------------------


class KVConnectorRole(enum.Enum):
    """Which half of a connector an instance is. The halves share no memory."""

    SCHEDULER = 0
    """One instance in the scheduler's process, built before KV memory exists."""
    WORKER = 1
    """One instance per worker process, built before KV memory is allocated."""


class KVConnectorMetadata(ABC):  # noqa: B024 - a mark; connectors put in what they need
    """What the scheduler half tells the worker halves in one step. Pickled on its way: no tensors
    on a device, no live objects."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024 - likewise
    """What a worker's peers must know of it before the first transfer. Pickled on its way."""


class KVConnectorWorkerMetadata(ABC):
    """What the worker halves tell the scheduler half in one step, beyond the common fields (0.32).

    Earlier hosts carry nothing of the kind: a connector must work, if less well, without.
    """

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Fold in what another rank said. Hosts do not check that the types agree."""


@dataclass
class KVConnectorStats(ABC):
    """Counters of one interval. They cross processes as the plain dict `data` and are mutated on
    the way: return a fresh object or a `clone` each time, never the one that goes on counting."""

    data: dict[str, Any] = field(default_factory=dict)

    @abstractmethod
    def reset(self) -> None:
        """Begin a new interval."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or interval's counters. Hosts refuse another type by assertion."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """The numbers of a log line."""

    def is_empty(self) -> bool:
        """True if there is nothing to report."""
        return not self.data

    def to_dict(self) -> dict[str, Any]:
        """What crosses the process line; `build_kv_connector_stats` makes an object of it."""
        return dict(self.data)

    def clone(self) -> KVConnectorStats:
        """An independent copy."""
        return copy.deepcopy(self)


@dataclass
class KVConnectorOutput:
    """What worker halves report after a step; one per rank, folded into one for the scheduler.

    Attributes:
        finished_sending: requests whose blocks the connector no longer needs; None if none.
        finished_recving: requests whose async load is over, failed or not; None if none.
        kv_connector_stats: counters since the last step, or None.
        kv_cache_events: events of this worker, or None.
        invalid_block_ids: blocks whose load failed.
        expected_finished_count: reports to wait for per id, if not one per rank; 0: unchanged.
        failed_recving: of `finished_recving`, those to be computed from the start (0.32).
        kv_connector_worker_meta: connector-specific (0.32), or None.
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
        """True if the scheduler need not be told anything."""
        stats = self.kv_connector_stats
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or self.failed_recving
            or self.kv_cache_events
            or self.kv_connector_worker_meta is not None
            or (stats is not None and not stats.is_empty())
        )


# --- abilities -----------------------------------------------------------------------------------


class SupportsHMA(ABC):
    """A connector for models with several KV groups. Without it hosts switch the hybrid memory
    allocator off, or refuse to start if it was asked for by name."""

    @abstractmethod
    def request_finished_all_groups(
        self, request: V1Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished`, with block ids per group; hosts call one or the other, never both.

        With more than one group hosts cannot recompute single blocks: a block id in
        `get_block_ids_with_load_errors` kills the engine. Report the request in `failed_recving`.
        """


def supports_hma(connector: object) -> bool:
    """Whether a connector, given as class or instance, is a `SupportsHMA`.

    Hosts ask the class, in processes in which no instance exists.
    """
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


# --- the connector -------------------------------------------------------------------------------


class KVConnectorBase_V1(ABC):
    """A connector in one class: one instance in the scheduler, one in each worker.

    Abstract are seven methods: `start_load_kv`, `wait_for_layer_load`, `save_kv_layer`,
    `wait_for_save` (worker), `get_num_new_matched_tokens`, `update_state_after_alloc`,
    `build_connector_meta` (scheduler). All others have the default that hosts expect.

    One step, in order: `schedule()` with lookups, `update_state_after_alloc` and
    `build_connector_meta`; on each worker `handle_preemptions`, `bind_connector_metadata`,
    `start_load_kv`, the forward with layer hooks, `wait_for_save`, the getters of results,
    `clear_connector_metadata`; then `update_connector_output` on the scheduler. vLLM 0.32 calls
    `start_load_kv` after the forward in steps without sync loads, so what `save_kv_layer` needs is
    prepared in `bind_connector_metadata`. With overlapping batches the next `schedule()` comes
    before this step's `update_connector_output`: what was ordered is not yet done.

    Hosts use the class itself, without an instance, in configuration and logging processes:
    importing its module must be cheap and must not touch a device.

    Attributes:
        prefer_cross_layer_blocks: True asks hosts (0.12 to 0.14) for one tensor over all layers and
            `register_cross_layers_kv_cache`; they comply only for uniform models.
    """

    prefer_cross_layer_blocks: ClassVar[bool] = False

    def __init__(
        self,
        vllm_config: V1Config,
        role: KVConnectorRole,
        kv_cache_config: object | None = None,
    ) -> None:
        """Hosts pass three arguments by name; 0.32 refuses a class without `kv_cache_config`.

        Args:
            vllm_config: the engine's configuration.
            role: which half this instance is.
            kv_cache_config: the engine's KV groups; None from hosts before 0.32, that have one.

        Raises:
            ConfigError: `vllm_config.kv_transfer_config` is None.
        """
        if vllm_config.kv_transfer_config is None:
            raise ConfigError(
                "kv_transfer_config is None, a connector needs one: start the host with "
                "--kv-transfer-config naming kv_connector and kv_role"
            )
        self._connector_metadata: KVConnectorMetadata | None = None
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role

    @property
    def role(self) -> KVConnectorRole:
        return self._role

    # Worker side: each worker process, on the model runner's thread. An exception that leaves one
    # of these methods is not an error report: it kills the worker. Failures are reported as ids.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take what `build_connector_meta` made for this step. Every step, with tokens or without.

        When it returns, blocks of requests that this step preempted or freed are written anew:
        nothing may still be reading them.
        """
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step is over. Every step."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The metadata of the step under way. For use inside the connector.

        Raises:
            ContractError: outside of a step.
        """
        if self._connector_metadata is None:
            raise ContractError(
                "no connector metadata is bound: it is there from bind_connector_metadata to "
                "clear_connector_metadata only (handle_preemptions gets it as an argument)"
            )
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        """Whether a step is under way. False in warm-up runs, which call layer hooks too."""
        return self._connector_metadata is not None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors by layer name. Once, after allocation.

        Shapes differ by host: `[2, blocks, tokens, heads, dim]`, `[blocks, 2, ...]` or, for MLA,
        `[blocks, tokens, dim]` up to 0.14; `[blocks, heads, tokens, content]` views with the
        strides of the physical layout in 0.32. Address blocks through strides, never by `view`.
        """

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Take one tensor over all layers, instead of `register_kv_caches` (0.12 to 0.14).

        Only with `prefer_cross_layer_blocks` and a model of uniform layers. Where the layer axis
        lies is decided by the attention backend.
        """

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Take the platform's copy between host and device. Once, after registration.

        The operation does nothing, silently, if id lists are empty or differ in length, and does
        not exist on CPU hosts.
        """

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """A memory pool in which hosts allocate KV memory (0.32); None: their own."""
        return None

    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        """Let go of blocks that are about to be overwritten: finish or abandon reads of them now.

        Preemption frees blocks at once and asks nobody, so an async save must end here. Called
        before `bind_connector_metadata`, with this step's metadata, in every step (0.32); with the
        set of preempted request ids, if there are any (0.14); not at all before: there, a save that
        outlives its step reads blocks of somebody else.
        """

    @abstractmethod
    def start_load_kv(self, forward_context: V1ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Bring what the metadata promises. Every step, with tokens or without.

        Sync loads must be in the blocks before a layer reads them: when this returns, or when
        `wait_for_layer_load` of that layer does. The scheduler has counted these tokens as computed
        and may share the blocks with other requests already, so a load that cannot be done must be
        reported by `get_block_ids_with_load_errors` in this step: leaving it out, for want of
        `attn_metadata` for example, gives wrong output. Async loads are only started.

        Args:
            forward_context: its `attn_metadata` may be None while loads are due.
            **kwargs: whatever else a host passes; must be accepted.
        """

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the load of this layer is done. Before each attention layer.

        Not called in steps without tokens, nor inside replayed CUDA graphs: see
        `requires_piecewise_for_cudagraph`.
        """

    @abstractmethod
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - the host's
        **kwargs: Any,  # noqa: ANN401 - the host's
    ) -> None:
        """Start to save this layer's new KV. After each attention layer; may return at once.

        Called or left out like `wait_for_layer_load`, so a record is complete only when every layer
        was seen. `kv_layer` may be a view with smaller blocks than those that block ids count.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the blocks of this step may be overwritten. Every step with tokens.

        In steps without tokens 0.32 and `kvferry.runner` call it too, earlier hosts do not: a queue
        that is drained nowhere else would stall there.
        """

    def finish_forward(self) -> None:
        """The forward was submitted (0.32)."""

    def reset_capture_state(self) -> None:
        """A graph capture begins (0.32)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Which requests' async work ended: `(sent or saved, loaded)`. Every step, at its end.

        Each id once per worker, and every worker must say it: hosts count reports down from the
        number of workers (or `get_finished_count`), so a worker that repeats itself releases blocks
        too early, and one that stays silent holds them for ever.

        - Sent: only ids for which `request_finished` said True, and only after they were in
          `finished_req_ids` of this or an earlier call. Any other, as a running request, kills the
          engine. An id that is never reported leaks its blocks, and the engine never idles.
        - Loaded: ids whose async load is over, also if it failed, also if the request was aborted
          meanwhile (its blocks are held for this report). Any other kills the engine.
        - An aborted load frees the request when it is reported; a "sent" for it afterwards kills
          the engine. So `request_finished` says False for a request that still loads.

        Args:
            finished_req_ids: all that ended since the last call, those never handled here included.
        """
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """`get_finished` with failures: may fill `failed_recving` as well (0.32).

        An id in `failed_recving` is in `finished_recving` too; its request is computed from the
        start and looked up again. The only way to report a failure with several KV groups.
        """
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorOutput(finished_sending=sending, finished_recving=recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last call; reading forgets them. Every step.

        Sync loads: in the step of the load. Async loads: up to the step that reports the id as
        loaded, and the id is reported nevertheless. The host computes the request from the first of
        these blocks on, or fails it: the operator's choice, and 0.32 fails by default. Of requests
        that share a bad block only the first computes it anew. If an async load is lost from its
        first block, the lookup is asked again: give the same answer and the engine loops for ever.
        With several KV groups any id here kills the engine.
        """
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters since the last call. Every step, on workers; 0.32 also on the scheduler, where
        the type must be the same as on the workers."""
        return None

    def get_kv_connector_kv_cache_events(self) -> object | None:
        """This worker's KV events since the last call (0.13 and later), or None. Hosts pass on what
        all workers report alike."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What this worker has to tell the scheduler half after the step (0.32), or None."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What peers must know of this worker. Once, after registration; None: nothing."""
        return None

    def shutdown(self) -> None:
        """The process ends. Idempotent, bounded in time; on both sides."""

    # Scheduler side: one process, one thread, inside schedule() and the handling of outputs. An
    # exception that leaves one of these methods kills the engine; so does a wrong answer, or worse.

    def on_new_request(self, request: V1Request) -> None:
        """The request was queued (0.32). Bookkeeping only; earlier hosts do not call it."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: V1Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond `num_computed_tokens` the connector can bring, and whether async.

        Asked at every scan of the waiting queue until the request is admitted, again after a
        preemption and after a failed load. The answer may come to nothing (no blocks, no budget,
        `skip_reading_prefix_cache`): no side effects, nothing pinned for good, no I/O.

        - Never negative: the scheduler computes with it, silently.
        - With the local tokens never more than `request.num_tokens`: the engine dies.
        - The last token is always computed. Sync: at most all but one, or the engine dies. Async:
          all are allowed, the scheduler steps back by one itself.
        - Whole blocks. Hosts take other counts, but know, share and repair blocks only.
        - `(0, True)` kills the engine.
        - `(None, ...)`: a hit is known and on its way, ask again. Nobody bounds the retries: the
          connector needs a deadline. Never for a request without such a hit.
        - After a preemption `request.num_tokens` counts generated tokens, and so may the answer.
        - Only what is there at this moment, and not again what has just failed.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: V1Request, blocks: V1Blocks, num_external_tokens: int
    ) -> None:
        """Blocks were allocated. After every admission, also with 0 external tokens.

        An async load sees this twice: with its count when it starts, with 0 when it has ended and
        the request is admitted. Decide on the count, not on whether there are blocks. A request
        that loads async is in no scheduler output until then: its block ids are known from here
        alone. `blocks` holds all blocks in 0.32; in 0.13, at the second call, the new ones only, so
        take ids from the first call.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: V1SchedulerOutput) -> KVConnectorMetadata:
        """Make this step's metadata; never None. Once at the end of each `schedule()`, with tokens
        or without. Forgets what was gathered for this step; does not change `scheduler_output`.

        - A prompt may come in chunks: block ids and tokens of a new request are those of its first
          chunk, later ones arrive as cached requests.
        - A resumed request comes as a cached one, its block ids in place of the old, or (0.32,
          newer model runner) as a new one. Handle both.
        - Block id 0 may be a placeholder outside of a sliding window: never read or write it.
        - `finished_req_ids` and `preempted_req_ids` lose their blocks in this step.
        """

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learn what the workers reported, folded over all ranks. Once per step that has any."""

    def request_finished(
        self, request: V1Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended: stopped, aborted or failed. Exactly once per request.

        Also for one that never ran (`block_ids` empty) and one aborted while it loads; not on
        preemption. True delays the freeing of its blocks until all workers report it as sent; see
        `get_finished` for why a request that still loads must get False (hosts before 0.32 free its
        blocks at once in that case; there, and only there, True is the safe answer).

        Returns:
            Whether to delay, and parameters for the final output of a normally finished request.
        """
        return False, None

    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
        """Whether to take over the unfinished tail of a recurrent state (0.32). True delays the
        free as `request_finished` does."""
        return False

    def take_events(self) -> Iterable[Any]:
        """Drain KV events gathered since the last call. Every step."""
        return ()

    def get_external_cache_hit_sources(
        self, request: V1Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Where hit tokens came from, for metrics (0.32); the counts must add up."""
        return {}

    def get_loaded_kv_cache_group_ids(self, request: V1Request) -> tuple[int, ...] | None:
        """KV groups that an async load fills (0.32); None: all that take part.

        Blocks of these groups are not zeroed: claim one, and it must be filled.
        """
        return None

    def has_pending_push_work(self) -> bool:
        """True keeps an idle engine stepping (0.32). Stuck True: a busy loop."""
        return False

    def has_pending_block_frees(self) -> bool:
        """True lets a request wait for blocks instead of preempting another (0.32). Stuck True: the
        engine makes no progress."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether KV must reach a consumer whatever happens (0.32): then preempted requests throw
        tokens away. Hosts assume so of every producer; a cache should say False."""
        return self._kv_transfer_config.kv_role in ("kv_producer", "kv_both")

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether groups may have local hits of different lengths (0.32)."""
        return False

    def bind_kv_cache_manager(self, kv_cache_manager: object) -> None:
        """Take the host's KV cache manager, once it exists (0.32)."""

    def bind_gpu_block_pool(self, block_pool: object) -> None:
        """Take the host's block pool, once it exists (0.32)."""

    def get_finished_count(self) -> int | None:
        """Reports per id that hosts wait for; None: one from each worker. Once, at start-up.

        Counted per id across steps. Fewer than there are reporting workers releases blocks too
        early; more never releases them.
        """
        return None

    def reset_cache(self) -> bool | None:
        """Forget everything stored, because weights changed (0.13 and later). False: could not.

        None, as here, is taken for success, so a connector that stores must implement it; saves
        under way must not bring old content back.
        """
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the workers' handshake metadata by tensor-parallel rank. Once, if there is any."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by (pipeline rank, tensor-parallel rank) (0.32).

        Raises:
            ConfigError: a pipeline rank above 0, and the connector did not override this.
        """
        beyond = sorted({pp for pp, _ in metadata if pp > 0})
        if beyond:
            raise ConfigError(
                f"handshake metadata from pipeline ranks {beyond}, but {type(self).__name__} knows "
                "rank 0 only: override set_xfer_handshake_metadata_pp_aware or use one stage"
            )
        self.set_xfer_handshake_metadata({tp: value for (_, tp), value in metadata.items()})

    # Asked of the class.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: V1Config) -> str | None:
        """The layout that the connector would like, "HND" or "NHD"; None: any.

        A wish: an operator's setting wins and hosts drop what they cannot do, with a warning.
        Verify strides at registration.

        Raises:
            TypeError: called on the base class.
        """
        if cls is KVConnectorBase_V1:
            raise TypeError("get_required_kvcache_layout is asked of a connector, not of its base")
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether work is done in layer hooks, which full CUDA graphs replay without (0.32).

        Earlier hosts cannot be asked: there the operator must choose piecewise graphs.
        """
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """An object around `data` as `KVConnectorStats.to_dict` gave it; None: not logged."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: V1Config,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> object | None:
        """The host's Prometheus metrics of this connector; None: none."""
        return None
