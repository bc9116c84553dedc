"""The types and functions of this vLLM, looked up once. The only file that knows how versions
differ. It tests for names, not for version numbers: builds from source have none.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from typing import Any

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
"""Without one of these a failed load would go unnoticed, or nothing would work at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One release of vLLM, as far as a connector sees it.

    Attributes:
        version: for messages.
        base: its `KVConnectorBase_V1`.
        hma: its `SupportsHMA`; None before there were several KV groups.
        metadata: its `KVConnectorMetadata`.
        worker_meta: its `KVConnectorWorkerMetadata`; None before 0.32's message from workers to the
            scheduler.
        stats: its `KVConnectorStats`; None if it collects none.
        prom_metrics: its `KVConnectorPromMetrics`; None if it exports none.
        results: its `KVConnectorTransferResults`; None before 0.32.
        hit_sources: its `CacheHitSource`; None if it does not count hits by source.
        events: its module of KV events; None if it has none.
        base_takes_groups: whether the base class's constructor takes `kv_cache_config`.
        load_config: its `get_config`: a model's configuration as it is written.
    """

    version: str
    base: type[Any]
    hma: type[Any] | None
    metadata: type[Any]
    worker_meta: type[Any] | None
    stats: type[Any] | None
    prom_metrics: type[Any] | None
    results: Callable[..., Any] | None
    hit_sources: Any
    events: Any
    base_takes_groups: bool
    load_config: Callable[..., Any]

    @property
    def bases(self) -> tuple[type[Any], ...]:
        """Base classes of a connector that serves several KV groups."""
        return (self.base,) if self.hma is None else (self.base, self.hma)

    @property
    def carries_messages(self) -> bool:
        """Whether workers' messages reach the scheduler, in their own field or on the stats."""
        return self.worker_meta is not None or self.stats is not None


def load_host() -> Host:
    """Look at the vLLM that is installed.

    Raises:
        ConfigError: there is none, or it lacks a hook that is needed.
    """
    try:
        v1 = import_module(f"{_V1}.base")
    except ImportError as error:
        raise ConfigError(
            f"this vLLM ({_version()}) has no connectors of the V1 kind: use 0.11.1 or later "
            f"({error})"
        ) from error
    metrics = _module(f"{_V1}.metrics")
    outputs = import_module("vllm.v1.outputs")
    worker_meta = getattr(v1, "KVConnectorWorkerMetadata", None)
    if "kv_connector_worker_meta" not in _fields(outputs.KVConnectorOutput):
        worker_meta = None
    host = Host(
        version=_version(),
        base=v1.KVConnectorBase_V1,
        hma=getattr(v1, "SupportsHMA", None),
        metadata=v1.KVConnectorMetadata,
        worker_meta=worker_meta,
        stats=getattr(metrics, "KVConnectorStats", None),
        prom_metrics=getattr(metrics, "KVConnectorPromMetrics", None),
        results=getattr(v1, "KVConnectorTransferResults", None),
        hit_sources=getattr(_module("vllm.v1.metrics.cache_hit_source"), "CacheHitSource", None),
        events=_module("vllm.distributed.kv_events"),
        load_config=import_module("vllm.transformers_utils.config").get_config,
        base_takes_groups="kv_cache_config" in inspect.signature(v1.KVConnectorBase_V1).parameters,
    )
    check_host(host)
    return host


def cpu_kernels(vllm_config: Any, block_sizes: Collection[int]) -> str | None:  # noqa: ANN401
    """The instruction set of this vLLM's CPU attention kernels, which decides a block's layout.
    None if it does not run on a CPU, or for latent attention, which has other kernels.

    Args:
        vllm_config: vLLM's configuration.
        block_sizes: of the KV groups, in tokens.
    """
    platforms = _module("vllm.platforms")
    model = vllm_config.model_config
    if platforms is None or not platforms.current_platform.is_cpu() or model.use_mla:
        return None
    choose = getattr(_module("vllm.v1.attention.backends.cpu_attn"), "_get_attn_isa", None)
    if choose is None:
        return "unknown"
    # 0.11 asked for two of these, later releases for more.
    more = (model.get_head_size(), vllm_config.cache_config.cache_dtype)
    more = more[: len(inspect.signature(choose).parameters) - 2]
    return "+".join(sorted({str(choose(model.dtype, size, *more)) for size in block_sizes}))


def computes_like_others(vllm_config: Any) -> bool:  # noqa: ANN401 - the host's
    """Whether this vLLM computes the KV that other engines compute, also after a hit.

    Not for latent attention on a CPU, where vLLM switches its own prefix cache off: even with right
    KV in its blocks, a prefill after a hit disagrees with one of the whole prompt, and the latter
    disagrees with Transformers (seen with 0.32).
    """
    platforms = _module("vllm.platforms")
    on_cpu = platforms is not None and platforms.current_platform.is_cpu()
    return not (on_cpu and vllm_config.model_config.use_mla)


def own_report(output: Any, name: str) -> Any:  # noqa: ANN401 - a `KVConnectorOutput`
    """`output` with the stats of the connector class `name` alone.

    `MultiConnector` puts the stats of its children into one object, by class, and hands all of it
    to each of them. Since 0.18 no messages travel on stats.
    """
    stats = output.kv_connector_stats
    held = getattr(stats, "data", None)
    if isinstance(held, dict) and hasattr(held.get(name), "carried_meta"):
        stats = held[name]
    if stats is output.kv_connector_stats:
        return output
    return replace(output, kv_connector_stats=stats)


def check_host(host: Host) -> None:
    """Raises ConfigError if `host` lacks a hook without which wrong KV might be served."""
    missing = [name for name in _NEEDED_HOOKS if not hasattr(host.base, name)]
    if missing:
        raise ConfigError(
            f"vLLM {host.version} cannot be served: its connectors have no {', '.join(missing)}; "
            "use 0.11.1 or later"
        )


def _module(name: str) -> Any:  # noqa: ANN401 - a host's module, or None
    try:
        return import_module(name)
    except ImportError:
        return None


def _fields(cls: type[Any]) -> set[str]:
    return {field.name for field in fields(cls)} if is_dataclass(cls) else set()


def _version() -> str:
    version = getattr(_module("vllm.version") or _module("vllm"), "__version__", None)
    return str(version) if version else "of unknown version"
