"""From a store URL to an open store. The options of each scheme are a dataclass here."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvferry.config import build_config, parse_size, parse_store_url
from kvferry.errors import ConfigError
from kvferry.observe import Observer
from kvferry.store.base import Store
from kvferry.store.memory import MemoryStore


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(MemoryOptions):
    """Options of `file:` URLs; each is an argument of `FileStore`, which documents it."""

    create: bool = True
    read_only: bool = False
    direct_io: Literal["auto", "off"] = "auto"
    index_file: str | None = None


def refuse_small_quota(url: str, record_bytes: int) -> None:
    """Raises ConfigError for a quota below one record. Before the store is opened: it would evict
    everything."""
    max_bytes = parse_store_url(url).options.get("max_bytes")
    if max_bytes is not None and parse_size(max_bytes) < record_bytes:
        raise ConfigError(
            f"max_bytes={max_bytes} is smaller than one chunk of this model ({record_bytes} "
            "bytes); raise it or lower chunk_tokens"
        )


def open_store(
    url: str,
    *,
    observer: Observer | None = None,
    multi_process: bool = False,
    index: bool = True,
) -> Store:
    """Open the store that `url` names.

    Args:
        url: `file:///absolute/directory` or `memory://name`, with options after a `?`.
        observer: receives the counts of the store.
        multi_process: True where scheduler and worker roles, or several ranks, live in different
            processes and must see each other's values; refuses stores that cannot.
        index: False if `contains` is never asked: the store then does not keep track.

    Raises:
        ConfigError: a URL, option or directory that cannot be used.

    Example:
        >>> with open_store("memory://example?max_bytes=1GiB") as store:
        ...     store.stat().max_bytes
        1073741824
    """
    parsed = parse_store_url(url)
    where = f"store URL {url!r}"
    observer = observer if observer is not None else Observer()
    if parsed.scheme == "memory":
        memory = build_config(MemoryOptions, parsed.options, where=where)
        if multi_process:
            raise ConfigError(
                f"{where}: a memory store is seen by one process only, and here several must share "
                "one; use file:///absolute/directory (on /dev/shm if it shall stay in memory)"
            )
        return MemoryStore(parsed.path, memory.max_bytes, observer)
    options = build_config(FileOptions, parsed.options, where=where)
    # Only here: a process that keeps values in memory need not load threads and a database.
    from kvferry.store.file.store import FileStore

    return FileStore(
        Path(parsed.path),
        max_bytes=options.max_bytes,
        create=options.create,
        read_only=options.read_only,
        direct_io=options.direct_io,
        index_file=None if options.index_file is None else Path(options.index_file),
        index=index,
        observer=observer,
    )
