"""Stores on other machines: what all of them share, and what one kind of server has to bring.

A value's name is `<prefix><namespace>/<key>`, both in hexadecimal, so that one server or bucket
holds the records of many models. No process lists a server to know what it has: `probe` asks for
the keys of one prompt, and the answers are remembered for a while.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.base import (
    ASK_SECONDS,
    NO_DEADLINE,
    Buffer,
    Entry,
    PutResult,
    ReadRange,
    Store,
    StoreStat,
)
from kvferry.store.io_pool import IOPool
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

OPERATION_SECONDS = 30.0
"""Deadline of calls that have none."""

DESCRIBE_SECONDS = 2.0
"""An engine's start waits so long for the description of its namespace to be stored."""

PROBE_SECONDS = 1.0
"""Deadline of the question itself: a late answer serves the next look-up."""

FRESH_SECONDS = 300.0
"""How long a key is taken to be there before the server is asked again. It may be evicted there
meanwhile: then the fetch misses."""

ABSENT_SECONDS = 1.0
"""How long a key that was absent is not asked for again."""

MAX_KNOWN = 1 << 18
"""Keys that are remembered; those that were not used for longest are forgotten first."""

MAX_PROBES = 256
"""Prompts whose keys wait to be asked for; more are not asked for, and miss."""

FIRST_BATCH = 32
"""Keys of a prompt in the first question. Each further question has twice as many, and none follows
when all of them were absent."""

DELETE_SECONDS = 2.0
MAX_TEXT_BYTES = 1 << 20
"""A longer description is somebody else's value."""

CLOSE_SECONDS = 2.0

STALE_SECONDS = 600.0
"""Age of a part file whose writer is taken to be dead."""

_ABOUT = "about.json"
_NAME = re.compile(rf"([0-9a-f]{{64}})/(?:([0-9a-f]{{64}})|{re.escape(_ABOUT)})")
_SESSION = re.compile(r"[0-9a-f]{32}")


class RemoteClient(ABC):
    """Speaks to one kind of server; all that a remote store has to bring.

    Calls block until `deadline` (`time.monotonic()` seconds) at most, plus a bounded clean-up. They
    raise StoreError, whose message never holds a credential. Thread-safe: several I/O threads call
    at once. No buffer is written after the call returned.
    """

    @abstractmethod
    def read(self, name: str, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        """See `Store.read`."""

    @abstractmethod
    def put(self, name: str, buffers: Sequence[Buffer], deadline: float) -> PutResult:
        """Store the concatenation of `buffers` unless the name has a value: then EXISTS. Atomic."""

    @abstractmethod
    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        """Whether each name has a value, asked in one batch."""

    @abstractmethod
    def delete(self, name: str, deadline: float) -> bool:
        """Remove a value. True if this call removed it."""

    @abstractmethod
    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """Name, size in bytes and last use (seconds since the epoch; 0: unknown) of each value
        whose name starts with `prefix`."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent; bounded in time."""


class _Known(NamedTuple):
    until: float
    num_bytes: int
    """0 where it was not learned."""


class _Question(NamedTuple):
    """The keys of one prompt that are not known."""

    keys: list[ChunkKey]
    mark: float
    """Until when look-ups wait for the answer."""


class RemoteStore(Store):
    """Values that a server keeps, and evicts by its own rules.

    Reading, not `touch`, is what makes a value recent there. `stat` counts what this process knows.

    Args:
        url: without credentials.
        client: closed with the store.
        prefix: of all names; ends in a separator, or is empty.
        namespace: under which values are named. Without one, only values that a `scan` of this
            store found can be read.
        index: False if `contains` is never asked.
        clock: monotonic seconds.
    """

    multi_process = True

    def __init__(
        self,
        url: str,
        client: RemoteClient,
        *,
        prefix: str = "",
        namespace: bytes = bytes(32),
        observer: Observer | None = None,
        index: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._client = client
        self._prefix = prefix
        self._namespace = namespace
        self._observer = Observer() if observer is None else observer
        self._clock = clock
        self._closed = False
        self._learns = index
        self._known: OrderedDict[ChunkKey, _Known] = OrderedDict()
        self._asked: dict[ChunkKey, float] = {}
        self._absent: dict[ChunkKey, float] = {}
        self._waiting: deque[_Question] = deque()
        self._listed: dict[ChunkKey, str] = {}
        self._questions = IOPool(2, "kvferry-probe")
        self._parts = PartFiles()
        self._heard: Callable[[StoreError | None], None] = lambda _fault: None

    # -- values ---------------------------------------------------------------------------------

    def contains(self, key: ChunkKey) -> bool | None:
        if not self._learns or self._closed:
            return False
        now = self._clock()
        known = self._known.get(key)
        if known is not None and now < known.until:
            return True
        return None if now < self._asked.get(key, 0.0) else False

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> int | None:
        if self._closed:
            return None
        size = self._client.read(self._name(key), ranges, self._until(deadline))
        if size is None:
            self._forget(key)
        else:
            self._learn(key, size)
        return size

    def put(
        self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE
    ) -> PutResult:
        if self._closed:
            return PutResult.FAILED
        try:
            result = self._client.put(self._name(key), buffers, self._until(deadline))
        except StoreError:
            result = PutResult.FAILED
        if result is PutResult.STORED:
            num_bytes = sum(memoryview(buffer).nbytes for buffer in buffers)
            self._learn(key, num_bytes)
            self._observer.count("store_put_records")
            self._observer.count("store_put_bytes", num_bytes)
        elif result is PutResult.EXISTS:
            self._learn(key)
        return result

    def discard(self, key: ChunkKey, reason: str) -> None:
        """Deleted and counted: a server that others share is no place for quarantine."""
        if self.delete(key):
            self._observer.count("store_quarantined")

    def delete(self, key: ChunkKey) -> bool:
        self._forget(key)
        if self._closed:
            return False
        try:
            return self._client.delete(self._name(key), time.monotonic() + DELETE_SECONDS)
        except StoreError:
            self._observer.count("store_delete_failed")
            return False

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        pass

    def stat(self) -> StoreStat:
        known = list(self._known.values())
        num_bytes = sum(each.num_bytes for each in known)
        return StoreStat(self.url, len(known), num_bytes, None, index_complete=True)

    def close(self) -> None:
        self._closed = True
        self._questions.close(CLOSE_SECONDS)
        self._parts.close()
        self._client.close()

    # -- what is there --------------------------------------------------------------------------

    def probe(self, keys: Sequence[ChunkKey]) -> None:
        if not self._learns or self._closed:
            return
        now = self._clock()
        # Those under way, and those that have just been absent, are not asked for again.
        unknown = [
            key
            for key in keys
            if self._known.get(key, _NEVER).until <= now
            and self._asked.get(key, 0.0) <= now
            and self._absent.get(key, 0.0) <= now
        ]
        if not unknown:
            return
        if len(self._waiting) >= MAX_PROBES:
            self._observer.count("store_probe_dropped")
            return
        mark = now + ASK_SECONDS
        self._asked.update(dict.fromkeys(unknown, mark))
        self._waiting.append(_Question(unknown, mark))
        self._questions.submit(lambda _job: self._ask())

    def _ask(self) -> None:
        """Ask for the keys of all prompts that wait, in one question for each length of prefix.
        Runs in: I/O thread."""
        questions: list[_Question] = []
        with suppress(IndexError):
            while True:
                questions.append(self._waiting.popleft())
        waiting, start, count = [each.keys for each in questions], 0, FIRST_BATCH
        try:
            while waiting:
                batches = [keys[start : start + count] for keys in waiting]
                self._ask_for(list(dict.fromkeys(key for keys in batches for key in keys)))
                start, count = start + count, 2 * count
                # Some of a prompt may lie elsewhere, but behind a whole batch nothing hits.
                waiting = [
                    keys
                    for keys, batch in zip(waiting, batches, strict=True)
                    if len(keys) > start and any(key in self._known for key in batch)
                ]
        except StoreError as error:
            self._observer.count("store_probe_failed")
            self._heard(error)
        finally:
            for keys, mark in questions:
                for key in keys:
                    if self._asked.get(key, mark) <= mark:  # else asked for again since
                        self._asked.pop(key, None)

    def _ask_for(self, keys: Sequence[ChunkKey]) -> None:
        """One question. Raises StoreError."""
        found = self._client.exists(
            [self._name(key) for key in keys], time.monotonic() + PROBE_SECONDS
        )
        self._heard(None)
        if len(self._absent) > MAX_KNOWN:
            self._absent.clear()
        until = self._clock() + ABSENT_SECONDS
        for key, is_there in zip(keys, found, strict=True):
            if is_there:
                self._learn(key)
            else:
                self._absent[key] = until

    def on_answer(self, heard: Callable[[StoreError | None], None]) -> None:
        self._heard = heard

    def note_stored(self, key: ChunkKey) -> None:
        if not self._closed:
            self._learn(key)

    def wait_indexed(self, timeout: float) -> bool:
        return not self._closed

    def scan(self) -> Iterator[Entry]:
        """Every value of every namespace; they can be read through this store from then on."""
        return (entry for entry in self._scan() if entry.key)

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        """Also those of which nothing but the description is left."""
        found: dict[bytes, tuple[int, int]] = {}
        for entry in self._scan():
            num_records, num_bytes = found.get(entry.namespace, (0, 0))
            if entry.key:
                num_records, num_bytes = num_records + 1, num_bytes + entry.num_bytes
            found[entry.namespace] = (num_records, num_bytes)
        return found

    def _scan(self) -> Iterator[Entry]:
        """Every value once, and with an empty key every description."""
        if self._closed:
            return
        seen: set[str] = set()  # a server may list a name twice
        for name, num_bytes, last_used in self._client.scan(self._prefix, NO_DEADLINE):
            found = _NAME.fullmatch(name[len(self._prefix) :])
            if found is None or name in seen:
                continue
            seen.add(name)
            key = ChunkKey(bytes.fromhex(found[2] or ""))
            if key:
                self._listed[key] = name
            yield Entry(key, num_bytes, last_used, bytes.fromhex(found[1]))

    def describe(self, namespace: bytes, description: str | None = None) -> str | None:
        name = f"{self._prefix}{namespace.hex()}/{_ABOUT}"
        until = time.monotonic() + DESCRIBE_SECONDS
        said = None
        with suppress(StoreError, UnicodeDecodeError):
            size = None if self._closed else self._client.read(name, (), until)
            if size is not None and size <= MAX_TEXT_BYTES:
                text = bytearray(size)
                self._client.read(name, [(0, memoryview(text))], until)
                said = text.decode()
            if description not in (None, said) and not self._closed:
                if said is not None:
                    self._client.delete(name, until)
                self._client.put(name, [str(description).encode()], until)
        return description or said

    # -- values that several ranks write --------------------------------------------------------

    def begin(
        self, key: ChunkKey, num_bytes: int, deadline: float = NO_DEADLINE
    ) -> str | PutResult:
        name = self._name(key)
        try:
            if self._closed:
                return PutResult.FAILED
            if any(self._client.exists([name], self._until(deadline))):
                self._learn(key)
                return PutResult.EXISTS
        except StoreError:
            return PutResult.FAILED
        return self._parts.begin(key, num_bytes)

    def write_at(
        self,
        session: str,
        offset: int,
        buffers: Sequence[Buffer],
        deadline: float = NO_DEADLINE,
    ) -> bool:
        return not self._closed and self._parts.write_at(session, offset, buffers)

    def commit(self, session: str, head: Buffer, deadline: float = NO_DEADLINE) -> PutResult:
        whole = None if self._closed else self._parts.take(session, head)
        if whole is None:
            return PutResult.FAILED
        key, content = whole
        return self.put(key, [content], deadline)

    def abort(self, session: str) -> None:
        self._parts.abort(session)

    # -- parts ----------------------------------------------------------------------------------

    def _name(self, key: ChunkKey) -> str:
        if len(key) != 32:
            raise ValueError(f"a key has 32 bytes, not {len(key)}")
        return self._listed.get(key) or f"{self._prefix}{self._namespace.hex()}/{key.hex()}"

    def _until(self, deadline: float) -> float:
        """The deadline by the clock of the clients."""
        return min(deadline, time.monotonic() + OPERATION_SECONDS)

    def _learn(self, key: ChunkKey, num_bytes: int = 0) -> None:
        if not self._learns:
            return
        self._absent.pop(key, None)
        size = num_bytes or self._known.get(key, _NEVER).num_bytes
        self._known[key] = _Known(self._clock() + FRESH_SECONDS, size)
        with suppress(KeyError):  # another thread forgot it
            self._known.move_to_end(key)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _forget(self, key: ChunkKey) -> None:
        self._known.pop(key, None)

    def __repr__(self) -> str:
        return f"<RemoteStore {self.url} {'closed' if self._closed else 'open'}>"


_NEVER = _Known(0.0, 0)


class PartFiles:
    """Values that the ranks of one machine put together in shared memory before one of them sends
    the whole: no kind of server has to offer more than whole values, and a value is one object.

    Ranks on another machine cannot write parts; their records are not stored. A part file whose
    process was killed is removed by the next one that opens a store, some minutes later.
    """

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        parent = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
        self._folder = parent / f"kvferry-parts-{os.getuid()}"
        self._lock = threading.Lock()
        self._has_warned = False
        self._begun: dict[str, ChunkKey] = {}
        with suppress(OSError):
            self._remove_stale()

    def begin(self, key: ChunkKey, num_bytes: int) -> str | PutResult:
        """See `SupportsShardedWrite`."""
        session = secrets.token_hex(16)
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            status = self._folder.lstat()
            if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
                return PutResult.FAILED  # another user made it, and could change what is in it
            fd = os.open(self._folder / session, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                # Memory that is full says so now, not by a signal later.
                reserve = getattr(os, "posix_fallocate", None)
                os.ftruncate(fd, num_bytes) if reserve is None else reserve(fd, 0, num_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            self._unlink(session)
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s: no room to put a record together: %s; give /dev/shm some gigabytes",
                    self._folder,
                    error.strerror,
                )
            return PutResult.NO_SPACE
        with self._lock:
            self._begun[session] = key
        return session

    def write_at(self, session: str, offset: int, buffers: Sequence[Buffer]) -> bool:
        """See `SupportsShardedWrite`."""
        if _SESSION.fullmatch(session) is None or offset < 0:
            return False
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        try:
            fd = os.open(self._folder / session, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if offset + sum(map(len, views)) > os.fstat(fd).st_size:
                    return False
                for view in views:
                    while view:
                        written = os.pwrite(fd, view, offset)
                        view, offset = view[written:], offset + written  # noqa: PLW2901
            finally:
                os.close(fd)
        except OSError:
            return False
        return True

    def take(self, session: str, head: Buffer) -> tuple[ChunkKey, bytes] | None:
        """The whole value, with its head; None for a session that is over or never began here.
        The file is gone afterwards."""
        with self._lock:
            key = self._begun.pop(session, None)
        if key is None:
            return None
        try:
            if self.write_at(session, 0, [head]):
                return key, (self._folder / session).read_bytes()
        except OSError:
            pass
        finally:
            self._unlink(session)
        return None

    def abort(self, session: str) -> None:
        """Remove what was begun here."""
        with self._lock:
            begun = self._begun.pop(session, None)
        if begun is not None:
            self._unlink(session)

    def close(self) -> None:
        """Remove all that was begun here."""
        for session in list(self._begun):
            self.abort(session)

    def _unlink(self, session: str) -> None:
        with suppress(OSError):
            os.unlink(self._folder / session)

    def _remove_stale(self) -> None:
        for path in self._folder.iterdir():
            with suppress(OSError):
                if time.time() - path.lstat().st_mtime > STALE_SECONDS:
                    path.unlink()
