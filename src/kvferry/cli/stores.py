"""Opens existing stores for commands and reads their records. Creates nothing, and changes nothing
unless asked to. `query_store` serves commands that only look."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, TypeVar

import typer

from kvferry.cli.output import NothingFound
from kvferry.cli.prompts import check_digits
from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry
from kvferry.store.faults import Calls
from kvferry.store.kind import Opening, StoreUrl
from kvferry.store.kinds import kind_of
from kvferry.store.url import open_one, parse_store_url, read_options
from kvferry.types import ChunkKey

T = TypeVar("T")

UrlArgument = Annotated[
    str,
    typer.Argument(
        metavar="URL", help="Store, for example file:///var/cache/kvferry or s3://bucket/kv."
    ),
]

FIRST_ANSWER_SECONDS = 10.0
"""How long a command waits for a server's first answer; a listing may take longer."""

INDEX_SECONDS = 60.0
"""How long a command waits for the listing of a large directory that has no index."""


def query_store(url: str, question: Callable[[Store], T]) -> T:
    """Open the store at `url` read-only and return what `question` answers. After a StoreError, a
    directory is asked again without its index, which may be damaged or locked. Raises as
    `open_existing`, and StoreError if the directory or the server cannot be listed."""
    try:
        with open_existing(url) as store:
            return question(store)
    except StoreError:
        parsed = parse_store_url(url)
        if not kind_of(parsed.scheme).is_directory:
            raise
        # A name that does not exist: the directory is listed instead.
        options = {**parsed.options, "index_file": f"{parsed.path}/none.sqlite3"}
        with open_existing(dataclasses.replace(parsed, options=options)) as store:
            return question(store)


def open_existing(
    url: str | StoreUrl, *, writable: bool = False, calls: Calls | None = None
) -> Store:
    """Open the store at `url` without creating, evicting or (unless `writable`) changing anything.
    `writable` makes no difference for a server: only `delete` and `discard` change it. `calls` is
    where the calls of a client are noted.

    Raises:
        ConfigError: not a store URL, nothing there, not a store, or of a newer format; or a store
            that lives in one process only and so has nothing to show to another.
        StoreError: a server hangs.
    """
    parsed = parse_store_url(url)
    kind = kind_of(parsed.scheme)
    if kind.is_private:
        raise ConfigError(
            f"store URL {str(parsed)!r}: a memory store ends with its process, so there is nothing "
            "to look at; use file:///absolute/directory"
        )
    if kind.is_directory:
        read_options(parsed)  # raises for wrong ones, before others are set
        if writable:
            require_writable(parsed)
        options = {**parsed.options, "create": "false", "read_only": str(not writable)}
        parsed = dataclasses.replace(parsed, options=options)
    # No command calls `contains`, so none needs the keys in memory. A writable directory has them
    # nevertheless: only then does its upkeep go on comparing a complete index with the files.
    opening = Opening(
        index=writable and kind.is_directory,
        may_create=False,
        calls=Calls() if calls is None else calls,
    )
    store = open_one(parsed, opening)
    await_answer(store)
    store.wait_indexed(INDEX_SECONDS)
    return store


def await_answer(store: Store) -> None:
    """Wait for a server's first answer; without one, close the store and raise StoreError. Other
    errors are left for the command to meet. A directory is not asked."""
    if not kind_of(parse_store_url(store.url).scheme).hosts:
        return
    started = time.monotonic()
    try:
        store.read(ChunkKey(bytes(32)), (), started + FIRST_ANSWER_SECONDS)
    except StoreError:
        # Clients may give up before the deadline, so an error after half of it is a hang, too.
        if time.monotonic() >= started + FIRST_ANSWER_SECONDS / 2:
            store.close()
            said = f"{store.url}: no answer within {FIRST_ANSWER_SECONDS:g} s"
            raise StoreError(FaultKind.LATE, said) from None
    except BaseException:
        store.close()
        raise


def require_writable(url: StoreUrl) -> None:
    """Raise ConfigError for the URL of a store that says read_only."""
    if getattr(read_options(url), "read_only", False):
        raise ConfigError(f"{url.where} says read_only, and this command changes the store")


def entries(store: Store, found: Iterable[Entry]) -> Iterator[Entry]:
    """Pass on `found`. If it is empty, raise as `namespaces` does."""
    is_empty = True
    for entry in found:
        is_empty = False
        yield entry
    if is_empty:
        namespaces(store)


def namespaces(store: Store) -> dict[bytes, tuple[int, int]]:
    """Return the numbers of records and of bytes by namespace. Raises StoreError if the store does
    not list them, ConfigError if nothing is stored on a server under this URL."""
    found = store.catalogue().namespaces()
    # A missing directory is found at its opening; a wrong prefix on a server only looks empty. A
    # store that was emptied still has the descriptions of its namespaces.
    if not found and kind_of(parse_store_url(store.url).scheme).hosts:
        raise ConfigError(
            f"nothing is stored under {store.url}; check the name and the prefix, unless no engine "
            "has used it yet"
        )
    return found


def find(store: Store, key_prefix: str) -> Entry:
    """Return the one record whose key starts with `key_prefix` (hexadecimal). Raises NothingFound
    if none does, ConfigError if several do."""
    prefix = check_digits(key_prefix, "a key")
    found = (
        entry
        for entry in entries(store, store.catalogue().scan())
        if entry.key.hex().startswith(prefix)
    )
    matches = list(found)
    if len(matches) == 1:
        return matches[0]
    what = f"in {store.url} with a key that starts with {prefix}"
    if not matches:
        raise NothingFound(f"no record {what}; `kvferry ls` lists them")
    raise ConfigError(f"{len(matches)} records {what}; give more digits")
