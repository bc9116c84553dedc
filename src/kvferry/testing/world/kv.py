"""KV that checks itself: a function of all tokens up to its own, of weights, salt, adapter, image,
layer, head and place. So a byte that is wrong, stale, foreign or misplaced shows when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.contract.spec import EngineSpec
from kvferry.types import NULL_BLOCK, BlockTable, KVGroup

Seeds = NDArray[np.uint64]
Right = Sequence[NDArray[np.float32]]
"""The right KV of each group, `[tokens, layers, heads, content]`."""

_LAYER, _HEAD, _PLACE = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xC2B2AE3D27D4EB4F),
    np.uint64(7919),
)

TAINT = 0.5
"""Added to KV that was computed from wrong KV: right values are whole numbers."""


def attended_from(window: int | None, place: int) -> int:
    """The first token that the token at a place attends to."""
    return 0 if window is None else max(0, place - window + 1)


class Content(NamedTuple):
    """What a chunk's record must hold: KV of these groups, of tokens with these seeds."""

    groups: tuple[KVGroup, ...]
    seeds: tuple[int, ...]


@cache
def _mix(index: int, num_layers: int, num_heads: int, content_size: int) -> Seeds:
    """Part of all values of a group that does not depend on tokens: `[layers, heads, content]`."""
    of_layer = (np.arange(num_layers, dtype=np.uint64) + 64 * index) * _LAYER
    of_head = np.arange(num_heads, dtype=np.uint64) * _HEAD
    of_place = np.arange(content_size, dtype=np.uint64) * _PLACE * _LAYER
    mix: Seeds = of_layer[:, None, None] + of_head[None, :, None] + of_place[None, None, :]
    return mix


def _values(mix: Seeds, seeds: Seeds) -> NDArray[np.float32]:
    """The right KV, `[tokens, layers, heads, content]`."""
    mixed = (seeds[:, None, None, None] ^ mix[None]) * _HEAD
    return ((mixed >> np.uint64(44)) & np.uint64(0xFFFF)).astype(np.float32)


def _right(seeds: Sequence[int], groups: Sequence[KVGroup]) -> list[NDArray[np.float32]]:
    """The right KV of each group, `[tokens, layers, heads, content]`."""
    of_tokens = np.asarray(seeds, dtype=np.uint64)
    return [
        _values(_mix(index, group.num_layers, group.num_kv_heads, group.content_size), of_tokens)
        for index, group in enumerate(groups)
    ]


def payload_of(content: Content) -> bytes:
    """The bytes behind the head of a right record, as docs/format.md lays them out."""
    right = _right(content.seeds, content.groups)
    return b"".join(values.transpose(1, 2, 0, 3).tobytes() for values in right)


def right_but_nan(found: bytes, right: bytes) -> bool:
    """Whether KV is right but for values that are NaN."""
    values, expected = (np.frombuffer(each, dtype=np.float32) for each in (found, right))
    return bool(len(values) == len(expected) and ((values == expected) | np.isnan(values)).all())


class WrongToken(NamedTuple):
    """A token of which some KV is wrong."""

    place: int
    block: int
    is_nan: bool
    """All that is wrong is NaN: it was computed as that, or never filled."""
    is_empty: bool
    """Nothing of some group is right."""


class RightKV:
    """The right KV of one request, of all ranks: each token's is made once."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._last = 0
        self._values: list[NDArray[np.float32]] = []

    def of(self, seeds: Sequence[int], groups: Sequence[KVGroup]) -> Right:
        """The KV of each group, `[tokens, layers, heads, content]`, of tokens with these seeds."""
        known = self._num_tokens
        if known and (known > len(seeds) or seeds[known - 1] != self._last):
            known, self._values = 0, []  # other weights: a seed depends on all before it
        if known < len(seeds):
            more = _right(seeds[known:], groups)
            self._values = (
                [np.concatenate(pair) for pair in zip(self._values, more, strict=True)]
                if known
                else more
            )
            self._num_tokens, self._last = len(seeds), seeds[-1]
        return self._values


class RankKV:
    """The KV tensors of one rank, `[blocks, heads, block size, content]` per layer.

    Attributes:
        groups: of the model.
        windows: of each block table; None: it keeps all.
        tensors: by the name of the layer, as a worker role registers them.
    """

    def __init__(self, spec: EngineSpec, num_blocks: int, block_size: int) -> None:
        self.groups = spec.groups
        tables = {part.group: part.table for part in spec.table_parts}
        self._tables = [tables[index] for index in range(len(spec.groups))]
        windows = {part.table: part.window for part in spec.table_parts}
        self.windows = tuple(windows[table] for table in range(len(windows)))
        self.tensors: dict[str, torch.Tensor] = {}
        self._arrays: list[NDArray[np.float32]] = []
        self._mine: list[tuple[slice, slice, slice]] = []  # of the right KV of each group
        for index, (group, shard) in enumerate(zip(spec.groups, spec.shard.groups, strict=True)):
            (first, stop), heads = shard.layers, slice(*shard.heads)
            num_heads = heads.stop - heads.start
            shape = (stop - first, num_blocks, num_heads, block_size, group.content_size)
            memory = torch.full(shape, float("nan"))
            self._arrays.append(memory.numpy())
            for layer in range(first, stop):
                self.tensors[f"{index}.{layer}"] = memory[layer - first]
            self._mine.append((slice(None), slice(first, stop), heads))
        tokens = np.arange(num_blocks * block_size)
        self._block_of, self._place_of = tokens // block_size, tokens % block_size

    def compute(
        self, blocks: BlockTable, right: Right, start: int, stop: int, *, more: float
    ) -> None:
        """Write the KV of these tokens, and so much more than right: `TAINT` if the forward read
        wrong KV."""
        places, inside = self._place_of[start:stop], self._block_of[start:stop]
        which = [np.asarray(table)[inside] for table in blocks]
        groups = zip(self._arrays, right, self._mine, self._tables, strict=True)
        for array, values, mine, table in groups:
            new = values[start:stop][mine]
            array[:, which[table], :, places] = new + np.float32(more) if more else new

    def wrong_tokens(self, blocks: BlockTable, right: Right, stop: int) -> list[WrongToken]:
        """The tokens before `stop` whose KV is not right, in blocks that the next one attends to.
        A block is right as a whole: other requests may share it."""
        if not stop:
            return []
        wrong: dict[tuple[int, int], tuple[bool, bool]] = {}
        groups = zip(self._arrays, right, self._mine, self._tables, strict=True)
        for array, values, mine, table in groups:
            first = attended_from(self.windows[table], stop)
            first -= int(self._place_of[first])
            if first >= stop:
                continue  # a window of one token sees nothing before it
            places = self._place_of[first:stop]
            which = np.asarray(blocks[table])[self._block_of[first:stop]]
            found = array[:, which, :, places]
            unequal = found != values[first:stop][mine]
            if not np.count_nonzero(unequal):
                continue
            differs = unequal.reshape(stop - first, -1)
            is_nan = (~differs | np.isnan(found).reshape(stop - first, -1)).all(axis=1)
            is_empty = differs.all(axis=1)
            for place in np.flatnonzero(differs.any(axis=1)).tolist():
                at = first + place, int(which[place])
                nan, empty = wrong.get(at, (True, False))
                wrong[at] = nan and bool(is_nan[place]), empty or bool(is_empty[place])
        return [WrongToken(*at, *how) for at, how in sorted(wrong.items())]

    def poison(self, blocks: Collection[int]) -> None:
        which = list(blocks)
        for array in self._arrays:
            array[:, which] = np.nan

    def null_block_is_untouched(self) -> bool:
        return all(np.isnan(array[:, NULL_BLOCK]).all() for array in self._arrays)
