"""`RemoteStore`, the store on a server, and `RemoteClient`, which each kind of server implements.

A value's name is `<prefix><namespace>/<key>`, the latter two in hexadecimal, so that one server or
bucket holds the records of many models. `kvferry.store.servers.server_keys` caches the keys.
"""

from __future__ import annotations

import copy
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.store.base import (
    CLOSED,
    EXISTS,
    NO_DEADLINE,
    STORED,
    Buffer,
    Put,
    PutResult,
    ReadRange,
    RecordBytes,
    Where,
)
from kvferry.store.catalogue import Catalogue, Contract, Entry, GcReport, StoredBytes
from kvferry.store.faults import Calls, Faults, Guard, checked, is_size
from kvferry.store.io_pool import IOPool
from kvferry.store.kind import Opening, ServerBounds, StoreUrl
from kvferry.store.maintenance import shrink
from kvferry.store.servers.server_keys import ServerStore
from kvferry.types import ChunkKey

T = TypeVar("T")

_FULL = Fault(FaultKind.FULL, "the server has no room for a value")
_REFUSED = Fault(FaultKind.REFUSED, "the server does not take a value")
_END = ("", -1, 0.0)
"""Of a listing."""
_ABOUT = "about.json"
_NOTICE = "erased.json"
_REMEMBERED_NAMES = 1 << 16
_LOOK_SECONDS = 10.0
"""How often a store looks whether its server has the descriptions that it gave."""
_NAME = re.compile(rf"([0-9a-f]{{64}})/(?:([0-9a-f]{{64}})|{re.escape(_ABOUT)})")


class RemoteClient(Contract, ABC):
    """A client of one kind of server. A new kind of remote store has to implement only this.

    Calls block until `deadline` (`time.monotonic()` seconds) at most, plus a bounded clean-up. They
    raise StoreError, whose message never holds a credential. Thread-safe: several I/O threads call
    at once. No buffer is written after a call has returned.
    """

    @abstractmethod
    def read(self, name: str, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        """See `Store.read`."""

    @abstractmethod
    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        """Store the concatenation of `buffers`. Atomic. If the name has a value, the call returns
        EXISTS, or with `replaces` replaces it."""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        """Whether each name has a value, asked in one batch."""

    @abstractmethod
    def delete(self, name: str, deadline: float) -> bool:
        """Remove a value. True if this call removed it."""

    @abstractmethod
    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """Yield name, size in bytes and last use (seconds since the epoch; 0: unknown) of each
        value whose name starts with `prefix`."""

    def facts(self) -> dict[str, int | bool | None]:
        """See `Store.facts`. A server that says nothing of itself has none."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Close the client. Idempotent; bounded in time."""


class _GuardedClient(RemoteClient):
    """A client whose every call ends with an answer of the right kind, or with StoreError, or is
    known to be under way."""

    def __init__(
        self, client: RemoteClient, faults: Faults, calls: Calls, bounds: ServerBounds
    ) -> None:
        self.inner = client
        self.guard = Guard(client, faults, calls, bounds.call_seconds)
        self._faults = faults
        self._close_seconds = bounds.close_seconds
        self._is_closed = False

    def read(self, name: str, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        with self.guard("read", deadline):
            size = self.inner.read(name, ranges, deadline)
            return checked(size is None or is_size(size), size)

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        with self.guard("put", deadline):
            result = self.inner.put(name, buffers, deadline, replaces=replaces)
            return checked(isinstance(result, PutResult), result)

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        with self.guard("exists", deadline):
            found = self.inner.exists(names, deadline)
            is_list = isinstance(found, list) and len(found) == len(names)
            return checked(is_list and set(map(type, found)) <= {bool}, found)

    def delete(self, name: str, deadline: float) -> bool:
        with self.guard("delete", deadline):
            was_there = self.inner.delete(name, deadline)
            return checked(isinstance(was_there, bool), was_there)

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        with self.guard("scan", deadline):
            listing = iter(self.inner.scan(prefix, deadline))
        while True:  # a reader that takes its time is no call of the client
            with self.guard("scan", deadline):
                if (found := next(listing, _END)) is _END:
                    return
                name, num_bytes, last_used = found
                is_entry = isinstance(name, str) and is_size(num_bytes)
                checked(is_entry and isinstance(last_used, int | float), found)
            yield found

    def facts(self) -> dict[str, int | bool | None]:
        with self.guard("facts"):
            found = self.inner.facts()
            return checked(isinstance(found, dict), found)

    def close(self) -> None:
        """Leave a client behind whose close does not end."""
        if self._is_closed:
            return
        self._is_closed = True
        thread = IOPool(1, "kvferry-close")
        job = thread.submit(lambda _job: self._close())
        if job.error is not None:  # the process can start no thread
            self._close()
        elif not job.wait(self._close_seconds):
            self._faults.does_not_end("client_close", f"{type(self.inner).__name__}.close")
        thread.close(0.0)

    def _close(self) -> None:
        with suppress(StoreError), self.guard("close"):
            self.inner.close()


class _Texts:
    """The texts of a prefix, and those that this process gave: the server may lose them.
    Thread-safe."""

    def __init__(
        self,
        client: RemoteClient,
        prefix: str,
        bounds: ServerBounds,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._bounds = bounds
        self._clock = clock
        self._given: dict[str, str] = {}  # by name
        self._looks_at = clock() + _LOOK_SECONDS  # whether the server has them

    def keep(self, name: str, text: str) -> None:
        """Write a text, now or later. Never raises."""
        self._given[name] = text
        with suppress(StoreError):
            self.write(name, text)

    def write_again(self) -> None:
        """Write the texts again that the server has lost: it restarted empty, was emptied, was away
        when they came, or evicted them. Runs in: I/O thread, after an answer."""
        now = self._clock()
        if now < self._looks_at:
            return
        self._looks_at = now + _LOOK_SECONDS
        for name, text in tuple(self._given.items()):
            # To read it also makes it one of the most recent, where the server evicts by use.
            with suppress(StoreError):
                self.write(name, text, replaces=False)

    def read(self, name: str) -> str | None:
        """Return a text; None if there is none, and an empty one if it is too long. Raises
        StoreError."""
        name, until = f"{self._prefix}{name}", self._clock() + self._bounds.quick_seconds
        size = self._client.read(name, (), until)
        if size is None:
            return None
        text = bytearray(size if size <= self._bounds.max_text_bytes else 0)
        self._client.read(name, [(0, memoryview(text))], until)
        return text.decode(errors="replace")

    def write(self, name: str, text: str, *, replaces: bool = True) -> None:
        """Write a text if there is none, or, with `replaces`, another one. Raises StoreError."""
        said = self.read(name)
        if said == text or (said is not None and not replaces):
            return
        name, until = f"{self._prefix}{name}", self._clock() + self._bounds.quick_seconds
        if said is not None:
            self._client.delete(name, until)
        self._client.put(name, [text.encode()], until)


class RemoteStore(ServerStore):
    """Values that a server keeps, and evicts by its own rules.

    A read may count as a use there; `touch` does nothing. `stat` counts keys that are known here.

    Args:
        url: URL without credentials.
        client: client of the server, closed with the store.
        opening: its namespace is that of the values; `in_namespace` gives a view of another.
        prefix: start of all names; ends in a separator, or is empty.
        clock: monotonic seconds, also of deadlines.

    Attributes:
        calls: those of the client under way.
    """

    def __init__(
        self,
        url: str,
        client: RemoteClient,
        opening: Opening | None = None,
        *,
        prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        opening = Opening() if opening is None else opening
        if not isinstance(client, RemoteClient):
            raise TypeError(f"a {type(client).__name__} is no RemoteClient")
        super().__init__(url, opening, clock)
        self.opening, self.clock = opening, clock
        faults = Faults(url, opening.observer, clock, is_of_client=True)
        self.calls = opening.calls
        self._client = _GuardedClient(client, faults, opening.calls, opening.bounds)
        self._prefix = prefix
        self._namespace = opening.namespace
        self._are_alike = opening.record_bytes is not None  # all values of a key have one size
        self._texts = _Texts(self._client, prefix, opening.bounds, clock)
        self._keys.after_answer = self._texts.write_again

    # -- values ---------------------------------------------------------------------------------

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        if self._closed:
            return None
        with self._keys.call() as learn:
            size = self._client.read(self.name_of(key), ranges, self._until(deadline))
            if size is None:
                self._keys.forget(key)
            else:
                learn(key, size)
        return None if size is None else RecordBytes(size)

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        if self._closed:
            return Put.failed(CLOSED)
        name, until = self.name_of(key), self._until(deadline)
        num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
        try:
            result = self._client.put(name, buffers, until)
            # To replace a wrong value loses nothing, even if another writer was first. To remove it
            # could take away the right value that another writer stored meanwhile.
            if result is PutResult.EXISTS:
                size = self._client.read(name, (), until)
                if self._is_wrong(size, num_bytes):
                    result = self._client.put(name, buffers, until, replaces=True)
        except StoreError as error:
            return Put.failed(error.fault)
        if not result.is_there:
            return Put.failed(_FULL if result is PutResult.NO_SPACE else _REFUSED)
        if result is PutResult.STORED:
            self._keys.learn(key, num_bytes)
            self._observer.count("store_put_records")
            self._observer.count("store_put_bytes", num_bytes)
        else:
            self._keys.learn(key)
        self._texts.write_again()
        return STORED if result is PutResult.STORED else EXISTS

    def _is_wrong(self, size: int | None, num_bytes: int) -> bool:
        """Whether a value of this size is none of a key whose right value has `num_bytes`. False
        for None: it went, or is not whole yet."""
        return size == 0 or (self._are_alike and size not in (None, num_bytes))

    def accepts(self) -> Fault | None:
        return CLOSED if self._closed else None

    def discard(self, key: ChunkKey, reason: str) -> None:
        if self.delete(key):
            self._observer.count("store_quarantined")

    def delete(self, key: ChunkKey) -> bool:
        self._keys.forget(key)
        if self._closed:
            return False
        until = self._clock() + self._bounds.quick_seconds
        try:
            return self._client.delete(self.name_of(key), until)
        except StoreError:
            self._observer.count("store_delete_failed")
            return False

    def close(self) -> None:
        self._keys.close()
        self._client.close()

    # -- what is there --------------------------------------------------------------------------

    def _find(self, keys: Sequence[ChunkKey]) -> list[Where]:
        until = self._clock() + self._bounds.probe_seconds
        found = self._client.exists([self.name_of(key) for key in keys], until)
        return [Where.HERE if each else Where.ABSENT for each in found]

    def in_namespace(self, namespace: bytes) -> RemoteStore:
        if namespace == self._namespace:
            return self
        other = copy.copy(self)  # with the same keys: no two namespaces have one
        other._namespace = namespace
        return other

    def describe(self, namespace: bytes, description: str) -> None:
        if not self._closed:
            self._texts.keep(f"{namespace.hex()}/{_ABOUT}", description)

    def catalogues(self) -> Sequence[Catalogue]:
        return [RemoteCatalogue(self, self._client, self._prefix, self._texts)]

    @property
    def is_closed(self) -> bool:
        return self._closed

    def name_of(self, key: ChunkKey) -> str:
        """Return the name of a value at the server."""
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        return f"{self._prefix}{self._namespace.hex()}/{key.hex()}"

    def _until(self, deadline: float) -> float:
        return min(deadline, self._clock() + self._bounds.call_seconds)


class RemoteCatalogue(Catalogue):
    """What a server lists under the prefix of a store."""

    def __init__(
        self, store: RemoteStore, client: RemoteClient, prefix: str, texts: _Texts
    ) -> None:
        self._store = store
        self._client = client
        self._prefix = prefix
        self._texts = texts

    def scan(self) -> Iterator[Entry]:
        return (entry for entry in self._scan() if entry.key)

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        """See `Catalogue.namespaces`. Includes namespaces that have only a description left."""
        found: dict[bytes, tuple[int, int]] = {}
        for key, num_bytes, _, namespace, *_ in self._scan():
            num_records, total = found.get(namespace, (0, 0))
            found[namespace] = (num_records + 1, total + num_bytes) if key else (num_records, total)
        return found

    def _scan(self) -> Iterator[Entry]:
        """Yield every value and, with an empty key, every description."""
        if self._store.is_closed:
            return
        # The names that came last, the oldest first: a server may list a name twice.
        seen: dict[tuple[bytes, bytes], None] = {}
        for name, num_bytes, last_used in self._client.scan(self._prefix, NO_DEADLINE):
            found = _NAME.fullmatch(name, len(self._prefix))
            if found is None:
                continue
            namespace, key = bytes.fromhex(found[1]), ChunkKey(bytes.fromhex(found[2] or ""))
            if (namespace, key) in seen:
                continue
            seen[namespace, key] = None
            if len(seen) > _REMEMBERED_NAMES:
                del seen[next(iter(seen))]
            yield Entry(key, StoredBytes(num_bytes), last_used, namespace)

    def description(self, namespace: bytes) -> str | None:
        return None if self._store.is_closed else self._texts.read(f"{namespace.hex()}/{_ABOUT}")

    def notice(self, text: str | None = None) -> str | None:
        if self._store.is_closed:
            return None
        if text is not None:
            self._texts.write(_NOTICE, text)
            return text
        said = self._texts.read(_NOTICE)
        if said is None:  # the server may have lost all: `rm` knows a salt by what is described
            self._texts.write_again()
        return said

    def facts(self) -> dict[str, int | bool | None]:
        return {} if self._store.is_closed else self._client.facts()

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        return shrink(self._store, max_bytes, older_than_seconds)


def open_remote(url: StoreUrl, client: RemoteClient, opening: Opening) -> RemoteStore:
    return RemoteStore(str(url), client, opening, prefix=url.path and f"{url.path}/")
