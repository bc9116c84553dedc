"""A process that uses a store forks: the child has nothing of it but reading."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

from kvferry.store.base import PutResult, Where
from kvferry.store.file import FileStore
from kvferry.testing.stores import make_key, make_value, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.store.file.halves import begin, finish
from tests.store.file.settings import PATIENT

CHILD_SECONDS = 30


def use_as_child(store):
    """What a child may try, none of which may hang, write or raise."""
    assert read_value(store, make_key(0)) == make_value(1000)
    assert store.where(make_key(0)) is Where.HERE
    assert store.where(make_key(10**6)) is not Where.HERE
    assert store.put(make_key(10**6), [b"value"]).result is PutResult.FAILED
    assert not store.delete(make_key(0))
    store.discard(make_key(1), "bad_checksum")
    store.touch([make_key(0)])
    store.probe([make_key(10**6)])
    assert store.stat().num_records > 0
    store.maintain()
    store.close()
    assert store.put(make_key(10**6), [b"value"]).result is PutResult.FAILED


def run_child(body):
    """Fork; the exit status of the child, -1 if it hung."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(0)
        status = 1
        try:
            body()
            status = 0
        except BaseException as error:
            os.write(2, f"child: {error!r}\n".encode())
        finally:
            os._exit(status)
    ended: list[int] = []  # one process is waited for, so its status is the last

    def has_ended() -> bool:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            ended.append(os.waitstatus_to_exitcode(status))
        return bool(done)

    try:
        wait_until(has_ended, "the end of the child", CHILD_SECONDS)
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -1
    return ended[0]


def assert_sound(store, root):
    with closing(sqlite3.connect(root / "index.sqlite3")) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        on_disk = {path.name: path.stat().st_size for path in root.glob("records/*/*")}
        rows = dict(db.execute("SELECT lower(hex(key)) || '.safetensors', num_bytes FROM records"))
        assert rows == on_disk
        assert db.execute("SELECT * FROM totals").fetchall() == [
            (len(on_disk), sum(on_disk.values()), 1)
        ]
    assert store.stat().used_bytes == sum(on_disk.values())
    assert os.listdir(root / "writing") == []


def test_a_busy_parent_may_fork_as_often_as_it_likes(tmp_path):
    root = tmp_path / "store"
    with FileStore(root, max_bytes=500_000, settings=PATIENT) as store:
        assert store.wait_indexed(30)
        for number in range(2):
            assert store.put(make_key(number), [make_value(1000)]).result is PutResult.STORED
        stop = threading.Event()
        results: list[PutResult] = []

        def keep_putting(seed):
            rng = random.Random(seed)
            while not stop.is_set():
                number = rng.randrange(10, 400)
                results.append(store.put(make_key(number), [make_value(1000, number)]).result)
                store.touch([make_key(0), make_key(1)])
                if rng.random() < 0.5:
                    store.delete(make_key(rng.randrange(10, 400)))

        threads = [threading.Thread(target=keep_putting, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        exits = []
        for _ in range(40):
            exits.append(run_child(lambda: use_as_child(store)))
        stop.set()
        for thread in threads:
            thread.join()
        assert exits == [0] * 40
        assert PutResult.FAILED not in results
        assert PutResult.STORED in results
        assert_sound(store, root)
        assert store.put(make_key(10**6), [b"value"]).result is PutResult.STORED
        assert read_value(store, make_key(10**6)) == b"value"


PROGRAM = """
import os, sys, threading
from pathlib import Path
from kvferry.store.file import FileStore
from kvferry.types import ChunkKey
from tests.store.file.halves import begin, finish
from tests.store.file.settings import PATIENT

def key_of(number):
    return ChunkKey(bytes([number]) * 32)

store = FileStore(Path(sys.argv[1]), max_bytes=100_000)
assert store.wait_indexed(30)
store.put(key_of(0), [b"value"])
stop = threading.Event()

def keep_putting():
    number = 0
    while not stop.is_set():
        number += 1
        store.put(key_of(10 + number % 50), [bytes(1000)])
        store.delete(key_of(10 + number * 7 % 50))
        store.touch([key_of(0)])

thread = threading.Thread(target=keep_putting, daemon=True)
thread.start()
for child in range(40):
    pid = os.fork()
    if pid == 0:
        assert store.read(key_of(0), ()) == 5
        assert store.put(key_of(1), [b"value"]).result == "failed"
        if child % 3 == 0:
            store.close()
        elif child % 3 == 1:
            del store
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, child
stop.set()
thread.join()
store.close()
"""


def test_a_forked_child_ends_as_any_interpreter_does(tmp_path):
    """Exit handlers and destructors run: after closing the store, or forgetting it, or neither."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    root = tmp_path / "store"
    with FileStore(root, max_bytes=100_000, background=False, settings=PATIENT) as store:
        store.maintain()
        assert_sound(store, root)


def test_a_child_that_closes_leaves_its_parents_half_written_record(bench):
    store = bench.open(max_bytes=100_000, bounds=PATIENT.bounds)
    writing = begin(store, make_key(), make_value(1000))
    store.touch([make_key()])
    assert run_child(store.close) == 0
    assert finish(store, writing) is PutResult.STORED
    assert read_value(store, make_key()) == make_value(1000)


def test_a_child_may_open_the_store_again(tmp_path):
    root = tmp_path / "store"

    def put_as_child():
        with FileStore(root, max_bytes=100_000, settings=PATIENT) as own:
            assert own.wait_indexed(30)
            assert own.put(make_key(1), [make_value(1000)]).result is PutResult.STORED

    with FileStore(root, max_bytes=100_000, settings=PATIENT) as store:
        assert store.wait_indexed(30)
        store.put(make_key(0), [make_value(1000)])
        assert run_child(put_as_child) == 0
        assert store.put(make_key(2), [make_value(1000)]).result is PutResult.STORED
        wait_until(lambda: store.where(make_key(1)) is Where.HERE, "what the child stored is known")
        assert_sound(store, root)
