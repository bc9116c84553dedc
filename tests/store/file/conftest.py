"""Fixtures: directory stores without background work, whose system calls tests can make fail, and
processes that use a store."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.observe import Counters
from kvferry.store.file import (
    FileSettings,
    FileStore,
    directory,
    fileio,
    store,
    writing,
)
from kvferry.store.file.directory import record_path
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from tests.store.file import storing

CALLS = (
    "open",
    "pwritev",
    "preadv",
    "ftruncate",
    "stat",
    "listdir",
    "mkdir",
    "link",
    "rename",
    "unlink",
)


class FaultyOS:
    """A stand-in for the module `os`. `fail[name]` is an error number or an exception: calls of one
    name fail with it from then on, if an argument contains `only_in`. `calls` counts the calls by
    name."""

    def __init__(self) -> None:
        self.fail: dict[str, int | Exception] = {}
        self.only_in = ""
        self.calls: Counter[str] = Counter()
        self.largest_write = 1 << 40

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args, **named):
            self.calls[name] += 1
            number = self.fail.get(name)
            if number is not None and (not self.only_in or self.only_in in str(args)):
                if isinstance(number, Exception):
                    raise type(number)(*number.args)
                raise OSError(number, errno.errorcode[number])
            return real(*args, **named)

        return call

    def pwritev(self, fd, buffers, offset):
        views = [view[: self.largest_write] for view in buffers[:1]] + list(buffers[1:])
        is_cut = views[0].nbytes < buffers[0].nbytes
        return self.__getattr__("pwritev")(fd, views[:1] if is_cut else views, offset)


class Bench:
    """Opens stores in one directory, and counts and fakes what they need."""

    def __init__(self, root) -> None:
        self.root = root
        self.io = FaultyOS()
        self.clock = FakeClock()
        self.wall = FakeClock(2_000_000_000.0)
        self.counters = Counters()
        self.stores: list[FileStore] = []

    def open(self, **options) -> FileStore:
        """Open a store; `options` are those of a store or of its settings."""
        given = {"clock": self.clock, "wall": self.wall, **options}
        names = {field.name for field in fields(FileSettings)}
        settings = FileSettings(**{name: given.pop(name) for name in names & given.keys()})
        given = {"background": False, "observer": self.counters, **given}
        made = FileStore(self.root, settings=settings, **given)
        self.stores.append(made)
        return made

    def path(self, key) -> Path:
        return Path(record_path(str(self.root), key))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    made = Bench(tmp_path / "store")
    for module in (directory, fileio, store, writing):
        monkeypatch.setattr(module, "os", made.io)
    yield made
    made.io.fail.clear()
    for opened in made.stores:
        opened.close()


class Children:
    """The server of `storing` and the processes that it has forked."""

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

    def use(self, root: Path, seed: float, seconds: float = 60.0) -> int:
        return self.start(
            "use_store",
            root=str(root),
            seed=seed,
            max_bytes=storing.QUOTA,
            max_value=storing.MAX_VALUE,
            seconds=seconds,
        )

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> None:
        wait_until(lambda: not os.path.exists(f"/proc/{pid}"), f"process {pid} ends", 60)
        self.alive.remove(pid)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *exc: object) -> None:
        for pid in list(self.alive):
            self.kill(pid)
        self._server.communicate(timeout=20)
        self._log.close()

    def complaints(self) -> list[str]:
        """Return the error output of children that reports a fault: wrong bytes, exceptions, a
        broken index."""
        lines = self.errors.read_text().splitlines()
        return [line for line in lines if "quarantined" not in line]


@pytest.fixture
def children(tmp_path):
    with Children(tmp_path) as started:
        yield started
