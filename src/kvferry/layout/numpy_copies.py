"""Copies between paged KV in the host's memory and record rows, through numpy.

It releases the GIL and starts no thread team of its own: a plan's moves become arrays whose element
is a whole contiguous span. Arguments were checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.layout.plan import BlockRun, Box, Move, Segment, in_wide_spans, moves, split

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

_NEAR_BYTES = 512 << 10
"""So much of either side stays in a core's own cache."""


class _Spans(NamedTuple):
    """A move as numpy runs it."""

    blocks: Array
    """`[num_blocks, *shape]` of spans in the cache."""
    shape: tuple[int, ...]
    row_offset: int
    row_strides: tuple[int, ...]
    row_token: int
    wide: _Spans | None
    """The same bytes in wide spans and not in order, if the move goes element by element."""
    near_blocks: int
    """So many blocks fit in a core's own cache."""

    def of_rows(self, rows: Array, start: int, num_blocks: int) -> Array:
        """`[num_blocks, *shape]` of spans in rows, from token `start` of these on."""
        offset = self.row_offset + start * self.row_token
        shape = (num_blocks, *self.shape)
        return np.ndarray(shape, self.blocks.dtype, rows, offset, self.row_strides)


class NumpyCopies:
    """Copies in the host's memory. Thread-safe.

    Args:
        parts: of the cache.
        storages: by address, as bytes.
    """

    def __init__(self, parts: tuple[Segment, ...], storages: Mapping[int, torch.Tensor]) -> None:
        self._segments = parts
        self._storages = {address: tensor.numpy() for address, tensor in storages.items()}
        # Keys are the boxes that a geometry has: pieces of a record, times slots of partial blocks.
        self._spans = lru_cache(maxsize=4096)(self._compute_spans)

    def scatter(self, rows: Array, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        """See `PagedKV.scatter`."""
        for run in runs:
            index = _index(run.blocks)
            for spans in self._spans(Box(layer, rows.shape, run.first_slot, run.num_slots)):
                source = spans.of_rows(rows, run.start - first_token, run.num_blocks)
                spans.blocks[index] = source

    def gather(self, rows: Array, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        """See `PagedKV.gather`."""
        for run in runs:
            start = run.start - first_token
            for spans in self._spans(Box(layer, rows.shape, run.first_slot, run.num_slots)):
                if spans.wide is None:
                    _take(spans, rows, start, run.blocks)
                    continue
                # Memory that is written element by element is fetched a line or two at a time, and
                # many lines at once for wide spans. So these go first, to have it at hand.
                for at in range(0, run.num_blocks, spans.near_blocks):
                    blocks = run.blocks[at : at + spans.near_blocks]
                    _take(spans.wide, rows, start + at * run.num_slots, blocks)
                    _take(spans, rows, start + at * run.num_slots, blocks)

    def _compute_spans(self, box: Box) -> tuple[_Spans, ...]:
        return tuple(
            self._spans_of(segment, part)
            for segment in self._segments
            for move in moves(segment, box)
            for part in split(move, _NEAR_BYTES)
        )

    def _spans_of(self, segment: Segment, move: Move) -> _Spans:
        wide = in_wide_spans(move)
        return _Spans(
            np.ndarray(
                (segment.num_blocks, *move.shape),
                _span_type(move.span),
                self._storages[move.storage],
                move.kv_offset,
                move.kv_strides,
            ),
            move.shape,
            move.row_offset,
            move.row_strides,
            move.row_token,
            None if wide is None else self._spans_of(segment, wide),
            max(1, _NEAR_BYTES // move.num_bytes),
        )


def _take(spans: _Spans, rows: Array, start: int, blocks: range | tuple[int, ...]) -> None:
    """Copy whole blocks out, to token `start` of the rows and on."""
    target = spans.of_rows(rows, start, len(blocks))
    if isinstance(blocks, range):
        target[...] = spans.blocks[_index(blocks)]
        return
    # One by one: reading through an index array would copy twice.
    for position, block in enumerate(blocks):
        target[position : position + 1] = spans.blocks[block : block + 1]


def _span_type(num_bytes: int) -> np.dtype[Any]:
    # Single elements, as of transposed keys: numpy copies integers faster than spans of their size.
    return np.dtype(f"u{num_bytes}" if num_bytes in (1, 2, 4, 8) else (np.void, num_bytes))


def _index(blocks: range | tuple[int, ...]) -> slice | Array:
    """What picks these blocks from a first axis."""
    if isinstance(blocks, range):
        return slice(blocks.start, blocks.stop)
    return np.array(blocks, dtype=np.intp)
