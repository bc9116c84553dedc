"""`kvferry show`: one record, header and checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kvferry.cli.output import JsonOption, emit, format_age, make_table
from kvferry.cli.records import check, inspect
from kvferry.cli.stores import UrlArgument, find, look
from kvferry.config import format_size
from kvferry.record.check import MissReason, RecordInfo
from kvferry.record.schema import LEAF_BYTES
from kvferry.store.base import Entry
from kvferry.types import FORMAT_VERSION

if TYPE_CHECKING:
    from kvferry.keys import JsonValue
    from kvferry.store.file import FileStore


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
    if isinstance(record, RecordInfo):
        facts |= _header(record)
    components = [] if isinstance(record, MissReason) else _components(record)
    value = {**facts, "components": components}
    emit(value, json, _facts_table(entry, facts), *([_table(components)] if components else []))
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


def _facts_table(entry: Entry, facts: dict[str, JsonValue]) -> Table:
    table = make_table(None, "field", "value")
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _readable(name, value, entry))
    return table


def _readable(name: str, value: JsonValue, entry: Entry) -> str:
    if name == "last_used":
        return f"{format_age(entry.last_used)} ago"
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{value} ({format_size(value)})"
    return str(value)


def _table(components: list[dict[str, JsonValue]]) -> Table:
    columns = ("name", "dtype", "shape", "offset", "num_bytes", "num_leaves")
    table = make_table(
        "components: [layers, kv heads, tokens, content]", *columns, right=columns[3:]
    )
    for component in components:
        table.add_row(*(str(component[column]) for column in columns))
    return table
