"""What a directory lists, tells and changes for commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol, TypeVar

from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.store.base import CLOSED, StoreStat
from kvferry.store.catalogue import Entry, GcReport, Indexed, Removal, StoredBytes
from kvferry.store.faults import Faults
from kvferry.store.file.directory import NOTICE, NUM_SHARDS, Directory
from kvferry.store.file.index import NO_QUOTA, Index
from kvferry.store.file.upkeep import Upkeep
from kvferry.types import ChunkKey

_OTHERS = Fault(FaultKind.UNUSABLE, "others evict by an index of their own")
_DESCRIPTION = re.compile(r"[0-9a-f]{64}\.json")

_Found = TypeVar("_Found")


class OpenDirectory(Protocol):
    """What a catalogue asks of its `FileStore`."""

    url: str
    directory: Directory
    index: Index
    upkeep: Upkeep

    @property
    def writes(self) -> bool: ...

    @property
    def is_closed(self) -> bool: ...

    def accepts(self) -> Fault | None: ...

    def stat(self) -> StoreStat: ...


class FileCatalogue(Indexed):
    """The catalogue of a `FileStore`.

    Args:
        max_bytes: quota of the store.
        wall: seconds since the epoch.
    """

    def __init__(
        self, store: OpenDirectory, faults: Faults, max_bytes: int, wall: Callable[[], float]
    ) -> None:
        self._store = store
        self._faults = faults
        self._max_bytes = max_bytes
        self._wall = wall
        self._directory, self._index, self._upkeep = store.directory, store.index, store.upkeep

    def lists(self, key: ChunkKey) -> bool:
        return any(self._listed(self._index.keys(key, key)))

    def scan(self) -> Iterator[Entry]:
        return self._listed(self._index.entries())

    def recent(self, limit: int) -> Iterator[Entry]:
        return self._listed(self._index.entries(limit))

    def described(self) -> list[bytes]:
        folders = map(self._directory.listed, ["namespaces"])
        names = sorted(self._listed(chain.from_iterable(folders)))
        return [bytes.fromhex(name[:64]) for name in names if _DESCRIPTION.fullmatch(name)]

    def description(self, namespace: bytes) -> str | None:
        with self._faults.guard("describe", is_logged=False):
            return self._directory.read_text(f"{namespace.hex()}.json", "namespaces")

    def notice(self, text: str | None = None) -> str | None:
        with self._faults.guard("notice"):
            if text is not None and self._store.writes:
                self._directory.write_text(NOTICE, text)
            return self._directory.read_text(NOTICE)

    def removals(self, limit: int) -> list[Removal]:
        return list(self._listed(self._index.removals(limit)))

    def stored(self) -> Iterator[Entry]:
        shards = map(self._directory.list_shard, range(NUM_SHARDS))
        keys = self._listed(chain.from_iterable(shards))
        return (Entry(key, StoredBytes(0), 0.0) for key in keys)

    def facts(self) -> dict[str, int | bool | None]:
        counts = self._store.stat()._asdict()
        del counts["url"]
        with self._faults.guard("list", "cannot be listed", is_logged=False):
            if counts["max_bytes"] is None:  # a command may not give that of the engines
                del counts["max_bytes"]
                counts |= self._directory.quota()
            files = self._directory.list_files("quarantine").values()
        sizes = [file.num_bytes for file in files]
        return {**counts, "quarantined": len(sizes), "quarantined_bytes": sum(sizes)}

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        if not self._store.writes:
            said = f"{self._store.url} is read-only or closed; open it writable to change it"
            raise StoreError(FaultKind.READ_ONLY, said)
        before = 0.0 if older_than_seconds is None else self._wall() - older_than_seconds
        quota = self._max_bytes if max_bytes is None else max_bytes
        with self._faults.guard("gc", "cannot be made smaller", is_logged=False):
            self._index.flush()
            self._upkeep.clean()
            start = self._index.totals
            self._directory.bound_quarantine(quota, before)
            self._index.shrink(quota, before)
            self._upkeep.clean()
        end = self._index.totals
        removed = start.num_records - end.num_records, start.num_bytes - end.num_bytes
        return GcReport(*removed, used_bytes=end.num_bytes)

    def pin(self, keys: Iterable[ChunkKey], until: float, *, by_client: bool = False) -> int:
        if self._max_bytes == NO_QUOTA and not by_client:
            said = f"{self._store.url} has no quota; give that of engines: ?max_bytes=200GiB"
            raise ConfigError(said)
        if not self._store.writes or not self._upkeep.may_pin:
            kind, text = _OTHERS if self._store.writes else self._store.accepts() or CLOSED
            raise StoreError(kind, f"{self._store.url} cannot pin: {text}")
        most = self._max_bytes // (4 if by_client else 2)
        with self._faults.guard("pin", "cannot pin", is_logged=False):
            return self._index.pins.pin(keys, until, most, extends=by_client)

    def _listed(self, found: Iterator[_Found]) -> Iterator[_Found]:
        """Yield what is found, nothing in a closed store. Translates errors to StoreError."""
        with self._faults.guard("list", "cannot be listed", is_logged=False):
            yield from () if self._store.is_closed else found
