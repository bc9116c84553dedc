# ruff: noqa: B027 - optional methods of an abstract base class are what this shape consists of
"""vLLM's one-class connector, under its own names.

A connector written for vLLM's V1 base class runs here after a change of its imports:

    from kvferry.v1 import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

Each docstring states when a host calls the method, which rules hosts enforce and what a violation
costs. "The engine dies" means an assertion in the scheduler's process: every request is lost. The
hosts are vLLM 0.10 to 0.32. "(0.32)" marks calls that only later hosts make; each has a default.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.errors import ConfigError, ContractError
from kvferry.v1.types import (
    CopyBlocksOp,
    ForwardContext,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    SchedulerOutput,
    V1Blocks,
    V1Config,
    V1Request,
)

if TYPE_CHECKING:
    import torch


class KVConnectorBase_V1(ABC):
    """A connector in one class: one instance in the scheduler, one in each worker.

    One step, in order: `schedule()` with lookups, `update_state_after_alloc` and
    `build_connector_meta`; on each worker `handle_preemptions`, `bind_connector_metadata`,
    `start_load_kv`, the forward with its layer hooks, `wait_for_save`, the getters of results and
    `clear_connector_metadata`; on the scheduler `update_connector_output`. In steps without sync
    loads vLLM 0.32 calls `start_load_kv` after the forward, so `bind_connector_metadata` must
    prepare everything that `save_kv_layer` needs. With overlapping batches the next `schedule()`
    precedes this step's `update_connector_output`.

    Hosts also use the class itself in configuration and logging processes, so importing its module
    must be cheap and must not touch a device.

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
        """Make one half. `kv_cache_config` has the engine's KV groups: 0.32 refuses a class whose
        constructor lacks it; earlier hosts may pass None if there is one group.

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

    # Worker side: each worker process, on the model runner's thread. An exception from one of these
    # methods kills the worker; failures are reported as ids instead.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step. From here on the host overwrites the blocks of requests that the step
        preempted or freed, so the connector must have stopped reading them."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """End a step."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """The metadata of the current step, for use inside the connector.

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
        """Whether a step has begun. False in warm-up runs, which call layer hooks too."""
        return self._connector_metadata is not None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the KV tensors by layer name. Once, after allocation.

        Shapes differ by host. Up to 0.14: `[2, blocks, tokens, heads, dim]`, `[blocks, 2, ...]` or,
        for MLA, `[blocks, tokens, dim]`. In 0.32: views `[blocks, heads, tokens, content]` with the
        strides of the physical layout. Address blocks through strides, never by `view`.
        """

    def register_cross_layers_kv_cache(
        self, kv_cache: torch.Tensor, attn_backend: type[Any]
    ) -> None:
        """Take one tensor over all layers, instead of `register_kv_caches` (0.12 to 0.14). The
        attention backend decides where the layer axis lies."""

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Take the platform's copy between host and device; CPU hosts have none. Once, after
        registration. The copy does nothing if the id lists are empty or differ in length."""

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """The memory pool in which the host is to allocate KV memory (0.32); None for its own."""
        return None

    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        """Finish or abandon reads of blocks that the host is about to overwrite.

        Precedes `bind_connector_metadata`. The argument is the step's metadata, in every step
        (0.32), or the set of preempted request ids if there are any (0.14). Earlier hosts do not
        call it: on these, a save that outlives its step reads blocks of another request.
        """

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401
        """Load the blocks that the metadata promises. Every step, with tokens or without; also if
        `forward_context.attn_metadata` is None. Some hosts pass further arguments by name.

        A sync load must be complete when this method returns, or when `wait_for_layer_load` of the
        layer does. The scheduler has already counted its tokens as computed, so a load that cannot
        be done must be reported by `get_block_ids_with_load_errors` in this step; skipping it gives
        wrong output. Async loads only start here.
        """

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the load of this layer is complete. Before each attention layer, but not in
        steps without tokens, nor inside replayed CUDA graphs (`requires_piecewise_for_cudagraph`).
        """

    @abstractmethod
    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - the host's
        **kwargs: Any,  # noqa: ANN401 - the host's
    ) -> None:
        """Start to save this layer's new KV. After each attention layer, in the same steps as
        `wait_for_layer_load`, so a record is complete only after a call for every layer. The blocks
        of `kv_layer` may be smaller than those that ids count."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return when the blocks of this step may be overwritten. Every step with tokens; in 0.32
        and the model-runner mixin also in steps without."""

    def finish_forward(self) -> None:
        """Called when the forward was submitted (0.32)."""

    def reset_capture_state(self) -> None:
        """Called when a graph capture begins (0.32)."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """The requests whose async work ended, as `(sent or saved, loaded)`. Called at the end of
        every step; every worker reports each id exactly once. The argument names all requests that
        ended since the last call, also those that the connector never handled.

        - Sent: only ids for which `request_finished` returned True, and only after they appeared in
          `finished_req_ids` of this or an earlier call. Any other id kills the engine. An id that
          is never reported leaks its blocks, and the engine never idles.
        - Loaded: ids whose async load ended, including failed loads and requests aborted meanwhile
          (hosts hold their blocks for this report). Any other id kills the engine.
        - The report of an aborted load frees the request; a "sent" for it afterwards kills the
          engine. So `request_finished` returns False for a request that is still loading.
        """
        return None, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """`get_finished` with failures (0.32). An id in `failed_recving` is in `finished_recving`
        too; the host computes its request from the start and looks it up again."""
        sending, recving = self.get_finished(finished_req_ids)
        return KVConnectorOutput(finished_sending=sending, finished_recving=recving)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last call; the call clears them. Every step.

        Report a sync load in its own step, an async load no later than the step that reports its id
        as loaded. The host recomputes the request from the first of these blocks, or fails it (the
        default of 0.32). If an async load lost its first block, the host looks the request up
        again, and the same answer makes the engine loop for ever. With several KV groups any id
        here kills the engine: use `failed_recving` instead.
        """
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters since the last call. Every step, on workers; 0.32 also on the scheduler, where
        the type must be the workers' type."""
        return None

    def get_kv_connector_kv_cache_events(self) -> object | None:
        """This worker's KV events since the last call (0.13 and later), or None. Hosts publish the
        events that all workers report alike."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """This worker's message to the scheduler half after the step (0.32), or None."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This worker's message to its peers, or None. Once, after registration."""
        return None

    def shutdown(self) -> None:
        """Called on both sides when the process ends. Idempotent; bounded in time."""

    # Scheduler side: one process, one thread, inside schedule() and the handling of outputs. An
    # exception from one of these methods kills the engine.

    def on_new_request(self, request: V1Request) -> None:
        """Called when a request was queued (0.32). Bookkeeping only."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: V1Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The number of tokens that the connector can load beyond `num_computed_tokens`, and
        whether the load is async. None for the number: a hit is known and on its way, ask again.

        The rules of `SchedulerRole.lookup` hold; the engine dies of a count that is too large and
        of `(0, True)`. An async answer may include the last token: the scheduler steps back by one.
        Hosts may discard the answer: no side effects, no final pins, no I/O.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: V1Request, blocks: V1Blocks, num_external_tokens: int
    ) -> None:
        """The host allocated blocks; see `SchedulerRole.update_after_alloc`.

        No scheduler output names a request during its async load, so its block ids come from this
        call alone. At the second call for such a load `blocks` holds all blocks in 0.32, but only
        the new ones in 0.13: take ids from the first call.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Make this step's metadata; never None. Once at the end of each `schedule()`, with tokens
        or without. Clears the state of this step; leaves `scheduler_output` as it is.

        - A prompt may come in chunks: block ids and tokens of a new request are those of its first
          chunk; later chunks arrive as cached requests.
        - A resumed request arrives as a cached one whose block ids replace the old, or as a new one
          (0.32, newer model runner). Handle both.
        - Block id 0 may be a placeholder outside of a sliding window: never read or write it.
        - Requests in `finished_req_ids` and `preempted_req_ids` lose their blocks in this step.
        """

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the merged report of all ranks. Once per step that has one."""

    def request_finished(
        self, request: V1Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Called when a request ended: stopped, aborted or failed. Exactly once per request, also
        for one that never ran (`block_ids` is empty); not for a preemption. Returns whether to hold
        the request's blocks until all workers report it as sent (never for a request that is still
        loading, see `get_finished`), and parameters for the final output.
        """
        return False, None

    def register_finished_partial_tail(self, *args: Any, **kwargs: Any) -> bool:  # noqa: ANN401
        """Whether to take over the unfinished tail of a recurrent state (0.32). True delays the
        release of blocks as in `request_finished`."""
        return False

    def take_events(self) -> Iterable[Any]:
        """Return and clear the KV events since the last call. Every step."""
        return ()

    def get_external_cache_hit_sources(
        self, request: V1Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Hit tokens by source, for metrics (0.32); the counts must add up."""
        return {}

    def get_loaded_kv_cache_group_ids(self, request: V1Request) -> tuple[int, ...] | None:
        """KV groups that an async load fills, so hosts do not zero them (0.32); None for all."""
        return None

    def has_pending_push_work(self) -> bool:
        """True makes an idle engine continue to step (0.32). If always True, it never idles."""
        return False

    def has_pending_block_frees(self) -> bool:
        """True lets a request wait for blocks instead of preempting another (0.32). If always True,
        the engine makes no progress."""
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether KV must reach a consumer in any case (0.32): preempted requests then discard
        tokens. Hosts assume it of every producer; a cache should return False."""
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
        """Number of reports per id that hosts wait for; None for one from each worker. Called once,
        at start-up. Too low a number releases blocks too early, too high a number never."""
        return None

    def reset_cache(self) -> bool | None:
        """Forget everything stored, because weights changed (0.13 and later). False: failed. Hosts
        take None for success. Saves under way must not bring old content back."""
        return None

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the workers' handshake metadata by tensor-parallel rank. Once, if there is any."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the same metadata by (pipeline rank, tensor-parallel rank) (0.32).

        Raises:
            ConfigError: a pipeline rank above 0, and the connector does not override this method.
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
        """The layout that the connector prefers, "HND" or "NHD"; None for any. An operator's
        setting wins, and hosts drop an unsupported one: verify strides at registration.

        Raises:
            TypeError: called on the base class.
        """
        if cls is KVConnectorBase_V1:
            raise TypeError("get_required_kvcache_layout is asked of a connector, not of its base")
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Whether the layer hooks have work to do (0.32): full CUDA graphs replay without them. On
        earlier hosts the operator must choose piecewise graphs."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Wrap `data`, the result of `KVConnectorStats.to_dict`, for the log; None: not logged."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: V1Config,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> object | None:
        """The host's Prometheus metrics of this connector, or None."""
        return None
