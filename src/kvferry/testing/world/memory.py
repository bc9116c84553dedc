"""The KV memory of a simulated host: which request holds which blocks, and which of them its own
prefix cache offers. A second block table has the layers with a window: a block there is given back
once no later token attends to it, and the null block takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from kvferry.engine.block_pool import BlockPool
from kvferry.testing.world.kv import RankKV, attended_from
from kvferry.testing.world.requests import HostRequest
from kvferry.types import NULL_BLOCK, ChunkKey

Tables = tuple[list[int], ...]
"""Blocks by table: those of full attention, and those of the window if there is one."""


class HostMemory:
    """See the module.

    Attributes:
        bad: blocks of failed loads, and what was computed from them.
    """

    def __init__(self, num_blocks: int, block_size: int, kvs: Sequence[RankKV]) -> None:
        self.bad: set[int] = set()
        self._size = block_size
        self._kvs = kvs
        self._windows = kvs[0].windows
        self._pool = BlockPool(num_blocks)

    @property
    def has_windows(self) -> bool:
        return len(self._windows) > 1

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of one table that hold so many tokens."""
        return -(-num_tokens // self._size)

    # -- blocks of requests ---------------------------------------------------------------------

    def take(self, request: HostRequest, local: Tables, num_computed: int, num_tokens: int) -> bool:
        """Give a request blocks for its first tokens, of which some are computed when it begins:
        those in `local`, and new ones. False if too few are free."""
        tables = tuple(
            [NULL_BLOCK] * first + table[first:]
            for first, table in zip(self._firsts(num_computed), local, strict=True)
        )
        held = _held(tables)
        self._pool.acquire(held)
        if not self._extend(tables, num_tokens):
            self._pool.free(held)
            return False
        request.block_ids = tables
        return True

    def grow(self, request: HostRequest, num_tokens: int) -> bool:
        """Give back what has left the window, and take blocks for its next tokens. False if too few
        are free."""
        num_computed = request.num_computed_tokens
        for first, table in zip(self._firsts(num_computed), request.block_ids, strict=True):
            kept = first
            while kept and table[kept - 1] != NULL_BLOCK:
                kept -= 1
            self._pool.free(table[kept:first])
            table[kept:first] = [NULL_BLOCK] * (first - kept)
        return self._extend(request.block_ids, num_computed + num_tokens)

    def lose(self, request: HostRequest) -> None:
        self._pool.free(_held(request.block_ids))
        request.block_ids = tuple([] for _ in self._windows)

    def _firsts(self, num_computed: int) -> list[int]:
        """The first block of each table that the next token attends to."""
        return [attended_from(window, num_computed) // self._size for window in self._windows]

    def _extend(self, tables: Tables, num_tokens: int) -> bool:
        total = self.num_blocks(num_tokens)
        missing = [max(0, total - len(table)) for table in tables]
        made = self._pool.allocate(sum(missing))
        if made is None:
            return False
        if made:
            for kv in self._kvs:
                kv.poison(made)
            self.bad.difference_update(made)
        for table, number in zip(tables, missing, strict=True):
            table.extend(made[:number])
            del made[:number]
        return True

    # -- the prefix cache -----------------------------------------------------------------------

    def find(self, keys: Sequence[ChunkKey]) -> Tables:
        """The blocks of the longest cached prefix that the next token could attend to. Only `take`
        holds them."""
        full = self._pool.find_prefix(keys)
        if not self.has_windows:
            return (full,)
        number = len(full)
        while number:
            _, first = self._firsts(number * self._size)
            kept = self._pool.find_prefix(map(_in_window, keys[first:number]))
            if first + len(kept) == number:
                return full[:number], [NULL_BLOCK] * first + kept
            number = first + len(kept)  # each longer one needs the block that is missing
        return [], []

    def offer(self, request: HostRequest, keys: Iterable[ChunkKey], stop: int) -> None:
        """Offer the full blocks of a request with these names, up to a token."""
        full, *windowed = request.block_ids
        parent = None
        for index, key in enumerate(keys):
            if (index + 1) * self._size > stop:
                break
            self._pool.cache(full[index], key, parent)
            for table in windowed:
                if table[index] != NULL_BLOCK:
                    self._pool.cache(table[index], _in_window(key), key)
            parent = key

    def uncache(self, blocks: Collection[int]) -> None:
        """Offer these blocks, and what was computed from them, no more."""
        self._pool.uncache(blocks)

    def reset(self) -> None:
        """Offer nothing that is here now."""
        self._pool.reset()


def _held(tables: Tables) -> list[int]:
    return [block for table in tables for block in table if block != NULL_BLOCK]


def _in_window(key: ChunkKey) -> ChunkKey:
    """The name of what a block of the window holds."""
    return ChunkKey(b"window " + key)
