"""Staging as the scheduler role hands it out."""

from __future__ import annotations

from kvferry.connectors.shared_storage.messages import ChunkRef
from kvferry.connectors.shared_storage.tickets import Tickets
from kvferry.store.memory import MemoryStore
from kvferry.testing.host import prefix_seeds


def test_staging_that_a_load_still_copies_out_of_is_lent_after_the_plan_that_carries_it():
    tickets = Tickets(1, 6, lambda: 0.0)
    chunks = tuple(ChunkRef(bytes([i]), 128 * i) for i in range(6))
    number = tickets.open(chunks, (0, 768), 1.0)
    tickets.drain()
    tickets.close(number, told=True)
    assert tickets.room(6) == 0
    assert tickets.any_open
    tickets.drain()
    assert tickets.room(6) == 6
    assert not tickets.any_open


def test_hits_admitted_in_a_row_are_whole_though_only_one_fits_into_staging(make_host):
    store = MemoryStore("row")
    prompts = [[first, *range(100, 140)] for first in range(4)]
    writer = make_host(store=store)
    for index, prompt in enumerate(prompts):
        writer.run(f"writer {index}", prompt)
    writer.settle()
    host = make_host(store=store, num_staging_chunks=7)  # loads have three quarters of it
    requests = [host.add(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    for request, following in zip(requests, [*requests[1:], None], strict=True):
        assert host.admit(request) == 40
        if following is not None:
            host.scheduler.lookup(following, 0)  # in the step that loads
        host.step([request], tokens=1)
        assert host.ranks[0].wrong_tokens(request, prefix_seeds(request), 40) == 0
