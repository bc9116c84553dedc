"""An engine that starts brings into memory what was used last."""

from __future__ import annotations

import pytest

from kvferry.cache.deciding.recent import AT_ONCE, FILL_SECONDS, RecentRecords
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate
from tests.cache.keeping import NUM_CHUNKS, PROMPT, open_store, wait_for


def fill(host) -> None:
    """Step as an idle host does while the connector has something to do."""

    def is_done() -> bool:
        host.step([])
        return not host.scheduler.has_pending_work()

    wait_for(is_done)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_first_hit_after_a_restart_is_promised_by_the_first_look_up(
    make_host, tmp_path, world_size: int
):
    writer = make_host(store=f"file://{tmp_path}/store", world_size=world_size)
    writer.run("writer", PROMPT)
    writer.settle()
    reader = make_host(store=f"file://{tmp_path}/store", world_size=world_size, fills=True)
    fill(reader)
    request = reader.add("reader", PROMPT)
    assert reader.scheduler.lookup(request, 0).num_tokens == 40
    reader.admit(request)
    reader.prefill(request)
    assert reader.observer["hit_tokens/memory"] == 40
    assert not reader.pool.is_filling


def test_records_of_another_model_are_left_alone(make_host, directory):
    other = make_host(store=open_store(directory), weights=b"o" * 32, fills=True)
    fill(other)
    assert other.pool.num_taken == 0
    assert other.observer["records_corrupt"] == 0
    assert other.run("other", PROMPT).num_external_tokens == 0
    again = make_host(store=open_store(directory))
    assert again.run("same", PROMPT).num_external_tokens == 40


def test_half_of_the_slots_are_filled_at_most(make_host, directory):
    host = make_host(store=open_store(directory), num_slots=4, fills=True)
    fill(host)
    assert host.observer.snapshot()["fetch_count"] == 2


def test_a_hit_does_not_wait_for_records_that_it_does_not_need(make_host, directory):
    host = make_host(store=open_store(directory), fills=True)
    while not host.pool.is_filling:
        host.step([])
    assert host.pool.num_taken <= AT_ONCE
    assert NUM_CHUNKS > AT_ONCE
    assert host.run("reader", PROMPT).num_external_tokens == 40


def test_a_store_that_hangs_while_it_is_listed_keeps_no_host_awake():
    gate, clock = Gate(), FakeClock()

    class Hanging(MemoryStore):
        def scan(self):
            gate.pass_through()
            return super().scan()

    recent = RecentRecords(Hanging("x"), None, 4, clock)
    assert gate.wait_for_arrival()
    assert not recent.is_done
    clock.advance(FILL_SECONDS + 1)
    assert recent.is_done
    assert recent.pop() == []
    gate.release()
    recent.close(5.0)


def test_a_host_with_a_request_is_not_kept_awake(make_host, directory):
    host = make_host(store=open_store(directory), fills=True)
    assert host.scheduler.has_pending_work()
    host.scheduler.lookup(host.add("other", [7] * 20), 0)
    assert not host.scheduler.has_pending_work()


def test_reset_ends_the_filling(make_host, directory):
    host = make_host(store=open_store(directory), fills=True)
    host.scheduler.reset()
    host.settle()
    assert not host.scheduler.has_pending_work()
    assert host.run("reader", PROMPT).num_external_tokens == 0
