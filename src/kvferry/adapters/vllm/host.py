"""The types and functions of the installed vLLM, looked up once. Most version differences are here.

This looks for names, not version numbers: builds from source have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kvferry.errors import ConfigError

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

_NEEDED_HOOKS = (
    "register_kv_caches",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "clear_connector_metadata",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
)
"""Without these hooks a failed load would go unnoticed, or nothing would work at all."""


STAGE_SECONDS = 120.0
"""How long a rank waits for those of other pipeline stages. vLLM has all construct their connectors
at one time, once they have loaded the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The types and functions of one vLLM that a connector uses.

    Attributes:
        base: its `KVConnectorBase_V1`.
        hma: its `SupportsHMA`.
        metadata: its `KVConnectorMetadata`.
        worker_meta: its `KVConnectorWorkerMetadata`; None if its `KVConnectorOutput` has no field
            for messages of workers (before 0.18).
        stats: its `KVConnectorStats`.
        prom_metrics: its `KVConnectorPromMetrics`.
        results: its `KVConnectorTransferResults`; None before 0.30.
        hit_sources: its `CacheHitSource`; None before 0.32.
        events: its module of KV events.
        load_config: its `get_config`, which reads a model's configuration as it is written.
        exchange: `exchange_over_stages`; None if it does not bring the description of each pipeline
            stage to the scheduler (before 0.24).
        hands_off_states: whether each step says which recurrent states stand in which blocks, and
            loads may fail by request (0.30).
    """

    base: type[Any]
    hma: type[Any]
    metadata: type[Any]
    worker_meta: type[Any] | None
    stats: type[Any]
    prom_metrics: type[Any]
    results: Callable[..., Any] | None
    hit_sources: Any
    events: Any
    load_config: Callable[..., Any]
    exchange: Callable[[bytes], list[bytes]] | None
    hands_off_states: bool


def load_host() -> Host:
    """Look up the types and functions of the installed vLLM.

    Raises:
        ConfigError: there is none, or it lacks a hook without which wrong KV might be served.
    """
    version = getattr(_module("vllm.version") or _module("vllm"), "__version__", "unknown")
    try:
        v1 = import_module(f"{_V1}.base")
    except ImportError as error:
        raise ConfigError(
            f"vLLM (version {version}) or its V1 connectors cannot be imported: install 0.11.1 or "
            f"later ({error})"
        ) from error
    missing = [name for name in _NEEDED_HOOKS if not hasattr(v1.KVConnectorBase_V1, name)]
    if missing:
        raise ConfigError(
            f"vLLM {version} is not supported: KVConnectorBase_V1 lacks {', '.join(missing)}; "
            "use 0.11.1 or later"
        )
    metrics = import_module(f"{_V1}.metrics")
    output = import_module("vllm.v1.outputs").KVConnectorOutput
    knows_stages = hasattr(v1.KVConnectorBase_V1, "set_xfer_handshake_metadata_pp_aware")
    step = import_module("vllm.v1.core.sched.output")
    in_step = {field.name for field in fields(step.SchedulerOutput)}
    results = getattr(v1, "KVConnectorTransferResults", None)
    has_worker_meta = "kv_connector_worker_meta" in {field.name for field in fields(output)}
    return Host(
        base=v1.KVConnectorBase_V1,
        hma=v1.SupportsHMA,
        metadata=v1.KVConnectorMetadata,
        worker_meta=v1.KVConnectorWorkerMetadata if has_worker_meta else None,
        stats=metrics.KVConnectorStats,
        prom_metrics=metrics.KVConnectorPromMetrics,
        results=results,
        hit_sources=getattr(_module("vllm.v1.metrics.cache_hit_source"), "CacheHitSource", None),
        events=import_module("vllm.distributed.kv_events"),
        load_config=import_module("vllm.transformers_utils.config").get_config,
        exchange=exchange_over_stages if knows_stages else None,
        hands_off_states=results is not None and "kv_connector_block_state" in in_step,
    )


def cpu_kernels(vllm_config: Any, block_sizes: Collection[int]) -> str | None:  # noqa: ANN401
    """Return the instruction set of this vLLM's CPU attention kernels, which decides a block's
    layout; "unknown" if this vLLM does not say. None if it does not run on a CPU, or for
    latent attention, which has other kernels. `block_sizes`: of the KV groups, in tokens."""
    model = vllm_config.model_config
    if not _on_cpu() or model.use_mla:
        return None
    choose = getattr(_module("vllm.v1.attention.backends.cpu_attn"), "_get_attn_isa", None)
    if choose is None:
        return "unknown"
    # The function took (dtype, block size) in 0.11; the later releases ask for more.
    more = (model.get_head_size(), vllm_config.cache_config.cache_dtype)
    more = more[: len(inspect.signature(choose).parameters) - 2]
    return "+".join(sorted({str(choose(model.dtype, size, *more)) for size in block_sizes}))


def computes_otherwise(vllm_config: Any) -> str:  # noqa: ANN401 - the host's
    """Say why this vLLM computes KV that other engines do not, or not after a hit; empty: it does.

    For latent attention on a CPU, vLLM switches its own prefix cache off: even with right KV in its
    blocks, a prefill after a hit disagrees with one of the whole prompt, and the latter disagrees
    with Transformers (seen with 0.32).
    """
    model = vllm_config.model_config
    if _on_cpu() and model.use_mla:
        return "on a CPU, vLLM's latent attention (MLA) gives other results after a prefix hit"
    if getattr(model, "is_diffusion", False) is True:
        return "a diffusion model writes the KV of a block of tokens that see each other"
    return ""


def needs_all_tokens(vllm_config: Any) -> str:  # noqa: ANN401 - the host's
    """Say what of this engine needs every token of a prompt to be computed, so that no hit may be
    used; empty: nothing does. What one request needs, `kvferry.v1.host` reads.

    vLLM keeps such outputs beside its own prefix cache, and would look for those of loaded tokens
    there: it then ends, or answers with what is not there. That holds for the next request that
    hits the loaded blocks in vLLM's cache, too, whatever the first one needed.
    """
    model = vllm_config.model_config
    outputs = getattr(vllm_config, "aux_output_config", None)
    is_routed = getattr(model, "enable_return_routed_experts", False) is True  # before 0.32
    if getattr(outputs, "enabled", is_routed):
        return "it returns the experts of each token (enable_return_routed_experts)"
    speculative = getattr(vllm_config, "speculative_config", None)
    if getattr(speculative, "method", None) == "extract_hidden_states":
        return "it returns the hidden states of each token (extract_hidden_states)"
    caches = bool(getattr(vllm_config.cache_config, "enable_prefix_caching", True))
    if getattr(model, "pooler_config", None) is not None and not getattr(
        model, "is_prefix_caching_supported", caches
    ):
        return "its pooling reads each token, so vLLM caches no prefix of this model"
    return ""


def offloads_a_part(kv_cache_config: Any) -> str:  # noqa: ANN401 - the host's
    """Say why vLLM's offloading moves only a part of each token's KV, if it does: a row that comes
    back after a restart is then a hit without the rest."""
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is None:
        return ""
    return "HiSparse keeps KV in host memory of its own, and offloads its indexer alone"


def prunes_items(vllm_config: Any) -> bool:  # noqa: ANN401 - the host's
    """Whether this engine drops tokens of videos. It then knows the positions of the text behind
    one by its encoder alone, which does not run for tokens of a hit (seen with 0.32: other
    positions, also after a hit in vLLM's own prefix cache)."""
    config = getattr(vllm_config.model_config, "multimodal_config", None)
    return bool(getattr(config, "video_pruning_rate", None))


def has_whole_items(vllm_config: Any) -> bool:  # noqa: ANN401 - the host's
    """Whether the tokens of an image attend to each other in both directions. vLLM computes such an
    item in one step, unless a hit ends in it (read in 0.32: then a step may end in it, too)."""
    return bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False))


def own_report(output: Any, name: str) -> Any:  # noqa: ANN401 - a `KVConnectorOutput`
    """Return `output` with only the stats of connector class `name`, if it holds several classes'.

    Up to 0.17, our workers' messages travel on stats, and `MultiConnector` hands the stats of all
    its children, by class, to each of them. Other `output` is returned as it is.
    """
    stats = output.kv_connector_stats
    held = getattr(stats, "data", None)
    if isinstance(held, dict) and hasattr(held.get(name), "carried_meta"):
        return replace(output, kv_connector_stats=held[name])
    return output


def _module(name: str) -> Any:  # noqa: ANN401 - a host's module, or None
    try:
        return import_module(name)
    except ImportError:
        return None


def _on_cpu() -> bool:
    return bool(import_module("vllm.platforms").current_platform.is_cpu())


def platform_name() -> str:
    """The device that this vLLM runs on: "cpu", "cuda", "rocm", ..."""
    platform = import_module("vllm.platforms").current_platform
    return "cpu" if _on_cpu() else str(getattr(platform, "device_name", "unknown"))


def shares_handshake(connector: object) -> bool:
    """Whether a worker's connector is one of several. vLLM's `MultiConnector` gives the metadata of
    the first child to all of them, and other connectors refuse what is not their own."""
    transfer = _module("vllm.distributed.kv_transfer")
    has_one = getattr(transfer, "has_kv_transfer_group", None)
    return has_one is not None and has_one() and transfer.get_kv_transfer_group() is not connector


def first_local_rank(rank: int) -> int:
    """The first rank on the machine of a worker, given its own; 0 where vLLM does not say it, as in
    the scheduler's process."""
    state = _module("vllm.distributed.parallel_state")
    try:
        # Below 0 in a data-parallel group: then ranks of other engines count as well.
        return max(0, rank - int(state.get_world_group().local_rank))
    except (AttributeError, AssertionError):  # vLLM has no such group here
        return 0


def exchange_over_stages(said: bytes, seconds: float = STAGE_SECONDS) -> list[bytes]:
    """Send `said` to the ranks of the other pipeline stages that hold the same heads. Return what
    each of them says, by stage. Called once by each worker, as vLLM constructs its connector.

    Raises:
        ConfigError: one of them says nothing for `seconds`, or has ended.
    """
    group = import_module("vllm.distributed.parallel_state").get_pp_group()

    def gathered(mine: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(mine) for _ in range(group.world_size)]
        torch.distributed.all_gather(found, mine, group=group.cpu_group, async_op=True).wait(
            timedelta(seconds=seconds)
        )
        return found

    try:
        sizes = [int(size) for size in gathered(torch.tensor([len(said)]))]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        return [
            bytes(each[:size].numpy()) for each, size in zip(gathered(mine), sizes, strict=True)
        ]
    except RuntimeError as error:  # torch's, whatever the reason
        raise ConfigError(
            f"pipeline stage {group.rank_in_group} did not hear from all other stages within "
            f"{seconds:.0f} s what they keep: {' '.join(str(error).split())}"
        ) from error


def conv_state_layout() -> str | None:
    """The order of axes of Mamba's convolution states in this vLLM; None if it has but one."""
    states = _module("vllm.model_executor.layers.mamba.mamba_utils")
    found = getattr(states, "get_conv_state_layout", None)
    return None if found is None else str(found())


def device_name() -> str:
    """The device, and whether its own kernels are installed: vLLM chooses kernels by both."""
    name = import_module("vllm.platforms").current_platform.get_device_name()
    return f"{name}, {'with' if find_spec('flashinfer') else 'without'} FlashInfer"
