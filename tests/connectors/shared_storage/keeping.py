"""What the tests of records kept in memory share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kvferry.store.base import Source
from kvferry.store.file.store import FileStore
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.faults import FaultyStore, Gate
from kvferry.types import ChunkKey

PROMPT = list(range(41))
NUM_CHUNKS = 5
SLOT = 8192
"""A head and a page of payload."""


class CountingStore(WrapperStore):
    """Counts what is opened. Notes uses only if told to: that changes files after a while."""

    def __init__(self, inner: Any, *, notes_uses: bool = False) -> None:
        super().__init__(inner)
        self.num_opened = 0
        self._notes_uses = notes_uses

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        if self._notes_uses:
            self.inner.touch(keys)

    def open_read(self, key: ChunkKey) -> Source | None:
        self.num_opened += 1
        return self.inner.open_read(key)


class HangsLater(FaultyStore):
    """Operations wait at `gate` once there is one."""

    gate: Gate | None = None

    def fault(self, operation: str) -> bool:
        if self.gate is not None:
            self.gate.pass_through()
        return True


def open_store(directory: Path, *, notes_uses: bool = False) -> CountingStore:
    """A store whose clock is ahead: what it holds was not changed just now."""
    store = FileStore(directory, wall=lambda: time.time() + 10)
    assert store.wait_indexed(10.0)
    return CountingStore(store, notes_uses=notes_uses)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def records(directory: Path) -> list[Path]:
    """Those of the prompt, in any order."""
    found = [path for path in directory.rglob("*") if path.is_file() and len(path.name) >= 64]
    assert len(found) == NUM_CHUNKS
    return sorted(found)


def note_uses(directory: Path) -> None:
    """Do to all records what noting their last use does."""
    for path in records(directory):
        os.utime(path, ns=(1, 1))


def filled(host: Any, num_records: int = NUM_CHUNKS) -> None:
    """Wait until what is stored is in memory."""
    wait_for(lambda: host.observer["kept_filled"] == num_records)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4200)
        byte = file.read(1)[0]
        file.seek(4200)
        file.write(bytes([byte ^ 1]))


def to_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_another(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4200] ^= 1
    path.with_name("other").write_bytes(content)
    path.with_name("other").replace(path)


def flip_and_note_a_use(path: Path) -> None:
    flip(path)
    os.utime(path, ns=(1, 1))


DAMAGES = {
    "flipped": (flip, "miss_bad_leaf"),
    "truncated": (lambda path: os.truncate(path, 5000), "miss_truncated"),
    "emptied": (lambda path: os.truncate(path, 0), "miss_truncated"),
    "removed": (Path.unlink, "miss_absent"),
    "a directory": (to_directory, "miss_absent"),
    "replaced": (to_another, "miss_bad_leaf"),
}
