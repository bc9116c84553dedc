"""Stores that do nothing on their own, with system calls that can be made to fail."""

from __future__ import annotations

import errno
from collections import Counter

import pytest

from kvferry.observe import Counters
from kvferry.store.file import FileStore
from kvferry.store.file.fileio import FileIO
from kvferry.testing.clock import FakeClock


class FaultyIO(FileIO):
    """`fail[name] = error number` makes one system call fail from then on; `calls` counts them."""

    def __init__(self) -> None:
        self.fail: dict[str, int] = {}
        self.only_in = ""
        self.calls: Counter[str] = Counter()
        self.largest_write = 1 << 40

    def _call(self, name, *args):
        self.calls[name] += 1
        number = self.fail.get(name)
        if number is not None and (not self.only_in or self.only_in in str(args[0])):
            raise OSError(number, errno.errorcode[number])
        return getattr(FileIO, name)(self, *args)

    def pwritev(self, fd, buffers, offset):
        views = [view[: self.largest_write] for view in buffers[:1]] + list(buffers[1:])
        is_cut = views[0].nbytes < buffers[0].nbytes
        return self._call("pwritev", fd, views[:1] if is_cut else views, offset)


def _faulty(name):
    def call(self, *args):
        return self._call(name, *args)

    return call


for _name in [name for name in vars(FileIO) if not name.startswith("_")]:
    if _name not in vars(FaultyIO):
        setattr(FaultyIO, _name, _faulty(_name))


class Bench:
    """Makes stores at one place and closes them."""

    def __init__(self, root) -> None:
        self.root = root
        self.io = FaultyIO()
        self.clock = FakeClock()
        self.wall = FakeClock(2_000_000_000.0)
        self.counters = Counters()
        self.stores: list[FileStore] = []

    def open(self, **options) -> FileStore:
        settings = {
            "background": False,
            "io": self.io,
            "clock": self.clock,
            "wall": self.wall,
            "observer": self.counters,
        }
        store = FileStore(self.root, **(settings | options))
        self.stores.append(store)
        return store

    def path(self, key):
        return self.root / "records" / f"{key[0] >> 3:02x}" / f"{key.hex()}.safetensors"


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path / "store")
    yield made
    made.io.fail.clear()
    for store in made.stores:
        store.close()
