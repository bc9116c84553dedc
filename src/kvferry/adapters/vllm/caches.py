"""How a block of this vLLM is to be read: as layouts that `kvferry.layout` knows.

Since 0.30 every layer is a view `[block, head, token, content]` whatever the memory order. Before,
each attention backend had a shape of its own, whose axes can be told apart only by asking the
backend for the shape of a cache with telling sizes.

The CPU kernels go further: what a block holds is theirs alone, and the axes of the tensor mean
nothing within it. Most keep keys transposed, which is a layout of ours. Of others only whole blocks
are kept, for engines with the same kernels and block size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvferry.contract.spec import EngineSpec
from kvferry.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch

_BY_TOKEN = "BHNC|BND|2BNHD"
_KEYS_ACROSS = "BHNC~|2BHND~"
_WHOLE_BLOCKS = "BHNC|2BNHD"

_ACROSS_KERNELS = ("vec", "vec16")
"""Instruction sets whose kernels keep keys transposed. (With "neon" it depends on the build.)"""

_PLAIN_DTYPES = ("float32", "float16", "bfloat16")
"""KV of other types is packed otherwise by the same kernels."""

# Sizes that no two axes share, so that a shape shows its order.
_BLOCKS, _BLOCK_SIZE, _HEADS, _HEAD_SIZE = 1013, 1024, 7, 576


def with_layout(spec: EngineSpec, cpu_kernels: str | None, chunk_tokens: object) -> EngineSpec:
    """`spec` with the layout of this vLLM's blocks.

    Args:
        spec: the engine.
        cpu_kernels: the instruction set of its CPU kernels; None if it runs elsewhere.
        chunk_tokens: tokens of a record, as the operator set them.

    Raises:
        ConfigError: records would end within blocks that only mean something whole.
    """
    if cpu_kernels is None:
        return replace(spec, kv_layout=_BY_TOKEN)
    if cpu_kernels in _ACROSS_KERNELS and all(g.dtype in _PLAIN_DTYPES for g in spec.groups):
        return replace(spec, kv_layout=_KEYS_ACROSS)
    sizes = sorted({part.block_size for part in spec.table_parts})
    if isinstance(chunk_tokens, int) and any(chunk_tokens % size for size in sizes):
        raise ConfigError(
            f"chunk_tokens={chunk_tokens} is no multiple of the block size {sizes[-1]}, which the "
            f"CPU kernels {cpu_kernels!r} need; set it to one"
        )
    content = f"{cpu_kernels} of {', '.join(map(str, sizes))} tokens"
    config = {**spec.identity.config, "cpu_blocks": content}
    return replace(spec, kv_layout=_WHOLE_BLOCKS, identity=replace(spec.identity, config=config))


def views(
    tensors: Mapping[str, torch.Tensor], layers: Mapping[str, Any], layout: str
) -> dict[str, torch.Tensor]:
    """The host's tensors as one of the layouts that `layout` names.

    Args:
        tensors: by layer.
        layers: the host's layers by name; asked for their backend if there are five axes to sort.
        layout: `EngineSpec.kv_layout`, from `with_layout`.

    Raises:
        LayoutError: a backend whose shape has other axes than those known.
    """
    if layout == _KEYS_ACROSS:
        return dict(tensors)
    return {
        name: tensor if tensor.dim() < 5 else tensor.permute(_axes_of(layers[name]))
        for name, tensor in tensors.items()
    }


def _axes_of(layer: Any) -> list[int]:  # noqa: ANN401 - the host's
    """Where the axes `[2, block, token, head, dim]` stand in the tensors of a layer's backend."""
    backend = layer.get_attn_backend()
    shape = tuple(backend.get_kv_cache_shape(_BLOCKS, _BLOCK_SIZE, _HEADS, _HEAD_SIZE))
    wanted = (2, _BLOCKS, _BLOCK_SIZE, _HEADS, _HEAD_SIZE)
    if sorted(shape) != sorted(wanted):
        raise LayoutError(
            f"{backend.__name__} keeps KV as {shape} for {_BLOCKS} blocks of {_BLOCK_SIZE} tokens, "
            f"{_HEADS} heads and head size {_HEAD_SIZE}: not served"
        )
    return [shape.index(size) for size in wanted]
