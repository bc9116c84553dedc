"""Recurrent states in a host's pages: which elements belong to which head. No tensors here.

A page holds the state of one layer after some token: arrays, one behind the other. Hosts divide
them over ranks by heads, and by channels where there are no heads. So the state of a layer is
described as components of `[heads, content]`, the same whatever the number of ranks:

    ssm      the state of a head, as the host keeps it
    conv.*   the last inputs of a convolution, oldest first: `[tap, channel]` of a head

In a page, the inputs of all heads of one tap lie side by side, or those of all taps of one channel
(`dim_first`). Columns of the convolution are x, B, C (Mamba-2), Q, K, V (delta nets) or x alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import LayoutError
from kvferry.layout.spec import ContentPart, Strided
from kvferry.types import StateComponent, StateRun

MAX_SHARDS = 64
"""Most pieces of channels that have no heads: no model is divided over more ranks."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Dtypes of states that can be described."""


class _Columns(NamedTuple):
    """Neighbouring columns of a convolution: those of `rank_heads` heads, each `width` wide."""

    name: str
    num_heads: int
    rank_heads: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The arrays of a page, as a host describes them.

    Attributes:
        shapes, dtypes: of each array, on one rank.
        num_ranks: over which they are divided; 1 if each rank has all.
        dim_first: whether a convolution's array is `[channel, tap]`, not `[tap, channel]`.
        shares_groups: whether B and C of Mamba-2 are of one group, which each rank copies.
    """

    shapes: Sequence[Sequence[int]]
    dtypes: Sequence[str]
    num_ranks: int = 1
    dim_first: bool = False
    shares_groups: bool = False

    def columns_of(self, array: int) -> tuple[int, int]:
        """Return the channels and the taps of a convolution's array."""
        first, second = self.shapes[array]
        return (first, second) if self.dim_first else (second, first)


def page_parts(component: StateComponent, pages: Strided) -> tuple[ContentPart, ...]:
    """Return the content parts of a component of one layer.

    Args:
        pages: the layer's pages `[blocks, bytes]`, or with axes of one element between them.

    Raises:
        LayoutError: the pages are no bytes, or not as long as the state, or not aligned.
    """
    item = ITEM_BYTES[component.dtype]
    num_blocks, page, stride = pages.shape[0], pages.shape[-1], pages.strides[0]
    last = max(run.offset + (run.size - 1) * run.stride for run in component.runs)
    needed = (last + (component.rank_heads - 1) * component.runs[0].head_stride + 1) * item
    is_of_bytes = pages.dtype in ("int8", "uint8") and pages.strides[-1] == 1
    if not is_of_bytes or math.prod(pages.shape) != num_blocks * page or page < needed:
        raise LayoutError(
            f"pages of states are bytes, at least {needed} each; the tensor has shape "
            f"{pages.shape}, strides {pages.strides} and dtype {pages.dtype}"
        )
    if pages.offset % item or stride % item:
        raise LayoutError(
            f"states of {component.dtype} begin at byte {pages.offset} and every {stride} bytes, "
            f"no multiples of {item}"
        )
    return tuple(
        ContentPart(
            pages.storage,
            pages.offset // item + run.offset,
            (num_blocks, component.rank_heads, 1, run.size),
            (stride // item, run.head_stride, 0, run.stride),
            run.start,
        )
        for run in component.runs
    )


def components_of(kind: str, arrays: Arrays) -> tuple[StateComponent, ...]:
    """Return the components of the states of one kind of layer, in the order of records.

    Args:
        kind: "mamba1", "mamba2", "gated_delta", "short_conv" or "linear". States of Kimi's delta
            attention have the form of gated delta nets.

    Raises:
        LayoutError: another kind, or arrays that such layers do not have.
    """
    known = {
        "mamba1": (_mamba1, 2, (2, 2)),
        "mamba2": (_mamba2, 2, (2, 3)),
        "gated_delta": (_gated_delta, 2, (2, 3)),
        "short_conv": (_short_conv, 1, (2,)),
        "linear": (_linear, 1, (3,)),
    }
    shapes = tuple(tuple(shape) for shape in arrays.shapes)
    if kind not in known:
        raise LayoutError(f"states of kind {kind!r} are not known; known: {', '.join(known)}")
    describe, number, axes = known[kind]
    if len(shapes) != number or tuple(map(len, shapes)) != axes or len(arrays.dtypes) != number:
        raise LayoutError(f"states of kind {kind!r} have other arrays than {shapes}")
    unknown = [dtype for dtype in arrays.dtypes if dtype not in ITEM_BYTES]
    if unknown:
        raise LayoutError(f"states of {unknown[0]} cannot be stored; use {', '.join(ITEM_BYTES)}")
    return describe(arrays)


def _mamba1(arrays: Arrays) -> tuple[StateComponent, ...]:
    channels, _ = arrays.columns_of(0)
    dim, size = arrays.shapes[1]
    if dim != channels:
        raise LayoutError(f"Mamba-1 has a state for each channel, not {dim} for {channels}")
    num_shards = _shards(channels * arrays.num_ranks, arrays.num_ranks)
    rank_shards = num_shards // arrays.num_ranks
    width = channels // rank_shards
    return (
        *_convolution(arrays, (_Columns("conv.x", num_shards, rank_shards, width),)),
        _recurrent(arrays, num_shards, rank_shards, width * size),
    )


def _mamba2(arrays: Arrays) -> tuple[StateComponent, ...]:
    heads, width, size = arrays.shapes[1]
    channels, _ = arrays.columns_of(0)
    groups, rest = divmod(channels - heads * width, 2 * size)
    if groups < 1 or rest:
        raise LayoutError(
            f"{channels} channels are no x of {heads} heads of {width}, B and C of {size} (Mamba-2)"
        )
    all_heads, all_groups = heads * arrays.num_ranks, groups * arrays.num_ranks
    if arrays.shares_groups:
        if groups > 1:
            raise LayoutError(f"each rank has {groups} groups of Mamba-2, the model has one")
        all_groups = 1
    columns = (
        _Columns("conv.x", all_heads, heads, width),
        _Columns("conv.b", all_groups, groups, size),
        _Columns("conv.c", all_groups, groups, size),
    )
    return (
        *_convolution(arrays, columns),
        _recurrent(arrays, all_heads, heads, width * size),
    )


def _gated_delta(arrays: Arrays) -> tuple[StateComponent, ...]:
    heads, value, key = arrays.shapes[1]
    channels, _ = arrays.columns_of(0)
    key_heads, rest = divmod(channels - heads * value, 2 * key)
    if key_heads < 1 or rest:
        raise LayoutError(
            f"{channels} channels are no Q and K of {key}, and V of {heads} heads of {value}"
        )
    ranks = arrays.num_ranks
    columns = (
        _Columns("conv.q", key_heads * ranks, key_heads, key),
        _Columns("conv.k", key_heads * ranks, key_heads, key),
        _Columns("conv.v", heads * ranks, heads, value),
    )
    return (
        *_convolution(arrays, columns),
        _recurrent(arrays, heads * ranks, heads, value * key),
    )


def _short_conv(arrays: Arrays) -> tuple[StateComponent, ...]:
    channels, _ = arrays.columns_of(0)
    num_shards = _shards(channels * arrays.num_ranks, arrays.num_ranks)
    rank_shards = num_shards // arrays.num_ranks
    width = channels // rank_shards
    return _convolution(arrays, (_Columns("conv.x", num_shards, rank_shards, width),))


def _linear(arrays: Arrays) -> tuple[StateComponent, ...]:
    heads, first, second = arrays.shapes[0]
    content = first * second
    run = StateRun(0, content, 0, content, 1)
    return (
        StateComponent(
            name="ssm",
            num_heads=heads * arrays.num_ranks,
            rank_heads=heads,
            content_size=content,
            dtype=arrays.dtypes[0],
            runs=(run,),
        ),
    )


def _shards(channels: int, num_ranks: int) -> int:
    """Return in how many equal pieces the channels of all ranks are described: the same for every
    number of ranks that divides them so far."""
    found = math.gcd(channels, MAX_SHARDS)
    if found % num_ranks:
        raise LayoutError(f"{channels} channels in {found} pieces are not divided over {num_ranks}")
    return found


def _convolution(arrays: Arrays, columns: Sequence[_Columns]) -> tuple[StateComponent, ...]:
    channels, taps = arrays.columns_of(0)
    found, column = [], 0
    for name, num_heads, rank_heads, width in columns:
        if arrays.dim_first:
            runs = tuple(
                StateRun(tap * width, width, column * taps + tap, width * taps, taps)
                for tap in range(taps)
            )
        else:
            runs = tuple(
                StateRun(tap * width, width, tap * channels + column, width, 1)
                for tap in range(taps)
            )
        found.append(
            StateComponent(
                name=name,
                num_heads=num_heads,
                rank_heads=rank_heads,
                content_size=taps * width,
                dtype=arrays.dtypes[0],
                runs=runs,
            )
        )
        column += rank_heads * width
    return tuple(found)


def _recurrent(arrays: Arrays, num_heads: int, rank_heads: int, content: int) -> StateComponent:
    """Describe the second array of a page, behind the convolution's."""
    before = math.prod(arrays.shapes[0]) * ITEM_BYTES[arrays.dtypes[0]]
    offset, rest = divmod(before, ITEM_BYTES[arrays.dtypes[1]])
    if rest:
        raise LayoutError(f"a state of {arrays.dtypes[1]} begins at byte {before} of its page")
    return StateComponent(
        name="ssm",
        num_heads=num_heads,
        rank_heads=rank_heads,
        content_size=content,
        dtype=arrays.dtypes[1],
        runs=(StateRun(0, content, offset, content, 1),),
    )
