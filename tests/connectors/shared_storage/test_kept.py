"""Records kept in memory after they were read: nothing is read twice, and nothing goes unseen.

The simulated host checks every byte of every request's KV, so a run proves that it was right.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.connectors.shared_storage import build
from kvferry.connectors.shared_storage.kept import KeptRecords
from kvferry.store.file.store import FileStore
from kvferry.testing.faults import Gate, StallingStore
from kvferry.types import ChunkKey

from .keeping import (
    DAMAGES,
    NUM_CHUNKS,
    PROMPT,
    SLOT,
    CountingStore,
    HangsLater,
    filled,
    flip,
    flip_and_note_a_use,
    note_uses,
    open_store,
    records,
    wait_for,
)
from .windowed import group, opened


@pytest.fixture
def host(directory: Path, make_host) -> Any:
    """A host that has that prompt in memory."""
    host = make_host(store=open_store(directory))
    host.store = host.parts[0].store
    filled(host)
    return host


@pytest.fixture(autouse=True, params=["one process", "two processes"])
def processes(request, monkeypatch) -> str:
    """Where the two roles are: in one process, the scheduler role takes what is kept itself."""
    if request.param == "two processes":
        monkeypatch.setattr(build, "find", lambda _engine: None)
    name: str = request.param
    return name


two_processes = pytest.mark.parametrize("processes", ["two processes"], indirect=True)


@pytest.fixture
def unfilled(monkeypatch) -> None:
    """Nothing is brought in beforehand."""
    monkeypatch.setattr(KeptRecords, "_fill", lambda _self: None)


def test_a_hit_on_what_was_read_before_reads_nothing(directory: Path, make_host):
    host = make_host(store=open_store(directory), num_staging_chunks=64)
    store = host.parts[0].store
    filled(host)
    opened_before = store.num_opened
    for number in range(3):
        assert host.run(f"warm {number}", PROMPT).num_external_tokens == 40
    assert store.num_opened == opened_before
    assert host.observer["kept_used"] == 3 * NUM_CHUNKS


@pytest.mark.usefixtures("unfilled")
def test_what_a_hit_read_is_kept_too(tmp_path: Path, make_host):
    host = make_host(store=open_store(tmp_path))
    host.run("writer", PROMPT)
    host.settle()
    assert host.run("reads", PROMPT).num_external_tokens == 40
    assert host.parts[0].store.num_opened == NUM_CHUNKS
    assert host.run("reads nothing", PROMPT).num_external_tokens == 40
    assert host.parts[0].store.num_opened == NUM_CHUNKS


def test_nothing_is_kept_if_so_configured(directory: Path, make_host):
    host = make_host(store=open_store(directory), keep_bytes=0)
    for number in range(2):
        assert host.run(f"warm {number}", PROMPT).num_external_tokens == 40
    assert host.parts[0].store.num_opened == 2 * NUM_CHUNKS
    assert host.parts[0].staging.num_kept == 0


def test_nothing_is_kept_that_cannot_be_used(directory: Path, make_host):
    assert make_host(store=open_store(directory)).parts[0].staging.max_kept > 0
    for options in ({"promise": "index"}, {"carries_worker_meta": False}, {"store": "memory://x"}):
        host = make_host(**{"store": open_store(directory)} | options)
        assert host.parts[0].staging.max_kept == 0


@pytest.mark.usefixtures("unfilled")
def test_what_was_not_read_from_the_store_says_nothing_of_its_speed(directory: Path, make_host):
    host = make_host(store=open_store(directory))
    host.run("reads", PROMPT)
    measured = host.scheduler._policy._load_rate
    assert measured is not None
    host.run("of memory", PROMPT)
    host.parts[0].staging.take_all(keys_of(host)[:1])
    host.run("of memory, but for one", PROMPT)
    assert host.observer["kept_used"] == 2 * NUM_CHUNKS - 1
    assert host.scheduler._policy._load_rate == measured


def keys_of(host: Any) -> list[ChunkKey]:
    keys: list[ChunkKey] = host.scheduler._track(host.add("for its keys", PROMPT)).keys.keys
    return keys


@pytest.mark.usefixtures("unfilled")
def test_what_is_nearest_to_the_root_is_kept_longest(directory: Path, make_host):
    host = make_host(store=open_store(directory), keep_bytes=3 * SLOT)
    host.run("reads", PROMPT)
    held = host.parts[0].staging.take_all(keys_of(host))
    assert [kept is not None for kept in held] == [True, True, True, False, False]


def test_a_hit_gives_up_its_own_end_for_its_beginning(host):
    staging, keys = host.parts[0].staging, keys_of(host)
    for kept in staging.take_all(keys[:2]):
        staging.release(kept.slot)
    taken = [staging.acquire() for _ in range(staging.num_free - 3)]
    assert host.run("warm", PROMPT).num_external_tokens == 24
    assert host.observer["miss_no_staging"] == 1
    for slot in taken:
        staging.release(slot)
    assert staging.num_free == staging.num_slots


def test_what_is_held_as_another_chunk_is_read(host):
    staging, key = host.parts[0].staging, keys_of(host)[2]
    [kept] = staging.take_all([key])
    kept.content.first_token += 8
    staging.release(kept.slot, content=kept.content)
    before = host.store.num_opened
    assert host.run("warm", PROMPT).num_external_tokens == 40
    assert host.store.num_opened == before + 1
    assert staging.num_free == staging.num_slots


def test_two_hits_on_one_record_at_once(host):
    first, second = host.add("one", PROMPT), host.add("two", PROMPT)
    assert [host.admit(first), host.admit(second)] == [40, 40]
    for request in (first, second):
        host.prefill(request)
        host.finish(request)
    host.settle()
    assert host.parts[0].staging.num_kept == NUM_CHUNKS
    assert host.parts[0].staging.num_free == host.parts[0].staging.num_slots


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_done_to_a_record_in_memory_is_found_by_the_next_hit(host, directory, name: str):
    damage, counter = DAMAGES[name]
    damage(records(directory)[2])
    assert host.run("warm", PROMPT).num_external_tokens in (0, 8, 16, 24, 32)
    assert host.observer[counter] == 1
    assert host.observer["kept_used"] == NUM_CHUNKS - 1
    # Whatever the failed read left in its slot is not taken for the record.
    staging = host.parts[0].staging
    assert staging.num_kept == NUM_CHUNKS - 1
    wait_for(lambda: staging.num_free == staging.num_slots)  # once it is stored anew


def test_a_store_that_is_gone_is_a_miss(host, directory: Path):
    shutil.rmtree(directory)
    assert host.run("warm", PROMPT).num_external_tokens == 0
    assert host.observer["kept_used"] == 0


def test_damage_that_looks_like_a_noted_use_is_found_a_little_later(host, directory: Path):
    damaged = records(directory)[2]
    flip_and_note_a_use(damaged)
    # Of memory, and right: every byte is checked.
    assert host.run("warm", PROMPT).num_external_tokens == 40
    wait_for(lambda: host.observer["records_corrupt"] == 1)
    wait_for(lambda: not damaged.exists())
    host.settle()
    assert host.run("warm again", PROMPT).num_external_tokens < 40


def test_a_noted_use_is_read_again_once_and_then_trusted(host, directory: Path):
    note_uses(directory)
    store = host.store
    before = store.num_opened
    assert host.run("warm", PROMPT).num_external_tokens == 40
    wait_for(lambda: host.observer["kept_rechecked"] == NUM_CHUNKS)
    assert store.num_opened == before + NUM_CHUNKS
    assert host.run("warm again", PROMPT).num_external_tokens == 40
    assert host.observer["kept_used"] == 2 * NUM_CHUNKS
    assert store.num_opened == before + NUM_CHUNKS


def test_changes_that_the_clock_cannot_tell_apart_are_not_trusted(tmp_path: Path, make_host):
    store = CountingStore(FileStore(tmp_path))  # its clock is right: all is of just now
    host = make_host(store=store)
    host.run("writer", PROMPT)
    host.settle()
    assert host.run("reads", PROMPT).num_external_tokens == 40
    times = {path: path.stat() for path in records(tmp_path)}
    path = records(tmp_path)[2]
    flip(path)
    os.utime(path, ns=(times[path].st_atime_ns, times[path].st_mtime_ns))
    host.run("warm", PROMPT)
    wait_for(lambda: host.observer["records_corrupt"] == 1)


def test_records_of_the_epoch_before_are_read_again_as_what_they_are(host, directory: Path):
    note_uses(directory)
    assert host.run("warm", PROMPT).num_external_tokens == 40
    assert host.scheduler.reset()
    assert host.run("another epoch", PROMPT).num_external_tokens == 0
    wait_for(lambda: host.observer["kept_rechecked"] == NUM_CHUNKS)
    assert host.observer["records_corrupt"] == 0


def test_records_of_other_models_are_left_alone(directory: Path, make_host):
    host = make_host(store=open_store(directory), weights=b"v" * 32)
    wait_for(lambda: host.parts[0].store.num_opened == NUM_CHUNKS)
    assert host.run("cold", PROMPT).num_external_tokens == 0
    assert host.observer["kept_filled"] == 0
    assert host.observer["records_corrupt"] == 0


@pytest.mark.parametrize("name", ["flipped", "truncated", "emptied", "a directory"])
def test_damage_found_by_filling_is_left_for_a_hit_to_tell(directory: Path, make_host, name: str):
    damaged, (damage, counter) = records(directory)[2], DAMAGES[name]
    damage(damaged)
    host = make_host(store=open_store(directory))
    filled(host, NUM_CHUNKS - 1)
    assert damaged.exists()
    assert host.observer[counter] == 0
    assert host.run("warm", PROMPT).num_external_tokens < 40
    assert host.observer[counter] == 1


def test_memory_goes_to_reads_and_writes_that_need_it(directory: Path, make_host):
    host = make_host(store=open_store(directory), num_staging_chunks=24, num_blocks=4096)
    filled(host)
    for number in range(6):
        prompt = [1000 * (number + 1) + token for token in range(41)]
        host.run(f"cold {number}", prompt)
        host.settle()
        assert host.run(f"warm {number}", prompt).num_external_tokens == 40
    staging = host.parts[0].staging
    assert staging.num_kept <= staging.max_kept == 12
    assert staging.num_free == 24


def test_the_most_recent_ones_are_brought_in(tmp_path: Path, make_host):
    host = make_host(store=open_store(tmp_path, notes_uses=True), num_blocks=4096)
    prompts = [[1000 * number + token for token in range(41)] for number in range(4)]
    for number, prompt in enumerate(prompts):
        host.run(f"writer {number}", prompt)
        host.settle()
    host.run("uses the first", prompts[0])
    host.settle()
    host.close()
    host.parts[0].store.close()  # writes noted uses back
    again = make_host(store=open_store(tmp_path), num_staging_chunks=2 * NUM_CHUNKS)
    filled(again, NUM_CHUNKS)
    before = again.parts[0].store.num_opened
    assert again.run("warm", prompts[0]).num_external_tokens == 40
    assert again.parts[0].store.num_opened == before


@two_processes
def test_a_store_that_hangs_when_looked_at_is_a_miss_at_the_deadline(directory: Path, make_host):
    gate = Gate()
    store = HangsLater(open_store(directory), operations=("stamp",))
    host = make_host(store=store, load_timeout_seconds=0.3)
    filled(host)
    store.gate = gate
    started = time.monotonic()
    assert host.run("warm", PROMPT).num_external_tokens == 0
    assert time.monotonic() - started < 5
    assert host.observer["miss_deadline"] == 1
    gate.release()
    host.settle()
    wait_for(lambda: host.parts[0].staging.num_free == host.parts[0].staging.num_slots)


def test_a_store_that_hangs_while_it_is_filled_from_holds_nothing_up(directory: Path, make_host):
    gate = Gate()
    stalling = StallingStore(open_store(directory), gate=gate, operations=("read_into",))
    host = make_host(store=stalling, load_timeout_seconds=0.3)
    assert gate.wait_for_arrival()
    assert host.run("warm", PROMPT).num_external_tokens == 0
    started = time.monotonic()
    host.close()
    assert time.monotonic() - started < 5
    gate.release()


@pytest.mark.usefixtures("unfilled")
def test_a_part_of_a_record_is_not_kept(tmp_path: Path):
    groups = (group(2, None), group(3, 12))
    prompt = list(range(65))
    store = open_store(tmp_path)
    with opened(groups, store) as host:
        host.run("writer", prompt)
        host.settle()
        assert host.run("reads", prompt).num_external_tokens == 64
        # Of the first chunks, nothing was read of the layers with a window.
        assert 0 < host.parts[0].staging.num_kept < 8
        assert host.run("again", prompt).num_external_tokens == 64
        assert host.run("shorter", prompt[:33]).num_external_tokens == 32
    store.close()


def test_each_rank_keeps_its_own_part(tmp_path: Path, make_host):
    url = f"file://{tmp_path}"
    host = make_host(store=url, world_size=2)
    host.run("writer", PROMPT)
    host.settle()
    time.sleep(2.1)  # the clock of this store is right: until it can tell changes apart
    again = make_host(store=url, world_size=2)
    filled(again, 2 * NUM_CHUNKS)
    assert again.run("warm", PROMPT).num_external_tokens == 40
    assert again.observer["kept_used"] == 2 * NUM_CHUNKS
