"""Slow reference caches for tests of the simulator, simple enough to see that they are right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import cache

import numpy as np

from kvferry.simulate.trace import Trace, trace_of

Prompts = Sequence[Sequence[int]]


def make_trace(
    prompts: Prompts, block_tokens: int, num_tokens: Sequence[int] | None = None
) -> Trace:
    """Make a trace of requests with these blocks; all blocks are whole if `num_tokens` is None."""
    counts = [len(blocks) for blocks in prompts]
    flat = np.array(list(itertools.chain(*prompts)), np.int64)
    whole = [count * block_tokens for count in counts]
    return trace_of(flat, counts, num_tokens or whole, block_tokens, 0.0)


def lru_hits(references: Sequence[int], capacity: int) -> list[bool]:
    """Return whether each reference hits a cache that evicts the least recently used block."""
    held: list[int] = []  # the least recently used first
    hits = []
    for block in references:
        hits.append(block in held)
        if block in held:
            held.remove(block)
        elif len(held) == capacity:
            held.pop(0)
        held.append(block)
    return hits


def most_hits(references: Sequence[int], capacity: int) -> int:
    """Return the most hits that any eviction decisions give, by trying all of them."""

    @cache
    def best(at: int, held: frozenset[int]) -> int:
        if at == len(references):
            return 0
        block = references[at]
        # Afterwards the block is held or not, and any of the others may be given up.
        some = sorted(held | {block})
        kept = (
            frozenset(choice)
            for size in range(capacity + 1)
            for choice in itertools.combinations(some, size)
        )
        return (block in held) + max(best(at + 1, choice) for choice in kept)

    return best(0, frozenset())


def pool_hits(prompts: Prompts, capacity: int, max_chances: int) -> list[bool]:
    """Return the hits of the host pool. A request hits its leading blocks that are held, and never
    evicts a block of its own. Each further use gives a block a chance, up to `max_chances`; a
    block loses a chance where it would have been evicted. The chances of `capacity` blocks that are
    in use or were evicted are remembered. Only for prompts without gaps and repetitions."""
    held: dict[int, int] = {}  # block -> chances; the first block is evicted first
    remembered: dict[int, int] = {}
    hits = []

    def remember(block: int, chances: int) -> None:
        remembered.pop(block, None)
        remembered[block] = chances
        if len(remembered) > capacity:
            del remembered[next(iter(remembered))]

    for prompt in prompts:
        used = list(itertools.takewhile(held.__contains__, prompt))
        hits += [place < len(used) for place in range(len(prompt))]
        for block in used:
            remember(block, held.pop(block))
        for block in prompt[len(used) :]:
            if len(used) == capacity:
                break
            if len(used) + len(held) == capacity:
                while held[first := next(iter(held))] > 0:
                    held[first] = held.pop(first) - 1
                del held[first]
                remember(first, 0)
            used.append(block)
        for block in reversed(used):
            held[block] = min(remembered.pop(block, -1) + 1, max_chances)
    return hits


def conversations(*, seed: int, num_requests: int, num_blocks: int = 6) -> list[list[int]]:
    """Make prompts that each repeat a prefix of an earlier one, or start a new conversation."""
    rng = random.Random(seed)
    fresh = itertools.count(1)
    prompts: list[list[int]] = []
    for _ in range(num_requests):
        prompt = [0]
        if prompts and rng.random() < 0.7:
            earlier = rng.choice(prompts[-5:])
            prompt = earlier[: rng.randint(1, len(earlier))]
        prompts.append(prompt + [next(fresh) for _ in range(rng.randint(0, num_blocks))])
    return prompts
