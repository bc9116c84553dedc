"""KV tensors as releases of vLLM lay them out, requests, and the right KV of each token, for
`versioned_host`."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.host import HostRequest
from tests.host_tables import kv_values
from tests.simulated_host import prefix_seeds

from .released import Release

LAYERS, HEADS, HEAD_SIZE, BLOCK = 2, 2, 4, 4

AXES = {
    "2, num_blocks, block_size, num_kv_heads, head_size": "2BNHD",
    "num_blocks, 2, block_size, num_kv_heads, head_size": "B2NHD",
    "2, num_blocks, num_kv_heads, block_size, head_size": "2BHND",
    "num_blocks, num_kv_heads, block_size, 2 * head_size": "BHNC",
}
"""KV shapes as the snapshots write them, and their axes."""

BACKENDS = ("FlashAttentionBackend", "TritonAttentionBackend", "CPUAttentionBackend")


def shapes_of(release: Release) -> dict[str, str]:
    """Return the axes of a layer's KV tensor by attention backend; since 0.30 all have the same."""
    shapes = release.facts["kv_shapes"]
    if not shapes.get("FlashAttentionBackend"):
        return dict.fromkeys(BACKENDS, "BHNC")
    return {
        name: next(AXES[shape] for shape in shapes[name] if shape in AXES)
        for name in BACKENDS
        if name in shapes
    }


class LayerKV:
    """One layer's tensor, with views of its keys and values.

    Attributes:
        tensor: the tensor as the host gives it to connectors.
        keys: view of the keys, `[block, head, token, dim]`.
        values: view of the values, with the same axes.
    """

    def __init__(self, axes: str, backend: str, num_blocks: int, heads: int) -> None:
        sizes = {"2": 2, "B": num_blocks, "H": heads, "N": BLOCK, "D": HEAD_SIZE}
        sizes["C"] = 2 * HEAD_SIZE
        self.tensor = torch.full(tuple(sizes[axis] for axis in axes), float("nan"))
        keys, values = self._planes(axes)
        if backend == "CPUAttentionBackend":
            # This backend's kernels keep the keys of a block and head transposed. In the newer
            # shape they keep all keys before all values, so its axes N and C mean nothing.
            if axes == "BHNC":
                keys, values = self.tensor.view(num_blocks, heads, 2, BLOCK, HEAD_SIZE).unbind(2)
            keys = keys.view(num_blocks, heads, HEAD_SIZE, BLOCK).transpose(2, 3)
        self.keys, self.values = keys, values

    def _planes(self, axes: str) -> tuple[torch.Tensor, torch.Tensor]:
        if axes == "BHNC":
            return self.tensor[..., :HEAD_SIZE], self.tensor[..., HEAD_SIZE:]
        planes = self.tensor.unbind(axes.index("2"))
        rest = axes.replace("2", "")
        order = [rest.index(axis) for axis in "BHND"]
        return planes[0].permute(order), planes[1].permute(order)

    def token(self, block: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys[block, :, slot], self.values[block, :, slot]


def expected_kv(layer: int, heads: range, seed: int) -> torch.Tensor:
    """Return the KV of the token that ends a prefix, `[heads, keys and values]`."""
    return kv_values([seed], layer, heads, 2 * HEAD_SIZE)[0].float()


def layer_names() -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]


def make_layer(backend: str, axes: str) -> Any:
    """An attention layer that can be asked for its backend."""

    class Backend:
        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
        ) -> tuple[int, ...]:
            sizes = {"2": 2, "B": num_blocks, "H": num_kv_heads, "N": block_size, "D": head_size}
            sizes["C"] = 2 * head_size
            return tuple(sizes[axis] for axis in axes)

    Backend.__name__ = backend
    return SimpleNamespace(get_attn_backend=lambda: Backend)


@dataclass
class Running:
    """A request as the engine keeps it."""

    view: Any
    tokens: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    shown: bool = False
    """Whether the workers know the request."""
    resumed: bool = False
    hit: int = 0

    @property
    def request_id(self) -> str:
        return str(self.view.request_id)

    def seeds(self) -> list[int]:
        return prefix_seeds(HostRequest(self.request_id, self.tokens, self.num_prompt))
