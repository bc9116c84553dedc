"""Which values of a store are too many or too old, for stores that do not evict by themselves."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Entry, GcReport, Store

logger = logging.getLogger(__name__)


def estimate(
    store: Store, found: Iterable[Entry], max_bytes: int | None, age: float | None
) -> GcReport:
    """What `Store.gc` would remove of the values `found`; nothing is removed."""
    entries = _newest_first(store, found, age)
    surplus = list(_surplus(entries, max_bytes, age))
    removed_bytes = sum(entry.num_bytes for entry in surplus)
    # Of a directory, with its quarantine.
    used_bytes = store.facts().get("used_bytes") or sum(entry.num_bytes for entry in entries)
    return GcReport(len(surplus), removed_bytes, used_bytes - removed_bytes)


def shrink(store: Store, max_bytes: int | None, age: float | None) -> GcReport:
    """Delete what `estimate` counts, the least recently used first. An engine that looks for one of
    these misses.

    Raises:
        ConfigError: there is an `age`, and no value says when it was used.
        StoreError: the store refused to delete a value, or failed; what went before is gone.
    """
    entries = _newest_first(store, store.scan(), age)
    used_bytes = sum(entry.num_bytes for entry in entries)
    removed_records = removed_bytes = 0
    for entry in reversed(list(_surplus(entries, max_bytes, age))):
        used_bytes -= entry.num_bytes
        values = store.of(entry.namespace)
        if values.delete(entry.key):
            removed_records += 1
            removed_bytes += entry.num_bytes
        elif values.read(entry.key, ()) is not None:  # else it went by itself
            raise StoreError(
                f"{store.url} does not delete {entry.key.hex()}; check the right to delete "
                f"({removed_records} records were deleted before)"
            )
    return GcReport(removed_records, removed_bytes, used_bytes)


def _newest_first(store: Store, found: Iterable[Entry], age: float | None) -> list[Entry]:
    """The most recently used first. Raises ConfigError if there is an `age`, and no value says when
    it was used."""
    entries = sorted(found, key=lambda entry: entry.last_used, reverse=True)
    num_unknown = sum(entry.last_used == 0.0 for entry in entries)
    if age is not None and entries and num_unknown == len(entries):
        raise ConfigError(
            f"{store.url} does not say when its records were used, so --older-than cannot choose; "
            "give --max-bytes alone"
        )
    if num_unknown:
        logger.warning(
            "%s does not say when %d of its records were used: --max-bytes takes these first, and "
            "--older-than none of them",
            store.url,
            num_unknown,
        )
    return entries


def _surplus(found: Iterable[Entry], max_bytes: int | None, age: float | None) -> Iterator[Entry]:
    """The values of `found` (the most recently used first) that do not fit, or were not used for
    long. An unknown last use is never long ago."""
    unused_since = 0.0 if age is None else time.time() - age
    seen_bytes = 0
    for entry in found:
        seen_bytes += entry.num_bytes
        too_much = max_bytes is not None and seen_bytes > max_bytes
        if too_much or 0.0 < entry.last_used < unused_since:
            yield entry
