"""`kvferry verify`: read everything in a store and take out what is not right."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from kvferry.cli.output import JsonOption, emit, make_table, progress, short_key
from kvferry.cli.stores import UrlArgument, open_existing
from kvferry.config import format_size

if TYPE_CHECKING:
    from kvferry.store.checking import VerifyReport


def verify(
    url: UrlArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report; leave bad records where they are.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check every checksum of every record; quarantine what is wrong.

    A record that vanishes meanwhile (evicted) is not counted; one that the medium does not give
    stays. Exit code 1 if any record was bad or could not be read.

    Example: kvferry verify file:///var/cache/kvferry --dry-run
    """
    with open_existing(url, writable=not dry_run) as store, progress() as bar:
        task = bar.add_task("verifying", total=store.stat().num_records)
        report = store.verify(lambda num_records, _: bar.update(task, completed=num_records))
    emit(
        {
            "dry_run": dry_run,
            "records": report.num_records,
            "num_bytes": report.num_bytes,
            "unreadable": report.num_unreadable,
            "bad": [{"key": key.hex(), "reason": str(reason)} for key, reason in report.bad],
            "reasons": dict(Counter(str(reason) for _, reason in report.bad)),
        },
        json,
        *_lines(report, dry_run=dry_run),
    )
    if report.bad or report.num_unreadable:
        raise typer.Exit(1)


def _lines(report: VerifyReport, *, dry_run: bool) -> list[RenderableType]:
    lines: list[RenderableType] = []
    if report.bad:
        table = make_table(None, "key", "reason", "action")
        for key, reason in report.bad:
            table.add_row(short_key(key), reason, "left" if dry_run else "quarantined")
        lines.append(table)
    lines.append(
        f"{report.num_records} records, {format_size(report.num_bytes)} checked: "
        f"{len(report.bad)} bad, {report.num_unreadable} unreadable"
    )
    return lines
