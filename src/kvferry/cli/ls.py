"""`kvferry ls`: the records of a store, one line each; or those that went last."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvferry.cli.output import JsonOption, emit, format_age, make_table, shortened
from kvferry.cli.records import inspect
from kvferry.cli.stores import UrlArgument, look, model_names
from kvferry.config import format_size
from kvferry.record.check import MissReason, RecordInfo
from kvferry.store.base import Entry, Removal

if TYPE_CHECKING:
    from kvferry.keys import JsonValue
    from kvferry.store.file import FileStore

_SHOWN_DIGITS = 16
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
    """List the records of a store, or those that went last."""
    if removed:
        _show_removals(look(url, lambda store: store.removals(limit or _MAX_REMOVALS)), json)
    else:
        _show(look(url, lambda store: _list(store, sort, limit)), json)


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


def _show(listing: _Listing, json: str | None) -> None:
    table = make_table(
        None, "key", "namespace", "first token", "tokens", "size", "last used", "model",
        right=("first token", "tokens", "size", "last used"),
    )  # fmt: skip
    for row in listing.rows:
        table.add_row(*_cells(row), shortened(listing.models.get(row.namespace, "")))
    value = [_as_json(row, listing.models.get(row.namespace)) for row in listing.rows]
    emit(value, json, table, f"{len(listing.rows)} of {listing.num_records} records")


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
    key = entry.key.hex()[:_SHOWN_DIGITS]
    if isinstance(record, MissReason):
        return key, f"unreadable: {record}", "", "", size, age
    namespace = record.schema.namespace.hex()[:_SHOWN_DIGITS]
    return key, namespace, str(record.first_token), str(record.schema.chunk_tokens), size, age


def _show_removals(removals: list[Removal], json: str | None) -> None:
    value: JsonValue = [{**each._asdict(), "key": each.key.hex()} for each in removals]
    table = make_table(None, "key", "size", "when", "why", "by", right=("size", "when"))
    for each in removals:
        why = f"{each.reason}: {each.detail}" if each.detail else each.reason
        table.add_row(
            each.key.hex()[:_SHOWN_DIGITS],
            format_size(each.num_bytes),
            f"{format_age(each.at)} ago",
            shortened(why),
            shortened(each.by),
        )
    emit(value, json, table, f"{len(removals)} records went last")
