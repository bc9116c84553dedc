"""Processes killed at random instants, and processes that share a full store."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from kvferry.observe import Counters
from kvferry.store.file import FileStore
from tests.servers.process import let_run
from tests.store.file import storing
from tests.store.file.conftest import Children
from tests.store.file.storing import MAX_VALUE, MAX_WRITING, QUOTA, assert_index_agrees, disk_bytes

NUM_PROCESSES = 4


def read_back(store: FileStore, number: int) -> bool:
    return storing.read_back(store, number, MAX_VALUE)


def assert_sound_after_recovery(root: Path, counters: Counters) -> None:
    """Open the store as anybody would: what the dead left comes back, and every count is exact."""
    with FileStore(root, max_bytes=QUOTA, background=False, observer=counters) as store:
        # The first round of upkeep; a store with a background thread does this by itself.
        started = time.time()
        store.maintain()
        assert_index_agrees(root)
        values = sum(path.stat().st_size for path in root.glob("records/**/*") if path.is_file())
        assert store.stat().used_bytes == values <= QUOTA
        for path in root.glob("writing/*"):
            assert started - path.stat().st_mtime < 2.0, "nobody writes it, and it was not young"
        stored = sum(read_back(store, number) for number in range(storing.NUM_KEYS))
        assert stored == store.stat().num_records == len(list(store.catalogue().scan()))
        assert not list(root.glob("*.broken")), "the index was never damaged"


def kill_some(root: Path, children: Children, num_kills: int) -> None:
    counters = Counters()
    rng = random.Random(2026)
    most = 0
    for kill in range(num_kills):
        while len(children.alive) < NUM_PROCESSES:
            children.use(root, rng.random())
        let_run(rng.random() ** 2 * 0.06)
        # A walk is no snapshot: a file removed behind it and one written before it both count. What
        # really is on disk shows in every walk.
        most = max(most, min(disk_bytes(root) for _ in range(3)))
        children.kill(rng.choice(children.alive))
        if kill % 10 == 9:
            for pid in list(children.alive):
                children.kill(pid)
            assert disk_bytes(root) <= QUOTA + NUM_PROCESSES * MAX_WRITING
            assert_sound_after_recovery(root, counters)
    assert QUOTA / 2 < most <= QUOTA + NUM_PROCESSES * MAX_WRITING
    assert children.complaints() == []


def test_some_kills_lose_no_byte_and_serve_no_wrong_one(tmp_path, children):
    kill_some(tmp_path / "store", children, 20)


@pytest.mark.slow
def test_many_kills_lose_no_byte_and_serve_no_wrong_one(tmp_path, children):
    num_kills = int(os.environ.get("KVFERRY_KILLS", "200"))
    kill_some(tmp_path / "store", children, num_kills)


@pytest.mark.parametrize("start", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_process_may_die_before_any_of_its_calls(tmp_path, children, start):
    """One dead process at a time leaves what the next one has to cope with, recovery first or not;
    every third time someone looks. The quick half knows every eighth call."""
    root = tmp_path / "store"
    counters = Counters()
    rng = random.Random(7)
    for number, calls_left in enumerate(range(start, 320, 8 if start == 1 else 3)):
        pid = children.start(
            "follow_script",
            root=str(root),
            calls_left=calls_left,
            recover_first=rng.random() < 0.5,
            max_bytes=QUOTA,
        )
        children.wait(pid)
        assert disk_bytes(root) <= QUOTA + MAX_WRITING
        if number % 3 == 2:
            assert_sound_after_recovery(root, counters)
    assert_sound_after_recovery(root, counters)
    assert counters["store_recovered_writes"] > 0
    assert children.complaints() == []


@pytest.mark.parametrize("action", ["delete", "discard", "evict"])
def test_a_record_whose_writer_died_while_committing_is_counted_once(tmp_path, children, action):
    """Someone takes the record out before anybody has settled what the dead writer reserved."""
    num_stored = 0
    for calls_left in range(1, 24):
        root = tmp_path / f"store{calls_left}"
        FileStore(root, background=False).close()
        arguments = {"numbers": [5], "calls_left": calls_left, "max_bytes": QUOTA}
        children.wait(children.start("put_some", root=str(root), **arguments))
        with FileStore(root, max_bytes=QUOTA, background=False) as store:
            was_there = read_back(store, 5)
            num_stored += was_there
            if action == "delete":
                store.delete(storing.key_of(5))
            elif action == "discard":
                store.discard(storing.key_of(5), "test")
            else:
                for number in range(10, 30):
                    store.put(storing.key_of(number), [bytes(QUOTA // 4)])
            store.maintain()
            assert_index_agrees(root)
            if was_there and action != "evict":
                assert not read_back(store, 5)
    assert 3 <= num_stored < 23
    assert children.complaints() == []


def test_of_values_put_together_each_is_whole_or_absent(tmp_path, children):
    """Killed before any call: after the recovery all that has a name has a row."""
    found = set()
    for calls_left in range(1, 40):
        root = tmp_path / f"store{calls_left}"
        FileStore(root, background=False).close()
        arguments = {"numbers": [1, 2, 3], "calls_left": calls_left, "max_bytes": QUOTA}
        children.wait(children.start("put_some", root=str(root), **arguments))
        with FileStore(root, max_bytes=QUOTA, background=False) as store:
            store.maintain()
            found.add(sum(read_back(store, number) for number in (1, 2, 3)))
            assert_index_agrees(root)
            assert list((root / "writing").glob("*")) == []
    assert found == {0, 1, 2, 3}
    assert children.complaints() == []


@pytest.mark.slow
def test_processes_sharing_a_full_store_stay_below_its_quota(tmp_path, children):
    root = tmp_path / "store"
    seconds = float(os.environ.get("KVFERRY_SOAK_SECONDS", "6"))
    FileStore(root, background=False).close()
    for seed in range(NUM_PROCESSES):
        children.use(root, seed, seconds + 40)
    end = time.monotonic() + seconds
    most = 0
    # On a slow disk it takes longer until the store is full.
    while time.monotonic() < end + (30 if most <= QUOTA / 2 else 0):
        most = max(most, min(disk_bytes(root) for _ in range(3)))
        let_run(0.02)
    root.with_name("stop").touch()
    for pid in list(children.alive):
        children.wait(pid)
    assert QUOTA / 2 < most <= QUOTA + NUM_PROCESSES * MAX_WRITING
    assert children.complaints() == []
    assert_sound_after_recovery(root, Counters())
