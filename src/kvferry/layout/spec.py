"""Named KV layouts: which axes a host's tensors have, and how these lie in memory. No tensors here.

`layout.ops.PagedKV` checks the engine's KV tensors against a layout when they are registered.

A layout consists of

    axes     the axes of each tensor that the host registers: one tensor per layer, or, with L among
             the axes, one tensor for all layers
    order    the order of these axes and L in memory, outermost first; if left out, the strides may
             have any order

    L layer · B block · 2 keys, values · H kv head · N token of a block · D head dim, or the latent
    of MLA · C content of a token and head, keys then values

A name is one of

    2BNHD B2NHD BND BHNC    one tensor per layer with these axes, memory in any order
    LBHNC LBNHC LHBNC       memory in this order. The host registers one view `[B, H, N, C]` per
    BLHNC BLNHC BHLNC       layer, or one tensor with all five axes. HND is LBHNC, NHD is LBNHC
    AXES:ORDER              AXES of one of the first four, memory in ORDER: 2BNHD:L2BHND (heads
                            before tokens), B2NHD:BL2NHD (views of a buffer over all layers)
    BL2NHD, ...             one tensor for all layers: L and the axes of one of the first four, in
                            any order, which is also the order in memory
    BHNC~ 2BHND~            one tensor per layer as vLLM's CPU kernels fill it: the keys of a block
                            and head are stored transposed, [D, N], before its values, [N, D]. So
                            the tensor's axes N and C do not index tokens and content
    A|B|...                 the first of these names with as many axes as the tensor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from kvferry.errors import LayoutError
from kvferry.types import GroupShard, KVGroup

LAYOUTS = ("BHNC", "2BNHD", "B2NHD", "BND")
"""Axes of one layer's tensor; its memory may have any order."""

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
    """The axes and memory order of a name, as in the module's text. `parse` makes it."""

    name: str
    axes: str
    order: str | None
    keys_across: bool = False
    """Keys are transposed within a block; see the module's text."""

    @property
    def is_one_buffer(self) -> bool:
        """Whether one tensor holds all layers."""
        return "L" in self.axes

    def of_tensor(self, num_axes: int) -> Layout:
        """Return the layout for a tensor with so many axes. A name in `MEMORY_ORDERS` means a view
        of four axes or a buffer of five; all other layouts stay as they are."""
        if num_axes == 5 and self.name in MEMORY_ORDERS:
            return Layout(self.name, self.name, self.name)
        return self

    def check(self, tensor: Strided, num_layers: int, layer_stride: int | None = None) -> None:
        """Check the tensor of one layer, or of all. Gaps are allowed: pages may be padded, and a
        view may be part of a larger tensor.

        Args:
            layer_stride: distance from one of `num_layers` tensors to the next, in elements; None
                if they are not evenly spaced.

        Raises:
            LayoutError: the number of axes is wrong, the axis named 2 has another size, or the
                strides have another order, overlap or, with transposed keys, leave a gap.
        """
        if len(tensor.shape) != len(self.axes):
            raise LayoutError(
                f"layout {self.name} has {len(self.axes)} axes, the tensor {len(tensor.shape)}"
            )
        if self.keys_across:
            self._check_keys_across(tensor)
        sizes = {"L": num_layers} | dict(zip(self.axes, tensor.shape, strict=True))
        if sizes.get("2", 2) != 2:
            raise LayoutError(
                f"layout {self.name}: axis {self.axes.index('2')} must be 2, not {sizes['2']}"
            )
        strides = dict(zip(self.axes, tensor.strides, strict=True))
        if layer_stride is not None:
            strides["L"] = layer_stride
        # The stride of an axis of size 1 means nothing.
        shown = sorted((a for a in strides if sizes[a] > 1), key=lambda axis: -strides[axis])
        extent = 1
        for axis in reversed(self.order or shown):
            # If the spacing of layers is unknown, assume the least: no gaps.
            stride = strides.get(axis, extent)
            if sizes[axis] > 1:
                if stride < extent or (self.order and extent == 1 != stride):
                    raise LayoutError(
                        f"layout {self.name} is {self.order or 'without overlaps'} in memory; the "
                        f"tensor has shape {tensor.shape} and strides {tensor.strides}: "
                        f"{''.join(shown)}"
                    )
                extent = stride * sizes[axis]

    def _check_keys_across(self, tensor: Strided) -> None:
        size = tensor.shape[-1]
        if tensor.strides[-2:] != (size, 1) or (self.axes[-1] == "C" and size % 2):
            raise LayoutError(
                f"layout {self.name} has its last two axes in one piece; the tensor has shape "
                f"{tensor.shape} and strides {tensor.strides}"
            )

    def parts(self, tensor: Strided, layer: int) -> tuple[ContentPart, ...]:
        """Return the content parts of one layer; `layer` matters only in a buffer of all layers."""
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
        offset = tensor.offset + layer * strides.get("L", 0)
        shape = (sizes["B"], sizes.get("H", 1), sizes["N"], sizes[content])
        steps = (strides["B"], strides.get("H", 0), strides["N"], strides[content])
        return tuple(
            ContentPart(tensor.storage, offset + side * strides.get("2", 0), shape, steps, start)
            for side, start in enumerate(range(0, sizes.get("2", 1) * shape[3], shape[3]))
        )


def parse(name: str) -> Layout:
    """Return the layout of that name. Raises LayoutError if there is none."""
    full = ALIASES.get(name, name)
    if full in KEYS_ACROSS:
        return Layout(full, full[:-1], None, keys_across=True)
    if full in MEMORY_ORDERS:
        return Layout(full, "BHNC", full)
    axes, colon, order = full.partition(":")
    is_known = axes in LAYOUTS or any(sorted(axes) == sorted(f"L{each}") for each in LAYOUTS)
    if colon:
        is_known &= sorted(order) in (sorted(axes), sorted({"L", *axes}))
    if not is_known:
        known = ", ".join((*LAYOUTS, *ALIASES, *MEMORY_ORDERS, *KEYS_ACROSS))
        raise LayoutError(
            f"unknown KV layout {name!r}; known: {known}, AXES:ORDER (for example 2BNHD:L2BHND), "
            "and buffers of all layers by their axes (for example BL2NHD)"
        )
    return Layout(full, axes, order or (axes if "L" in axes else None))


def layer_parts(
    tensors: Sequence[Strided], group: KVGroup, shard: GroupShard, layout: str
) -> list[tuple[ContentPart, ...]]:
    """Check a rank's tensors, and return the content parts of each layer.

    Args:
        tensors: one per layer, in layer order, or one with all layers.
        group: geometry of the whole group.
        shard: the layers and heads that the rank holds.
        layout: a name that `parse` knows, or several with | between them.

    Raises:
        LayoutError: the tensors do not fit group, shard and layout.
    """
    num_layers = shard.layers[1] - shard.layers[0]
    num_axes = len(tensors[0].shape) if tensors else 0
    layouts = [parse(name).of_tensor(num_axes) for name in layout.split("|")]
    spec = next((each for each in layouts if len(each.axes) == num_axes), layouts[0])
    expected = 1 if spec.is_one_buffer else num_layers
    if len(tensors) != expected or num_layers < 1:
        raise LayoutError(
            f"{len(tensors)} KV tensors for a shard of {num_layers} layers in layout {layout}, "
            f"which needs {expected}"
        )
    layer_stride = None if spec.is_one_buffer else _layer_stride(tensors)
    for tensor in tensors:
        spec.check(tensor, num_layers, layer_stride)
        if tensor.dtype != group.dtype:
            raise LayoutError(f"KV dtype is {group.dtype}, the tensor has {tensor.dtype}")
    if spec.is_one_buffer:
        buffer_layers = tensors[0].shape[spec.axes.index("L")]
        if buffer_layers != num_layers:
            raise LayoutError(f"{buffer_layers} layers in the buffer, {num_layers} in the shard")
        layers = [spec.parts(tensors[0], layer) for layer in range(num_layers)]
    else:
        layers = [spec.parts(tensor, 0) for tensor in tensors]
    num_blocks = layers[0][0].shape[0]
    for parts in layers:
        _check_geometry(parts, group, shard, num_blocks)
    return layers


def _layer_stride(tensors: Sequence[Strided]) -> int | None:
    """Return the elements from one layer to the next; None if layers are not evenly spaced."""
    if len({tensor.storage for tensor in tensors}) > 1:
        return None
    steps = {after.offset - before.offset for before, after in pairwise(tensors)}
    step = steps.pop() if len(steps) == 1 else 0
    return abs(step) or None


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
