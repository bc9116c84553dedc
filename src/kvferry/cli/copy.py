"""`kvferry copy`: records of one store into another, each verified on the way."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.cli.choice import Choice, DryRunOption, choosing, chosen, count
from kvferry.cli.output import JsonOption, JsonRow, emit, make_table, progress
from kvferry.cli.stores import UrlArgument, await_answer, open_existing, require_writable
from kvferry.config import format_size
from kvferry.errors import ConfigError, StoreError
from kvferry.keys import Namespace
from kvferry.record.check import MissReason, check_head, check_record, parse_head
from kvferry.store.base import Catalogue, Entry, PutResult
from kvferry.store.kind import Opening, StoreUrl
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
        if dry_run or not num_records:
            emit(facts, json, f"{said} would be copied" if num_records else "nothing to copy")
            if not num_records:
                raise typer.Exit(1)
            return
        task = bar.add_task("copying", total=num_records)
        with open_one(target, Opening(index=False)) as store:
            await_answer(store)
            copying = Copying(source, store)
            for done, entry in enumerate(chosen(source, choice), 1):
                copying.copy(entry)
                bar.update(task, completed=done)
            if choice.token_ids is not None:  # in order, and the start of a prompt is evicted last
                store.touch(copying.keys)
    bad: list[JsonRow] = [
        {"key": entry.key.hex(), "reason": str(why)} for entry, why in copying.bad
    ]
    facts |= {"stored": copying.num_stored, "existing": copying.num_existing, "bad": list(bad)}
    text = f"{said}: {copying.num_stored} copied, {copying.num_existing} were there before"
    tables = [make_table({"not copied": "key", "reason": "reason"}, bad)] if bad else []
    emit(facts, json, text, *tables)
    if bad:
        raise typer.Exit(1)


class Copying:
    """Copies records one by one, and describes their namespaces in the target.

    Attributes:
        keys: of the records that the target has now, in order.
        bad: records that were left out, and why.
    """

    def __init__(self, source: Catalogue, target: Catalogue) -> None:
        self._source = source
        self._target = target
        self._described: set[bytes] = set()
        self.keys: list[ChunkKey] = []
        self.bad: list[tuple[Entry, MissReason]] = []
        self.num_stored = self.num_existing = 0

    def copy(self, entry: Entry) -> None:
        """Copy a record, if it is still there. Raises StoreError if a store fails, or the target
        does not take it."""
        values = self._source.of(entry.namespace)
        size = values.read(entry.key, ())
        if size is None:
            return
        record = memoryview(bytearray(min(size, MAX_RECORD_BYTES)))
        if values.read(entry.key, [(0, record)]) is None:
            return
        info = parse_head(record, size)
        if isinstance(info, MissReason):
            self.bad.append((entry, info))
            return
        schema, key = info.schema, entry.key
        why = check_head(schema, key, info.first_token, size, record)
        why = why or check_record(schema, key, record, size)
        if why is None:
            self._store(entry, schema.namespace, record)
        else:
            self.bad.append((entry, why))

    def _store(self, entry: Entry, namespace: bytes, record: memoryview) -> None:
        if namespace not in self._described:
            self._described.add(namespace)
            text = self._source.describe(namespace)
            if text is not None and Namespace.from_text(namespace, text) is not None:
                self._target.describe(namespace, text)
        result = self._target.of(namespace).put(entry.key, [record])
        if result in (PutResult.NO_SPACE, PutResult.FAILED):
            why = "has no room" if result is PutResult.NO_SPACE else "does not take a record"
            because = f": {self._target.refusal}" if self._target.refusal else ""
            raise StoreError(
                f"{self._target.url} {why}{because}; {len(self.keys)} records were copied"
            )
        self.num_stored += result is PutResult.STORED
        self.num_existing += result is PutResult.EXISTS
        self.keys.append(entry.key)


def _target(url: str) -> StoreUrl:
    """Parse a store URL. Raises ConfigError if nothing can be copied into that store."""
    parsed = parse_store_url(url)
    if parsed.scheme in ("memory", "peer"):
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
