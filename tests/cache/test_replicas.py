"""Replicas that list each other: together they hit nearly what one server with the memory of both
does. Requests go to them in turn, whatever they hold."""

from __future__ import annotations

import random

import pytest

from tests.cache.test_peers import peers
from tests.servers.process import free_ports

__all__ = ["peers"]

CHUNK_TOKENS = 8
NUM_REQUESTS, NUM_OPEN = 200, 16
NUM_SLOTS = 220
"""Of each replica; the trace has some 700 chunks."""


def conversations(seed):
    """Prompts as conversations make them: some system prompts that they share, turns that add to
    the history, old ones that end as new ones begin."""
    chance, last = random.Random(seed), 0

    def fresh(most_chunks):
        nonlocal last
        start, last = last, last + CHUNK_TOKENS * chance.randint(1, most_chunks)
        last += chance.randrange(CHUNK_TOKENS)
        return list(range(start, last))

    systems, opened = [fresh(6) for _ in range(4)], []
    for _ in range(NUM_REQUESTS):
        if len(opened) < NUM_OPEN or chance.random() < 0.25:
            del opened[NUM_OPEN - 1 :]
            history = chance.choices(systems, [8, 4, 2, 1])[0] + fresh(6)
        else:
            history = opened.pop(chance.randrange(len(opened))) + fresh(4)
        opened.insert(chance.randrange(len(opened) + 1), history)
        yield history


def share_of_hits(hosts, prompts):
    """Tokens that were hits, of all; each request is whole before the next comes."""
    hits = 0
    for number, prompt in enumerate(prompts):
        request = hosts[number % len(hosts)].run(f"{number}", prompt)
        hits += request.num_external_tokens
        for host in hosts:
            host.settle()
    return hits / sum(map(len, prompts))


@pytest.mark.slow
def test_two_replicas_hit_nearly_what_one_with_the_sum_of_their_memory_does(peers):
    prompts, ports = list(conversations(1)), free_ports(3)
    sizes = {"num_blocks": 1024, "tiers": True, "load_timeout_seconds": 20.0}
    one = peers(None, [ports[2]], num_slots=2 * NUM_SLOTS, **sizes)  # nobody serves there
    single = share_of_hits([one], prompts)
    two = [
        peers(port, [other], num_slots=NUM_SLOTS, **sizes)
        for port, other in (ports[:2], reversed(ports[:2]))
    ]
    together = share_of_hits(two, prompts)
    own = sum(host.observer["hit_tokens/memory"] for host in two) / sum(map(len, prompts))
    print(f"one server {single:.3f}, two replicas {together:.3f}, of which in own memory {own:.3f}")
    assert together >= 0.95 * single
    assert own < 0.9 * together
