"""`kvferry ls` lists the records of a store, shows one in full, or counts them by namespace;
`kvferry verify` takes out wrong ones."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, NamedTuple

import typer
from rich.console import RenderableType

from kvferry.cli.output import (
    Exit,
    JsonOption,
    JsonRow,
    emit,
    format_age,
    make_fact_table,
    make_namespace_table,
    make_table,
    make_tables,
    progress,
    say_nothing,
)
from kvferry.cli.stores import (
    UrlArgument,
    entries,
    find,
    namespaces,
    open_existing,
    query_store,
)
from kvferry.config import format_size
from kvferry.errors import ConfigError, StoreError
from kvferry.record.check import ReadFault, RecordInfo
from kvferry.record.schema import LEAF_BYTES
from kvferry.record.shards import shard_text
from kvferry.report.gather import causes
from kvferry.store import maintenance
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry, Indexed, Removal
from kvferry.store.kind import shown_url
from kvferry.survey import Holding, survey
from kvferry.types import FORMAT_VERSION


class Order(StrEnum):
    """What `--sort` sorts by."""

    AGE = "age"
    """Most recently used first."""
    TOKEN = "token"
    """By namespace, then by position in the prompt. Reads the header of every record."""


class By(StrEnum):
    """What `--by` counts by."""

    NAMESPACE = "namespace"


class _Listed(NamedTuple):
    """A record with the listed fields of its header. The rest of the header is not kept: there may
    be millions of records."""

    namespace: bytes
    """According to the record; according to the index if the record is not readable."""
    place: tuple[bytes, int]
    """Namespace and position; unreadable records, the ones to look for, come first."""
    facts: JsonRow

    @classmethod
    def of(cls, store: Store, entry: Entry) -> _Listed:
        facts = {**_entry_facts(entry), "model": None}
        found = maintenance.inspect(store, entry)
        if isinstance(found, ReadFault):
            return cls(entry.namespace, (b"", 0), {**facts, "error": str(found)})
        space, first = found.schema.namespace, found.first_token
        facts |= {"namespace": space.hex(), "first_token": first}
        if found.schema.is_of_state:
            return cls(space, (space, first), {**facts, "num_tokens": 0, "is_state": True})
        return cls(space, (space, first), {**facts, "num_tokens": found.schema.chunk_tokens})


def ls(
    url: UrlArgument,
    key: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Show this record in full: its key, or first digits."),
    ] = None,
    by: Annotated[
        By | None, typer.Option(help="Count records by namespace, and removals by reason.")
    ] = None,
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
    """List the records of a store, or those that were removed last; count or show them.

    A bucket knows when a record was written, not when it was used; Mooncake knows neither. The
    quota shown is that of the URL. Exit code 1 if a record that is shown by its KEY is not right;
    it stays where it is (`kvferry verify` takes it out).

    Example: kvferry ls file:///var/cache/kvferry --by namespace
    """
    if (key is not None) + (by is not None) + removed > 1:
        raise ConfigError("KEY, --by and --removed ask different questions; give one of them")
    limit = limit or sys.maxsize
    if key is not None:
        _show_one(url, key, json)
    elif by is not None:
        value, shown = count_all(url)
        emit(value, json, *shown)
    elif removed:
        _show_removals(query_store(url, lambda store: _removals(store, limit)), json)
    else:
        _show_records(*query_store(url, lambda store: _list(store, sort, limit)), json)


def _list(store: Store, sort: Order, limit: int) -> tuple[list[JsonRow], JsonRow, int]:
    """Return the records to show, the names of their models by namespace, and the number of all
    records. Keeps in memory at most one record more than it returns."""
    num_records = 0

    def every() -> Iterator[Entry]:
        nonlocal num_records
        for entry in entries(store, store.catalogue().scan()):
            num_records += 1
            yield entry

    if sort is Order.TOKEN:
        heads = (_Listed.of(store, entry) for entry in every())
        listed = heapq.nsmallest(limit, heads, key=lambda each: each.place)
    else:
        if (index := Indexed.find(store)) is not None:
            chosen, num_records = list(index.recent(limit)), store.stat().num_records
        else:
            chosen = heapq.nlargest(limit, every(), lambda each: each.last_used)
        listed = [_Listed.of(store, entry) for entry in chosen]
    found = survey(store, (each.namespace for each in listed))
    models: JsonRow = {each.digest.hex(): each.title for each in found if each.title}
    for each in listed:
        each.facts["model"] = models.get(each.namespace.hex())
    return [each.facts for each in listed], models, num_records


def _removals(store: Store, limit: int) -> list[Removal]:
    index = Indexed.of(store, "does not remember what was removed; a directory does")
    return index.removals(limit)


def _show_records(
    facts: list[JsonRow], models: JsonRow, num_records: int, json: str | None
) -> None:
    columns = {
        "key": "key", "namespace": "namespace", "position": "first_token", "tokens": "num_tokens",
        "size": "num_bytes", "used": "last_used",
    }  # fmt: skip
    if any("pinned_until" in row for row in facts):
        columns["pinned"] = "pinned_until"
    rows = [
        {**row, "namespace": row.get("namespace", f"unreadable: {row.get('error')}")}
        | ({"num_tokens": "state"} if row.get("is_state") else {})
        for row in facts
    ]
    tables = make_tables(columns, rows)
    if models:
        # Beside each record, a long name would leave no room for the rest.
        names = [{"namespace": digest, "name": name} for digest, name in models.items()]
        tables.append(make_table({"namespace": "namespace", "model": "name"}, names))
    emit(list(facts), json, *tables, f"{len(facts):,} of {num_records:,} records")


def _entry_facts(entry: Entry) -> JsonRow:
    last_used = entry.last_used or None  # 0: unknown
    facts: JsonRow = {
        "key": entry.key.hex(),
        "num_bytes": entry.stored_bytes,
        "last_used": last_used,
    }
    return facts | ({"pinned_until": entry.pinned_until} if entry.pinned_until else {})


def _show_removals(removals: list[Removal], json: str | None) -> None:
    facts: list[JsonRow] = [
        {
            "key": each.key.hex(),
            "num_bytes": each.stored_bytes,
            "at": each.at,
            "reason": each.reason,
            "detail": each.detail,
            "by": each.by,
        }
        for each in removals
    ]
    rows = [
        {**row, "why": f"{row['reason']}: {row['detail']}" if row["detail"] else row["reason"]}
        for row in facts
    ]
    columns = {"key": "key", "size": "num_bytes", "when": "at", "why": "why", "by": "by"}
    tables = make_tables(columns, rows)
    emit(list(facts), json, *tables, f"{len(removals):,} records were removed last")


def _show_one(url: str, key_prefix: str, json: str | None) -> None:
    """Show one record: header, components and the result of checking every leaf. Exit code 1 if it
    is not right; it stays where it is."""

    def look_at(store: Store) -> tuple[Entry, RecordInfo | ReadFault, ReadFault | None]:
        entry = find(store, key_prefix)
        checked = maintenance.verify(store, [entry], discards=False)
        fault = None if checked.num_records else ReadFault.ABSENT
        fault = ReadFault.IO_ERROR if checked.num_unreadable else fault
        return entry, maintenance.inspect(store, entry), dict(checked.bad).get(entry, fault)

    entry, record, fault = query_store(url, look_at)
    facts = {**_entry_facts(entry), "verdict": "right" if fault is None else str(fault)}
    components: list[JsonRow] = []
    if isinstance(record, RecordInfo):
        schema = record.schema
        facts |= {
            "format_version": FORMAT_VERSION,
            "namespace": schema.namespace.hex(),
            "first_token": record.first_token,
            "num_tokens": 0 if schema.is_of_state else schema.chunk_tokens,
            **({"is_state": True} if schema.is_of_state else {}),
            **({"of": record.of.hex(), "shard": shard_text(schema.shard)} if record.of else {}),
            "head_bytes": schema.head_bytes,
            "payload_bytes": schema.payload_bytes,
            "num_leaves": schema.num_leaves,
            "leaf_bytes": LEAF_BYTES,
        }
        components = [
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
    tables = [make_fact_table(facts)]
    if components:
        columns = {name: name for name in components[0]}
        title = "components: [layers, kv heads, tokens, content]"
        tables.append(make_table(columns, components, title=title))
    emit({**facts, "components": list(components)}, json, *tables)
    if fault is not None:
        raise typer.Exit(Exit.NO)


def count_all(url: str) -> tuple[JsonRow, list[RenderableType]]:
    """Count the records of a store by namespace, and its recent removals by reason. Return the
    result for programs, and for people. Raises as `query_store`."""

    def look(store: Store) -> tuple[list[Holding], JsonRow, list[Removal]]:
        counts = namespaces(store)
        index = Indexed.find(store)
        removals = [] if index is None else index.removals(sys.maxsize)
        return survey(store, counts, counts), dict(store.catalogue().facts()), removals

    found, facts, removals = query_store(url, look)
    facts = {
        "url": shown_url(url),
        "num_records": sum(each.num_records for each in found),
        "used_bytes": sum(each.num_bytes for each in found),
        **facts,
    }
    spaces = [each.row() for each in found]
    by_reason = causes(each._replace(detail="") for each in removals)
    removed = [each._asdict() for each in sorted(by_reason, key=lambda cause: -cause.last_at)]
    since = removals[-1].at if removals else None
    shown: list[RenderableType] = [make_fact_table(facts)]
    if spaces:
        shown.append(make_namespace_table("records by namespace", spaces))
    if since is not None:
        columns = {"why": "reason", "records": "num_records", "size": "num_bytes"}
        title = f"removed in the last {format_age(since)}"
        shown.append(make_table({**columns, "last": "last_at"}, removed, title=title))
    lists = {"namespaces": list(spaces), "removed": list(removed), "removed_since": since}
    return {**facts, **lists}, shown


def verify(
    url: UrlArgument,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only report; leave bad records where they are.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """Check every checksum of every record; quarantine wrong ones, or delete them from a server.

    A record that is evicted meanwhile is not counted; one that cannot be read stays. Exit code 1 if
    any record was bad or could not be read, or there is none.

    Example: kvferry verify file:///var/cache/kvferry --dry-run
    """
    with open_existing(url, writable=not dry_run) as store, progress() as bar:
        task = bar.add_task("verifying", total=store.stat().num_records or None)
        report = maintenance.verify(
            store,
            entries(store, store.catalogue().stored()),
            lambda num_records, _: bar.update(task, completed=num_records),
            discards=not dry_run,
        )
        bad: list[JsonRow] = [
            {"key": entry.key.hex(), "reason": str(why), "action": _action(store, entry, dry_run)}
            for entry, why in report.bad
        ]
    num_seen = report.num_records + report.num_unreadable
    value: JsonRow = {
        "dry_run": dry_run,
        "records": report.num_records,
        "num_bytes": report.num_bytes,
        "unreadable": report.num_unreadable,
        "bad": list(bad),
        "reasons": dict(Counter(str(why) for _, why in report.bad)),
    }
    if not num_seen:
        say_nothing(value, json, f"no record in {shown_url(url)} to verify")
    columns = {"key": "key", "reason": "reason", "action": "action"}
    tables = [make_table(columns, bad)] if bad else []
    checked = f"{report.num_records:,} records, {format_size(report.num_bytes)} checked"
    emit(value, json, *tables, f"{checked}: {len(bad)} bad, {report.num_unreadable} unreadable")
    if report.bad or report.num_unreadable:
        raise typer.Exit(Exit.NO)


def _action(store: Store, entry: Entry, dry_run: bool) -> str:
    """Say what became of a bad record; it is left if the medium or the server refuses."""
    try:
        is_left = dry_run or store.in_namespace(entry.namespace).read(entry.key, ()) is not None
    except StoreError:
        is_left = True
    if is_left:
        return "left"
    return "quarantined" if store.quarantines else "deleted"
