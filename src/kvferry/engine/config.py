"""Options of the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvferry.errors import ConfigError

KV_LAYOUTS = {
    "HND": "LBHNC",
    "NHD": "LBNHC",
    "cross_layer": "BLHNC",
    **{order: order for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
}
"""Orders of the KV pool's axes in memory, by name: layer, block, kv head, token, content. The first
three names are those of vLLM; with "cross_layer" all layers of a block lie together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    Attributes:
        block_size: tokens in one KV block.
        num_blocks: KV blocks in the pool, the null block included; wins over `kv_cache_bytes`.
        kv_cache_bytes: size of the KV pool. With neither, the pool holds `max_num_seqs` requests of
            full length, but at most 1 GiB.
        max_batched_tokens: tokens in one step; longer prompts are prefilled in chunks.
        max_num_seqs: requests that run or load at the same time.
        kv_layout: order of the KV pool's axes in memory, a key of `KV_LAYOUTS`. No part of what is
            stored.
        dtype: "float32", "bfloat16", "float16", or "auto" for what the model's config says.
        device: torch device of weights and KV; with ranks on "cuda", each has the device of its
            number.
        tensor_parallel_size: processes that share the model; this one is the first of them.
        prefix_caching: keep the KV blocks of finished requests for prompts that start alike.
        num_threads: torch's threads on a CPU, for the whole process; None leaves it as it is.
        load_deadline_seconds: how long a request waits for its connector, once for an answer to a
            look-up and once for the end of a load, before its prompt is computed instead.
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
        for name in ("block_size", "max_batched_tokens", "max_num_seqs", "tensor_parallel_size"):
            _require(name, getattr(self, name), at_least=1)
        if self.kv_layout not in KV_LAYOUTS:
            raise ConfigError(
                f"kv_layout is {self.kv_layout!r}; it must be one of {', '.join(KV_LAYOUTS)}"
            )
        if self.num_blocks is not None:
            _require("num_blocks", self.num_blocks, at_least=2)
        if self.kv_cache_bytes is not None:
            _require("kv_cache_bytes", self.kv_cache_bytes, at_least=1)
        if self.num_threads is not None:
            _require("num_threads", self.num_threads, at_least=1)
        if not self.load_deadline_seconds > 0:
            raise ConfigError(
                f"load_deadline_seconds is {self.load_deadline_seconds}; it must be more than 0"
            )


def _require(name: str, value: int, *, at_least: int) -> None:
    if value < at_least:
        raise ConfigError(f"{name} is {value}; it must be {at_least} or more")
