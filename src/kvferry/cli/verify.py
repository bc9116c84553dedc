"""`kvferry verify`: read everything in a store and take out what is not right."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, NamedTuple

import typer
from rich.console import RenderableType

from kvferry.cli import records
from kvferry.cli.output import JsonOption, emit, make_table, progress
from kvferry.cli.stores import UrlArgument, open_existing, scan
from kvferry.config import format_size
from kvferry.record.check import MissReason
from kvferry.store.base import Entry


class _Bad(NamedTuple):
    entry: Entry
    reason: MissReason


def verify(
    url: UrlArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report; leave bad records where they are.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check every checksum of every record; quarantine what is wrong.

    A record that vanishes meanwhile (evicted) is not counted; one that cannot be read (I/O error)
    is reported and stays. Exit code 1 if any record was bad.
    """
    checked = checked_bytes = 0
    bad: list[_Bad] = []
    with open_existing(url, writable=not dry_run) as store, progress() as bar:
        for entry in bar.track(list(scan(store)), description="verifying"):
            reason = records.verify(store, entry)
            if reason is MissReason.ABSENT:
                continue
            checked += 1
            checked_bytes += entry.num_bytes
            if reason is None:
                continue
            bad.append(_Bad(entry, reason))
            if reason.is_corruption and not dry_run:
                store.discard(entry.key, reason)
    emit(
        {
            "dry_run": dry_run,
            "records": checked,
            "num_bytes": checked_bytes,
            "bad": [{"key": entry.key.hex(), "reason": str(reason)} for entry, reason in bad],
            "reasons": dict(Counter(str(reason) for _, reason in bad)),
        },
        json,
        *_report(checked, checked_bytes, bad, dry_run=dry_run),
    )
    if bad:
        raise typer.Exit(1)


def _report(
    checked: int, checked_bytes: int, bad: list[_Bad], *, dry_run: bool
) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if bad:
        table = make_table(None, "key", "size", "reason", "action", right=("size",))
        for entry, reason in bad:
            moved = reason.is_corruption and not dry_run
            size = format_size(entry.num_bytes)
            table.add_row(entry.key.hex(), size, reason, "quarantined" if moved else "left")
        lines.append(table)
    lines.append(f"{checked} records, {format_size(checked_bytes)} checked; {len(bad)} bad")
    return lines
