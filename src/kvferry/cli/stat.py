"""`kvferry stat`: how full a store is, whose records they are, and what went lately."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.cli.output import (
    JsonOption,
    emit,
    format_age,
    make_fact_table,
    make_table,
    short_key,
)
from kvferry.cli.stores import UrlArgument, look, model_names
from kvferry.config import format_size, parse_store_url
from kvferry.store.base import Removal, StoreStat

if TYPE_CHECKING:
    from rich.table import Table

    from kvferry.keys import JsonValue
    from kvferry.store.file import FileStore

_SHOWN_NAMESPACES = 20
_MAX_REMOVALS = 1 << 30


class _Namespace(NamedTuple):
    digest: bytes
    model: str | None
    num_records: int
    num_bytes: int


class _Removed(NamedTuple):
    """What went for one reason."""

    reason: str
    num_records: int
    num_bytes: int
    last_at: float


def stat(url: UrlArgument, json: JsonOption = None) -> None:
    """Show what a store holds by model, its quota, what went lately and why.

    `used_bytes` counts what all processes that share the store have stored or reserved, and what is
    in quarantine. The quota is that of the URL given here; engines bring their own. `memory_bytes`
    is the host memory for KV, per engine, unless the option of that name says otherwise.

    Example: kvferry stat file:///var/cache/kvferry?max_bytes=10GiB
    """
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.connectors.registry import default_options

    counts, namespaces, removals = look(url, _ask)
    quarantined, quarantined_bytes = _quarantine(parse_store_url(url).path)
    facts: dict[str, JsonValue] = {
        "url": url,
        "num_records": counts.num_records,
        "used_bytes": counts.used_bytes,
        "max_bytes": counts.max_bytes,
        "index_complete": counts.index_complete,
        "quarantined": quarantined,
        "quarantined_bytes": quarantined_bytes,
        "memory_bytes": default_options("shared_storage")["memory_bytes"],
    }
    removed = _by_reason(removals)
    since = removals[-1].at if removals else None
    tables = [make_fact_table(facts)]
    if namespaces:
        tables.append(_namespace_table(namespaces))
    if since is not None:
        tables.append(_removed_table(removed, since))
    value: JsonValue = {
        **facts,
        "namespaces": [
            {
                "namespace": each.digest.hex() or None,
                "model": each.model,
                "num_records": each.num_records,
                "num_bytes": each.num_bytes,
            }
            for each in namespaces
        ],
        "removed": [each._asdict() for each in removed],
        "removed_since": since,
    }
    emit(value, json, *tables)


def _ask(store: FileStore) -> tuple[StoreStat, list[_Namespace], list[Removal]]:
    """Counts, namespaces (the largest first) and removals (the latest first)."""
    counts = store.namespaces()
    models = model_names(store, counts)
    namespaces = [_Namespace(each, models.get(each), *count) for each, count in counts.items()]
    namespaces.sort(key=lambda each: -each.num_bytes)
    return store.stat(), namespaces, store.removals(_MAX_REMOVALS)


def _by_reason(removals: list[Removal]) -> list[_Removed]:
    """The latest first."""
    found = []
    for reason in dict.fromkeys(each.reason for each in removals):
        went = [each for each in removals if each.reason == reason]
        found.append(_Removed(reason, len(went), sum(each.num_bytes for each in went), went[0].at))
    return found


def _namespace_table(namespaces: list[_Namespace]) -> Table:
    left = len(namespaces) - _SHOWN_NAMESPACES
    rows = [
        (
            short_key(each.digest) or "not known yet",
            str(each.num_records),
            format_size(each.num_bytes),
            each.model or "",
        )
        for each in namespaces[:_SHOWN_NAMESPACES]
    ]
    return make_table(
        ("namespace", "records", "size", "model"),
        rows,
        title="records by namespace" + (f", {left} smaller ones not shown" if left > 0 else ""),
        right=("records", "size"),
    )


def _removed_table(removed: list[_Removed], since: float) -> Table:
    rows = [
        (
            each.reason,
            str(each.num_records),
            format_size(each.num_bytes),
            f"{format_age(each.last_at)} ago",
        )
        for each in removed
    ]
    return make_table(
        ("why", "records", "size", "last"),
        rows,
        title=f"went in the last {format_age(since)}",
        right=("records", "size", "last"),
    )


def _quarantine(root: str) -> tuple[int, int]:
    """Files in quarantine and their bytes, as the directory has them."""
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.store.file.directory import Directory

    files = Directory(root).list_files("quarantine").values()
    return len(files), sum(file.num_bytes for file in files)
