"""The thread that brings records into memory and reads those in doubt again, without a worker."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.connectors.shared_storage import kept as module
from kvferry.connectors.shared_storage.kept import KeptRecords
from kvferry.observe import Counters
from kvferry.store.staging import Content, Staging
from kvferry.testing.faults import Gate
from kvferry.testing.stores import make_key

from .keeping import NUM_CHUNKS, SLOT, note_uses, open_store, records, wait_for


class Bench:
    """Records of a store, kept."""

    def __init__(self, directory: Path, make_host: Any, num_slots: int) -> None:
        self.parts = make_host(store=open_store(directory), keep_bytes=0).parts[0]
        self.store, self.observer, self.busy = self.parts.store, Counters(), False
        self.staging = Staging(num_slots * SLOT, SLOT, num_slots * SLOT)
        self.kept = KeptRecords(
            self.parts._rows, self.store, self.staging, lambda: self.busy, self.observer
        )

    def contents(self) -> list[Content]:
        """What is held, which goes on being held."""
        return [held.content for held in list(self.staging._kept.values())]


@pytest.fixture
def bench(directory: Path, make_host):
    made: list[Bench] = []

    def make(num_slots: int = 64) -> Bench:
        made.append(Bench(directory, make_host, num_slots))
        return made[-1]

    yield make
    for one in made:
        one.busy = False
        assert one.kept.close(10.0)
        assert one.staging.num_free == one.staging.num_slots


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    monkeypatch.setattr(module, "RECHECK_SECONDS", 0.01)


def filled(one: Bench) -> None:
    one.kept.start()
    wait_for(lambda: one.staging.num_kept == NUM_CHUNKS)


def test_filling_gives_way_to_reads_for_requests(bench):
    one = bench()
    one.busy = True
    one.kept.start()
    time.sleep(0.2)
    assert one.staging.num_kept == 0
    one.busy = False
    wait_for(lambda: one.staging.num_kept == NUM_CHUNKS)


def test_a_hit_that_begins_ends_a_read_under_way_which_is_done_again_after_it(bench, monkeypatch):
    one = bench()
    open_read, opened = one.store.open_read, []

    def busy_from_here(key):
        opened.append(key)
        one.busy = len(opened) == 2  # once to see what it is, once to read it
        return open_read(key)

    monkeypatch.setattr(one.store, "open_read", busy_from_here)
    one.kept.start()
    wait_for(lambda: one.busy)
    time.sleep(0.2)
    assert one.staging.num_kept == 0
    one.busy = False
    wait_for(lambda: one.staging.num_kept == NUM_CHUNKS)
    assert len(opened) == 2 * NUM_CHUNKS + 1


def test_memory_is_not_made_ready_beside_a_hit(bench, monkeypatch):
    one = bench()
    asked: list[bool] = []

    def prepare(_num_bytes, go_on):
        one.busy = True
        asked.append(go_on())

    monkeypatch.setattr(one.staging, "prepare", prepare)
    one.kept.start()
    wait_for(lambda: one.busy)
    time.sleep(0.1)
    assert not asked
    one.busy = False
    wait_for(lambda: asked == [True])


def test_records_in_doubt_do_not_wait_for_memory_that_hits_keep_from_being_made_ready(
    bench, monkeypatch, directory
):
    monkeypatch.setattr(module, "PREPARE_SECONDS", 0.1)
    one = bench()
    answers: list[bool] = []
    monkeypatch.setattr(one.staging, "prepare", lambda _num_bytes, go_on: answers.append(go_on()))
    filled(one)
    wait_for(lambda: answers == [True])
    note_uses(directory)
    for number in range(2):
        one.busy = True
        assert one.kept.confirm(one.contents()[number])
        one.kept.used()
        wait_for(lambda expected=number + 1: one.observer["kept_rechecked"] == expected)
    assert answers[1] is False


def test_a_record_that_hits_keep_from_being_read_is_left_to_them(bench, monkeypatch):
    one = bench()
    open_read = one.store.open_read

    def busy(key):
        one.busy = True
        timer = threading.Timer(0.02, setattr, (one, "busy", False))
        timer.start()
        return open_read(key)

    monkeypatch.setattr(one.store, "open_read", busy)
    prepared = threading.Event()
    monkeypatch.setattr(one.staging, "prepare", lambda _num_bytes, _go_on: prepared.set())
    one.kept.start()
    assert prepared.wait(10.0)
    assert one.staging.num_kept == 0


def test_of_what_is_brought_in_the_most_recent_goes_last(bench, directory: Path):
    paths = records(directory)
    for number, path in enumerate(paths):
        os.utime(path, ns=(number, number))
    one = bench()
    filled(one)
    names = [f"{content.key.hex()}.safetensors" for content in one.contents()]
    assert names == [path.name for path in paths]


def test_filling_ends_in_time_however_busy_it_is(bench, monkeypatch):
    monkeypatch.setattr(module, "FILL_SECONDS", 0.1)
    one = bench()
    one.busy = True
    prepared = threading.Event()
    monkeypatch.setattr(one.staging, "prepare", lambda _num_bytes, _go_on: prepared.set())
    one.kept.start()
    assert prepared.wait(10.0)
    assert one.staging.num_kept == 0


def test_filling_leaves_a_quarter_of_the_slots(bench):
    one = bench(num_slots=8)
    taken = [one.staging.acquire() for _ in range(5)]
    one.kept.start()
    wait_for(lambda: one.staging.num_kept == 1)
    time.sleep(0.1)
    assert one.staging.num_kept == 1
    for slot in taken:
        one.staging.release(slot)


def test_more_recent_values_of_other_sizes_do_not_hide_ours(bench):
    one = bench(num_slots=2 * NUM_CHUNKS)
    for number in range(5 * NUM_CHUNKS):
        one.store.put(make_key(number), [b"x" * 100])
    filled(one)


def test_what_a_scan_found_before_it_failed_is_brought_in(bench, monkeypatch):
    one = bench()
    entries = list(one.store.scan())

    def scan():
        yield from entries
        raise module.StoreError("the medium failed")

    monkeypatch.setattr(one.store, "scan", scan)
    filled(one)


def test_a_fault_while_filling_ends_filling_only(bench, monkeypatch, directory: Path):
    one = bench()
    open_read = one.store.open_read

    def failing(key):
        if one.staging.num_kept == 2:
            raise ValueError("a fault of ours")
        return open_read(key)

    monkeypatch.setattr(one.store, "open_read", failing)
    one.kept.start()
    wait_for(lambda: one.observer["kept_failed"] == 1)
    assert one.staging.num_kept == 2
    monkeypatch.undo()
    monkeypatch.setattr(module, "RECHECK_SECONDS", 0.01)
    note_uses(directory)
    content = one.contents()[0]
    assert one.kept.confirm(content)
    one.kept.used()
    wait_for(lambda: one.observer["kept_rechecked"] == 1)
    assert content.stamp == one.store.stamp(content.key)


def test_memory_is_made_ready_again_after_a_use(bench, monkeypatch):
    one = bench()
    calls: list[int] = []
    monkeypatch.setattr(one.staging, "prepare", lambda num_bytes, _go_on: calls.append(num_bytes))
    filled(one)
    wait_for(lambda: len(calls) == 1)
    one.kept.used()
    wait_for(lambda: len(calls) == 2)


def test_a_fault_while_reading_again_ends_trust_in_that_record(bench, monkeypatch, directory):
    one = bench()
    filled(one)
    note_uses(directory)
    first, second = one.contents()[:2]

    def failing(key):
        raise ValueError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(one.store, "open_read", failing)
        assert one.kept.confirm(first)
        one.kept.used()
        wait_for(lambda: one.observer["kept_failed"] == 1)
    assert not one.kept.confirm(first)
    assert one.kept.confirm(second)


def test_what_is_in_doubt_is_not_used_if_nobody_reads_it_again(bench, monkeypatch, directory):
    monkeypatch.setattr(module, "LATE_SECONDS", 0.05)
    one = bench()
    filled(one)
    note_uses(directory)
    first, second, third = one.contents()[:3]
    store_hangs, read_again = Gate(), one.kept._read_again

    def hang(content: Content) -> None:
        store_hangs.pass_through()
        read_again(content)

    monkeypatch.setattr(one.kept, "_read_again", hang)
    assert one.kept.confirm(first)
    assert one.kept.confirm(second)
    assert store_hangs.wait_for_arrival()
    time.sleep(0.1)
    assert not one.kept.confirm(third)
    store_hangs.release()
    wait_for(lambda: one.observer["kept_rechecked"] == 2)
    assert one.kept.confirm(third)


def test_without_a_thread_only_what_was_left_alone_is_used(bench, monkeypatch, directory):
    one = bench()
    filled(one)
    contents = one.contents()
    assert one.kept.close(10.0)
    assert one.kept.confirm(contents[0])
    note_uses(directory)
    assert not one.kept.confirm(contents[0])


def test_a_process_that_may_have_no_more_threads_serves_all_the_same(bench, monkeypatch):
    def start(_self):
        raise RuntimeError("can't start new thread")

    one = bench()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        one.kept.start()
    assert one.staging.num_kept == 0
    one.kept.used()


def test_damage_that_filling_meets_takes_no_slot(bench, directory: Path):
    damaged = records(directory)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    one = bench()
    one.kept.start()
    wait_for(lambda: one.staging.num_kept == NUM_CHUNKS - 1)
    time.sleep(0.05)
    assert one.observer["records_corrupt"] == 0
    assert damaged.exists()
