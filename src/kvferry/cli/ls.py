"""`kvferry ls`: the records of a store, one line each."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvferry.cli.output import JsonOption, emit, format_age, make_table
from kvferry.cli.records import inspect
from kvferry.cli.stores import UrlArgument, open_existing
from kvferry.config import format_size
from kvferry.record.check import MissReason, RecordInfo
from kvferry.store.base import Entry

if TYPE_CHECKING:
    from kvferry.keys import JsonValue

_SHOWN_DIGITS = 16


class Order(StrEnum):
    """What `--sort` sorts by."""

    AGE = "age"
    """Most recently used first."""
    SIZE = "size"
    """Largest first."""
    TOKEN = "token"
    """By namespace, then by position in the prompt."""


class _Row(NamedTuple):
    entry: Entry
    record: RecordInfo | MissReason


def ls(
    url: UrlArgument,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Records to show; 0 shows all.")
    ] = 50,
    sort: Annotated[Order, typer.Option("--sort", help="Order of the records.")] = Order.AGE,
    json: JsonOption = None,
) -> None:
    """List the records of a store."""
    with open_existing(url) as store:
        entries = list(store.scan())
        if sort is Order.TOKEN:  # the only order that needs every header
            rows = [_Row(entry, inspect(store, entry)) for entry in entries]
            shown = sorted(rows, key=_place)[: limit or None]
        else:
            chosen = sorted(entries, key=_recency if sort is Order.AGE else _size)[: limit or None]
            shown = [_Row(entry, inspect(store, entry)) for entry in chosen]
    value = [_as_json(row) for row in shown]
    table = make_table(
        None, "key", "namespace", "first token", "tokens", "size", "last used",
        right=("first token", "tokens", "size", "last used"),
    )  # fmt: skip
    for row in shown:
        table.add_row(*_cells(row))
    emit(value, json, table, f"{len(shown)} of {len(entries)} records")


def _recency(entry: Entry) -> float:
    return -entry.last_used


def _size(entry: Entry) -> int:
    return -entry.num_bytes


def _place(row: _Row) -> tuple[bytes, int]:
    """Unreadable records come first: they are what one looks for."""
    if isinstance(row.record, MissReason):
        return b"", 0
    return row.record.schema.namespace, row.record.first_token


def _as_json(row: _Row) -> dict[str, JsonValue]:
    entry, record = row
    value: dict[str, JsonValue] = {
        "key": entry.key.hex(),
        "num_bytes": entry.num_bytes,
        "last_used": entry.last_used,
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
