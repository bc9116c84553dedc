"""Named KV layouts: which axes a host's tensors have. No tensors here.

`layout.ops.PagedKV` checks the engine's KV tensors, one for each layer, against a layout when they
are registered. How their axes lie in memory, their strides say: any order will do.

    B block · 2 keys, values · H kv head · N token of a block · D head dim, or the latent of MLA
    C content of a token and head, keys then values

A name is one of

    2BNHD B2NHD BND BHNC    the axes of a tensor
    NHD HND LBHNC ...       hosts' names of orders in memory, of views `[B, H, N, C]`: as BHNC
    BHNC~ 2BHND~            tensors as vLLM's CPU kernels fill them: the keys of a block and head
                            are stored transposed, [D, N], before its values, [N, D]. So the
                            tensor's axes N and C do not index tokens and content
    A|B|...                 the first of these names with as many axes as the tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import LayoutError
from kvferry.types import GroupShard, KVGroup

LAYOUTS = ("BHNC", "2BNHD", "B2NHD", "BND")
"""Axes of one layer's tensor."""

KEYS_ACROSS = ("BHNC~", "2BHND~")
"""Layouts whose keys are transposed within a block."""

MEMORY_ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Orders of all KV in memory. vLLM has them since 0.32; its tensors are views `[B, H, N, C]`."""

ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}


class Strided(NamedTuple):
    """A tensor without its elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset: int
    """Position of the first element in the memory, in elements."""
    storage: int
    """Address of the memory: equal for views of one allocation."""
    dtype: str


class ContentPart(NamedTuple):
    """Keys, values or all content of one layer, as a view `[block, head, token, content]`."""

    storage: int
    offset: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    start: int
    """Index on a record's content axis at which this part begins."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a name, as in the module's text. `parse` makes it."""

    name: str
    axes: str
    keys_across: bool = False
    """Keys are transposed within a block; see the module's text."""

    def check(self, tensor: Strided) -> None:
        """Check the tensor of one layer. Gaps are allowed: pages may be padded, and a view may be
        part of a larger tensor.

        Raises:
            LayoutError: the number of axes is wrong, the axis named 2 has another size, or the
                strides overlap or, with transposed keys, leave a gap.
        """
        if len(tensor.shape) != len(self.axes):
            raise LayoutError(
                f"layout {self.name} has {len(self.axes)} axes, the tensor {len(tensor.shape)}"
            )
        if self.keys_across:
            self._check_keys_across(tensor)
        sizes = dict(zip(self.axes, tensor.shape, strict=True))
        if sizes.get("2", 2) != 2:
            raise LayoutError(
                f"layout {self.name}: axis {self.axes.index('2')} must be 2, not {sizes['2']}"
            )
        extent = 1
        for stride, size in sorted(zip(tensor.strides, tensor.shape, strict=True)):
            if size == 1:
                continue  # its stride means nothing
            if stride < extent:
                raise LayoutError(
                    f"layout {self.name} is without overlaps in memory; the tensor has shape "
                    f"{tensor.shape} and strides {tensor.strides}"
                )
            extent = stride * size

    def _check_keys_across(self, tensor: Strided) -> None:
        size = tensor.shape[-1]
        if tensor.strides[-2:] != (size, 1) or (self.axes[-1] == "C" and size % 2):
            raise LayoutError(
                f"layout {self.name} has its last two axes in one piece; the tensor has shape "
                f"{tensor.shape} and strides {tensor.strides}"
            )

    def parts(self, tensor: Strided) -> tuple[ContentPart, ...]:
        """Return the content parts of the tensor of one layer."""
        sizes = dict(zip(self.axes, tensor.shape, strict=True))
        strides = dict(zip(self.axes, tensor.strides, strict=True))
        if self.keys_across:
            dim = sizes["D"] if "D" in sizes else sizes["C"] // 2
            plane = strides["2"] if "2" in strides else sizes["N"] * dim
            shape = (sizes["B"], sizes["H"], sizes["N"], dim)
            block, head = strides["B"], strides["H"]
            return (
                ContentPart(tensor.storage, tensor.offset, shape, (block, head, 1, sizes["N"]), 0),
                ContentPart(
                    tensor.storage, tensor.offset + plane, shape, (block, head, dim, 1), dim
                ),
            )
        content = "C" if "C" in sizes else "D"
        offset = tensor.offset
        shape = (sizes["B"], sizes.get("H", 1), sizes["N"], sizes[content])
        steps = (strides["B"], strides.get("H", 0), strides["N"], strides[content])
        return tuple(
            ContentPart(tensor.storage, offset + side * strides.get("2", 0), shape, steps, start)
            for side, start in enumerate(range(0, sizes.get("2", 1) * shape[3], shape[3]))
        )


def parse(name: str) -> Layout:
    """Return the layout of that name. Raises LayoutError if there is none."""
    if name in KEYS_ACROSS:
        return Layout(name, name[:-1], keys_across=True)
    if name in (*ALIASES, *MEMORY_ORDERS):
        return Layout(name, "BHNC")
    if name not in LAYOUTS:
        known = ", ".join((*LAYOUTS, *ALIASES, *MEMORY_ORDERS, *KEYS_ACROSS))
        raise LayoutError(f"unknown KV layout {name!r}; known: {known}")
    return Layout(name, name)


def layer_parts(
    tensors: Sequence[Strided], group: KVGroup, shard: GroupShard, layout: str
) -> list[tuple[ContentPart, ...]]:
    """Check a rank's tensors, and return the content parts of each layer.

    Args:
        tensors: one per layer, in layer order.
        group: geometry of the whole group.
        shard: the layers and heads that the rank holds.
        layout: a name that `parse` knows, or several with | between them.

    Raises:
        LayoutError: the tensors do not fit group, shard and layout.
    """
    num_layers = shard.layers[1] - shard.layers[0]
    if len(tensors) != num_layers or num_layers < 1:
        raise LayoutError(f"{len(tensors)} KV tensors for a shard of {num_layers} layers")
    num_axes = len(tensors[0].shape)
    layouts = [parse(name) for name in layout.split("|")]
    spec = next((each for each in layouts if len(each.axes) == num_axes), layouts[0])
    for tensor in tensors:
        spec.check(tensor)
        if tensor.dtype != group.dtype:
            raise LayoutError(f"KV dtype is {group.dtype}, the tensor has {tensor.dtype}")
    layers = [spec.parts(tensor) for tensor in tensors]
    num_blocks = layers[0][0].shape[0]
    for parts in layers:
        _check_geometry(parts, group, shard, num_blocks)
    return layers


def _check_geometry(
    parts: tuple[ContentPart, ...], group: KVGroup, shard: GroupShard, num_blocks: int
) -> None:
    content = sum(part.shape[3] for part in parts)
    if content != group.content_size:
        raise LayoutError(f"content size is {group.content_size}, the tensor holds {content}")
    expected = (num_blocks, shard.heads[1] - shard.heads[0], group.block_size)
    if parts[0].shape[:3] != expected:
        raise LayoutError(
            f"expected [blocks, heads, block_size] = {expected}, "
            f"the tensor has {parts[0].shape[:3]}"
        )
