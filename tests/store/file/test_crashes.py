"""Processes killed at random instants, and processes that share a full store."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.observe import Counters
from kvferry.store.file import FileStore
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import Layout
from kvferry.store.file.usage import read_usage
from tests.store.file import storing

MAX_VALUE = 100_000
QUOTA = 400_000


def disk_bytes(root: Path) -> int:
    """Bytes of all values on disk, wherever they lie; a file with two names counts once."""
    sizes = {}
    for directory, _, names in os.walk(root):
        for name in names:
            if name in ("ledger", "reconcile.lock") or "kvferry.json" in name:
                continue
            try:
                status = os.lstat(f"{directory}/{name}")
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def used_bytes(root: Path) -> int:
    return read_usage(FileIO(), Layout(str(root))).num_bytes


def read_back(store: FileStore, number: int) -> bool:
    return storing.read_back(store, number, MAX_VALUE)


class Children:
    """The processes of `storing`."""

    def __init__(self, tmp_path: Path) -> None:
        self.errors = tmp_path / "errors"
        self._log = self.errors.open("w")
        self._server = subprocess.Popen(
            [sys.executable, storing.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.alive: list[int] = []

    def start(self, run: str, **arguments: object) -> int:
        self._server.stdin.write(json.dumps({"run": run, **arguments}) + "\n")
        self._server.stdin.flush()
        pid = int(self._server.stdout.readline())
        self.alive.append(pid)
        return pid

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                self.alive.remove(pid)
                return
            time.sleep(0.001)
        raise AssertionError(f"process {pid} did not end")

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in list(self.alive):
            self.kill(pid)
        self._server.communicate(timeout=20)
        self._log.close()

    def complaints(self) -> list[str]:
        """What children said that they must not say: wrong bytes, exceptions, corrected counts."""
        lines = self.errors.read_text().splitlines()
        return [line for line in lines if "quarantined" not in line]


@pytest.fixture
def children(tmp_path):
    with Children(tmp_path) as started:
        yield started


def assert_sound_after_recovery(root: Path, counters: Counters) -> None:
    """Open the store as anybody would: what the dead left comes back, and every count is exact."""
    with FileStore(root, max_bytes=QUOTA, background=False, observer=counters) as store:
        # The first round of upkeep; a store with a background thread does this by itself.
        store.maintain()
        assert used_bytes(root) == disk_bytes(root) == store.stat().used_bytes <= QUOTA
        assert len(os.listdir(root / "writers")) == 1
        numbers = range(storing.PROMPT.stop)
        stored = sum(read_back(store, number) for number in numbers)
        assert stored == len(list(store.scan()))


@pytest.mark.slow
def test_two_hundred_kills_lose_no_byte_and_serve_no_wrong_one(tmp_path, children):
    root = tmp_path / "store"
    counters = Counters()
    rng = random.Random(2026)
    for kill in range(200):
        while len(children.alive) < 2:
            children.start(
                "use_store",
                root=str(root),
                seed=rng.random(),
                max_bytes=QUOTA,
                max_value=MAX_VALUE,
                seconds=60,
            )
        time.sleep(rng.random() ** 2 * 0.06)
        children.kill(rng.choice(children.alive))
        if kill % 10 == 9:
            children.kill(children.alive[0])
            assert_sound_after_recovery(root, counters)
    assert children.complaints() == []
    # A reconciliation would have hidden a count that recovery got wrong.
    assert counters["store_corrected_bytes"] == 0
    assert counters["store_recovered_writers"] >= 20


@pytest.mark.slow
def test_a_process_may_die_before_any_of_its_system_calls(tmp_path, children):
    """One dead process at a time leaves what the next one has to cope with, recovery first or not;
    every third time someone looks."""
    root = tmp_path / "store"
    counters = Counters()
    rng = random.Random(7)
    for calls_left in range(1, 240):
        pid = children.start(
            "follow_script",
            root=str(root),
            calls_left=calls_left,
            recover_first=rng.random() < 0.5,
            max_bytes=QUOTA,
        )
        children.wait(pid)
        if calls_left % 3 == 0:
            assert_sound_after_recovery(root, counters)
    assert children.complaints() == []
    assert counters["store_corrected_bytes"] == 0
    assert counters["store_recovered_writers"] >= 60


@pytest.mark.parametrize("action", ["delete", "discard", "evict"])
def test_a_record_whose_writer_died_while_committing_is_counted_once(tmp_path, children, action):
    """Someone takes the record out before anybody has settled the dead writer's account."""
    for calls_left in range(8, 18):
        root = tmp_path / f"store{calls_left}"
        arguments = {"number": 5, "calls_left": calls_left, "max_bytes": QUOTA}
        children.wait(children.start("put_one", root=str(root), **arguments))
        with FileStore(root, max_bytes=QUOTA, background=False) as store:
            was_there = read_back(store, 5)
            if action == "delete":
                store.delete(storing.key_of(5))
            elif action == "discard":
                store.discard(storing.key_of(5), "test")
            else:
                for number in range(10, 30):
                    store.put(storing.key_of(number), [bytes(QUOTA // 4)])
            assert used_bytes(root) >= disk_bytes(root)
            store.maintain()
            assert used_bytes(root) == disk_bytes(root)
            if was_there and action != "evict":
                assert not read_back(store, 5)


@pytest.mark.parametrize("start", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_was_reserved_ahead_by_a_dead_process_comes_back(tmp_path, children, start):
    """Killed before any of its system calls, or behind the last one; the quick half knows every
    eighth of them."""
    counters = Counters()
    num_reserved = 0
    for calls_left in range(start, 240, 8 if start == 1 else 1):
        root = tmp_path / f"store{calls_left}"
        FileStore(root).close()
        arguments = {"calls_left": calls_left, "max_bytes": QUOTA}
        children.wait(children.start("put_prompts", root=str(root), **arguments))
        on_disk = disk_bytes(root)
        num_reserved += used_bytes(root) > on_disk
        assert used_bytes(root) >= on_disk
        assert_sound_after_recovery(root, counters)
    assert children.complaints() == []
    assert counters["store_corrected_bytes"] == 0
    assert num_reserved >= 10


@pytest.mark.slow
def test_processes_sharing_a_full_store_stay_below_its_quota(tmp_path, children):
    root = tmp_path / "store"
    counters = Counters()
    seconds = float(os.environ.get("KVFERRY_SOAK_SECONDS", "6"))
    FileStore(root).close()
    for seed in range(4):
        children.start(
            "use_store",
            root=str(root),
            seed=seed,
            max_bytes=QUOTA,
            max_value=MAX_VALUE,
            seconds=seconds + 40,
        )
    end = time.monotonic() + seconds
    most = 0
    # On a slow disk it takes longer until the store is full.
    while time.monotonic() < end + (30 if most <= QUOTA / 2 else 0):
        # A walk is no snapshot: a file removed behind it and one written before it both count. What
        # really is on disk shows in every walk.
        most = max(most, min(disk_bytes(root) for _ in range(3)))
        time.sleep(0.02)
    root.with_name("stop").touch()
    for pid in list(children.alive):
        children.wait(pid)
    assert QUOTA / 2 < most <= QUOTA + 4 * MAX_VALUE
    assert children.complaints() == []
    assert_sound_after_recovery(root, counters)
