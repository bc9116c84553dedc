"""`kvferry verify` and `gc`: take out of a store what is wrong, and what is too much."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from kvferry.cli import output
from kvferry.cli.output import JsonOption, JsonRow, emit, make_table
from kvferry.cli.stores import UrlArgument, entries, look, namespaces, open_existing
from kvferry.config import format_size
from kvferry.errors import ConfigError, StoreError
from kvferry.store import maintenance
from kvferry.store.base import Entry, Store
from kvferry.store.maintenance import estimate


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
        report = maintenance.verify(
            store,
            entries(store, store.stored()),
            lambda num_records, _: bar.update(task, completed=num_records),
            discards=not dry_run,
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


def _action(store: Store, entry: Entry, dry_run: bool) -> str:
    """What became of a bad record; it stays where the medium or the server refuses."""
    try:
        is_left = dry_run or store.of(entry.namespace).read(entry.key, ()) is not None
    except StoreError:
        is_left = True
    if is_left:
        return "left"
    return "quarantined" if store.quarantines else "deleted"


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
        report = look(
            url, lambda store: estimate(store, entries(store, store.scan()), keep_bytes, age)
        )
    else:
        with open_existing(url, writable=True) as store:
            report = store.gc(keep_bytes, age)
            if not (report.removed_records or report.used_bytes):
                namespaces(store)  # raises where the prefix is wrong
    verb = "would delete" if dry_run else "deleted"
    rows: list[JsonRow] = [
        {"what": verb, "records": report.removed_records, "num_bytes": report.removed_bytes},
        {"what": "in use after it", "num_bytes": report.used_bytes},
    ]
    table = make_table({"": "what", "records": "records", "size": "num_bytes"}, rows)
    emit({"dry_run": dry_run, **report._asdict()}, json, table)
