"""`kvferry verify` and `gc`: take out of a store what is wrong, and what is too much."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli import output
from kvferry.cli.output import JsonOption, JsonRow, emit, make_table
from kvferry.cli.stores import UrlArgument, as_directory, entries, look, open_existing
from kvferry.config import format_size
from kvferry.errors import ConfigError, StoreError
from kvferry.store import checking
from kvferry.store.base import Entry, GcReport

if TYPE_CHECKING:
    from kvferry.cli.stores import AnyStore

logger = logging.getLogger(__name__)


def verify(
    url: UrlArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report; leave bad records where they are.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check every checksum of every record; quarantine what is wrong, or delete it from a server.

    A record that vanishes meanwhile (evicted) is not counted; one that the medium does not give
    stays. Exit code 1 if any record was bad or could not be read.

    Example: kvferry verify file:///var/cache/kvferry --dry-run
    """
    with open_existing(url, writable=not dry_run) as store, output.progress() as bar:
        task = bar.add_task("verifying", total=store.stat().num_records or None)
        report = _verify(
            store, lambda num_records, _: bar.update(task, completed=num_records), dry_run
        )
        bad: list[JsonRow] = [
            {"key": entry.key.hex(), "reason": str(why), "action": _action(store, entry, dry_run)}
            for entry, why in report.bad
        ]
    value: JsonRow = {
        "dry_run": dry_run,
        "records": report.num_records,
        "num_bytes": report.num_bytes,
        "unreadable": report.num_unreadable,
        "bad": list(bad),
        "reasons": dict(Counter(str(why) for _, why in report.bad)),
    }
    tables = []
    if bad:
        columns = {"key": "key", "reason": "reason", "action": "action"}
        tables.append(make_table(columns, bad))
    checked = f"{report.num_records} records, {format_size(report.num_bytes)} checked"
    emit(value, json, *tables, f"{checked}: {len(bad)} bad, {report.num_unreadable} unreadable")
    if report.bad or report.num_unreadable:
        raise typer.Exit(1)


def _verify(store: AnyStore, progress: checking.Progress, dry_run: bool) -> checking.VerifyReport:
    directory = as_directory(store)
    if directory is not None:  # knows files that the index does not
        return directory.verify(progress)
    return checking.verify(store, entries(store), progress, discards=not dry_run)


def _action(store: AnyStore, entry: Entry, dry_run: bool) -> str:
    """What became of a bad record; it stays where the medium or the server refuses."""
    try:
        is_left = dry_run or store.of(entry.namespace).read(entry.key, ()) is not None
    except StoreError:
        is_left = True
    if is_left:
        return "left"
    return "deleted" if as_directory(store) is None else "quarantined"


def gc(
    url: UrlArgument,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep at most this much, e.g. 10GiB.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Delete what was not used for this long, e.g. 36h."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Delete records not used for long, then the least recently used, until the rest fits.

    A dry run is an estimate: in a directory, a real one also removes what is in quarantine, and a
    little more than asked for, so that the next write need not evict again. A bucket says when a
    record was written, not used.

    Example: kvferry gc file:///var/cache/kvferry --max-bytes 10GiB
    """
    if max_bytes is None and older_than is None:
        raise ConfigError("nothing to do: give --max-bytes, --older-than or both")
    keep_bytes = None if max_bytes is None else output.require_size("--max-bytes", max_bytes)
    age = None if older_than is None else output.parse_duration(older_than)
    if dry_run:
        report = look(url, lambda store: _estimate(store, keep_bytes, age))
    else:
        with open_existing(url, writable=True) as store:
            directory = as_directory(store)
            if directory is not None:
                report = directory.gc(keep_bytes, age)
            else:
                report = _shrink(store, keep_bytes, age)
    verb = "would delete" if dry_run else "deleted"
    rows: list[JsonRow] = [
        {"what": verb, "records": report.removed_records, "num_bytes": report.removed_bytes},
        {"what": "in use after it", "num_bytes": report.used_bytes},
    ]
    table = make_table({"": "what", "records": "records", "size": "num_bytes"}, rows)
    emit({"dry_run": dry_run, **report._asdict()}, json, table)


def _estimate(store: AnyStore, max_bytes: int | None, age: float | None) -> GcReport:
    """What `gc` would remove of the records."""
    found, used_bytes = _newest_first(store, age)
    removed_records = removed_bytes = 0
    for entry in _surplus(found, max_bytes, age):
        removed_records += 1
        removed_bytes += entry.num_bytes
    return GcReport(removed_records, removed_bytes, used_bytes - removed_bytes)


def _shrink(store: AnyStore, max_bytes: int | None, age: float | None) -> GcReport:
    """Delete what `_estimate` counts, the least recently used first. An engine that looks for one
    of these misses.

    Raises:
        StoreError: the server refused to delete a record, or failed; what went before is gone.
    """
    found, used_bytes = _newest_first(store, age)
    removed_records = removed_bytes = 0
    for entry in reversed(list(_surplus(found, max_bytes, age))):
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


def _newest_first(store: AnyStore, age: float | None) -> tuple[Iterable[Entry], int]:
    """Every record, the most recently used first, and the bytes that are stored.

    Raises:
        ConfigError: there is an `age`, and no record says when it was used.
    """
    directory = as_directory(store)
    if directory is not None:
        return directory.recent(sys.maxsize), directory.stat().used_bytes
    found = sorted(entries(store), key=lambda entry: entry.last_used, reverse=True)
    num_unknown = sum(entry.last_used == 0.0 for entry in found)
    if age is not None and found and num_unknown == len(found):
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
    return found, sum(entry.num_bytes for entry in found)


def _surplus(found: Iterable[Entry], max_bytes: int | None, age: float | None) -> Iterator[Entry]:
    """The records of `found` (the most recently used first) that do not fit, or were not used for
    long. An unknown last use is never long ago."""
    unused_since = 0.0 if age is None else time.time() - age
    seen_bytes = 0
    for entry in found:
        seen_bytes += entry.num_bytes
        too_much = max_bytes is not None and seen_bytes > max_bytes
        if too_much or 0.0 < entry.last_used < unused_since:
            yield entry
