"""`kvferry stat`: how full a store is, whose records they are, and what went lately."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.cli.output import JsonOption, emit, format_age, make_table, short_key
from kvferry.cli.stores import UrlArgument, look, model_names
from kvferry.config import format_size, parse_store_url
from kvferry.store.base import Removal, StoreStat

if TYPE_CHECKING:
    from rich.table import Table

    from kvferry.keys import JsonValue
    from kvferry.store.file import FileStore

_SHOWN_NAMESPACES = 20
_MAX_REMOVALS = 1 << 30


class _Found(NamedTuple):
    stat: StoreStat
    namespaces: dict[bytes, tuple[int, int]]
    models: dict[bytes, str]
    removals: list[Removal]


def stat(url: UrlArgument, json: JsonOption = None) -> None:
    """Show what a store holds by model, its quota, what went lately and why.

    `used_bytes` counts what all processes that share the store have stored or reserved, and what is
    in quarantine. The quota is that of the URL given here; engines bring their own. `memory_bytes`
    is the host memory for KV, per engine, unless the option of that name says otherwise.

    Example: kvferry stat file:///var/cache/kvferry?max_bytes=10GiB
    """
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.connectors.registry import default_options

    found = look(url, _ask)
    quarantined, quarantined_bytes = _quarantine(parse_store_url(url).path)
    facts: dict[str, JsonValue] = {
        "url": url,
        "num_records": found.stat.num_records,
        "used_bytes": found.stat.used_bytes,
        "max_bytes": found.stat.max_bytes,
        "index_complete": found.stat.index_complete,
        "quarantined": quarantined,
        "quarantined_bytes": quarantined_bytes,
        "memory_bytes": default_options("shared_storage")["memory_bytes"],
    }
    namespaces = _by_namespace(found)
    removed = _by_reason(found.removals)
    table = make_table(None, "what", "value")
    for name, fact in facts.items():
        table.add_row(name, _readable(name, fact))
    tables: list[Table] = [table]
    if namespaces:
        tables.append(_namespace_table(namespaces))
    if removed:
        tables.append(_removed_table(removed, found.removals[-1].at))
    value: JsonValue = {
        **facts,
        "namespaces": list(namespaces),
        "removed": list(removed),
        "removed_since": found.removals[-1].at if removed else None,
    }
    emit(value, json, *tables)


def _ask(store: FileStore) -> _Found:
    namespaces = store.namespaces()
    models = model_names(store, namespaces)
    return _Found(store.stat(), namespaces, models, store.removals(_MAX_REMOVALS))


def _by_namespace(found: _Found) -> list[dict[str, JsonValue]]:
    """The largest first."""
    return [
        {
            "namespace": namespace.hex() or None,
            "model": found.models.get(namespace),
            "num_records": num_records,
            "num_bytes": num_bytes,
        }
        for namespace, (num_records, num_bytes) in sorted(
            found.namespaces.items(), key=lambda item: -item[1][1]
        )
    ]


def _by_reason(removals: list[Removal]) -> list[dict[str, JsonValue]]:
    """The latest first."""
    rows: dict[str, dict[str, JsonValue]] = {}
    for reason in dict.fromkeys(each.reason for each in removals):
        went = [each for each in removals if each.reason == reason]
        rows[reason] = {
            "reason": reason,
            "num_records": len(went),
            "num_bytes": sum(each.num_bytes for each in went),
            "last_at": went[0].at,
        }
    return list(rows.values())


def _namespace_table(rows: list[dict[str, JsonValue]]) -> Table:
    left = len(rows) - _SHOWN_NAMESPACES
    title = f"records by namespace, {left} smaller ones not shown" if left > 0 else None
    table = make_table(
        title or "records by namespace",
        *("namespace", "records", "size", "model"),
        right=("records", "size"),
    )
    for row in rows[:_SHOWN_NAMESPACES]:
        namespace = bytes.fromhex(str(row["namespace"] or ""))
        table.add_row(
            short_key(namespace) or "not known yet",
            str(row["num_records"]),
            _size(row["num_bytes"]),
            str(row["model"] or ""),
        )
    return table


def _removed_table(rows: list[dict[str, JsonValue]], since: float) -> Table:
    table = make_table(
        f"went in the last {format_age(since)}",
        *("why", "records", "size", "last"),
        right=("records", "size", "last"),
    )
    for row in rows:
        age = f"{format_age(float(str(row['last_at'])))} ago"
        table.add_row(str(row["reason"]), str(row["num_records"]), _size(row["num_bytes"]), age)
    return table


def _size(num_bytes: JsonValue) -> str:
    return format_size(num_bytes) if isinstance(num_bytes, int) else ""


def _quarantine(root: str) -> tuple[int, int]:
    """Files in quarantine and their bytes, as the directory has them."""
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.store.file.directory import Directory

    files = Directory(root).list_quarantine().values()
    return len(files), sum(file.num_bytes for file in files)


def _readable(name: str, fact: JsonValue) -> str:
    if fact is None:
        return "no limit"
    if name.endswith("_bytes") and isinstance(fact, int):
        return f"{format_size(fact)} ({fact} bytes)"
    return {True: "yes", False: "no"}.get(fact, "") if isinstance(fact, bool) else str(fact)
