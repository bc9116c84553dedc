"""A store in a dict, for `memory:` URLs: the smallest implementation of the store contract, and its
example.

Every `MemoryStore` has values of its own, even if names are equal. To share one, pass the object.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.observe import Observer
from kvferry.store.base import (
    ABSENT,
    CLOSED,
    EXISTS,
    HERE,
    NO_DEADLINE,
    STORED,
    Address,
    Buffer,
    Put,
    ReadRange,
    RecordBytes,
    SingleStore,
    StoreStat,
    Where,
)
from kvferry.store.catalogue import Catalogue, Entry, GcReport, StoredBytes
from kvferry.store.kind import Opening, StoreKind, StoreUrl
from kvferry.types import ChunkKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Options of `memory:` URLs.

    Attributes:
        max_bytes: sum of the sizes of all values; None for no limit.
    """

    max_bytes: int | None = field(default=None, metadata={"unit": "bytes"})

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError("option 'max_bytes' is 0; give a size such as 10GiB, or leave it out")


class _Value(NamedTuple):
    """A stored value; also a `Loan` of `kvferry.transfer.base`."""

    content: bytes
    last_used: float

    @property
    def buffers(self) -> tuple[memoryview]:
        return (memoryview(self.content),)


def copy_ranges(content: Buffer, ranges: Sequence[ReadRange]) -> int:
    """Fill `ranges` from a value that is in memory, as `Store.read` does; return its size."""
    value = memoryview(content)
    for offset, buffer in ranges:
        part = value[offset : offset + len(buffer)]
        buffer[: len(part)] = part
    return len(value)


_TOO_LARGE = Fault(FaultKind.FULL, "a value is larger than max_bytes")


class MemoryStore(SingleStore):
    """Values in this process only. Evicts the least recent ones to stay within `max_bytes`.

    Args:
        name: shown in the URL.
        observer: counts `store_evicted_records`, `store_evicted_bytes` and `store_quarantined`.
        clock: seconds since the epoch.

    Raises:
        ConfigError: `max_bytes` is not positive.
    """

    multi_process = False

    def __init__(
        self,
        name: str = "",
        max_bytes: int | None = None,
        observer: Observer | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes is {max_bytes}; give at least 1, or None for no limit")
        self.url = str(StoreUrl(scheme="memory", path=name))
        self._max_bytes = max_bytes
        self._observer = observer if observer is not None else Observer()
        self._clock = clock
        self._lock = threading.Lock()
        self._values: OrderedDict[ChunkKey, _Value] = OrderedDict()  # least recent first
        self._used_bytes = 0
        self._closed = False

    def where(self, key: ChunkKey) -> Where:
        return HERE if key in self._values else ABSENT

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        value = self._values.get(key)
        return None if value is None else RecordBytes(copy_ranges(value.content, ranges))

    def accepts(self) -> Fault | None:
        return CLOSED if self._closed else None

    def lend(self, key: ChunkKey, seconds: float) -> _Value | None:
        """See `kvferry.transfer.base.Lender`: so a `PeerServer` can serve this store."""
        return self._values.get(key)

    def release(self, loan: _Value) -> None:
        """Nothing to do: a value never changes, and a reader's reference keeps it alive."""

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        content = b"".join(buffers)
        with self._lock:
            if self._closed:
                return Put.failed(CLOSED)
            if key in self._values:
                return EXISTS
            if self._max_bytes is not None and len(content) > self._max_bytes:
                return Put.failed(_TOO_LARGE)
            evicted = self._make_room(len(content))
            self._values[key] = _Value(content, self._clock())
            self._used_bytes += len(content)
        if evicted:
            self._observer.count("store_evicted_records", len(evicted))
            self._observer.count("store_evicted_bytes", sum(evicted))
        return STORED

    def _make_room(self, num_bytes: int) -> list[int]:
        """Evict until `num_bytes` fit; return the sizes of the evicted values. Needs the lock."""
        evicted: list[int] = []
        while self._max_bytes is not None and self._used_bytes + num_bytes > self._max_bytes:
            _, value = self._values.popitem(last=False)
            self._used_bytes -= len(value.content)
            evicted.append(len(value.content))
        return evicted

    def discard(self, key: ChunkKey, reason: str) -> None:
        if self.delete(key):
            self._observer.count("store_quarantined")

    def delete(self, key: ChunkKey) -> bool:
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._used_bytes -= len(value.content)
        return value is not None

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        now = self._clock()
        with self._lock:
            # From the end, so that the first key, the root of the prefix, is the most recent.
            for key in reversed(list(keys)):
                value = self._values.get(key)
                if value is not None:  # replaced, never removed: `contains` takes no lock
                    self._values[key] = value._replace(last_used=now)
                    self._values.move_to_end(key)

    def stat(self) -> StoreStat:
        with self._lock:
            return StoreStat(
                url=self.url,
                num_records=len(self._values),
                used_bytes=self._used_bytes,
                max_bytes=self._max_bytes,
                index_complete=True,
            )

    def values(self) -> list[tuple[ChunkKey, _Value]]:
        """All values now, the least recent first."""
        with self._lock:
            return list(self._values.items())

    def describe(self, namespace: bytes, description: str) -> None:
        pass  # it ends with its process, which knows its namespaces

    def in_namespace(self, namespace: bytes) -> MemoryStore:
        return self

    def catalogues(self) -> Sequence[Catalogue]:
        return [MemoryCatalogue(self)]

    # -- nothing is here that this object does not know at once ----------------------------------

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        return ABSENT

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        return False

    def wait_indexed(self, timeout: float) -> bool:
        return True

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._values.clear()
            self._used_bytes = 0

    def __repr__(self) -> str:
        stat = self.stat()
        state = "closed" if self._closed else f"{stat.num_records} values, {stat.used_bytes} bytes"
        return f"<MemoryStore {self.url} {state}>"


class MemoryCatalogue(Catalogue):
    """What a `MemoryStore` lists. It keeps no texts."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    def scan(self) -> Iterator[Entry]:
        values = self._store.values()
        return (
            Entry(key, StoredBytes(len(value.content)), value.last_used) for key, value in values
        )

    def description(self, namespace: bytes) -> str | None:
        return None

    def notice(self, text: str | None = None) -> str | None:
        return None

    def facts(self) -> dict[str, int | bool | None]:
        return {}

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        said = f"{self._store.url} cannot be made smaller by a command"
        raise StoreError(FaultKind.UNUSABLE, said)


def _check_path(where: str, _raw_path: str, path: str) -> None:
    if "/" in path:
        raise ConfigError(f"{where}: the name of a memory store holds no /; write memory://name")


def _open_url(url: StoreUrl, options: MemoryOptions, opening: Opening) -> MemoryStore:
    if opening.multi_process:
        raise ConfigError(
            f"{url.where}: a memory store is seen by one process only, and here several must share "
            "one; use file:///absolute/directory (on /dev/shm if it shall stay in memory)"
        )
    return MemoryStore(url.path, options.max_bytes, opening.observer)


KIND = StoreKind(options=MemoryOptions, open=_open_url, check_path=_check_path, is_private=True)
