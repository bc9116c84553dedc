"""Stores for tests that wrap a sound store and misbehave on purpose.

    store = StallingStore(MemoryStore(), gate=gate)             # operations wait until released
    store = FailingStore(MemoryStore(), operations={"put"})     # the medium fails
    store = CorruptingStore(MemoryStore(), damage=flip_bit(7))  # the bytes are not what was stored

They can wrap each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.store.base import (
    NO_DEADLINE,
    Buffer,
    Put,
    ReadRange,
    RecordBytes,
    Store,
)
from kvferry.store.memory import copy_ranges
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ChunkKey

Operation = Literal["read", "put", "delete", "discard"]
Damage = Callable[[bytes], bytes]


def flip_bit(index: int) -> Damage:
    """Make a damage that inverts bit `index` (0: lowest bit of the first byte), modulo the size."""

    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[index // 8 % len(changed)] ^= 1 << index % 8
        return bytes(changed)

    return damage


def truncate(num_bytes: int) -> Damage:
    """Make a damage that keeps the first `num_bytes`; a negative number cuts from the end."""
    return lambda content: content[:num_bytes]


def zero(start: int, stop: int) -> Damage:
    """Make a damage that zeroes `[start, stop)`, like a hole in a file."""

    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[start:stop] = bytes(len(content[start:stop]))
        return bytes(changed)

    return damage


INJECTED = Put.failed(Fault(FaultKind.REFUSED, "injected: a write failed"))
"""The answer of a write that fails on purpose."""


class Gate:
    """A gate where operations wait for a test. It starts closed; `release` opens it permanently."""

    def __init__(self, limit_seconds: float = 60.0) -> None:
        self._limit_seconds = limit_seconds
        self._open = threading.Event()
        self._arrivals = threading.Semaphore(0)

    def pass_through(self) -> None:
        """Wait until released. Waits `limit_seconds` at most, so that a test that forgets `release`
        does not hang."""
        self._arrivals.release()
        self._open.wait(self._limit_seconds)

    def wait_for_arrival(self, timeout: float = 30.0) -> bool:
        """Wait until one more operation has arrived at the gate; False after `timeout` seconds."""
        return self._arrivals.acquire(timeout=timeout)

    def release(self) -> None:
        self._open.set()


class FaultyStore(WrapperStore):
    """A store that asks `enter` before each read, put, delete and discard. What may enter goes on
    to the inner store. By default `enter` asks `fault` about `operations` and lets others in.

    An operation that may not enter fails as the store contract says: `read` raises StoreError,
    writes answer FAILED, `delete` and `discard` do nothing.
    """

    def __init__(self, inner: Store, operations: Collection[Operation]) -> None:
        super().__init__(inner)
        self._operations: frozenset[str] = frozenset(operations)

    def enter(self, operation: str) -> bool:
        """Whether `operation` may go on. May block."""
        return operation not in self._operations or self.fault(operation)

    def fault(self, operation: str) -> bool:
        """Called for each of the chosen operations. True lets it go on."""
        raise NotImplementedError

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        if not self.enter("read"):
            raise StoreError(FaultKind.REFUSED, f"injected: read of {key.hex()[:16]} failed")
        return self.inner.read(key, ranges, deadline)

    def check_medium(self, deadline: float) -> None:
        if not self.enter("read"):
            raise StoreError(FaultKind.AWAY, "injected: the medium failed")
        self.inner.check_medium(deadline)

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        return self.inner.put(key, buffers, deadline) if self.enter("put") else INJECTED

    def delete(self, key: ChunkKey) -> bool:
        return self.enter("delete") and self.inner.delete(key)

    def discard(self, key: ChunkKey, reason: str) -> None:
        if self.enter("discard"):
            self.inner.discard(key, reason)


class StallingStore(FaultyStore):
    """A store whose operations wait at `gate`, then work, like a file system that hangs."""

    def __init__(
        self,
        inner: Store,
        *,
        gate: Gate,
        operations: Collection[Operation] = ("read", "put"),
    ) -> None:
        super().__init__(inner, operations)
        self._gate = gate

    def fault(self, operation: str) -> bool:
        self._gate.pass_through()
        return True


class FailingStore(FaultyStore):
    """A store whose operations fail: the first `num_failures` of them, or all.

    Attributes:
        num_failed: failures injected so far.
    """

    def __init__(
        self,
        inner: Store,
        *,
        operations: Collection[Operation],
        num_failures: int | None = None,
    ) -> None:
        super().__init__(inner, operations)
        self._num_failures = num_failures
        self._lock = threading.Lock()
        self.num_failed = 0

    def fault(self, operation: str) -> bool:
        with self._lock:
            if self._num_failures is not None and self.num_failed >= self._num_failures:
                return True
            self.num_failed += 1
            return False


class CorruptingStore(WrapperStore):
    """A store that damages values as they are read. What is stored stays right.

    Args:
        inner: the sound store.
        damage: applied to whole values: `flip_bit`, `truncate`, `zero` or any function.
        keys: which values; None for all.
    """

    def __init__(
        self, inner: Store, *, damage: Damage, keys: Collection[ChunkKey] | None = None
    ) -> None:
        super().__init__(inner)
        self._damage = damage
        self._keys = keys

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        if self._keys is not None and key not in self._keys:
            return self.inner.read(key, ranges, deadline)
        size = self.inner.read(key, (), deadline)
        if size is None:
            return None
        content = bytearray(size)
        self.inner.read(key, [(0, memoryview(content))], deadline)
        return RecordBytes(copy_ranges(self._damage(bytes(content)), ranges))
