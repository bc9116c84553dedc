"""The hooks that a store gives its conformance suite, and helpers of the tests."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import Buffer, Store
from kvferry.types import ChunkKey

awkward_sizes = (1, 4095, 4096, 4097, 65_537, 2**20 + 3)
"""Sizes of values just beside round numbers, so that no store is right for those only."""

PATIENCE_SECONDS = 20.0
"""How long a test waits for another thread. Only a failing test waits so long."""


def make_key(number: int = 0) -> ChunkKey:
    """Make a key that looks real (32 random bytes) and is the same in every run."""
    return ChunkKey(random.Random(f"key {number}").randbytes(32))


def make_value(num_bytes: int = 4097, number: int = 0) -> bytes:
    """Make bytes that look random, differ by `number` and are the same in every run."""
    return random.Random(f"value {number}").randbytes(num_bytes)


def read_value(store: Store, key: ChunkKey) -> bytes | None:
    """Read a whole value through the store's API; None if absent."""
    while (size := store.read(key, ())) is not None:
        buffer = bytearray(size)
        found = store.read(key, [(0, memoryview(buffer))])
        if found == size:
            return bytes(buffer)
        assert found is None, f"a value of {size} bytes became one of {found}"
    return None


def can_scan(store: Store) -> bool:
    """Whether the store lists its values."""
    try:
        next(store.catalogue().scan(), None)
    except StoreError:
        return False
    return True


def same_bytes(found: Buffer | None, expected: Buffer | None) -> bool:
    """Whether both are equal. An assert on long values that differ takes pytest minutes."""
    return found == expected


def wait_until(
    condition: Callable[[], bool],
    what: str,
    patience: float = PATIENCE_SECONDS,
    *,
    interval: float = 0.005,
) -> None:
    """Ask every `interval` seconds until `condition` holds; fail after `patience` seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"not within {patience:g} s: {what}"
        time.sleep(interval)


def run_together(*actions: Callable[[], object]) -> None:
    """Run `actions` at once, each in its own thread, and raise the first error."""
    barrier = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def run(action: Callable[[], object]) -> None:
        barrier.wait(PATIENCE_SECONDS)
        try:
            action()
        except BaseException as error:  # handed to the caller below, whatever it is
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "an operation did not return"
    if errors:
        raise errors[0]


class StoreHooks(ABC):
    """What the conformance tests must know about one kind of store; its test class defines it."""

    persistent: ClassVar[bool] = False
    """True if a store that is reopened at the same place still holds its values."""

    patience_seconds: ClassVar[float] = PATIENCE_SECONDS
    """How long a test waits for a thread of the store."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """A store without a quota, closed after the test."""
        with self.make_store(tmp_path) as store:
            yield store

    @abstractmethod
    def make_store(
        self,
        tmp_path: Path,
        *,
        max_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> Store:
        """Open a store at `tmp_path`. Tests open several instances at one place."""

    @abstractmethod
    def poke(self, store: Store, key: ChunkKey, value: bytes | None) -> None:
        """Write `value` under `key` to the medium, behind the store's API; None removes it."""

    @abstractmethod
    def peek(self, store: Store, key: ChunkKey) -> bytes | None:
        """Return what the medium holds under `key`, behind the store's API; None if nothing."""

    def takes(self, value: bytes) -> int:
        """Return how many bytes a value takes in a listing."""
        return len(value)

    def charge(self, num_bytes: int) -> int:
        """Return what a value takes from the quota; `stat().used_bytes` is the sum of these."""
        return num_bytes

    def settle(self, store: Store) -> None:  # noqa: B027  # nothing to wait for is the default
        """Wait until all puts and touches so far count for the next eviction, and counts are up to
        date. For stores that do such work in batches, in the background."""
