"""`kvferry gc`: make a store smaller now, instead of when a writer needs the room."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import typer

from kvferry.cli.output import (
    JsonOption,
    emit,
    make_table,
    parse_duration,
    require_size,
)
from kvferry.cli.stores import UrlArgument, look, open_existing
from kvferry.config import format_size
from kvferry.errors import ConfigError
from kvferry.store.base import Entry, Store


class _Outcome(NamedTuple):
    removed_records: int
    removed_bytes: int
    used_bytes: int


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
    """Delete records not used for long, then the least recently used, until the rest fits.

    A dry run is an estimate: a real one also removes what is in quarantine, and a little more than
    asked for, so that the next write need not evict again.

    Example: kvferry gc file:///var/cache/kvferry --max-bytes 10GiB
    """
    if max_bytes is None and older_than is None:
        raise ConfigError("nothing to do: give --max-bytes, --older-than or both")
    keep_bytes = None if max_bytes is None else require_size("--max-bytes", max_bytes)
    age = None if older_than is None else parse_duration(older_than)
    if dry_run:
        since = None if age is None else time.time() - age
        done = look(
            url,
            lambda store: _estimate(
                store, store.scan(), max_bytes=keep_bytes, not_used_since=since
            ),
        )
    else:
        with open_existing(url, writable=True) as store:
            report = store.gc(keep_bytes, age)
        done = _Outcome(report.removed_records, report.removed_bytes, report.used_bytes)
    table = make_table(None, "", "records", "size", right=("records", "size"))
    verb = "would delete" if dry_run else "deleted"
    table.add_row(verb, str(done.removed_records), format_size(done.removed_bytes))
    table.add_row("in use after it", "", format_size(done.used_bytes))
    emit({"dry_run": dry_run, **done._asdict()}, json, table)


def _estimate(
    store: Store,
    entries: Iterable[Entry],
    *,
    max_bytes: int | None,
    not_used_since: float | None,
) -> _Outcome:
    victims = choose_victims(entries, max_bytes=max_bytes, not_used_since=not_used_since)
    removed_bytes = sum(entry.num_bytes for entry in victims)
    return _Outcome(len(victims), removed_bytes, store.stat().used_bytes - removed_bytes)


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
