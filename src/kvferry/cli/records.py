"""The commands `kvferry ls`, `show` and `stat` list the records of a store, show one in full, or
count them; `verify` takes out wrong records, and `gc` deletes old ones."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer

from kvferry.cli.output import (
    JsonOption,
    JsonRow,
    YesOption,
    confirm,
    emit,
    emit_rows,
    format_age,
    make_fact_table,
    make_namespace_table,
    make_table,
    parse_duration,
    progress,
    require_size,
)
from kvferry.cli.stores import (
    UrlArgument,
    check,
    entries,
    find,
    inspect,
    model_names,
    namespaces,
    open_existing,
    query_store,
)
from kvferry.config import format_size
from kvferry.errors import ConfigError, StoreError
from kvferry.record.check import MissReason, RecordInfo
from kvferry.record.schema import LEAF_BYTES, RecordSchema
from kvferry.store import maintenance
from kvferry.store.base import Entry, Removal, Store
from kvferry.store.kind import shown_url
from kvferry.store.maintenance import estimate
from kvferry.types import FORMAT_VERSION


class Order(StrEnum):
    """What `--sort` sorts by."""

    AGE = "age"
    """Most recently used first."""
    SIZE = "size"
    """Largest first."""
    TOKEN = "token"
    """By namespace, then by position in the prompt. Reads the header of every record."""


class _Shown(NamedTuple):
    """A record with the listed fields of its header, or the reason why the header is unreadable.
    The rest of the header is not kept: there may be millions of records."""

    entry: Entry
    namespace: bytes
    """According to the record; according to the index if the record is not readable."""
    first_token: int = 0
    num_tokens: int = 0
    error: MissReason | None = None

    @classmethod
    def of(cls, store: Store, entry: Entry) -> _Shown:
        found = inspect(store, entry)
        if isinstance(found, MissReason):
            return cls(entry, entry.namespace, error=found)
        return cls(entry, found.schema.namespace, found.first_token, found.schema.chunk_tokens)

    def facts(self, model: str | None) -> JsonRow:
        row: JsonRow = {**_entry_facts(self.entry), "model": model}
        if self.error is not None:
            return {**row, "error": str(self.error)}
        tokens: JsonRow = {"first_token": self.first_token, "num_tokens": self.num_tokens}
        return {**row, "namespace": self.namespace.hex(), **tokens}


def ls(
    url: UrlArgument,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Records to show; 0 shows all.")
    ] = 50,
    sort: Annotated[
        Order, typer.Option(help="Order of the records; token reads the head of every one.")
    ] = Order.AGE,
    removed: Annotated[
        bool, typer.Option("--removed", help="List removed records instead, with the reason.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """List the records of a store, or those that were removed last.

    A bucket knows when a record was written, not when it was used; Mooncake knows neither.

    Example: kvferry ls file:///var/cache/kvferry --sort size --limit 20
    """
    if removed:
        _show_removals(query_store(url, lambda store: _removals(store, limit or sys.maxsize)), json)
    else:
        _show_records(*query_store(url, lambda store: _list(store, sort, limit)), json)


def _list(store: Store, sort: Order, limit: int) -> tuple[list[_Shown], dict[bytes, str], int]:
    """Return the records to show, the names of their models, and the number of all records. Keeps
    in memory at most one record more than it returns."""
    limit = limit or sys.maxsize
    num_records = 0

    def every() -> Iterator[Entry]:
        nonlocal num_records
        for entry in entries(store, store.scan()):
            num_records += 1
            yield entry

    if sort is Order.TOKEN:
        heads = (_Shown.of(store, entry) for entry in every())
        shown = heapq.nsmallest(limit, heads, key=_place)
        return shown, model_names(store, (found.namespace for found in shown)), num_records
    if sort is Order.SIZE:
        chosen = heapq.nlargest(limit, every(), lambda each: each.num_bytes)
    else:
        try:
            chosen, num_records = list(store.recent(limit)), store.stat().num_records
        except StoreError:  # the store does not know which were used last
            chosen = heapq.nlargest(limit, every(), lambda each: each.last_used)
    shown = [_Shown.of(store, entry) for entry in chosen]
    return shown, model_names(store, (found.namespace for found in shown)), num_records


def _removals(store: Store, limit: int) -> list[Removal]:
    removals = store.removals(limit)
    if removals is None:
        raise ConfigError(f"{store.url} does not remember what was removed; a directory does")
    return removals


def _place(found: _Shown) -> tuple[bytes, int]:
    """Sort key: namespace and position. Unreadable records, the ones to look for, come first."""
    if found.error is not None:
        return b"", 0
    return found.namespace, found.first_token


def _show_records(
    shown: list[_Shown], models: dict[bytes, str], num_records: int, json: str | None
) -> None:
    def facts() -> Iterator[JsonRow]:
        return (found.facts(models.get(found.namespace)) for found in shown)

    columns = {
        "key": "key", "namespace": "namespace", "position": "first_token", "tokens": "num_tokens",
        "size": "num_bytes", "used": "last_used",
    }  # fmt: skip
    if any(found.entry.pinned_until for found in shown):
        columns["pinned"] = "pinned_until"
    rows = (
        {**row, "namespace": row.get("namespace", f"unreadable: {row.get('error')}")}
        for row in facts()
    )
    tables = []
    if models:
        # Beside each record, a long name would leave no room for the rest.
        names = [{"namespace": each.hex(), "model": name} for each, name in models.items()]
        tables.append(make_table({"namespace": "namespace", "model": "model"}, names))
    emit_rows(facts(), json, columns, rows, *tables, f"{len(shown)} of {num_records} records")


def _entry_facts(entry: Entry) -> JsonRow:
    last_used = entry.last_used or None  # 0: unknown
    facts: JsonRow = {"key": entry.key.hex(), "num_bytes": entry.num_bytes, "last_used": last_used}
    return facts | ({"pinned_until": entry.pinned_until} if entry.pinned_until else {})


def _show_removals(removals: list[Removal], json: str | None) -> None:
    def facts() -> Iterator[JsonRow]:
        return ({**each._asdict(), "key": each.key.hex()} for each in removals)

    rows = (
        {**row, "why": f"{row['reason']}: {row['detail']}" if row["detail"] else row["reason"]}
        for row in facts()
    )
    columns = {"key": "key", "size": "num_bytes", "when": "at", "why": "why", "by": "by"}
    emit_rows(facts(), json, columns, rows, f"{len(removals)} records were removed last")


def show(
    url: UrlArgument,
    key_prefix: Annotated[
        str, typer.Argument(metavar="KEY", help="Key of the record, or its first digits.")
    ],
    json: JsonOption = None,
) -> None:
    """Show one record: header, components and the result of checking every leaf.

    Exit code 1 if the record is not right; it stays where it is (`kvferry verify` takes it out).

    Example: kvferry show file:///var/cache/kvferry 3f9a
    """

    def look_at(store: Store) -> tuple[Entry, RecordInfo | MissReason, MissReason | None]:
        entry = find(store, key_prefix)
        return entry, inspect(store, entry), check(store, entry)

    entry, record, fault = query_store(url, look_at)
    facts = {**_entry_facts(entry), "verdict": "right" if fault is None else str(fault)}
    components: list[JsonRow] = []
    if isinstance(record, RecordInfo):
        schema = record.schema
        facts |= {
            "format_version": FORMAT_VERSION,
            "namespace": schema.namespace.hex(),
            "first_token": record.first_token,
            "num_tokens": schema.chunk_tokens,
            "head_bytes": schema.head_bytes,
            "payload_bytes": schema.payload_bytes,
            "num_leaves": schema.num_leaves,
            "leaf_bytes": LEAF_BYTES,
        }
        components = _components(schema)
    tables = [make_fact_table(facts)]
    if components:
        columns = {name: name for name in components[0]}
        title = "components: [layers, kv heads, tokens, content]"
        tables.append(make_table(columns, components, title=title))
    emit({**facts, "components": list(components)}, json, *tables)
    if fault is not None:
        raise typer.Exit(1)


def _components(schema: RecordSchema) -> list[JsonRow]:
    return [
        {
            "name": component.name,
            "dtype": component.dtype,
            "shape": list(component.shape),
            "offset": offset,
            "num_bytes": component.num_bytes,
            "num_leaves": component.num_rows * component.leaves_per_row,
        }
        for component, offset in zip(schema.components, schema.component_offsets, strict=True)
    ]


def stat(url: UrlArgument, json: JsonOption = None) -> None:
    """Count the records of a store by model; for a directory, also show its quota, and recent
    removals by reason.

    `used_bytes` counts the records of all processes that share the store, and its quarantine. The
    quota is that of the URL given here; each engine has its own. `memory_bytes` is the default host
    memory for KV of one engine.

    Example: kvferry stat file:///var/cache/kvferry?max_bytes=10GiB
    """
    from kvferry.cache.config import DEFAULT_MEMORY_BYTES

    facts, spaces, removals = query_store(url, count_records)
    facts = {"url": shown_url(url), **facts, "memory_bytes": DEFAULT_MEMORY_BYTES}
    removed = by_reason(removals)
    since = removals[-1].at if removals else None
    tables = [make_fact_table(facts)]
    if spaces:
        tables.append(make_namespace_table("records by namespace", spaces))
    if since is not None:
        columns = {"why": "reason", "records": "num_records", "size": "num_bytes"}
        title = f"removed in the last {format_age(since)}"
        tables.append(make_table({**columns, "last": "last_at"}, removed, title=title))
    lists = {"namespaces": list(spaces), "removed": list(removed), "removed_since": since}
    emit({**facts, **lists}, json, *tables)


def count_records(store: Store) -> tuple[JsonRow, list[JsonRow], list[Removal]]:
    """Return counts, rows of namespaces (the largest first) and removals (the latest first)."""
    counts = namespaces(store)
    models = model_names(store, counts)
    largest_first = sorted(counts.items(), key=lambda item: -item[1][1])
    rows: list[JsonRow] = [
        {
            "namespace": digest.hex() or None,
            "model": models.get(digest),
            "num_records": num_records,
            "num_bytes": num_bytes,
        }
        for digest, (num_records, num_bytes) in largest_first
    ]
    facts: JsonRow = {
        "num_records": sum(num_records for num_records, _ in counts.values()),
        "used_bytes": sum(num_bytes for _, num_bytes in counts.values()),
        **store.facts(),
    }
    return facts, rows, store.removals(sys.maxsize) or []


def by_reason(removals: list[Removal]) -> list[JsonRow]:
    """Sum up removals by reason, the most recent reason first."""
    from kvferry.report.gather import causes

    found = causes(each._replace(detail="") for each in removals)
    return [
        {
            "reason": cause.reason,
            "num_records": cause.num_records,
            "num_bytes": cause.num_bytes,
            "last_at": cause.last_at,
        }
        for cause in sorted(found, key=lambda cause: -cause.last_at)
    ]


def verify(
    url: UrlArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report; leave bad records where they are.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check every checksum of every record; quarantine wrong ones, or delete them from a server.

    A record that is evicted meanwhile is not counted; one that cannot be read stays. Exit code 1 if
    any record was bad or could not be read.

    Example: kvferry verify file:///var/cache/kvferry --dry-run
    """
    with open_existing(url, writable=not dry_run) as store, progress() as bar:
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
    """Say what became of a bad record; it is left if the medium or the server refuses."""
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
        bool, typer.Option("--dry-run", help="Report what would be deleted; delete nothing.")
    ] = False,
    yes: YesOption = False,
    json: JsonOption = None,
) -> None:
    """Delete records that were not used for long, then the least recently used until the rest fits.
    Pinned records stay. Asks before it empties a store.

    A dry run is an estimate: in a directory, a real run makes room by removing what is in
    quarantine, too. A bucket says when a record was written, not used.

    Example: kvferry gc file:///var/cache/kvferry --max-bytes 10GiB
    """
    if max_bytes is None and older_than is None:
        raise ConfigError("nothing to do: give --max-bytes, --older-than or both")
    keep_bytes = None if max_bytes is None else require_size("--max-bytes", max_bytes)
    age = None if older_than is None else parse_duration(older_than)
    if dry_run:
        report = query_store(
            url, lambda store: estimate(store, entries(store, store.scan()), keep_bytes, age)
        )
    else:
        if keep_bytes == 0 or age == 0:
            confirm(f"delete all records of {shown_url(url)} that are not pinned?", yes=yes)
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
