"""`kvferry status`: what a cache does now, once or again and again."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from kvferry.cli.output import JsonOption, JsonRow, emit, format_age, make_table, plain
from kvferry.cli.records import count_all
from kvferry.config import format_size
from kvferry.errors import KVError
from kvferry.store.kind import shown_url

if TYPE_CHECKING:
    from kvferry.readings import Buckets, Day, Reading

_ANSWER_SECONDS = 3.0
_BAR = 16
_MAX_ROWS = 12
_MAX_TEXT = 60

_TIERS = {"tier": "tier", "by": "role", "state": "state", "for": "age", "because": "because"}
_QUOTAS = {"store": "tier", "records": "records", "used": "used_bytes", "quota": "max_bytes"}
_TIMES = {"latency": "what", "count": "count", "half within": "p50", "99% within": "p99"}


class By(StrEnum):
    """What `--by` counts by."""

    DAY = "day"


View = Callable[[], tuple[JsonRow, list[RenderableType]]]
"""Reads the source once; returns the result for programs, and for people."""


def status(
    source: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="An engine's http://host:port/metrics, or a store."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read this journal (option `record`) instead of a URL."),
    ] = None,
    by: Annotated[
        By | None, typer.Option(help="Say of all of a journal what was not computed, by day.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Read again and again, in a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600.0, help="Seconds between two readings.")
    ] = 2.0,
    json: JsonOption = None,
) -> None:
    """Show what a cache does: hits by tier, reasons of misses, tiers and their states, latencies.

    From an engine's metrics, the last requests of a journal, or a store. Ctrl-C ends --watch.

    Example: kvferry status http://localhost:8000/metrics --watch
    """
    if (source is None) == (journal is None):
        raise typer.BadParameter("give the URL of an engine's metrics or of a store, or --journal")
    if by is not None and journal is None:
        raise typer.BadParameter("--by day is of a journal: give --journal")
    view = _view(source or "", journal, by_day=by is not None)
    if not watch or json is not None or not sys.stdout.isatty():
        value, shown = view()
        emit(value, json, *shown)
        return
    try:
        _run_live(view, interval)
    except KeyboardInterrupt:  # the way to end it
        return


def _view(source: str, journal: Path | None, *, by_day: bool) -> View:
    from kvferry.readings import read_days, read_endpoint, read_requests

    before: Reading | None = None

    def of_engine() -> tuple[JsonRow, list[RenderableType]]:
        nonlocal before
        now, last = read_endpoint(source, _ANSWER_SECONDS), before
        before = now
        return _show(now, last, shown_url(source))

    if journal is not None and by_day:
        return lambda: _show_days(read_days(journal), str(journal))
    if journal is not None:
        return lambda: _show(read_requests(journal), None, f"last requests of {journal}")
    if source.startswith(("http://", "https://")):
        return of_engine
    return lambda: count_all(source)


def _show_days(days: Sequence[Day], where: str) -> tuple[JsonRow, list[RenderableType]]:
    """Show what was not computed, thanks to a store."""
    loaded, total = sum(day.loaded for day in days), sum(day.num_tokens for day in days)
    seconds, untimed = sum(day.seconds for day in days), sum(day.untimed for day in days)
    summary = f"{where}: {loaded:,} of {total:,} tokens were loaded instead of computed"
    if seconds:
        summary += f", which would have taken {format_age(0.0, seconds)}"
    if untimed:
        summary += f" (of {untimed:,} tokens it is not known how long)"
    rows: list[JsonRow] = [
        {**day._asdict(), "share": f"{day.loaded / max(1, day.num_tokens):.1%}",
         "not_computed": format_age(0.0, day.seconds)}
        for day in days
    ]  # fmt: skip
    columns = {"day": "day", "requests": "num_requests", "tokens": "num_tokens"}
    columns |= {"loaded": "loaded", "share": "share", "not computed for": "not_computed"}
    value: JsonRow = {"summary": summary, "seconds": seconds, "days": list(rows)}
    return value, [summary, "", make_table({**columns, "engine's own": "own"}, rows)]


def _run_live(view: View, interval: float) -> None:
    """Refresh the screen until Ctrl-C. The first reading may raise; later faults become a line."""
    console = Console(highlight=False)
    _, shown = view()
    answered_at = time.time()
    fault: list[RenderableType] = []
    pause = interval
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(Group(*map(_as_text, [*fault, *shown])), refresh=True)
            time.sleep(pause)
            started = time.monotonic()
            try:
                _, shown = view()
                answered_at, fault = time.time(), []
            except (KVError, OSError) as error:
                fault = [f"no answer for {format_age(answered_at)}: {error}"]
            # Pause five times as long as it took, so that a large store is not listed all the time.
            pause = max(interval, 5 * (time.monotonic() - started))


def _as_text(renderable: RenderableType) -> RenderableType:
    return plain(renderable) if isinstance(renderable, str) else renderable


# -- requests -------------------------------------------------------------------------------------


def _show(now: Reading, before: Reading | None, where: str) -> tuple[JsonRow, list[RenderableType]]:
    recent = now if before is None else now.since(before)
    if not recent.num_tokens:
        recent = now  # no request came between the two readings
    total = recent.num_tokens
    hit = sum(recent.hits.values())
    what = "since the start" if recent.span is None else f"in {recent.span:.0f} s"
    summary = f"{where}: {hit:,.0f} of {total:,.0f} tokens hit {what}"
    if recent.span is not None and total:
        summary += f", {total / recent.span:,.0f} tokens/s"
    hits, misses = _shares(recent.hits, total), _shares(recent.misses, total)
    tiers, times = _tiers(now), _times(recent)
    value: JsonRow = {
        "at": now.at,
        "seconds": recent.span,
        "tokens": total,
        "hits": dict(recent.hits),
        "misses": dict(recent.misses),
        "counts": dict(recent.counts),
        "tiers": list(tiers),
        "latencies": list(times),
    }
    columns = {"tokens": "tokens", "share": "share", "": "bar"}
    shown: list[RenderableType] = [summary, "", make_table({"hit": "what"} | columns, hits)]
    shown += [make_table({"missed": "what"} | columns, misses)] if misses else []
    shown += _counted(recent)
    for names, rows in ((_TIERS, tiers), (_QUOTAS, _quotas(now)), (_TIMES, times)):
        shown += ["", make_table(names, rows)] if rows else []
    return value, shown


def _shares(tokens: Mapping[str, float], total: float) -> list[JsonRow]:
    largest = sorted(tokens.items(), key=lambda item: -item[1])[:_MAX_ROWS]
    return [
        {
            "what": (name or "unknown")[:_MAX_TEXT],
            "tokens": round(count),
            "share": f"{count / total:.1%}",
            "bar": "█" * round(_BAR * count / total),
        }
        for name, count in largest
        if count > 0 and total > 0
    ]


def _counted(recent: Reading) -> list[RenderableType]:
    counts, span = recent.counts, recent.span
    parts = []
    if slots := counts.get("pool_slots/total"):
        held, used = counts.get("pool_slots/held", 0), counts.get("pool_slots/in_use", 0)
        parts.append(f"pool: {held:.0f} of {slots:.0f} slots held, {used:.0f} in use")
    if counts.get("ranks_apart"):
        parts.append("ranks on several machines: each stores the rows that it holds, as shards")
    for name, text in (
        ("tier_read_bytes", "read"),
        ("saved_bytes", "saved"),
        ("saved_state_bytes", "states saved"),
        ("loaded_state_bytes", "states loaded"),
    ):
        if num_bytes := counts.get(name):
            rate = "" if span is None else f" ({format_size(int(num_bytes / span))}/s)"
            parts.append(f"{text} {format_size(int(num_bytes))}{rate}")
    for name, text in (
        ("records_corrupt", "records found wrong"),
        ("save_failed", "saves failed"),
        ("save_not_finite", "chunks with NaN or Inf"),
        ("load_failed_chunks", "loads failed"),
        ("hook_failed", "faults of kvferry"),
    ):
        if count := counts.get(name):
            parts.append(f"{count:.0f} {text}")
    return ["", *parts] if parts else []


def _tiers(now: Reading) -> list[JsonRow]:
    return [
        {
            **each._asdict(),
            "because": each.because or None,
            "kind": each.kind or None,
            "age": format_age(each.since),
        }
        for each in now.tiers[: 4 * _MAX_ROWS]
    ]


def _quotas(now: Reading) -> list[JsonRow]:
    names = [name.partition("/")[2] for name in now.counts if name.startswith("store_used_bytes/")]
    whats = "records", "used_bytes", "max_bytes"
    rows: list[JsonRow] = []
    for tier in names[:_MAX_ROWS]:
        counts = {what: now.counts.get(f"store_{what}/{tier}") for what in whats}
        known = {what: int(count) for what, count in counts.items() if count is not None}
        rows.append({"tier": tier, **known})
    return rows


def _times(recent: Reading) -> list[JsonRow]:
    from kvferry.readings import quantile

    def within(buckets: Buckets, part: float) -> str:
        seconds = quantile(buckets, part)
        return "longer" if seconds == math.inf else f"{seconds * 1e3:g} ms"

    return [
        {
            "what": name[:_MAX_TEXT],
            "count": int(buckets[math.inf]),
            "p50": within(buckets, 0.5),
            "p99": within(buckets, 0.99),
        }
        for name, buckets in list(recent.times.items())[:_MAX_ROWS]
        if buckets.get(math.inf, 0.0) > 0
    ]
