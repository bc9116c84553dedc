"""Copy tokens between paged KV tensors and canonical record rows.

The only module of its level that imports torch. Tensors arrive in a host's layout, named, never
guessed; they are turned once into strided views `[block, head, token, content]`, so that one loop
serves all layouts. On CPU the copies run through numpy, which releases the GIL and starts no
thread team of its own; on a device through torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from kvferry.errors import LayoutError
from kvferry.types import GroupShard, KVGroup

LAYOUTS = ("BHNC", "2BNHD", "B2NHD", "BND")
"""Accepted layouts: B blocks, N tokens of a block, H kv heads, D head dim, C = K then V content."""

_SAME_SIZE_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Part(NamedTuple):
    """A run of the content axis in one layer tensor."""

    view: torch.Tensor
    """`[num_blocks, num_kv_heads, block_size, size]`, any strides."""
    start: int
    """Where this part begins on the record's content axis."""


class BlockRun(NamedTuple):
    """Tokens `[start, stop)` of a request that lie in whole blocks, or in a part of one block."""

    blocks: slice | np.ndarray[tuple[int], np.dtype[np.intp]]
    """Their ids: a slice if they are consecutive."""
    num_blocks: int
    first_slot: int
    num_slots: int
    """Slots used of each block; less than the block size only if `num_blocks` is 1."""
    start: int
    stop: int

    def singles(self) -> Iterator[BlockRun]:
        """The same tokens by runs that are slices: reading through an index array would copy
        twice."""
        if isinstance(self.blocks, slice):
            yield self
            return
        start = self.start
        for block in self.blocks.tolist():
            stop = start + self.num_slots
            yield BlockRun(slice(block, block + 1), 1, 0, self.num_slots, start, stop)
            start = stop


def parts_of(tensor: torch.Tensor, layout: str) -> tuple[Part, ...]:
    """Views of one layer's tensor by content part.

    Args:
        tensor: KV of one layer.
        layout: one of `LAYOUTS`.

    Raises:
        LayoutError: unknown layout, or a tensor with another number of axes.
    """
    if layout not in LAYOUTS:
        raise LayoutError(f"unknown KV layout {layout!r}; known: {', '.join(LAYOUTS)}")
    if tensor.dim() != len(layout):
        raise LayoutError(f"layout {layout} has {len(layout)} axes, the tensor {tensor.dim()}")
    if layout == "BHNC":
        return (Part(tensor, 0),)
    if layout == "BND":
        return (Part(tensor.unsqueeze(1), 0),)
    kv_axis = layout.index("2")
    if tensor.shape[kv_axis] != 2:
        raise LayoutError(f"layout {layout}: axis {kv_axis} must be 2, not {tensor.shape[kv_axis]}")
    key, value = (tensor.select(kv_axis, i).permute(0, 2, 1, 3) for i in (0, 1))
    return (Part(key, 0), Part(value, tensor.shape[-1]))


class PagedKV:
    """The paged KV of one group on one rank.

    Args:
        tensors: one tensor per layer this rank holds, in layer order.
        group: geometry of the whole group.
        shard: the layers and heads this rank holds.
        layout: one of `LAYOUTS`.
        null_block: id that stands for "no block" and is never read or written; None if the host
            has none.

    Raises:
        LayoutError: tensors that are not what group, shard and layout say.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: KVGroup,
        shard: GroupShard,
        layout: str,
        *,
        null_block: int | None = 0,
    ) -> None:
        num_layers = shard.layers[1] - shard.layers[0]
        if len(tensors) != num_layers or not tensors:
            raise LayoutError(f"{len(tensors)} KV tensors for a shard of {num_layers} layers")
        layers = [parts_of(tensor, layout) for tensor in tensors]
        self.num_blocks = layers[0][0].view.shape[0]
        self.block_size = group.block_size
        self.null_block = null_block
        num_heads = shard.heads[1] - shard.heads[0]
        for parts in layers:
            _check_parts(parts, group, num_heads, self.num_blocks)
        self.is_cpu = tensors[0].device.type == "cpu"
        # Per content part: one array [layer, block, head, token, size] where the layers are evenly
        # spaced in one storage, else one array [block, head, token, size] per layer.
        self._parts = [
            (
                parts[0].start,
                parts[0].start + parts[0].view.shape[-1],
                _stack([part.view for part in parts]),
            )
            for parts in zip(*layers, strict=True)
        ]

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Raises LayoutError for an id that is not a block of this cache."""
        if block_ids and not (min(block_ids) >= 0 and max(block_ids) < self.num_blocks):
            bad = next(b for b in block_ids if not 0 <= b < self.num_blocks)
            raise LayoutError(f"block id {bad} is outside [0, {self.num_blocks})")

    def runs(self, block_ids: Sequence[int], start: int, stop: int) -> Iterator[BlockRun]:
        """Split tokens `[start, stop)` of a request into maximal runs of blocks.

        Args:
            block_ids: the blocks that hold the range, no more, in token order.
            start: first token.
            stop: end of the range.
        """
        size = self.block_size
        first_index = start // size
        while start < stop:
            index, slot = divmod(start, size)
            index -= first_index
            block = block_ids[index]
            end = min(stop, start - slot + size)
            count = 1
            if block == self.null_block:
                start = end
                continue
            if slot == 0 and end - start == size:
                # As many whole blocks as there are: one copy for all of them, one release of the
                # GIL instead of one per block.
                while end + size <= stop and block_ids[index + count] != self.null_block:
                    count += 1
                    end += size
            blocks = _index(block_ids[index : index + count])
            yield BlockRun(blocks, count, slot, (end - start) // count, start, end)
            start = end

    def scatter(
        self, rows: Any, layer: int, head: int, runs: Sequence[BlockRun], first_token: int
    ) -> None:
        """Copy record rows into blocks.

        Args:
            rows: `[layers, heads, tokens, content]` array from `as_rows`.
            layer: first layer of `rows`, counted within this rank's shard.
            head: first head of `rows`, likewise.
            runs: where the tokens go.
            first_token: token position of index 0 of the token axis of `rows`.
        """
        for index, low, high, array in self._targets(layer, rows.shape[0]):
            source = rows if index is None else rows[index]
            for run in runs:
                tokens = _tokens(source[..., low:high], run, first_token)
                array[_at(run, head, rows.shape[1])] = tokens

    def gather(
        self, rows: Any, layer: int, head: int, runs: Sequence[BlockRun], first_token: int
    ) -> None:
        """Copy blocks into record rows; arguments as `scatter`."""
        for index, low, high, array in self._targets(layer, rows.shape[0]):
            source = rows if index is None else rows[index]
            for run in chain.from_iterable(run.singles() for run in runs):
                target = _tokens(source[..., low:high], run, first_token)
                target[...] = array[_at(run, head, rows.shape[1])]

    def _targets(self, layer: int, num_layers: int) -> Iterator[tuple[int | None, int, int, Any]]:
        for low, high, arrays in self._parts:
            if isinstance(arrays, list):
                for index in range(num_layers):
                    yield index, low, high, arrays[layer + index]
            else:
                yield None, low, high, arrays[layer : layer + num_layers]


def as_rows(
    buffer: memoryview, paged: PagedKV, dtype: str, shape: tuple[int, int, int, int]
) -> Any:
    """View `buffer` as `[layers, heads, tokens, content]` in the form `PagedKV` copies.

    Args:
        buffer: writable, C order, exactly as long as `shape` says.
        paged: the cache the rows come from or go to.
        dtype: torch name of the element type.
        shape: of the result.
    """
    element = getattr(torch, dtype)
    if paged.is_cpu:
        kind = _SAME_SIZE_INT[element.itemsize]
        return np.frombuffer(buffer, dtype=str(kind).removeprefix("torch.")).reshape(shape)
    return torch.frombuffer(buffer, dtype=element).view(shape)


def _check_parts(parts: tuple[Part, ...], group: KVGroup, num_heads: int, num_blocks: int) -> None:
    content = sum(part.view.shape[-1] for part in parts)
    if content != group.content_size:
        raise LayoutError(f"content size is {group.content_size}, the tensor holds {content}")
    for part in parts:
        expected = (num_blocks, num_heads, group.block_size)
        if tuple(part.view.shape[:3]) != expected:
            raise LayoutError(
                f"expected [blocks, heads, block_size] = {expected}, "
                f"the tensor has {tuple(part.view.shape[:3])}"
            )
        if str(part.view.dtype).removeprefix("torch.") != group.dtype:
            raise LayoutError(f"KV dtype is {group.dtype}, the tensor has {part.view.dtype}")


def _stack(views: list[torch.Tensor]) -> Any:
    """One array over all layers if they are evenly spaced in one storage, else a list."""
    first = views[0]
    if first.device.type == "cpu":
        kind = _SAME_SIZE_INT[first.element_size()]
        views = [view.view(kind) for view in views]
        first = views[0]
    step = views[1].storage_offset() - first.storage_offset() if len(views) > 1 else 0
    base = first.untyped_storage().data_ptr()
    even = step >= 0 and all(
        view.untyped_storage().data_ptr() == base
        and view.stride() == first.stride()
        and view.storage_offset() == first.storage_offset() + index * step
        for index, view in enumerate(views)
    )
    if even:
        stacked = first.as_strided((len(views), *first.shape), (step, *first.stride()))
        return stacked.numpy() if stacked.device.type == "cpu" else stacked
    return [view.numpy() if view.device.type == "cpu" else view for view in views]


def _index(blocks: Sequence[int]) -> slice | np.ndarray[tuple[int], np.dtype[np.intp]]:
    """A slice if the ids are consecutive, else an index array."""
    first, count = blocks[0], len(blocks)
    if all(block == first + offset for offset, block in enumerate(blocks)):
        return slice(first, first + count)
    return np.array(blocks, dtype=np.intp)


def _at(run: BlockRun, head: int, num_heads: int) -> tuple[Any, ...]:
    """Where `[..., block, head, slot, size]` of a run lies in the arrays of a part."""
    slots = slice(run.first_slot, run.first_slot + run.num_slots)
    return (..., run.blocks, slice(head, head + num_heads), slots, slice(None))


def _tokens(rows: Any, run: BlockRun, first_token: int) -> Any:
    """The same tokens of `[..., head, token, size]` rows, as `[..., block, head, slot, size]`.

    Splitting an axis of a strided view never copies, so assignments go to the caller's memory.
    """
    tokens = rows[..., run.start - first_token : run.stop - first_token, :]
    if run.num_blocks == 1:
        return tokens[..., None, :, :, :]
    shape = (*tokens.shape[:-2], run.num_blocks, run.num_slots, tokens.shape[-1])
    if isinstance(tokens, torch.Tensor):
        return torch.unflatten(tokens, -2, shape[-3:-1]).movedim(-3, -4)
    strides = tokens.strides
    split = np.lib.stride_tricks.as_strided(
        tokens, shape, (*strides[:-2], strides[-2] * run.num_slots, *strides[-2:])
    )
    return np.moveaxis(split, -3, -4)
