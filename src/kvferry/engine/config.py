"""Options of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvferry.errors import ConfigError
from kvferry.layout.spec import ALIASES, MEMORY_ORDERS

KV_LAYOUTS = {
    **ALIASES,
    "cross_layer": "BLHNC",
    **{order: order for order in MEMORY_ORDERS},
}
"""Orders of the KV pool's axes in memory, by name. Axes: layer, block, kv head, token (N), content.
All names but "cross_layer" are vLLM's; with this one all layers of a block lie together."""

_LEAST = {
    "block_size": 1,
    "num_blocks": 2,
    "kv_cache_bytes": 1,
    "max_batched_tokens": 1,
    "max_num_seqs": 1,
    "tensor_parallel_size": 1,
    "num_threads": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    Attributes:
        block_size: tokens in one KV block.
        num_blocks: KV blocks in the pool, the null block included; wins over `kv_cache_bytes`.
        kv_cache_bytes: size of the KV pool. If both are None, the pool holds `max_num_seqs`
            requests of full length, but at most 1 GiB.
        max_batched_tokens: tokens in one step; longer prompts are prefilled in chunks.
        max_num_seqs: requests that run or load at the same time.
        kv_layout: order of the KV pool's axes in memory, a key of `KV_LAYOUTS`. Stored KV does not
            depend on it.
        dtype: "float32", "bfloat16", "float16", or "auto" for the dtype in the model's config.
        device: torch device of weights and KV; with several ranks, "cuda" gives each the device of
            its number.
        tensor_parallel_size: processes that share the model; this process is the first of them.
        prefix_caching: keep the KV blocks of finished requests for prompts that start alike.
        num_threads: torch's threads on a CPU, for the whole process of each rank. None leaves this
            process as it is, and gives each other rank an equal share of the cores.
        load_deadline_seconds: how long a request waits for the connector's answer to a look-up, and
            again for the end of a load. After that the engine computes the prompt instead.
            Requests also wait this long for blocks that the connector keeps of an ended request.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = field(default=None, metadata={"unit": "bytes"})
    max_batched_tokens: int = 2048
    max_num_seqs: int = 16
    kv_layout: str = "HND"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    tensor_parallel_size: int = 1
    prefix_caching: bool = True
    num_threads: int | None = None
    load_deadline_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it must be {least} or more")
        if self.kv_layout not in KV_LAYOUTS:
            raise ConfigError(
                f"kv_layout is {self.kv_layout!r}; it must be one of {', '.join(KV_LAYOUTS)}"
            )
        if not self.load_deadline_seconds > 0:
            raise ConfigError(
                f"load_deadline_seconds is {self.load_deadline_seconds}; it must be more than 0"
            )
