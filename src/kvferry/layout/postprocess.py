"""Correct, in place, blocks that were copied byte for byte from an engine of another layout.

Names and effects are those of vLLM's connector utilities, up to what they refuse. There, logical
axes are `[B, N, H, D]` until 0.14 (the default here) and `[B, H, N, D]` in 0.32: `axes` says which,
whatever the strides. Head-major means that in memory all tokens of head 0 come before head 1.

None of these is its own inverse: run exactly one of them, once, on each received block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from kvferry.errors import LayoutError
from kvferry.layout.plan import check_block_ids

Axes = Literal["BNHD", "BHND"]
"""B blocks, N tokens of a block, H kv heads, D head dim."""


def kv_postprocess_layout_on_receive(
    cache: torch.Tensor, indices: torch.Tensor | Sequence[int], *, axes: Axes = "BNHD"
) -> None:
    """Blocks arrived head-major where tokens are to be outermost: transpose them.

    Args:
        cache: keys or values of one layer, four axes as `axes` says.
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
    """Several smaller head-major blocks arrived in each head-major block: join them.

    For blocks whose memory is head-major here too; values are taken in that order.
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
    """Several smaller head-major blocks arrived in each block where tokens are to be outermost.

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
    """Read each block as `[ratio, H, N / ratio, D]` values in the order in which it lies, and
    write them as tokens and heads.

    "In the order in which it lies" is `[N, H, D]` for blocks with tokens outermost, `[H, N, D]` for
    head-major ones: decided by what the caller asks for, not by strides, as in vLLM.
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
    """`[B, N, H, D]` of the same memory, elements as integers of their size."""
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
    """Block ids as a tensor beside the cache; a range check waits for the device."""
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
    return block_ids.to(cache.device)
