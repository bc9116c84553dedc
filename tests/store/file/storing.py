"""Processes that use a directory store until they end or are killed. A small server forks them,
which has not imported torch.

The fixture `children` runs this as a script, which reads one JSON line per process to start and
answers with its pid.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import time
from contextlib import suppress
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.store.file import FileStore, database, directory, fileio, index, store, writing
from kvferry.store.file.index import Index
from kvferry.testing.stores import read_value
from kvferry.types import ChunkKey

NUM_KEYS = 64
MAX_VALUE = 100_000
MAX_WRITING = 3 * MAX_VALUE
"""Bytes beyond the quota that one process may write: the values of one `put_all`."""

QUOTA = 400_000


def key_of(number: int) -> ChunkKey:
    return ChunkKey(random.Random(number).randbytes(32))


def value_of(number: int, max_bytes: int) -> bytes:
    """Return the value that belongs under a key, so that any process can detect wrong bytes."""
    seed = random.Random(f"value {number}")
    return seed.randbytes(64) * (seed.randint(1, max_bytes) // 64 + 1)


def read_back(opened: FileStore, number: int, max_value: int) -> bool:
    """Return whether the key is there. Raises AssertionError if its bytes are wrong."""
    found = read_value(opened, key_of(number))
    if found is None:
        return False
    if found != value_of(number, max_value):
        raise AssertionError(f"wrong bytes under key {number}")
    return True


def disk_bytes(root: Path) -> int:
    """Return the bytes of all values on disk but in quarantine; a file with two names counts
    once."""
    sizes = {}
    for place in ("records", "writing"):
        for within, _, names in os.walk(root / place):
            for name in names:
                try:
                    status = os.lstat(f"{within}/{name}")
                except FileNotFoundError:
                    continue
                sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def assert_index_agrees(root: Path) -> None:
    """Assert that the index lists what the directory holds, and that its totals are right."""
    files = {path.name[:64]: path.stat().st_size for path in root.glob("records/*/*")}
    db = sqlite3.connect(f"file:{root}/index.sqlite3?mode=ro", uri=True)
    try:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = {key.hex(): size for key, size in db.execute("SELECT key, num_bytes FROM records")}
        totals = db.execute("SELECT num_records, num_bytes, is_complete FROM totals").fetchall()
    finally:
        db.close()
    assert rows == files
    assert totals == [(len(files), sum(files.values()), 1)]


def one_action(opened: FileStore, rng: random.Random, max_value: int) -> None:
    number = rng.randrange(NUM_KEYS)
    action = rng.random()
    if action < 0.4:
        value = value_of(number, max_value)
        middle = rng.randrange(len(value))
        opened.put(key_of(number), [value[:middle], value[middle:]])
    elif action < 0.6:
        put_several(opened, [each % NUM_KEYS for each in range(number, number + 3)], max_value)
    elif action < 0.75:
        read_back(opened, number, max_value)
    elif action < 0.83:
        opened.delete(key_of(number))
    elif action < 0.87:
        opened.discard(key_of(number), "test")
    elif action < 0.92:
        opened.touch([key_of(number)])
    elif action < 0.93:
        with suppress(StoreError):  # the index cannot be asked
            opened.catalogue().gc(max_bytes=max_value * 2)
    else:
        value = value_of(number, max_value)
        opened.put(key_of(number), [value[:32], value[32:]])


def put_several(opened: FileStore, numbers: list[int], max_value: int) -> None:
    opened.put_all([(key_of(number), [value_of(number, max_value)]) for number in numbers])


def use_store(root: str, seed: int, max_bytes: int, max_value: int, seconds: float) -> None:
    """Run random actions until the time is up or there is a file ``stop`` beside the store."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    stop = Path(root).with_name("stop")
    with FileStore(Path(root), max_bytes=max_bytes) as opened:
        while time.monotonic() < end and not stop.exists():
            one_action(opened, rng, max_value)


CHANGING = ("pwritev", "ftruncate", "mkdir", "link", "rename", "replace", "unlink")
TRANSACTIONS = (
    "add_written",
    "forget",
    "add",
    "flush",
    "shrink",
)


class DyingOS:
    """A stand-in for the module `os` that ends the process before its n-th call that changes
    something. The beginning and the end of a transaction of the index count as calls, too."""

    def __init__(self, calls_left: int) -> None:
        self._calls_left = calls_left

    def __getattr__(self, name):
        real = getattr(os, name)
        return self._counted(real) if name in CHANGING else real

    def open(self, path, flags, *args, **named):
        if flags & os.O_CREAT:
            self._count()
        return os.open(path, flags, *args, **named)

    def install(self) -> None:
        for module in (directory, fileio, store, index, database, writing):
            module.os = self
        for name in TRANSACTIONS:
            setattr(Index, name, self._counted(getattr(Index, name), twice=True))

    def _counted(self, real, *, twice=False):
        def call(*args, **named):
            self._count()
            answer = real(*args, **named)
            if twice:
                self._count()
            return answer

        return call

    def _count(self) -> None:
        self._calls_left -= 1
        if self._calls_left == 0:
            os._exit(9)


def follow_script(root: str, calls_left: int, recover_first: bool, max_bytes: int) -> None:
    """Run random actions that are the same each time, mostly writes into a full store."""
    DyingOS(calls_left).install()
    opened = FileStore(Path(root), max_bytes=max_bytes, background=False)
    opened.maintain()  # the index has to know what is there before anything is stored
    if recover_first:
        opened.maintain()
    rng = random.Random(calls_left)
    for _ in range(40):
        one_action(opened, rng, max_bytes // 4)
    opened.close()


def put_some(root: str, numbers: list[int], calls_left: int, max_bytes: int) -> None:
    """Store several values at once, until the process dies or all are stored."""
    DyingOS(calls_left).install()
    opened = FileStore(Path(root), max_bytes=max_bytes, background=False)
    put_several(opened, numbers, max_bytes // 4)
    os._exit(0)


def stop_with_lock(path: str, begin: str) -> None:
    """Take a lock on an index, and stop the process while it holds the lock."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute(begin)
    db.execute("SELECT * FROM totals").fetchall()
    os.kill(os.getpid(), signal.SIGSTOP)


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                arguments = json.loads(line)
                globals()[arguments.pop("run")](**arguments)
            except BaseException as error:
                # The test sees nothing of a child but its error output.
                os.write(2, f"child failed: {error!r}\n".encode())
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
