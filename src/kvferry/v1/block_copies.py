"""vLLM's connector utilities that move tensors, under their own names.

`copy_kv_blocks` copies whole blocks between two sets of KV tensors, as host buffers need it. The
`kv_postprocess_*` functions correct, in place, blocks that were copied byte for byte from an engine
of another layout. They differ from vLLM's functions only in what they refuse. `axes` names the
logical axes of a tensor, whatever the strides: in vLLM these are `[B, N, H, D]` until 0.14 (the
default here) and `[B, H, N, D]` in 0.32. Head-major means that in memory all tokens of head 0 come
before head 1. No correction is its own inverse: run exactly one, once, on each received block.

Written for connectors on a host's worker; kvferry's own cache does not use them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from kvferry.errors import LayoutError
from kvferry.layout.device import INT_OF
from kvferry.layout.plan import check_block_ids
from kvferry.layout.spec import parse

_HOST_SIDE = {"h2d": "source", "d2h": "destination"}


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Sequence[int],
    dst_block_ids: Sequence[int],
    direction: Literal["h2d", "d2h"],
    *,
    layout: str | None = None,
) -> None:
    """Copy block `src_block_ids[i]` to block `dst_block_ids[i]`, for all i, in every source layer.

    All arguments are checked before the first byte is written. Works on the CPU, which ignores
    `direction`, and between a device and the host; when it returns, the copy to the host is done.
    Source and destination may be the same tensors: every block is read before it is written.

    Args:
        src_kv_caches: layer name to tensor.
        dst_kv_caches: the same layers, and maybe more, with blocks of the same shape and dtype.
        src_block_ids: block ids to read; if there are none, nothing is done.
        dst_block_ids: as many block ids to write, none of them twice.
        direction: "h2d" from the host to a device, "d2h" back.
        layout: a name that `layout.spec.parse` knows, for both sides. None: the block axis is the
            second one of `[2, num_blocks, ...]` tensors with five axes, and otherwise the first.

    Raises:
        LayoutError: arguments that do not fit; nothing was copied.
    """
    if direction not in _HOST_SIDE:
        raise LayoutError(f"direction is {direction!r}; known: 'h2d', 'd2h'")
    if len(src_block_ids) != len(dst_block_ids):
        raise LayoutError(
            f"{len(src_block_ids)} source blocks for {len(dst_block_ids)} destination blocks"
        )
    if not src_block_ids:
        return
    if not src_kv_caches:
        raise LayoutError(f"no layer to copy {len(src_block_ids)} blocks of")
    sources, targets = list(map(_index, src_block_ids)), list(map(_index, dst_block_ids))
    if len(set(targets)) < len(targets):
        twice = next(block for i, block in enumerate(targets) if block in targets[:i])
        raise LayoutError(f"destination block {twice} is named twice")
    pairs = [
        _pair(name, src, dst_kv_caches, direction, layout) for name, src in src_kv_caches.items()
    ]
    for pair in pairs:
        where = f"layer {pair.name!r}: "
        check_block_ids(sources, pair.src.shape[pair.axis], where + "source ")
        check_block_ids(targets, pair.dst.shape[pair.axis], where + "destination ")
    for _, src, dst, axis in pairs:
        blocks = src.index_select(axis, torch.tensor(sources, device=src.device))
        dst.index_copy_(axis, torch.tensor(targets, device=dst.device), blocks.to(dst.device))


class _LayerPair(NamedTuple):
    """One layer on both sides, as tensors of integers of the element's size."""

    name: str
    src: torch.Tensor
    dst: torch.Tensor
    axis: int
    """The block axis."""


def _pair(
    name: str,
    src: torch.Tensor,
    dst_kv_caches: Mapping[str, torch.Tensor],
    direction: str,
    layout: str | None,
) -> _LayerPair:
    if name not in dst_kv_caches:
        raise LayoutError(f"layer {name!r} is not in the destination")
    dst = dst_kv_caches[name]
    if src.dtype != dst.dtype:
        raise LayoutError(f"layer {name!r}: dtype {src.dtype} in the source, {dst.dtype} to fill")
    host_side = src if direction == "h2d" else dst
    if host_side.device.type != "cpu":
        raise LayoutError(
            f"layer {name!r}: direction {direction!r}, but the {_HOST_SIDE[direction]} is on "
            f"{host_side.device}"
        )
    axis = _block_axis(name, src, layout)
    shapes = [tuple(t.shape[:axis] + t.shape[axis + 1 :]) for t in (src, dst)]
    if src.dim() != dst.dim() or axis != _block_axis(name, dst, layout) or shapes[0] != shapes[1]:
        raise LayoutError(
            f"layer {name!r}: blocks of {tuple(src.shape)} do not fit {tuple(dst.shape)}"
        )
    bits = INT_OF[src.element_size()]
    return _LayerPair(name, src.view(bits), dst.view(bits), axis)


def _block_axis(name: str, tensor: torch.Tensor, layout: str | None) -> int:
    if layout is not None:
        axes = parse(layout).axes
        if tensor.dim() != len(axes):
            raise LayoutError(
                f"layer {name!r}: layout {layout} has {len(axes)} axes, the tensor {tensor.dim()}"
            )
        return axes.index("B")
    if tensor.dim() < 2:
        raise LayoutError(f"layer {name!r}: a tensor with {tensor.dim()} axes has no blocks")
    if tensor.dim() != 5 or tensor.shape[0] != 2:
        return 0
    if tensor.shape[1] == 2:
        raise LayoutError(
            f"layer {name!r}: {tuple(tensor.shape)} may be [2, num_blocks, ...] or "
            "[num_blocks, 2, ...]: pass layout='2BNHD' or layout='B2NHD'"
        )
    return 1


def _index(block_id: int) -> int:
    try:
        return operator.index(block_id)
    except TypeError as error:
        raise LayoutError(f"block id {block_id!r} is not an integer") from error


# --- corrections of received blocks ---------------------------------------------------------------

Axes = Literal["BNHD", "BHND"]
"""B blocks, N tokens of a block, H kv heads, D head dim."""


def kv_postprocess_layout_on_receive(
    cache: torch.Tensor, indices: torch.Tensor | Sequence[int], *, axes: Axes = "BNHD"
) -> None:
    """Transpose blocks that arrived head-major but need tokens outermost.

    Args:
        cache: keys or values of one layer, four axes in the order of `axes`.
        indices: the received blocks; others are left alone.
        axes: names the axes of `cache`.

    Raises:
        LayoutError: arguments that do not fit; nothing was changed.
    """
    _rearrange(cache, indices, 1, axes, to_tokens_first=True)


def kv_postprocess_blksize_on_receive(
    cache: torch.Tensor,
    indices: torch.Tensor | Sequence[int],
    block_size_ratio: int,
    *,
    axes: Axes = "BNHD",
) -> None:
    """Join the smaller head-major blocks that arrived in each head-major block.

    For blocks whose memory is head-major here, too; values are taken in that order.
    `block_size_ratio` is the number of the sender's blocks in one of ours and divides the block
    size. Other arguments and errors as for `kv_postprocess_layout_on_receive`.
    """
    _rearrange(cache, indices, block_size_ratio, axes, to_tokens_first=False)


def kv_postprocess_blksize_and_layout_on_receive(
    cache: torch.Tensor,
    indices: torch.Tensor | Sequence[int],
    block_size_ratio: int,
    *,
    axes: Axes = "BNHD",
) -> None:
    """Join the smaller head-major blocks that arrived in each block, and put tokens outermost.

    With ratio 1 this is `kv_postprocess_layout_on_receive`. Arguments and errors as for
    `kv_postprocess_blksize_on_receive`.
    """
    _rearrange(cache, indices, block_size_ratio, axes, to_tokens_first=True)


def _rearrange(
    cache: torch.Tensor,
    indices: torch.Tensor | Sequence[int],
    ratio: int,
    axes: str,
    *,
    to_tokens_first: bool,
) -> None:
    """Read the values of each block in memory order as `[ratio, H, N / ratio, D]`, and write them
    back as tokens and heads.

    Memory order is `[N, H, D]` for blocks with tokens outermost and `[H, N, D]` for head-major
    blocks. As in vLLM, `to_tokens_first` decides which order is read and written, not the strides.
    """
    cache = _tokens_first_view(cache, axes)
    block_ids = _checked_indices(cache, indices)
    num_tokens, num_heads, head_dim = cache.shape[1:]
    if ratio < 1 or num_tokens % ratio:
        raise LayoutError(f"block_size_ratio {ratio} does not divide the block size {num_tokens}")
    if not block_ids.numel():
        return
    blocks = cache.index_select(0, block_ids)
    if not to_tokens_first:
        blocks = blocks.transpose(1, 2)
    arrived = blocks.reshape(-1, ratio, num_heads, num_tokens // ratio, head_dim)
    tokens = arrived.permute(0, 1, 3, 2, 4).reshape(-1, num_tokens, num_heads, head_dim)
    cache.index_copy_(0, block_ids, tokens)


def _tokens_first_view(cache: torch.Tensor, axes: str) -> torch.Tensor:
    """View the cache as `[B, N, H, D]`; elements of one byte as integers."""
    if axes not in ("BNHD", "BHND"):
        raise LayoutError(f"unknown axes {axes!r}; known: BNHD, BHND")
    if cache.dim() != 4:
        raise LayoutError(
            f"axes {axes} need 4 axes, the tensor has {cache.dim()}: pass keys and values of one "
            "layer apart"
        )
    if cache.element_size() == 1:
        cache = cache.view(torch.uint8)  # not every float8 can be indexed
    return cache if axes == "BNHD" else cache.transpose(1, 2)


def _checked_indices(cache: torch.Tensor, indices: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Return block ids as a tensor on the cache's device. The range check waits for a device."""
    block_ids = torch.as_tensor(indices)
    if not block_ids.numel():
        block_ids = block_ids.long()
    if block_ids.dim() != 1 or block_ids.dtype not in (torch.int64, torch.int32):
        raise LayoutError(
            f"indices must be one axis of int32 or int64 block ids, not {block_ids.dtype} of shape "
            f"{tuple(block_ids.shape)}"
        )
    if block_ids.numel():
        check_block_ids([int(limit) for limit in torch.aminmax(block_ids)], cache.shape[0])
    return block_ids.long().to(cache.device)
