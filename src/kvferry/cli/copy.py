"""`kvferry copy`: records of one store into another, each verified on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, NamedTuple

import typer
from rich.progress import Progress

from kvferry.cli.choice import (
    Choice,
    DryRunOption,
    choosing,
    chosen,
    keys_of_prompt,
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
from kvferry.errors import ConfigError, LayoutError, StoreError
from kvferry.keys import Namespace
from kvferry.record.check import ReadFault, RecordInfo, check_head, check_record, parse_head
from kvferry.record.join import joined
from kvferry.store.base import PutResult, Store
from kvferry.store.catalogue import Entry
from kvferry.store.kind import Opening, StoreUrl
from kvferry.store.kinds import ends_with_process
from kvferry.store.maintenance import inspect, is_misnamed
from kvferry.store.url import open_one, parse_store_url, read_options
from kvferry.types import ChunkKey

MAX_RECORD_BYTES = 4 << 30
"""Limit of a record. One is in memory at a time, or one with all its shards."""


@choosing
def copy(
    url: UrlArgument,
    choice: Choice,
    to: Annotated[str, typer.Argument(metavar="TO", help="Store that takes the records.")],
    join: Annotated[
        bool,
        typer.Option("--join", help="Instead of shards, store the whole records that they make."),
    ] = False,
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Copy the records that match all given options into another store; without options, all.

    Every checksum is checked before a record is stored; a wrong one is left out. A directory that
    is no store yet becomes one. Exit code 1 if nothing was chosen, a record was wrong, or shards
    do not make one. Shards are what ranks on several machines store; with --join, TO may be URL.

    Example: kvferry copy file:///kv valkey://cache/kv --model DIR --prompt-file F
    """
    target = _target(to)
    with open_existing(url) as source, progress() as bar:
        items = _Items(source, choice)
        num_records, num_bytes = items.count(bar if join else None)
        _refuse_small(target, num_bytes)
        of_what = f"{format_size(num_bytes)}{items.said()}"
        facts: JsonRow = {"dry_run": dry_run, "records": num_records, "num_bytes": num_bytes}
        if join:
            facts |= {"of_shards": len(items.shards), "shards": len(items.keys)}
        if not num_records:
            say_nothing(facts, json, why_nothing(source, choice))
        if dry_run:
            emit(facts, json, f"{num_records:,} records, {of_what} would be copied")
            return
        with open_one(target, Opening(index=False)) as store:
            await_answer(store)
            copying = _Copying(source, store, skips=join)
            for item in bar.track(items, num_records, description="copying"):
                copying.copy(item)
            if choice.prompt is not None:  # in order, and the start of a prompt is evicted last
                store.touch(items.in_order(copying.copied))
    _report(copying, num_records, of_what, facts, json)


class _Item(NamedTuple):
    """A record to copy: its one entry, or the entries of the shards that make it."""

    namespace: bytes
    key: ChunkKey
    entries: list[Entry]

    @property
    def is_joined(self) -> bool:
        return self.entries[0].key != self.key


class _Items:
    """The records to copy: those that were chosen, and those that chosen shards make.

    Attributes:
        shards: by namespace and key of the whole record. Takes about 400 bytes of memory a shard.
        keys: of these shards.
    """

    def __init__(self, source: Store, choice: Choice) -> None:
        self._source = source
        self._choice = choice
        # Of a prompt, whose records are looked up one by one; others are many, and are listed.
        self._of_prompt = None if choice.prompt is None else list(chosen(source, choice))
        self.shards: dict[tuple[bytes, ChunkKey], list[Entry]] = {}
        self.keys: set[ChunkKey] = set()

    def count(self, bar: Progress | None) -> tuple[int, int]:
        """Return the number of records, and of the bytes that are stored of them now. With a `bar`,
        look for shards among what is chosen."""
        num_wholes = num_bytes = 0
        entries: Iterable[Entry] = self._chosen()
        if bar is not None:
            entries = bar.track(entries, description="looking for shards")
        for entry in entries:
            num_bytes += entry.stored_bytes
            whole = None if bar is None else self._whole_of(entry)
            if whole is None:
                num_wholes += 1
            else:
                self.shards.setdefault(whole, []).append(entry)
                self.keys.add(entry.key)
        return num_wholes + len(self.shards), num_bytes

    def _chosen(self) -> Iterable[Entry]:
        found = self._of_prompt
        return chosen(self._source, self._choice) if found is None else found

    def _whole_of(self, entry: Entry) -> tuple[bytes, ChunkKey] | None:
        """Return the namespace and key of the record of which an entry is a shard."""
        info = inspect(self._source, entry)
        if isinstance(info, ReadFault) or not info.is_shard:
            return None
        return info.schema.namespace, ChunkKey(info.of)

    def __iter__(self) -> Iterator[_Item]:
        for entry in self._chosen():
            if entry.key not in self.keys:
                yield _Item(entry.namespace, entry.key, [entry])
        for whole, entries in self.shards.items():
            yield _Item(*whole, entries)

    def said(self) -> str:
        return f", {len(self.shards):,} of {len(self.keys):,} shards" if self.shards else ""

    def in_order(self, copied: list[tuple[ChunkKey, bytes]]) -> list[ChunkKey]:
        """Return the keys of `_Copying.copied` in the order of the chosen prompt; last, drafts that
        the target had, which were not read."""
        prompt = self._choice.prompt
        assert prompt is not None, "asked only where a prompt was chosen"
        keys = keys_of_prompt(self._source, self._choice, prompt)
        places = {bytes(key): place for place, (_, key) in enumerate(keys)}
        found = [(places.get(of or key, len(places)), key) for key, of in copied]
        return [key for _, key in sorted(found)]


class _Copying:
    """Copies records, and remembers what came of them.

    Args:
        skips: whether what the target has is not read.

    Attributes:
        copied: key of each record that the target has now and, of a shard, of the whole record.
        bad: keys of what was left out, and why.
        num_read: records that were copied, there before, or wrong.
        num_vanished: records that were removed before they were read.
    """

    def __init__(self, source: Store, target: Store, *, skips: bool) -> None:
        self._source = source
        self._target = target
        self._skips = skips
        self._described: set[bytes] = set()
        self.copied: list[tuple[ChunkKey, bytes]] = []
        self.results: Counter[PutResult] = Counter()
        self.bad: list[tuple[ChunkKey, str]] = []
        self.num_read = self.num_vanished = 0

    def copy(self, item: _Item) -> None:
        """Copy a record that is still there, and describe its namespace in the target. Raises
        StoreError if a store fails, or the target does not take a record."""
        if self._skips and item.namespace:
            values = self._target.in_namespace(item.namespace)
            if values.read(item.key, ()) is not None:
                self._learn(item.key, b"", PutResult.EXISTS)
                return
        num_bad = len(self.bad)
        found = [each for entry in item.entries if (each := self._read(entry)) is not None]
        whole = found[0][1] if found else None
        if found and item.is_joined:
            whole = self._joined(item.key, found)
        if whole is not None:
            info = found[0][0]
            of = b"" if item.is_joined else info.of
            self._put(item.key, of, info.schema.namespace, whole)
        elif len(self.bad) > num_bad:
            self.num_read += 1
        else:
            self.num_vanished += 1

    def _learn(self, key: ChunkKey, of: bytes, result: PutResult) -> None:
        self.num_read += 1
        self.results[result] += 1
        self.copied.append((key, of))

    def _read(self, entry: Entry) -> tuple[RecordInfo, memoryview] | None:
        """Read and check a record; None if it is gone or wrong."""
        values = self._source.in_namespace(entry.namespace)
        size = values.read(entry.key, ())
        record = memoryview(bytearray(min(size or 0, MAX_RECORD_BYTES)))
        if size is None or values.read(entry.key, [(0, record)]) is None:
            return None
        info = _checked(entry.key, record, size)
        if isinstance(info, ReadFault):
            self.bad.append((entry.key, str(info)))
            return None
        return info, record

    def _joined(
        self, key: ChunkKey, shards: list[tuple[RecordInfo, memoryview]]
    ) -> memoryview | None:
        """Return the record that shards make; None if they make none."""
        try:
            return joined(shards)
        except LayoutError as error:
            self.bad.append((key, str(error)))
            return None

    def _put(self, key: ChunkKey, of: bytes, namespace: bytes, record: memoryview) -> None:
        if namespace not in self._described:
            self._described.add(namespace)
            text = self._source.catalogue().description(namespace)
            if text is not None and Namespace.from_text(namespace, text) is not None:
                self._target.describe(namespace, text)
        result, fault = self._target.in_namespace(namespace).put(key, [record])
        if fault is not None:
            why = "has no room" if result is PutResult.NO_SPACE else "does not take a record"
            said = f"{self._target.url} {why}: {fault}; {len(self.copied)} records were copied"
            raise StoreError(fault.kind, said)
        self._learn(key, of, result)


def _checked(key: ChunkKey, record: memoryview, size: int) -> RecordInfo | ReadFault:
    """Check a whole value; return its header, or why it is wrong."""
    info = parse_head(record, size)
    if isinstance(info, ReadFault):
        return info
    if is_misnamed(info):
        return ReadFault.OTHER_RECORD
    why = check_head(info.schema, key, info.first_token, size, record, info.of)
    return why or check_record(info.schema, key, record, size) or info


def _report(
    copying: _Copying, num_records: int, of_what: str, facts: JsonRow, json: str | None
) -> None:
    """Print what was copied. Ends the command with `Exit.NO` if something was wrong."""
    bad: list[JsonRow] = [{"key": key.hex(), "reason": why} for key, why in copying.bad]
    num_stored, num_existing = (
        copying.results[each] for each in (PutResult.STORED, PutResult.EXISTS)
    )
    # Those that were counted first and did not come again are gone as well.
    num_records = max(num_records, copying.num_read + copying.num_vanished)
    num_vanished = num_records - copying.num_read
    facts |= {"records": num_records, "stored": num_stored, "existing": num_existing}
    facts |= {"vanished": num_vanished, "bad": list(bad)}
    parts = [f"{num_stored} copied", f"{num_existing} were there before"]
    parts += [f"{num_vanished} vanished meanwhile"] if num_vanished else []
    parts += [f"{len(bad)} wrong"] if bad else []
    tables = [make_table({"not copied": "key", "reason": "reason"}, bad)] if bad else []
    emit(facts, json, f"{num_records:,} records, {of_what}: {', '.join(parts)}", *tables)
    if bad:
        raise typer.Exit(Exit.NO)


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
