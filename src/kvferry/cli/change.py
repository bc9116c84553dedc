"""`kvferry rm` and `kvferry pin`: delete chosen records, or keep them from eviction."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from typing import Annotated

import typer

from kvferry.cli import stores
from kvferry.cli.choice import (
    Choice,
    DryRunOption,
    choosing,
    chosen,
    why_nothing,
)
from kvferry.cli.erase import erase
from kvferry.cli.output import (
    JsonOption,
    JsonRow,
    YesOption,
    confirm,
    emit,
    parse_duration,
    require_size,
    say_nothing,
)
from kvferry.cli.stores import UrlArgument, open_existing
from kvferry.config import format_size
from kvferry.errors import ConfigError
from kvferry.store import maintenance
from kvferry.store.base import Store
from kvferry.store.catalogue import GcReport, Indexed, too_many_pins
from kvferry.store.kind import shown_url

_CANNOT_PIN = "cannot pin; a directory can"


@choosing
def rm(
    urls: Annotated[
        list[str], typer.Argument(metavar="URL...", help="Store, or all that may hold it.")
    ],
    choice: Choice,
    max_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep at most this much, e.g. 10GiB.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only records not used for this long, e.g. 36h."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="All records of the store.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = None,
) -> None:
    """Delete the records that match all given options, or the least recently used beyond a size.

    Asks first. Pinned records stay where age or size chooses; else they are deleted, too, and
    engines drop them from memory within seconds. --salt without a prompt is all of that salt. Of a
    prompt, its own chunks are deleted: longer prompts that begin with it miss from then on. A
    bucket says when a record was written, not used. Exit code 1 if nothing matches, 3 if something
    is left.

    Example: kvferry rm file:///var/cache/kvferry --tenant team-a --dry-run
    """
    choice = _with_age(choice, older_than)
    is_by_use = _is_by_use(choice, max_bytes is not None, everything)
    keep_bytes = None if max_bytes is None else require_size("--max-bytes", max_bytes)
    if not is_by_use:
        erase(urls, choice, json, dry_run=dry_run, yes=yes)
        return
    if len(urls) > 1:
        raise ConfigError("--max-bytes and --older-than alone are of one store; give one URL")
    _make_smaller(urls[0], keep_bytes, choice, json, dry_run=dry_run, yes=yes)


def _make_smaller(
    url: str,
    keep_bytes: int | None,
    choice: Choice,
    json: str | None,
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    def ask(store: Store) -> tuple[GcReport, str]:
        found = stores.entries(store, store.catalogue().scan())
        report = maintenance.estimate(store, found, keep_bytes, choice.age)
        return report, explained(store, report)

    def explained(store: Store, report: GcReport) -> str:
        # A store that has at most the wanted size is what was asked for.
        is_done = report.removed_records > 0 or keep_bytes is not None
        return "" if is_done else why_nothing(store, choice)

    report, why = GcReport(0, 0, 0), ""
    if dry_run or not yes:
        report, why = stores.query_store(url, ask)
    if not dry_run and not why:
        confirm(f"delete {_count(report)}, of {shown_url(url)}?", yes=yes)
        with open_existing(url, writable=True) as store:
            report = _shrink(store, keep_bytes, choice.age)
            why = explained(store, report)
    value: JsonRow = {"dry_run": dry_run, "records": report.removed_records}
    value |= {"num_bytes": report.removed_bytes, "used_bytes": report.used_bytes}
    if why:
        say_nothing(value, json, why)
    verb = "would be deleted" if dry_run else "deleted"
    used = format_size(report.used_bytes)
    emit(value, json, f"{_count(report)} {verb}; {used} in use after it")


def _count(report: GcReport) -> str:
    return f"{report.removed_records:,} records, {format_size(report.removed_bytes)}"


def _with_age(choice: Choice, older_than: str | None) -> Choice:
    if older_than is None:
        return choice
    if choice.prompt is not None:
        raise ConfigError("--older-than and a prompt do not go together")
    return replace(choice, age=parse_duration(older_than))


def _is_by_use(choice: Choice, has_size: bool, everything: bool) -> bool:
    """Whether age and size alone choose. Raises ConfigError if the options do not go together."""
    is_by_use = replace(choice, age=None).is_everything and not everything
    if is_by_use and not has_size and choice.age is None:
        raise ConfigError(
            "choose the records: --max-bytes, --older-than, --namespace, --model, --tenant, "
            "--salt, a prompt, or --everything"
        )
    if has_size and not is_by_use:
        raise ConfigError("--max-bytes is of the whole store: it goes with --older-than alone")
    if everything and not choice.is_everything:
        raise ConfigError("--everything stands alone")
    return is_by_use


def _shrink(store: Store, keep_bytes: int | None, age: float | None) -> GcReport:
    report = store.catalogue().gc(keep_bytes, age)
    if not (report.removed_records or report.used_bytes):
        stores.namespaces(store)  # raises where the prefix is wrong
    return report


@choosing
def pin(
    url: UrlArgument,
    choice: Choice,
    until: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="For so long, e.g. 36h; a local time such as 2027-01-31T08:00; or 'now' to unpin.",
        ),
    ],
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Protect records from eviction, and from `rm` by age and size; 'now' unpins them.

    Only a directory can pin, up to half of its quota: give the same max_bytes in the URL as the
    engines do. Servers evict by their own rules and cannot. Ranks on several machines may have a
    directory each: pin in all. Exit code 1 if none of the chosen records is there.

    Example: kvferry pin "file:///var/cache/kvferry?max_bytes=200GiB" --until 36h --model M
    """
    ends = _time(until)
    if choice.is_everything:
        raise ConfigError("choose the records: --namespace, --model, --tenant, or a prompt")
    with open_existing(url, writable=not dry_run) as store:
        if dry_run:
            num_records = _count_pins(store, choice, ends)
        else:
            index = Indexed.of(store, _CANNOT_PIN)
            num_records = index.pin((entry.key for entry in chosen(store, choice)), ends)
        why = "" if num_records else why_nothing(store, choice)
    is_over = ends <= time.time()
    done = "unpinned" if is_over else f"pinned for {(ends - time.time()) / 3600:.1f} h"
    value: JsonRow = {"dry_run": dry_run, "records": num_records}
    value["until"] = None if is_over else ends
    if why:
        say_nothing(value, json, why)
    emit(value, json, f"{num_records:,} records {'would be ' if dry_run else ''}{done}")


def _count_pins(store: Store, choice: Choice, ends: float) -> int:
    """Count what `Store.pin` would pin or unpin; raises as it does, except for a right to write."""
    max_bytes = store.stat().max_bytes
    if max_bytes is None:
        return Indexed.of(store, _CANNOT_PIN).pin((), ends)  # raises: no quota, or a server
    sizes = {entry.key: entry.stored_bytes for entry in chosen(store, choice)}
    if ends > time.time():
        pinned = {
            each.key: each.stored_bytes for each in store.catalogue().scan() if each.pinned_until
        }
        if 2 * sum({**pinned, **sizes}.values()) > max_bytes:
            raise too_many_pins(len(pinned))
    return len(sizes)


def _time(text: str) -> float:
    """Parse a time into seconds since the epoch; 'now' is 0. A time without an offset is local.
    Raises ConfigError if it is no time, or is past."""
    if text == "now":
        return 0.0
    try:
        return time.time() + parse_duration(text)
    except ConfigError:
        pass
    try:
        ends = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"--until {text!r}: write 36h, 2027-01-31T08:00 or now") from None
    if ends <= time.time():
        raise ConfigError(f"--until {text} is in the past; write 'now' to unpin")
    return ends
