"""Computes from a trace the hits of LRU at every size, and the most hits that any cache can have.

LRU is that of the host pool and of a directory: a request asks for its prefix first and then counts
as a use of all its blocks, of the root as the latest. So a prompt loses its last blocks first. The
blocks in order of their last use are a stack, and a cache of `capacity` blocks holds its top. A
block is hit if fewer blocks than that lie above it, and one pass answers for all capacities
(Mattson's stack algorithm).

The optimum is Belady's with bypass: a block that is needed later than all held blocks is not taken
in. It knows the future, so no eviction order hits more. `Simulator` calls these functions.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from kvferry.simulate.trace import Ints

NEVER = np.iinfo(np.int64).max
"""Distance of the first reference to a block."""


def previous_references(blocks: Ints) -> Ints:
    """Return each reference's previous reference to the same block, or -1: [num_references]."""
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(blocks), -1)
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous


def reuse_distances(blocks: Ints, starts: Ints) -> Ints:
    """Return for each reference how many other blocks lie above its block in the stack when its
    request comes, or NEVER: [num_references]. See `Trace` for the arguments.

    Let the blocks of each request stand in reverse, in order of use, and p[i] be the previous
    reference to the block of reference i. Between p[i] and the request of i, at f, stand
    f - p[i] - 1 references. Those that repeat a block seen in between must not count: they are the
    j < f with p[j] > p[i], which a Fenwick tree counts. A block implies the blocks before it in a
    prompt, so none of the j from f to i is one of them. Blocks of a prefix are used together again
    and again, and all references of such a run repeat equally many. So a run is counted as one.
    """
    counts = np.diff(starts)
    asked = np.repeat(starts[:-1], counts)
    mirror = asked + np.repeat(starts[1:], counts) - 1 - np.arange(len(blocks))
    previous = previous_references(blocks[mirror])
    seen = np.flatnonzero(previous >= 0)
    distances = np.full(len(previous), NEVER)
    if not len(seen):
        return distances
    before = previous[seen]
    is_first = np.ones(len(seen), bool)
    is_first[1:] = (np.diff(seen) != 1) | (np.diff(before) != 1)
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(np.append(firsts, len(seen)))
    ranks = np.empty(len(firsts), np.int64)
    ranks[np.argsort(before[firsts])] = np.arange(1, len(firsts) + 1)
    repeated = _sum_of_later(ranks.tolist(), lengths.tolist())
    above = asked[seen] - before - 1 - np.repeat(np.asarray(repeated, np.int64), lengths)
    # A trace may name a block twice in one request. `mirror` is its own inverse.
    distances[mirror[seen]] = np.maximum(above, 0)
    return distances


def _sum_of_later(ranks: list[int], weights: list[int]) -> list[int]:
    """Return for each entry the summed weights of the earlier entries with a higher rank. The ranks
    are 1 to `len(ranks)`, each once."""
    size = len(ranks)
    tree = [0] * (size + 1)
    total = 0
    sums = []
    for rank, weight in zip(ranks, weights, strict=True):
        lower = 0
        at = rank
        while at:
            lower += tree[at]
            at &= at - 1
        sums.append(total - lower)
        total += weight
        at = rank
        while at <= size:
            tree[at] += weight
            at += at & -at
    return sums


def optimum(previous: Ints, capacity: int) -> NDArray[np.bool_]:
    """Return which references hit `capacity` blocks under Belady's optimum with bypass, which has
    the most hits: [num_references].

    A hit needs its block to be kept since its previous reference. When more than `capacity` blocks
    are kept, the one that is needed last is given up.
    """
    following = np.full(len(previous), -1)
    seen = np.flatnonzero(previous >= 0)
    following[previous[seen]] = seen
    hits = bytearray(len(previous))  # until its turn: whether the block is kept for it
    latest: list[int] = []  # max-heap by negation; past turns stay at the bottom
    num_kept = 0
    turns = np.flatnonzero((previous >= 0) | (following >= 0))
    for at, after in zip(turns.tolist(), following[turns].tolist(), strict=True):
        num_kept -= hits[at]
        if after < 0:
            continue
        heapq.heappush(latest, -after)
        hits[after] = 1
        num_kept += 1
        if num_kept > capacity:
            hits[-heapq.heappop(latest)] = 0
            num_kept -= 1
    return np.frombuffer(hits, np.bool_)
