"""`kvferry ls` and `show`: the records of a store, one line each or one in full."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvferry.cli.output import (
    JsonOption,
    emit,
    format_age,
    make_fact_table,
    make_table,
    short_key,
)
from kvferry.cli.stores import UrlArgument, check, find, inspect, look, model_names
from kvferry.config import format_size
from kvferry.record.check import MissReason, RecordInfo
from kvferry.record.schema import LEAF_BYTES
from kvferry.store.base import Entry, Removal
from kvferry.types import FORMAT_VERSION

if TYPE_CHECKING:
    from kvferry.keys import JsonValue
    from kvferry.store.file import FileStore

_MAX_REMOVALS = 1 << 30


class Order(StrEnum):
    """What `--sort` sorts by."""

    AGE = "age"
    """Most recently used first."""
    SIZE = "size"
    """Largest first."""
    TOKEN = "token"
    """By namespace, then by position in the prompt. Reads the header of every record."""


class _Row(NamedTuple):
    entry: Entry
    record: RecordInfo | MissReason

    @property
    def namespace(self) -> bytes:
        """As the record says; what the index knows if it is not readable."""
        if isinstance(self.record, MissReason):
            return self.entry.namespace
        return self.record.schema.namespace


class _Listing(NamedTuple):
    rows: list[_Row]
    num_records: int
    models: dict[bytes, str]


def ls(
    url: UrlArgument,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Records to show; 0 shows all.")
    ] = 50,
    sort: Annotated[
        Order,
        typer.Option("--sort", help="Order of the records; token reads the head of every one."),
    ] = Order.AGE,
    removed: Annotated[
        bool, typer.Option("--removed", help="What went last instead: when, why, by whom.")
    ] = False,
    json: JsonOption = None,
) -> None:
    """List the records of a store, or those that went last.

    Example: kvferry ls file:///var/cache/kvferry --sort size --limit 20
    """
    if removed:
        _show_removals(look(url, lambda store: store.removals(limit or _MAX_REMOVALS)), json)
    else:
        _show_records(look(url, lambda store: _list(store, sort, limit)), json)


def _list(store: FileStore, sort: Order, limit: int) -> _Listing:
    """The records to show; of all others at most one at a time is in memory."""
    num_records = store.stat().num_records
    if sort is Order.TOKEN:
        every = (_Row(entry, inspect(store, entry)) for entry in store.scan())
        rows = heapq.nsmallest(limit or max(1, num_records), every, key=_place)
    else:
        order = "last_used" if sort is Order.AGE else "num_bytes"
        chosen: Iterable[Entry] = store.scan(order, limit or -1)  # type: ignore[arg-type]
        rows = [_Row(entry, inspect(store, entry)) for entry in chosen]
    models = model_names(store, (row.namespace for row in rows))
    return _Listing(rows, num_records, models)


def _place(row: _Row) -> tuple[bytes, int]:
    """Unreadable records come first: they are what one looks for."""
    if isinstance(row.record, MissReason):
        return b"", 0
    return row.namespace, row.record.first_token


def _show_records(listing: _Listing, json: str | None) -> None:
    columns = ("key", "namespace", "position", "tokens", "size", "used")
    tables = [make_table(columns, map(_cells, listing.rows), right=columns[2:])]
    if listing.models:
        # Beside each record, a long name would leave no room for the rest.
        names = ((short_key(namespace), model) for namespace, model in listing.models.items())
        tables.append(make_table(("namespace", "model"), names))
    value = [_as_json(row, listing.models.get(row.namespace)) for row in listing.rows]
    emit(value, json, *tables, f"{len(listing.rows)} of {listing.num_records} records")


def _as_json(row: _Row, model: str | None) -> dict[str, JsonValue]:
    entry, record = row
    value: dict[str, JsonValue] = {
        "key": entry.key.hex(),
        "num_bytes": entry.num_bytes,
        "last_used": entry.last_used,
        "model": model,
    }
    if isinstance(record, MissReason):
        return {**value, "error": str(record)}
    return {
        **value,
        "namespace": record.schema.namespace.hex(),
        "first_token": record.first_token,
        "num_tokens": record.schema.chunk_tokens,
    }


def _cells(row: _Row) -> tuple[str, ...]:
    entry, record = row
    size, age = format_size(entry.num_bytes), format_age(entry.last_used)
    key = short_key(entry.key)
    if isinstance(record, MissReason):
        return key, f"unreadable: {record}", "", "", size, age
    namespace = short_key(record.schema.namespace)
    return key, namespace, str(record.first_token), str(record.schema.chunk_tokens), size, age


def _show_removals(removals: list[Removal], json: str | None) -> None:
    rows = [
        (
            short_key(each.key),
            format_size(each.num_bytes),
            f"{format_age(each.at)} ago",
            f"{each.reason}: {each.detail}" if each.detail else each.reason,
            each.by,
        )
        for each in removals
    ]
    table = make_table(("key", "size", "when", "why", "by"), rows, right=("size", "when"))
    value: JsonValue = [{**each._asdict(), "key": each.key.hex()} for each in removals]
    emit(value, json, table, f"{len(removals)} records went last")


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
    entry, record, fault = look(url, lambda store: _look_at(store, key_prefix))
    facts: dict[str, JsonValue] = {
        "key": entry.key.hex(),
        "num_bytes": entry.num_bytes,
        "last_used": entry.last_used,
        "verdict": "right" if fault is None else str(fault),
    }
    components: list[dict[str, JsonValue]] = []
    if isinstance(record, RecordInfo):
        facts |= _header(record)
        components = _components(record)
    tables = [make_fact_table(facts)]
    if components:
        columns = tuple(components[0])
        rows = [[str(cell) for cell in component.values()] for component in components]
        title = "components: [layers, kv heads, tokens, content]"
        tables.append(make_table(columns, rows, title=title, right=columns[3:]))
    emit({**facts, "components": list(components)}, json, *tables)
    if fault is not None:
        raise typer.Exit(1)


def _look_at(
    store: FileStore, key_prefix: str
) -> tuple[Entry, RecordInfo | MissReason, MissReason | None]:
    entry = find(store, key_prefix)
    return entry, inspect(store, entry), check(store, entry)


def _header(record: RecordInfo) -> dict[str, JsonValue]:
    schema = record.schema
    return {
        "format_version": FORMAT_VERSION,
        "namespace": schema.namespace.hex(),
        "first_token": record.first_token,
        "num_tokens": schema.chunk_tokens,
        "head_bytes": schema.head_bytes,
        "payload_bytes": schema.payload_bytes,
        "num_leaves": schema.num_leaves,
        "leaf_bytes": LEAF_BYTES,
    }


def _components(record: RecordInfo) -> list[dict[str, JsonValue]]:
    schema = record.schema
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
