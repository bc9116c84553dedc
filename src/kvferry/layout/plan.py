"""Which bytes of paged blocks go where in record rows, and back. Pure arithmetic.

    tokens of a request ── block_runs ──▶ runs of blocks
    parts of all layers ── segments ────▶ layers evenly spaced in memory

Record rows are `[layers, heads, tokens, content]` in C order. `layout.ops` does the copies. A slot
is here the place of one token within a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import LayoutError
from kvferry.layout.spec import ContentPart


class BlockRun(NamedTuple):
    """Tokens `[start, stop)` of a request that fill whole blocks, or a part of one block."""

    blocks: range | tuple[int, ...]
    """Ids of the blocks; a range if they are consecutive."""
    first_slot: int
    num_slots: int
    """Number of slots used in each block; less than the block size only for a single block."""
    start: int
    stop: int


class Segment(NamedTuple):
    """One content part (keys, values or all) of layers that are evenly spaced in one memory."""

    part: ContentPart
    """The part of the first layer."""
    first_layer: int
    num_layers: int
    layer_stride: int
    """In elements; 0 for a single layer."""
    item: int
    """Bytes of an element."""

    def layers_among(self, first: int, count: int) -> tuple[int, int]:
        """Return which of its layers are in `[first, first + count)`: none where start >= stop."""
        return max(self.first_layer, first), min(self.first_layer + self.num_layers, first + count)


def check_block_ids(block_ids: Sequence[int], num_blocks: int, where: str = "") -> None:
    """Raise LayoutError for an id outside `[0, num_blocks)`. Its text begins with `where`."""
    if block_ids and not (min(block_ids) >= 0 and max(block_ids) < num_blocks):
        bad = next(block for block in block_ids if not 0 <= block < num_blocks)
        raise LayoutError(f"{where}block id {bad} is outside [0, {num_blocks})")


def block_runs(block_ids: Sequence[int], start: int, stop: int, block_size: int) -> list[BlockRun]:
    """Split tokens `[start, stop)` of a request into maximal runs of blocks of `block_size` tokens.
    `block_ids` are the blocks of this range in token order. Raises LayoutError for too few."""
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
            # Take all whole blocks: one copy and one release of the GIL for all of them.
            count = (stop - start) // block_size
            end = start + count * block_size
        ids = block_ids[index : index + count]
        consecutive = range(ids[0], ids[0] + count)
        blocks = consecutive if list(ids) == list(consecutive) else tuple(ids)
        runs.append(BlockRun(blocks, slot, (end - start) // count, start, end))
        start = end
    return runs


def segments(layers: Sequence[tuple[ContentPart, ...]], item: int) -> tuple[Segment, ...]:
    """Join the parts of successive layers that are evenly spaced at ascending addresses in one
    memory. An element has `item` bytes."""
    found: list[Segment] = []
    for parts in zip(*layers, strict=True):
        at = 0
        while at < len(parts):
            first, count = parts[at], 1
            step = parts[at + 1].offset - first.offset if at + 1 < len(parts) else 0
            while (
                step >= 0
                and at + count < len(parts)
                and parts[at + count] == first._replace(offset=first.offset + count * step)
            ):
                count += 1
            found.append(Segment(first, at, count, step if count > 1 else 0, item))
            at += count
    return tuple(found)
