"""`kvferry copy`: records of one store into another, each verified on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import typer

from kvferry.cli.choice import (
    Choice,
    DryRunOption,
    choosing,
    chosen,
    count,
    why_nothing,
)
from kvferry.cli.output import (
    Exit,
    JsonOption,
    JsonRow,
    emit,
    make_table,
    progress,
    say_nothing,
)
from kvferry.cli.stores import UrlArgument, await_answer, open_existing, require_writable
from kvferry.config import format_size
from kvferry.errors import ConfigError, StoreError
from kvferry.keys import Namespace
from kvferry.record.check import ReadFault, check_head, check_record, parse_head
from kvferry.store.base import PutResult, Store
from kvferry.store.catalogue import Entry
from kvferry.store.kind import Opening, StoreUrl
from kvferry.store.kinds import ends_with_process
from kvferry.store.url import open_one, parse_store_url, read_options
from kvferry.types import ChunkKey

MAX_RECORD_BYTES = 4 << 30
"""Limit of a record; one is in memory at a time."""


@choosing
def copy(
    url: UrlArgument,
    choice: Choice,
    to: Annotated[str, typer.Argument(metavar="TO", help="Store that takes the records.")],
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Copy the records that match all given options into another store; without options, all.

    Every checksum is checked before a record is stored; a wrong one is left out. A directory that
    is no store yet becomes one. Exit code 1 if nothing was chosen, or a record was wrong.

    Example: kvferry copy file:///kv valkey://cache/kv --model DIR --prompt-file F
    """
    target = _target(to)
    with open_existing(url) as source, progress() as bar:
        num_records, num_bytes = count(source, choice)
        _refuse_small(target, num_bytes)
        said = f"{num_records:,} records, {format_size(num_bytes)}"
        facts: JsonRow = {"dry_run": dry_run, "records": num_records, "num_bytes": num_bytes}
        if not num_records:
            say_nothing(facts, json, why_nothing(source, choice))
        if dry_run:
            emit(facts, json, f"{said} would be copied")
            return
        with open_one(target, Opening(index=False)) as store:
            await_answer(store)
            found = bar.track(chosen(source, choice), num_records, description="copying")
            copied = _copy(source, store, found)
            if choice.prompt is not None:  # in order, and the start of a prompt is evicted last
                store.touch(copied.keys)
    bad: list[JsonRow] = [{"key": entry.key.hex(), "reason": str(why)} for entry, why in copied.bad]
    num_stored, num_existing = (
        copied.results[each] for each in (PutResult.STORED, PutResult.EXISTS)
    )
    # Those that were counted first and did not come again are gone as well.
    num_read = len(copied.keys) + len(bad)
    num_records = max(num_records, num_read + copied.num_vanished)
    num_vanished = num_records - num_read
    facts |= {"records": num_records, "stored": num_stored, "existing": num_existing}
    facts |= {"vanished": num_vanished, "bad": list(bad)}
    parts = [f"{num_stored} copied", f"{num_existing} were there before"]
    parts += [f"{num_vanished} vanished meanwhile"] if num_vanished else []
    parts += [f"{len(bad)} wrong"] if bad else []
    text = f"{num_records:,} records, {format_size(num_bytes)}: {', '.join(parts)}"
    tables = [make_table({"not copied": "key", "reason": "reason"}, bad)] if bad else []
    emit(facts, json, text, *tables)
    if bad:
        raise typer.Exit(Exit.NO)


class _Copied(NamedTuple):
    keys: list[ChunkKey]
    """Of the records that the target has now, in order."""
    results: Counter[PutResult]
    bad: list[tuple[Entry, ReadFault]]
    """Records that were left out, and why."""
    num_vanished: int
    """Records that were removed before they were read."""


def _copy(source: Store, target: Store, entries: Iterable[Entry]) -> _Copied:
    """Copy records that are still there, and describe their namespaces in the target. Raises
    StoreError if a store fails, or the target does not take a record."""
    keys: list[ChunkKey] = []
    results: Counter[PutResult] = Counter()
    bad: list[tuple[Entry, ReadFault]] = []
    num_vanished = 0
    described: set[bytes] = set()
    for entry in entries:
        values = source.in_namespace(entry.namespace)
        size = values.read(entry.key, ())
        record = memoryview(bytearray(min(size or 0, MAX_RECORD_BYTES)))
        if size is None or values.read(entry.key, [(0, record)]) is None:
            num_vanished += 1
            continue
        namespace = _checked(entry.key, record, size)
        if isinstance(namespace, ReadFault):
            bad.append((entry, namespace))
            continue
        if namespace not in described:
            described.add(namespace)
            text = source.catalogue().description(namespace)
            if text is not None and Namespace.from_text(namespace, text) is not None:
                target.describe(namespace, text)
        result, fault = target.in_namespace(namespace).put(entry.key, [record])
        if fault is not None:
            why = "has no room" if result is PutResult.NO_SPACE else "does not take a record"
            said = f"{target.url} {why}: {fault}; {len(keys)} records were copied"
            raise StoreError(fault.kind, said)
        results[result] += 1
        keys.append(entry.key)
    return _Copied(keys, results, bad, num_vanished)


def _checked(key: ChunkKey, record: memoryview, size: int) -> bytes | ReadFault:
    """Check a whole record; return its namespace, or why it is wrong."""
    info = parse_head(record, size)
    if isinstance(info, ReadFault):
        return info
    why = check_head(info.schema, key, info.first_token, size, record, info.of)
    return why or check_record(info.schema, key, record, size) or info.schema.namespace


def _target(url: str) -> StoreUrl:
    """Parse a store URL. Raises ConfigError if nothing can be copied into that store."""
    parsed = parse_store_url(url)
    if ends_with_process(str(parsed)):
        raise ConfigError(f"{parsed.where}: ends with its process; name a directory or a server")
    require_writable(parsed)
    return parsed


def _refuse_small(url: StoreUrl, num_bytes: int) -> None:
    """Raise ConfigError for a quota below what is chosen. To open a store with it may evict."""
    max_bytes = getattr(read_options(url), "max_bytes", None)
    if max_bytes is not None and max_bytes < num_bytes:
        raise ConfigError(
            f"max_bytes={format_size(max_bytes)} is less than the chosen records have "
            f"({format_size(num_bytes)}); raise it, or choose fewer"
        )
