"""`kvferry gc`: make a store smaller now, instead of when a writer needs the room."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated

import typer

from kvferry.cli.output import JsonOption, emit, format_age, make_table, parse_duration, progress
from kvferry.cli.stores import UrlArgument, open_existing, scan
from kvferry.config import format_size, parse_size
from kvferry.errors import ConfigError
from kvferry.store.base import Entry


def gc(
    url: UrlArgument,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", help="Keep at most this much, e.g. 10GiB."),
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="AGE", help="Delete what was not used for this long, e.g. 36h."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Delete the least recently used records of a store."""
    if max_bytes is None and older_than is None:
        raise ConfigError("nothing to do: give --max-bytes, --older-than or both")
    keep_bytes = None if max_bytes is None else parse_size(max_bytes)
    now = time.time()
    oldest = None if older_than is None else now - parse_duration(older_than)
    with open_existing(url, writable=not dry_run) as store:
        entries = list(scan(store))
        victims = choose_victims(entries, max_bytes=keep_bytes, not_used_since=oldest)
        deleted = victims
        if not dry_run:
            with progress() as bar:
                deleted = [
                    entry
                    for entry in bar.track(victims, description="deleting")
                    if store.delete(entry.key)
                ]
    deleted_bytes = sum(entry.num_bytes for entry in deleted)
    kept_bytes = sum(entry.num_bytes for entry in entries) - deleted_bytes
    table = make_table(None, "", "records", "size", right=("records", "size"))
    table.add_row(
        "would delete" if dry_run else "deleted", str(len(deleted)), format_size(deleted_bytes)
    )
    table.add_row("kept", str(len(entries) - len(deleted)), format_size(kept_bytes))
    note = [f"least recently used of these: {format_age(victims[0].last_used, now)} ago"]
    emit(
        {
            "dry_run": dry_run,
            "deleted_records": len(deleted),
            "deleted_bytes": deleted_bytes,
            "kept_records": len(entries) - len(deleted),
            "kept_bytes": kept_bytes,
        },
        json,
        table,
        *(note if victims else []),
    )


def choose_victims(
    entries: Iterable[Entry], *, max_bytes: int | None, not_used_since: float | None
) -> list[Entry]:
    """What to delete, least recently used first. Pure.

    Args:
        entries: everything stored.
        max_bytes: keep at most this much; None for no bound.
        not_used_since: delete what was last used before this time, whatever the size.
    """
    oldest_first = sorted(entries, key=lambda entry: entry.last_used)
    kept_bytes = sum(entry.num_bytes for entry in oldest_first)
    victims = []
    for entry in oldest_first:
        too_old = not_used_since is not None and entry.last_used < not_used_since
        too_much = max_bytes is not None and kept_bytes > max_bytes
        if not (too_old or too_much):
            break
        victims.append(entry)
        kept_bytes -= entry.num_bytes
    return victims
