"""Copies between paged KV in the host's memory and record rows, through numpy.

It releases the GIL and starts no thread team of its own: a plan's moves become arrays whose element
is a whole contiguous span. Arguments were checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.layout.plan import BlockRun, Move, Segment, move_of

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]


class _Spans(NamedTuple):
    """A move as numpy runs it."""

    move: Move
    blocks: Array
    """`[num_blocks, *move.shape]` of spans in the cache."""

    def of_rows(self, rows: Array, start: int, num_blocks: int) -> Array:
        """`[num_blocks, *move.shape]` of spans in rows, from token `start` of these on."""
        offset = self.move.row_offset + start * self.move.row_token
        shape = (num_blocks, *self.move.shape)
        return np.ndarray(shape, self.blocks.dtype, rows, offset, self.move.row_strides)


class NumpyCopies:
    """Copies in the host's memory. Thread-safe. Made as `MakeCopies` says."""

    def __init__(self, parts: tuple[Segment, ...], storages: Mapping[int, torch.Tensor]) -> None:
        self._segments = parts
        self._storages = {address: tensor.numpy() for address, tensor in storages.items()}
        # As many keys as a geometry has: pieces of a record, times slots of partial blocks.
        self._spans = lru_cache(maxsize=4096)(self._compute_spans)

    def scatter(self, rows: Array, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        for run in runs:
            index = _index(run.blocks)
            for spans in self._spans(layer, rows.shape, run.first_slot, run.num_slots):
                source = spans.of_rows(rows, run.start - first_token, len(run.blocks))
                spans.blocks[index] = source

    def gather(self, rows: Array, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        for run in runs:
            for spans in self._spans(layer, rows.shape, run.first_slot, run.num_slots):
                target = spans.of_rows(rows, run.start - first_token, len(run.blocks))
                if isinstance(run.blocks, range):
                    target[...] = spans.blocks[_index(run.blocks)]
                    continue
                # One by one: reading through an index array would copy twice.
                for position, block in enumerate(run.blocks):
                    target[position : position + 1] = spans.blocks[block : block + 1]

    def _compute_spans(
        self, layer: int, shape: tuple[int, int, int, int], first_slot: int, num_slots: int
    ) -> tuple[_Spans, ...]:
        found = []
        for segment in self._segments:
            move = move_of(segment, layer, shape, first_slot, num_slots)
            if move is not None:
                memory, kind = self._storages[move.storage], _span_type(move.span)
                size = (segment.num_blocks, *move.shape)
                blocks = np.ndarray(size, kind, memory, move.kv_offset, move.kv_strides)
                found.append(_Spans(move, blocks))
        return tuple(found)


def _span_type(num_bytes: int) -> np.dtype[Any]:
    # Single elements, as of transposed keys: numpy copies integers faster than spans of their size.
    return np.dtype(f"u{num_bytes}" if num_bytes in (1, 2, 4, 8) else (np.void, num_bytes))


def _index(blocks: range | tuple[int, ...]) -> slice | Array:
    """What picks these blocks from a first axis."""
    if isinstance(blocks, range):
        return slice(blocks.start, blocks.stop)
    return np.array(blocks, dtype=np.intp)
