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


def lru_hits(prompts: Prompts, capacity: int) -> list[bool]:
    """Return whether each reference hits a cache in which a request uses its whole prompt, the root
    last, and in which it evicts no block of its own."""
    held: list[int] = []  # the least recently used first
    hits = []
    for prompt in prompts:
        used = list(itertools.takewhile(held.__contains__, prompt))
        hits += [place < len(used) for place in range(len(prompt))]
        used = list(prompt[:capacity])
        idle = [block for block in held if block not in used]
        held = idle[max(0, len(used) + len(idle) - capacity) :] + used[::-1]
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
