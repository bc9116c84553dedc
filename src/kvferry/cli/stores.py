"""Opens an existing store for a command and reads its records: creates nothing, and changes nothing
unless asked to. Hostile bytes become a reason instead of an error.

`query_store` serves commands that only look, `open_existing` those that may change a store, and
`doctor`, `export` and `explain` of several stores. `import` and `warm` open the store themselves
and call `await_answer`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, TypeVar

import typer

from kvferry.errors import ConfigError, StoreError
from kvferry.record.check import MissReason, RecordInfo, parse_head
from kvferry.record.schema import MAX_HEADER_BYTES
from kvferry.store.base import Entry, Store
from kvferry.store.kind import Opening, StoreUrl
from kvferry.store.maintenance import verify
from kvferry.store.url import kind_of, open_one, parse_store_url, read_options
from kvferry.types import ChunkKey

T = TypeVar("T")

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="Store, for example file:///var/cache/kvferry or s3://bucket/kv."
    ),
]

UNREADABLE = "(unreadable)"
"""Stands where the name of a model would."""

FIRST_ANSWER_SECONDS = 10.0
"""How long a command waits for a server's first answer; to list it may take longer."""

INDEX_SECONDS = 60.0
"""How long a command waits for the listing of a large directory that has no index."""


def query_store(url: str, question: Callable[[Store], T]) -> T:
    """Answer `question` about the store at `url`, opened read-only. A directory whose index is
    damaged or stays locked is asked without it: after any StoreError, `question` starts again.

    Raises:
        ConfigError: see `open_existing`.
        StoreError: the directory or the server cannot be listed.
    """
    try:
        with open_existing(url) as store:
            return question(store)
    except StoreError:
        parsed = parse_store_url(url)
        if parsed.scheme != "file":
            raise
        # A name that does not exist: the directory is listed instead.
        options = {**parsed.options, "index_file": f"{parsed.path}/none.sqlite3"}
        with open_existing(dataclasses.replace(parsed, options=options)) as store:
            return question(store)


def open_existing(url: str | StoreUrl, *, writable: bool = False) -> Store:
    """Open the store at `url` without creating, evicting or (unless `writable`) changing anything.
    On a server, only `delete` and `discard` change anything, whatever `writable` says.

    Raises:
        ConfigError: not a store URL, nothing there, not a store, or of a newer format; or a store
            that lives in one process only and so has nothing to show to another.
        StoreError: a server hangs.
    """
    parsed = url if isinstance(url, StoreUrl) else parse_store_url(url)
    if parsed.scheme == "memory":
        raise ConfigError(
            f"store URL {str(parsed)!r}: a memory store ends with its process, so there is nothing "
            "to look at; use file:///absolute/directory"
        )
    if parsed.scheme == "file":
        parsed = _existing(parsed, writable=writable)
    # No command calls `contains`, so none needs the keys in memory. But only the upkeep of a store
    # that has them goes on to compare a directory with an index that is complete.
    store = open_one(parsed, Opening(index=writable and parsed.scheme == "file"))
    await_answer(store)
    until = time.monotonic() + INDEX_SECONDS
    while not store.stat().index_complete and time.monotonic() < until:
        time.sleep(0.005)
    return store


def await_answer(store: Store) -> None:
    """Close the store and raise StoreError if its server says nothing. Other errors are left for
    the command to meet. A directory is not asked."""
    if not kind_of(parse_store_url(store.url).scheme).hosts:
        return
    started = time.monotonic()
    try:
        store.read(ChunkKey(bytes(32)), (), started + FIRST_ANSWER_SECONDS)
    except StoreError:
        # Clients give up a little before the deadline, too.
        if time.monotonic() >= started + FIRST_ANSWER_SECONDS / 2:
            store.close()
            raise StoreError(f"{store.url}: no answer within {FIRST_ANSWER_SECONDS:g} s") from None
    except BaseException:
        store.close()
        raise


def _existing(parsed: StoreUrl, *, writable: bool) -> StoreUrl:
    """The URL of a directory, with options under which opening neither creates nor (unless
    `writable`) changes it."""
    given = read_options(parsed)
    if writable and getattr(given, "read_only", False):
        raise ConfigError(
            f"store URL {str(parsed)!r} says read_only, and this command changes the store"
        )
    options = {**parsed.options, "create": "false", "read_only": str(not writable)}
    return dataclasses.replace(parsed, options=options)


def entries(store: Store, found: Iterable[Entry]) -> Iterator[Entry]:
    """Passes on `found`; refuses a server URL under which nothing is stored.

    Raises:
        ConfigError: nothing is stored on a server under this URL.
        StoreError: the store cannot be listed.
    """
    is_empty = True
    for entry in found:
        is_empty = False
        yield entry
    if is_empty:
        namespaces(store)


def namespaces(store: Store) -> dict[bytes, tuple[int, int]]:
    """Number of records and of bytes, by namespace; raises as `entries`."""
    found = store.namespaces()
    # A server has no directory that could be missing: a wrong prefix looks like this. A store that
    # was emptied still has the description of its namespaces.
    if not found and kind_of(parse_store_url(store.url).scheme).hosts:
        raise ConfigError(
            f"nothing is stored under {store.url}; check the name and the prefix, unless no engine "
            "has used it yet"
        )
    return found


def find(store: Store, key_prefix: str) -> Entry:
    """The one value whose key starts with `key_prefix` (hexadecimal).

    Raises:
        ConfigError: not hexadecimal, or none or several match.
    """
    prefix = key_prefix.lower()
    if not prefix or len(prefix) > 64 or set(prefix) - set("0123456789abcdef"):
        raise ConfigError(f"{key_prefix!r} is not a key; give 1 to 64 hexadecimal digits")
    matches = [
        entry for entry in entries(store, store.scan()) if entry.key.hex().startswith(prefix)
    ]
    if len(matches) == 1:
        return matches[0]
    number = "no record" if not matches else f"{len(matches)} records"
    hint = "`kvferry ls` lists them" if not matches else "give more digits"
    raise ConfigError(f"{number} in {store.url} with a key that starts with {prefix}; {hint}")


def model_names(store: Store, digests: Iterable[bytes]) -> dict[bytes, str]:
    """Names of the models of namespaces that the store describes; `UNREADABLE` for a description
    that is damaged, or of another namespace."""
    from kvferry.explain import describe_all

    return {
        digest: UNREADABLE if namespace is None else namespace.title
        for digest, namespace in describe_all(store, digests).items()
    }


def inspect(store: Store, entry: Entry) -> RecordInfo | MissReason:
    """Read the header of a record; hostile bytes and a failing medium become a reason."""
    try:
        head = memoryview(bytearray(8 + MAX_HEADER_BYTES))
        size = store.of(entry.namespace).read(entry.key, [(0, head)])
        if size is None:
            return MissReason.ABSENT
        info = parse_head(head[:size], size)
    except StoreError:
        return MissReason.IO_ERROR
    if isinstance(info, RecordInfo) and info.key != entry.key:
        return MissReason.WRONG_KEY
    return info


def check(store: Store, entry: Entry) -> MissReason | None:
    """Compare every checksum of a record, and leave it where it is; None if it is right."""
    report = verify(store, [entry], discards=False)
    if report.bad:
        return report.bad[0][1]
    if report.num_unreadable:
        return MissReason.IO_ERROR
    return None if report.num_records else MissReason.ABSENT
