"""`kvferry report`: one page for a browser on what a store holds, and what was removed and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from kvferry.cli.output import (
    JsonOption,
    JsonRow,
    emit,
    progress,
    require_extra,
    require_targets,
    write_text,
)
from kvferry.cli.stores import UrlArgument, entries, query_store
from kvferry.config import format_size
from kvferry.explain import MAX_REMOVALS
from kvferry.journal import journal_lines
from kvferry.report.gather import RecordedRequests, Survey
from kvferry.report.page import MAX_ROWS, Report, render
from kvferry.store.base import Store
from kvferry.store.catalogue import Indexed
from kvferry.store.kind import shown_url
from kvferry.survey import survey


def report(
    url: UrlArgument,
    html: Annotated[Path, typer.Option(metavar="FILE", help="The page; replaced if it is there.")],
    journal: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A journal (option `record`): prefixes, hits over time."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Draw a store as one page that needs no network: namespaces by size and last use, removals
    over time and why, quarantine. A journal adds prefixes and the share of hits over time.

    Example: kvferry report file:///var/cache/kvferry --html report.html
    """
    require_extra("the page", "report", "plotly")
    require_targets(journal, html, None if json in (None, "-") else Path(json))
    with progress() as bar:
        requests = None if journal is None else RecordedRequests()
        if journal is not None and requests is not None:
            for _, line in bar.track(journal_lines(journal), description="reading requests"):
                requests.add(line)
        found = query_store(url, lambda store: _gather(store, shown_url(url), requests, bar))
    write_text(html, render(found))
    said = f"{found.num_records:,} records, {format_size(found.num_bytes)}"
    if requests is not None:
        said += f", {requests.count} requests"
    value: JsonRow = {
        "html": str(html),
        "records": found.num_records,
        "num_bytes": found.num_bytes,
        "namespaces": len(found.spaces),
        "removed": None if found.removals is None else len(found.removals),
        "requests": None if requests is None else requests.count,
    }
    emit(value, json, f"{html}: {said}")


def _gather(store: Store, url: str, requests: RecordedRequests | None, bar: Progress) -> Report:
    chunks = {} if requests is None else requests.chunks()
    sums = Survey(chunks, time.time())
    total, index = store.stat().num_records or None, Indexed.find(store)
    for entry in bar.track(
        entries(store, store.catalogue().scan()), total, description="reading records"
    ):
        sums.add(entry)
    spaces = sums.largest_spaces()
    shown = {digest: (each.num_records, each.num_bytes) for digest, each in spaces.items()}
    return Report(
        url=url,
        at=time.time(),
        facts=store.catalogue().facts(),
        spaces=spaces,
        holdings={each.digest: each for each in survey(store, list(spaces)[:MAX_ROWS], shown)},
        runs=sums.runs(),
        removals=None if index is None else index.removals(MAX_REMOVALS),
        requests=requests,
    )
