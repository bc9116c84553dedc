"""Which bytes of paged blocks go where in record rows, and back. Pure arithmetic.

    tokens of a request ── block_runs ──▶ runs of blocks
    parts of all layers ── segments ────▶ layers evenly spaced in memory
    a segment and record rows ─ move_of ─▶ for any block: spans of bytes, contiguous on both sides

Record rows are `[layers, heads, tokens, content]` in C order. A move is computed once for all
blocks of a geometry; what differs between blocks is one offset on either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import LayoutError
from kvferry.layout.spec import ContentPart

_MAX_SPAN = 1 << 30  # the largest element that numpy can have is just below twice that


class BlockRun(NamedTuple):
    """Tokens `[start, stop)` of a request that lie in whole blocks, or in a part of one block."""

    blocks: range | tuple[int, ...]
    """Their ids: a range if they are consecutive."""
    first_slot: int
    num_slots: int
    """Slots used of each block; less than the block size only if there is one block."""
    start: int
    stop: int


class Segment(NamedTuple):
    """One content part of layers that are evenly spaced in one memory. In bytes, but for counts."""

    storage: int
    first_layer: int
    num_layers: int
    low: int
    """Where the part begins in the content of a row."""
    size: int
    """Of the part."""
    item: int
    """Of an element."""
    offset: int
    """Of block 0, head 0, token 0 of the first layer."""
    num_blocks: int
    num_heads: int
    block_size: int
    """In tokens."""
    strides: tuple[int, ...]
    """Of layer, block, head, token, content element."""


class Move(NamedTuple):
    """What of any one block goes where: a box of spans, as numpy describes one. All in bytes."""

    storage: int
    span: int
    """Contiguous on both sides."""
    shape: tuple[int, ...]
    """Number of spans by axis, outermost in the block's memory first."""
    kv_offset: int
    """In the storage, for block 0."""
    kv_strides: tuple[int, ...]
    """Of the block axis, then of `shape`."""
    row_offset: int
    row_strides: tuple[int, ...]
    """Of blocks that follow each other, then of `shape`."""
    row_token: int
    """Distance of one token to the next in the rows."""


def check_block_ids(block_ids: Sequence[int], num_blocks: int, where: str = "") -> None:
    """Raises LayoutError, whose text begins with `where`, for an id outside `[0, num_blocks)`."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        bad = next(block for block in block_ids if not 0 <= block < num_blocks)
        raise LayoutError(f"{where}block id {bad} is outside [0, {num_blocks})")


def block_runs(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> list[BlockRun]:
    """Split tokens `[start, stop)` of a request into maximal runs of blocks of `block_size` tokens.
    `block_ids` hold the range and no more, in token order. Raises LayoutError for too few."""
    first_index = start // block_size
    if start < 0 or -(-stop // block_size) - first_index > len(block_ids):
        raise LayoutError(
            f"tokens {start} to {stop} do not lie in {len(block_ids)} blocks of {block_size}"
        )
    runs = []
    while start < stop:
        index, slot = divmod(start, block_size)
        index -= first_index
        end = min(stop, start - slot + block_size)
        count = 1
        if end - start == block_size:
            # As many whole blocks as there are: one copy and one release of the GIL for all.
            count = (stop - start) // block_size
            end = start + count * block_size
        ids = block_ids[index : index + count]
        consecutive = range(ids[0], ids[0] + count)
        blocks = consecutive if list(ids) == list(consecutive) else tuple(ids)
        runs.append(BlockRun(blocks, slot, (end - start) // count, start, end))
        start = end
    return runs


def segments(layers: Sequence[tuple[ContentPart, ...]], item: int) -> tuple[Segment, ...]:
    """Join the parts of successive layers where these are evenly spaced in one memory. An element
    has `item` bytes."""
    found: list[Segment] = []
    for parts in zip(*layers, strict=True):
        at = 0
        while at < len(parts):
            first, count = parts[at], 1
            step = parts[at + 1].offset - first.offset if at + 1 < len(parts) else 0
            while at + count < len(parts) and parts[at + count] == first._replace(
                offset=first.offset + count * step
            ):
                count += 1
            found.append(
                Segment(
                    storage=first.storage,
                    first_layer=at,
                    num_layers=count,
                    low=first.start * item,
                    size=first.shape[3] * item,
                    item=item,
                    offset=first.offset * item,
                    num_blocks=first.shape[0],
                    num_heads=first.shape[1],
                    block_size=first.shape[2],
                    strides=(
                        step * item if count > 1 else 0,
                        *(stride * item for stride in first.strides),
                    ),
                )
            )
            at += count
    return tuple(found)


def move_of(
    segment: Segment,
    layer: int,
    shape: tuple[int, int, int, int],
    first_slot: int,
    num_slots: int,
) -> Move | None:
    """What a segment of the cache and rows of a `shape` (in elements) from `layer` of the rank's
    shard on have in common, in these slots of a block; None if that is nothing."""
    low = max(segment.first_layer, layer)
    high = min(segment.first_layer + segment.num_layers, layer + shape[0])
    if low >= high:
        return None
    kv_layer, kv_block, kv_head, kv_token, kv_item = segment.strides
    row_token = shape[3] * segment.item
    row_head = shape[2] * row_token
    row_layer = shape[1] * row_head
    span, axes = _coalesced(
        [
            (high - low, kv_layer, row_layer),
            (shape[1], kv_head, row_head),
            (num_slots, kv_token, row_token),
            (segment.size // segment.item, kv_item, segment.item),
        ],
        segment.item,
    )
    kv_start = segment.offset + (low - segment.first_layer) * kv_layer
    return Move(
        storage=segment.storage,
        span=span,
        shape=tuple(size for size, _, _ in axes),
        kv_offset=kv_start + first_slot * kv_token,
        kv_strides=(kv_block, *(kv for _, kv, _ in axes)),
        row_offset=(low - layer) * row_layer + segment.low,
        row_strides=(num_slots * row_token, *(row for _, _, row in axes)),
        row_token=row_token,
    )


def _coalesced(
    axes: list[tuple[int, int, int]], item: int
) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Join axes (size, stride in the block, stride in the row) that are contiguous on both sides:
    the contiguous span in bytes, and the axes that remain, outermost first."""
    left = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: -axis[1])
    span = item
    while left and left[-1][1] == left[-1][2] == span and left[-1][0] * span <= _MAX_SPAN:
        span *= left.pop()[0]
    joined: list[tuple[int, int, int]] = []
    for size, kv, row in left:
        if joined and joined[-1][1:] == (size * kv, size * row):
            joined[-1] = (joined[-1][0] * size, kv, row)
        else:
            joined.append((size, kv, row))
    return span, tuple(joined)
