"""Opening a store to look at it: nothing is created, and nothing changes unless asked for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, cast

import typer

from kvferry.config import build_config, parse_store_url
from kvferry.errors import ConfigError
from kvferry.store.base import Entry
from kvferry.store.url import FileOptions, open_store

if TYPE_CHECKING:
    from kvferry.store.file import FileStore

UrlArgument = Annotated[
    str, typer.Argument(metavar="URL", help="Store, for example file:///var/cache/kvferry.")
]

INDEX_SECONDS = 60.0
"""How long a command waits for the index of a large store."""


def open_existing(url: str, *, writable: bool = False) -> FileStore:
    """Open the store at `url` without creating, evicting or (unless `writable`) changing anything.

    Raises:
        ConfigError: not a store URL, nothing there, not a store, or of a newer format; or a store
            that lives in one process only and so has nothing to show to another.
    """
    parsed = parse_store_url(url)
    if parsed.scheme == "memory":
        raise ConfigError(
            f"store URL {url!r}: a memory store ends with its process, so there is nothing to look "
            "at; use file:///absolute/directory"
        )
    # Before options are changed here: a refusal should show the URL as it was given.
    given = build_config(FileOptions, parsed.options, where=f"store URL {url!r}")
    if writable and given.read_only:
        raise ConfigError(f"store URL {url!r} says read_only, and this command changes the store")
    options = {**parsed.options, "create": "false", "read_only": str(not writable)}
    # What a file URL opens; the class itself is not imported here, since that takes its time.
    store = cast("FileStore", open_store(str(dataclasses.replace(parsed, options=options))))
    store.wait_indexed(INDEX_SECONDS)
    return store


def find(store: FileStore, key_prefix: str) -> Entry:
    """The one value whose key starts with `key_prefix` (hexadecimal).

    Raises:
        ConfigError: not hexadecimal, or none or several match.
    """
    prefix = key_prefix.lower()
    if not prefix or len(prefix) > 64 or set(prefix) - set("0123456789abcdef"):
        raise ConfigError(f"{key_prefix!r} is not a key; give 1 to 64 hexadecimal digits")
    matches = [entry for entry in store.scan() if entry.key.hex().startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    found = "no record" if not matches else f"{len(matches)} records"
    hint = "`kvferry ls` lists them" if not matches else "give more digits"
    raise ConfigError(f"{found} in {store.url} with a key that starts with {prefix}; {hint}")
