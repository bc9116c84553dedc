"""Hits promised at once, of records that the worker role of the same process keeps in memory.

The simulated host checks every byte of every request's KV, so a run proves that it was right.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.connectors.shared_storage import reservations as module
from kvferry.connectors.shared_storage.build import Parts
from kvferry.connectors.shared_storage.kept import KeptRecords
from kvferry.connectors.shared_storage.messages import ChunkRef
from kvferry.connectors.shared_storage.reservations import Reservations, find, publish
from kvferry.observe import Counters
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Stamp
from kvferry.store.file.watch import RecordWatch
from kvferry.store.staging import Content, Staging
from kvferry.testing.faults import Gate
from kvferry.testing.host import make_groups
from kvferry.types import ChunkKey

from .keeping import (
    DAMAGES,
    NUM_CHUNKS,
    PROMPT,
    SLOT,
    HangsLater,
    filled,
    note_uses,
    open_store,
    records,
    wait_for,
)

SCHEMA = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=8, groups=make_groups())


@pytest.fixture
def host(directory: Path, make_host) -> Any:
    """A host that has the prompt in memory."""
    host = make_host(store=open_store(directory))
    filled(host)
    host.staging = host.parts[0].staging
    return host


def assert_nothing_is_taken(host: Any) -> None:
    wait_for(lambda: host.staging.num_free == host.staging.num_slots)


# -- hits ---------------------------------------------------------------------------------------


def test_a_hit_in_memory_is_promised_by_the_first_look_up(host):
    request = host.add("warm", PROMPT)
    before = host.parts[0].store.num_opened
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    assert host.admit(request) == 40
    host.prefill(request)
    assert host.num_steps == 1
    host.finish(request)
    assert host.parts[0].store.num_opened == before
    assert host.observer["kept_used"] == NUM_CHUNKS
    assert host.observer["loaded_tokens"] == 40
    assert_nothing_is_taken(host)
    assert host.staging.num_kept == NUM_CHUNKS


def test_of_a_hit_that_is_partly_in_memory_all_is_asked_for(host):
    host.staging.take_all([ChunkKey(key) for key in list(host.staging._kept)[:1]])
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    assert host.staging.num_kept == NUM_CHUNKS - 1
    assert host.admit(request) == 40


def test_what_another_process_keeps_is_asked_for(host, monkeypatch):
    pid = os.getpid()
    monkeypatch.setattr(module.os, "getpid", lambda: pid + 1)
    assert host.scheduler.lookup(host.add("warm", PROMPT), 0).num_tokens is None


def test_of_several_ranks_each_is_asked(tmp_path: Path, make_host):
    url = f"file://{tmp_path}"
    host = make_host(store=url, world_size=2)
    host.run("writer", PROMPT)
    host.settle()
    time.sleep(2.1)  # the clock of this store is right: until it can tell changes apart
    again = make_host(store=url, world_size=2)
    filled(again, 2 * NUM_CHUNKS)
    assert again.scheduler.lookup(again.add("warm", PROMPT), 0).num_tokens is None


def test_a_slow_store_does_not_keep_memory_from_being_used(host):
    policy = host.scheduler._policy
    policy.saw_compute(1000, 0.001)
    for _ in range(4):
        policy.saw_load(40, 100.0)
    assert not policy.worth_loading(40)
    assert host.run("warm", PROMPT).num_external_tokens == 40


def test_a_hit_in_memory_waits_for_staging_like_any_other(host):
    tickets = host.scheduler._tickets
    room = tickets.room(10**6)
    number = tickets.open(tuple(ChunkRef(bytes([1]) * 32, 0) for _ in range(room - 4)), (0, 8), 1e9)
    assert host.scheduler.lookup(host.add("warm", PROMPT), 0).num_tokens is None
    assert tickets.room(10**6) == 4
    assert host.staging.num_kept == NUM_CHUNKS
    tickets.close(number, told=False)
    assert host.run("again", PROMPT).num_external_tokens == 40
    assert_nothing_is_taken(host)


def test_hits_in_a_row_all_are_of_memory(host):
    opened = host.parts[0].store.num_opened
    for number in range(5):
        assert host.run(f"warm {number}", PROMPT).num_external_tokens == 40
    assert host.num_steps == 5
    assert host.parts[0].store.num_opened == opened


def test_staging_that_others_have_is_not_promised_twice(host):
    first, second = host.add("one", PROMPT), host.add("two", PROMPT)
    assert host.scheduler.lookup(first, 0).num_tokens == 40
    assert host.scheduler.lookup(second, 0).num_tokens is None
    assert [host.admit(first), host.admit(second)] == [40, 40]
    for request in (first, second):
        host.prefill(request)
        host.finish(request)
    assert_nothing_is_taken(host)


# -- promises that come to nothing --------------------------------------------------------------


def test_a_request_that_ends_before_the_plan_gives_its_slots_back(host):
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    assert host.staging.num_kept == 0
    host.finish(request)
    assert host.staging.num_kept == NUM_CHUNKS
    assert not host.scheduler.has_pending_work()
    assert_nothing_is_taken(host)


def test_a_load_that_no_plan_carried_gives_its_slots_back(host):
    request = host.add("warm", PROMPT)
    assert host.admit(request) == 40
    host.finish(request)
    host.step([])
    assert host.staging.num_kept == NUM_CHUNKS
    assert_nothing_is_taken(host)
    assert host.run("again", PROMPT).num_external_tokens == 40


def test_a_request_preempted_before_its_load_gives_its_slots_back(host):
    request = host.add("warm", PROMPT)
    assert host.admit(request) == 40
    host.preempt(request)
    host.step([])
    assert_nothing_is_taken(host)
    assert host.admit(request) == 40
    host.prefill(request)


def test_a_request_that_waits_for_blocks_keeps_its_promise(host):
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    for _ in range(3):
        host.step([])
        assert host.scheduler.lookup(request, 0).num_tokens == 40
    assert host.admit(request) == 40
    host.prefill(request)
    host.finish(request)
    assert_nothing_is_taken(host)


def test_another_epoch_gives_everything_back(host):
    assert host.scheduler.lookup(host.add("warm", PROMPT), 0).num_tokens == 40
    assert host.scheduler.reset()
    assert host.staging.num_kept == NUM_CHUNKS
    host.step([])
    assert_nothing_is_taken(host)


def test_a_step_that_fails_at_its_beginning_gives_everything_back(host, monkeypatch):
    request = host.add("warm", PROMPT)
    assert host.admit(request) == 40
    worker = host.ranks[0].worker
    monkeypatch.setattr(worker._fetches, "begin", lambda _op: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        host.step([request], tokens=1)
    worker.end_step()
    assert_nothing_is_taken(host)


def test_a_closed_worker_is_promised_of_no_more(host):
    request = host.add("warm", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens == 40
    host.ranks[0].worker.close()
    assert_nothing_is_taken(host)
    assert host.scheduler.lookup(host.add("another", PROMPT), 0).num_tokens is None


# -- what became of the records meanwhile -------------------------------------------------------


def change_unheard(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system tell of nothing, as on a network mount that others write to."""
    store = host.parts[0].store.inner
    monkeypatch.setattr(type(store), "is_unchanged", lambda _self, _key, _since: True)


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_known_before_the_promise(host, directory: Path, name: str):
    DAMAGES[name][0](records(directory)[2])
    assert host.scheduler.lookup(host.add("warm", PROMPT), 0).num_tokens is None


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_that_the_system_does_not_tell_of_is_found_with_its_hit(
    host, directory: Path, name: str, monkeypatch
):
    damage, counter = DAMAGES[name]
    with monkeypatch.context() as patch:
        change_unheard(host, patch)
        damage(records(directory)[2])
        # Of memory, and right: every byte is checked.
        assert host.run("warm", PROMPT).num_external_tokens == 40
        wait_for(lambda: host.observer[counter] == 1)
        assert host.run("not of memory", PROMPT).num_external_tokens in (0, 8, 16, 24, 32)


def test_a_store_that_is_gone_and_not_told_of_is_found_gone_with_the_hit(
    host, directory: Path, monkeypatch
):
    change_unheard(host, monkeypatch)
    directory.rename(directory.with_name("elsewhere"))
    assert host.run("warm", PROMPT).num_external_tokens == 40
    wait_for(lambda: host.observer["miss_absent"] == NUM_CHUNKS)
    assert host.run("not of memory", PROMPT).num_external_tokens == 0


def test_a_noted_use_is_no_reason_to_ask(host, directory: Path):
    note_uses(directory)
    for number in range(2):
        request = host.add(f"warm {number}", PROMPT)
        assert host.scheduler.lookup(request, 0).num_tokens == 40
        assert host.admit(request) == 40
        host.prefill(request)
        host.finish(request)
        wait_for(lambda: host.observer["kept_rechecked"] == NUM_CHUNKS)


def test_what_was_written_anew_is_asked_for_once(host, directory: Path):
    for path in records(directory):
        path.write_bytes(path.read_bytes())
    assert host.run("asks", PROMPT).num_external_tokens == 40
    assert host.scheduler.lookup(host.add("warm", PROMPT), 0).num_tokens == 40


def test_where_the_system_tells_of_nothing_all_is_asked_for(
    directory: Path, make_host, monkeypatch
):
    def refuse(_self: RecordWatch) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(RecordWatch, "__init__", refuse)
    host = make_host(store=open_store(directory))
    filled(host)
    assert host.scheduler.lookup(host.add("warm", PROMPT), 0).num_tokens is None
    assert host.run("warm", PROMPT).num_external_tokens == 40


def test_a_store_that_hangs_holds_up_no_hit_in_memory(directory: Path, make_host):
    store = HangsLater(open_store(directory), operations=("stamp", "open_read"))
    host = make_host(store=store, load_timeout_seconds=0.3)
    filled(host)
    store.gate = gate = Gate()
    for number in range(3):
        assert host.run(f"warm {number}", PROMPT).num_external_tokens == 40
    assert host.num_steps == 3
    gate.release()


def test_looks_that_wait_for_a_store_that_hangs_do_not_pile_up(directory: Path, make_host):
    store = HangsLater(open_store(directory), operations=("stamp",))
    host = make_host(store=store)
    filled(host)
    store.gate = gate = Gate()
    for number in range(20):
        assert host.run(f"warm {number}", PROMPT).num_external_tokens == 40
    worker = host.ranks[0].worker
    assert len(worker._kept._unasked) <= NUM_CHUNKS
    assert worker._load_pool._queue.qsize() == 0
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < 5
    gate.release()


def test_without_a_thread_to_look_the_next_hit_asks_first(directory: Path, make_host, monkeypatch):
    host = make_host(store=open_store(directory))
    filled(host)
    monkeypatch.setattr(KeptRecords, "_has_thread", False)
    assert host.run("warm", PROMPT).num_external_tokens == 40
    assert host.scheduler.lookup(host.add("again", PROMPT), 0).num_tokens is None
    assert host.run("once more", PROMPT).num_external_tokens == 40


# -- without a host -----------------------------------------------------------------------------


class Unchanged:
    """A store in which nothing ever happens, but to `changed`."""

    def __init__(self, *changed: bytes) -> None:
        self.changed = changed

    def watch(self) -> bool:
        return True

    def is_unchanged(self, key: ChunkKey, _since: Stamp) -> bool:
        return key not in self.changed


def kept(num_slots: int = 4) -> tuple[Staging, list[ChunkRef]]:
    """Staging that holds three chunks."""
    staging = Staging(2 * num_slots * SLOT, SLOT, num_slots * SLOT)
    chunks = [ChunkRef(bytes([index]) * 32, 8 * index) for index in range(3)]
    for chunk in chunks:
        slot = staging.acquire()
        assert slot is not None
        stamp = Stamp(value=(1,), changes=None, written=False)
        content = Content(ChunkKey(chunk.key), chunk.first_token, SCHEMA, stamp)
        staging.release(slot, content=content)
    return staging, chunks


def test_all_are_taken_or_none():
    staging, chunks = kept()
    reservations = Reservations(staging, Unchanged())
    assert not reservations.reserve(1, [*chunks, ChunkRef(b"x" * 32, 24)])
    assert staging.num_kept == 3
    assert reservations.reserve(2, chunks)
    assert staging.num_kept == 0
    assert not reservations.reserve(3, chunks[:1])
    claimed = reservations.claim(2, chunks)
    assert claimed is not None
    assert [one.content.key for one in claimed] == [chunk.key for chunk in chunks]
    assert reservations.claim(2, chunks) is None
    assert reservations.claim(1, chunks) is None


def test_what_was_reserved_for_others_is_not_handed_out():
    staging, chunks = kept()
    reservations = Reservations(staging, Unchanged())
    assert reservations.reserve(1, chunks)
    assert reservations.claim(1, chunks[::-1]) is None
    assert staging.num_kept == 3


def test_what_is_given_back_goes_from_the_end():
    staging, chunks = kept()
    reservations = Reservations(staging, Unchanged())
    assert reservations.reserve(1, chunks)
    reservations.cancel(1)
    for _ in range(staging.num_slots - 2):
        assert staging.acquire() is not None
    held = staging.take_all([ChunkKey(chunk.key) for chunk in chunks])
    assert [one is not None for one in held] == [True, True, False]


def test_what_is_not_to_be_trusted_is_not_taken():
    staging, chunks = kept()
    reservations = Reservations(staging, Unchanged())
    [one] = staging.take_all([ChunkKey(chunks[1].key)])
    assert one is not None
    one.content.stamp = None
    staging.release(one.slot, content=one.content)
    assert not reservations.reserve(1, chunks)
    assert reservations.reserve(1, chunks[:1])


def test_what_was_changed_is_not_taken():
    staging, chunks = kept()
    reservations = Reservations(staging, Unchanged(chunks[1].key))
    assert not reservations.reserve(1, chunks)
    assert reservations.reserve(1, chunks[:1])
    assert staging.num_kept == 2


def test_what_is_held_as_another_chunk_is_not_taken():
    staging, chunks = kept()
    assert not Reservations(staging, Unchanged()).reserve(1, [ChunkRef(chunks[0].key, 8)])
    assert staging.num_kept == 3


def test_what_nobody_claims_is_free_again():
    staging, chunks = kept()
    reservations = Reservations(staging, Unchanged())
    for end in (lambda: reservations.cancel(1), reservations.close):
        assert reservations.reserve(1, chunks)
        end()
        assert staging.num_kept == 3
    assert not reservations.reserve(2, chunks)


def test_roles_find_each_other_by_the_name_of_their_engine():
    staging, chunks = kept()
    one, other = Reservations(staging, Unchanged()), Reservations(staging, Unchanged())
    publish("one", one)
    publish("other", other)
    assert find("one") is one
    assert find("other") is other
    assert find("a third") is None
    del one
    assert find("one") is None
    assert other.reserve(1, chunks)


def test_two_engines_of_one_name_promise_nothing_of_each_other(caplog):
    staging, chunks = kept()
    one, other = (Reservations(staging, Unchanged()) for _ in range(2))
    publish("same name", one)
    assert one.reserve(1, chunks)
    assert not caplog.records
    publish("same name", other)
    assert find("same name") is None
    assert "engine_id" in caplog.text
    assert one.claim(1, chunks) is not None  # what was promised stays
    third = Reservations(staging, Unchanged())
    publish("same name", third)
    assert find("same name") is None
    one.close()
    other.close()  # the engine was started anew
    assert find("same name") is third


@pytest.mark.parametrize(
    ("differs", "finds"),
    [
        ({}, True),
        ({"engine": "b"}, False),
        ({"weights": b"v" * 32}, False),
        ({"store": "y"}, False),
    ],
)
def test_roles_built_apart_find_each_other(tmp_path: Path, make_host, differs, finds: bool):
    spec = make_host().parts[0].spec

    def parts(*, engine: str = "a", weights: bytes | None = None, store: str = "x") -> Parts:
        identity = spec.identity if weights is None else replace(spec.identity, weights=weights)
        options = {"store": f"file://{tmp_path / store}", "chunk_tokens": 8}
        options["staging_bytes"] = options["keep_bytes"] = "1MiB"
        this = replace(spec, identity=identity)
        return Parts(this, options, Counters(), engine=engine)

    of_worker, of_scheduler = parts(), parts(**differs)
    worker, scheduler = of_worker.worker(), of_scheduler.scheduler()
    assert (scheduler._tickets._in_memory() is worker._reservations) is finds
    worker.close()
    assert scheduler._tickets._in_memory() is None
    for one in (of_worker, of_scheduler):
        one.close()
