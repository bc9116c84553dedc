"""Replays a trace through a pool of blocks like the host pool, under a choice of eviction orders.

The policy `pool` has the host pool's own order. `docs/simulate.md` says what the others would gain.
`Simulator` calls `replay`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvferry.cache.config import CacheBounds
from kvferry.config import DEFAULT_CHUNK_TOKENS, unknown
from kvferry.errors import ConfigError
from kvferry.simulate.reuse import Replay
from kvferry.simulate.trace import Trace

MAX_CHANCES = 2
"""Most second chances of a chunk. With more, chunks that were popular once stay too long; the
traces gain nothing from three."""


class Lru:
    """The idle chunks, least recently used first: the order in which `HostPool` evicts.

    A chunk is removed while a request uses it, and added again at the end of the use. The chunks of
    a prefix are used together, and `touch` moves the root to the end of the order. So a prompt
    loses its last chunks first, and a chunk never stays without its parents.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, int] = OrderedDict()  # remaining chances by key

    def add(self, key: int) -> None:
        """Add a chunk that became idle just after its use. Adding an idle chunk counts as a use."""
        self._order[key] = 0
        self._order.move_to_end(key)

    def remove(self, key: int) -> None:
        """Remove a chunk that is used or given up. Does nothing if it is not idle."""
        self._order.pop(key, None)

    def touch(self, keys: Sequence[int]) -> None:
        """Note that a request used a prefix. Of its idle chunks, the root is evicted last."""
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def evict(self) -> int:
        """Remove and return the chunk that is worth least.

        Raises:
            KeyError: no chunk is idle.
        """
        return self._order.popitem(last=False)[0]

    def __contains__(self, key: object) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)


class Chances(Lru):
    """LRU with second chances. A chunk that was used again goes through the order once more for
    each use, at most `MAX_CHANCES` times, before it is evicted. A chunk that returns soon after its
    eviction counts as used again.

    Most chunks of a trace are never used again. They leave first, so the chunks of conversations
    that go on stay longer than under LRU.

    Args:
        num_remembered: how many chunks that are not idle keep their chances; the pool's size.
    """

    def __init__(self, num_remembered: int) -> None:
        super().__init__()
        self._num_remembered = num_remembered
        self._left: OrderedDict[int, int] = OrderedDict()  # chances on return, by key

    def add(self, key: int) -> None:
        # -1: the touch at the end of the request that brings a new chunk is not yet a use.
        chances = self._order.pop(key, None)
        self._order[key] = self._left.pop(key, -1) if chances is None else chances

    def remove(self, key: int) -> None:
        chances = self._order.pop(key, None)
        if chances is not None:
            self._remember(key, chances)

    def touch(self, keys: Sequence[int]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order[key] = min(order[key] + 1, MAX_CHANCES)
                order.move_to_end(key)

    def evict(self) -> int:
        order = self._order
        key, chances = order.popitem(last=False)
        while chances > 0:
            order[key] = chances - 1
            key, chances = order.popitem(last=False)
        self._remember(key, 0)
        return key

    def _remember(self, key: int, chances: int) -> None:
        self._left[key] = chances
        if len(self._left) > self._num_remembered:
            self._left.popitem(last=False)


LRU = "lru"
"""LRU that touches blocks in the order of the prompt. `reuse` computes it without a replay."""

POOL = "pool"
CHANCES = "chances"

REPEATED = "repeated"
"""`pool` with the option `save_repeated`: a block is stored when a second request uses it."""

POLICIES: Final = (LRU, POOL, CHANCES, REPEATED)


def check_policy(name: str) -> None:
    """Raise ConfigError, with the nearest name, for an unknown policy."""
    if name not in POLICIES:
        raise ConfigError(unknown("policy", name, POLICIES))


def replay(trace: Trace, capacity: int, order: Lru, *, repeated: bool = False) -> Replay:
    """Run one request after another through a pool of `capacity` blocks, as the host pool works.

    A request pins the leading blocks that are held; these are its hits. Each other block takes a
    place while there is one, but evicts no block of the same request. At the end of the request all
    its blocks become idle, and the whole prefix counts as used.

    Args:
        repeated: whether a block is stored only when it is used again while its first use is still
            remembered, as in a cache with `save_repeated` and chunks of default size.
    """
    hits = bytearray(trace.num_references)
    starts = trace.starts.tolist()
    blocks = trace.blocks
    held = bytearray(trace.num_unique)
    used_once: OrderedDict[int, None] = OrderedDict()
    num_remembered = CacheBounds().max_used_once * DEFAULT_CHUNK_TOKENS // trace.block_tokens
    num_free = capacity
    num_written = 0
    add, remove, evict = order.add, order.remove, order.evict
    for start, stop in itertools.pairwise(starts):
        keys = blocks[start:stop].tolist()
        num_hit = 0
        for key in keys:
            if not held[key]:
                break
            remove(key)
            num_hit += 1
        hits[start : start + num_hit] = b"\1" * num_hit
        used = keys[:num_hit]
        for key in keys[num_hit:]:
            if held[key]:  # after a gap, or twice in this request
                remove(key)
            elif repeated and key not in used_once:
                used_once[key] = None
                if len(used_once) > num_remembered:
                    used_once.popitem(last=False)
                continue
            else:
                if num_free:
                    num_free -= 1
                elif len(order):
                    held[evict()] = 0
                else:  # all places have blocks of this request
                    continue
                held[key] = 1
                num_written += 1
            used.append(key)
        for key in reversed(used):
            add(key)
        order.touch(used)
    return Replay(np.frombuffer(hits, np.bool_), num_written)
