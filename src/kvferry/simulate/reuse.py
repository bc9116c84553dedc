"""Computes from a trace its reuse distances, the hits of LRU at every size, and the optimum.

The reuse distance of a reference is the number of other blocks referenced since the same block was
referenced last. LRU of `capacity` blocks hits exactly the references with a smaller distance
(Mattson's stack algorithm), so one pass answers for all capacities.

The optimum is Belady's with bypass: a block that is needed later than all held blocks is not taken
in. It knows the future, so no eviction order hits more. `Simulator` calls these functions.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.simulate.trace import Ints

NEVER = np.iinfo(np.int64).max
"""Distance of the first reference to a block."""


class Replay(NamedTuple):
    """Outcome of a trace with one cache."""

    hits: NDArray[np.bool_]
    """Whether the reference was a hit: [num_references]."""
    num_written: int
    """Blocks that the cache took in."""


def previous_references(blocks: Ints) -> Ints:
    """Return each reference's previous reference to the same block, or -1: [num_references]."""
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(blocks), -1)
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous


def reuse_distances(previous: Ints) -> Ints:
    """Return the reuse distance of each reference, or NEVER: [num_references].

    Let p[i] be the previous reference to the block of reference i. Between them stand
    i - p[i] - 1 references. Those that repeat a block seen in between must not count: they are the
    j < i with p[j] > p[i], which a Fenwick tree counts. Blocks of a prefix are referenced together
    again and again, and all references of such a run have the same distance. So a run is counted
    as one.
    """
    seen = np.flatnonzero(previous >= 0)
    before = previous[seen]
    if not len(seen):
        return np.full(len(previous), NEVER)
    is_first = np.ones(len(seen), bool)
    is_first[1:] = (np.diff(seen) != 1) | (np.diff(before) != 1)
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(np.append(firsts, len(seen)))
    ranks = np.empty(len(firsts), np.int64)
    ranks[np.argsort(before[firsts])] = np.arange(1, len(firsts) + 1)
    repeated = _sum_of_later(ranks.tolist(), lengths.tolist())
    distances = np.full(len(previous), NEVER)
    distances[seen] = seen - before - 1 - np.repeat(np.asarray(repeated, np.int64), lengths)
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


def lru_outcome(distances: Ints, capacity: int) -> Replay:
    """Return the outcome of LRU that touches blocks in prompt order, as published figures do."""
    hits = distances < capacity
    return Replay(hits, len(hits) - int(hits.sum()))


def optimum(previous: Ints, capacity: int) -> Replay:
    """Return the outcome of Belady's optimum with bypass: the most hits of `capacity` blocks.

    A hit needs its block to be kept since its previous reference. When more than `capacity` blocks
    are kept, the one that is needed last is given up.
    """
    following = np.full(len(previous), -1)
    seen = np.flatnonzero(previous >= 0)
    following[previous[seen]] = seen
    hits = bytearray(len(previous))  # until its turn: whether the block is kept for it
    latest: list[int] = []  # max-heap by negation; past turns stay at the bottom
    num_kept = num_written = 0
    turns = np.flatnonzero((previous >= 0) | (following >= 0))
    for at, after in zip(turns.tolist(), following[turns].tolist(), strict=True):
        was_kept = hits[at]
        num_kept -= was_kept
        if after < 0:
            continue
        heapq.heappush(latest, -after)
        hits[after] = 1
        num_kept += 1
        if num_kept > capacity:
            hits[-heapq.heappop(latest)] = 0
            num_kept -= 1
        num_written += hits[after] and not was_kept
    return Replay(np.frombuffer(hits, np.bool_), num_written)
