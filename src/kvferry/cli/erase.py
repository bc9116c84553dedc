"""What `kvferry rm` deletes by its kind: in every store that is named and, by a notice, in the
memory of the engines that use them. Says what was erased where, and what was not reached.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import typer

from kvferry.cli.choice import Choice, Looked, chosen, names_of_choice, why_nothing
from kvferry.cli.output import Exit, JsonRow, confirm, emit, make_table, progress, say_nothing
from kvferry.cli.stores import open_existing
from kvferry.config import format_size, printable
from kvferry.errors import ConfigError, StoreError
from kvferry.store import maintenance
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry
from kvferry.store.erasures import MAX_NAMES, add_to_notice, parse_notice
from kvferry.store.kind import shown_url
from kvferry.store.kinds import kind_of
from kvferry.store.url import parse_tiers
from kvferry.types import ChunkKey

_Name = tuple[bytes, ChunkKey]
"""A record's namespace and key."""

_TRIES = 4
_COLUMNS = {
    "store": "url", "records": "records", "size": "num_bytes", "say no salt": "unmarked",
    "in quarantine": "quarantined", "left": "left",
}  # fmt: skip


@dataclass(slots=True)
class _Erased:
    """What was deleted from one store, or is to be.

    Attributes:
        store: None if it could not be opened.
        is_only: whether no other store is named, so that its failure is that of the command.
        left: why something may be left; empty if nothing is.
        told: whether engines are told of it.
        listed: the chosen records and their bytes, before engines are told.
        num_gone: those of `num_records` that others deleted first.
    """

    url: str
    store: Store | None
    is_only: bool = False
    num_records: int = 0
    num_bytes: int = 0
    looked: Looked | None = None
    quarantined: int = 0
    left: str = ""
    told: bool = False
    listed: dict[_Name, int] = field(default_factory=dict)
    num_gone: int = 0

    def failed(self, error: StoreError) -> None:
        if self.is_only and not self.num_records:
            raise error
        self.left = str(error)

    def row(self, choice: Choice) -> JsonRow:
        looked = self.looked or Looked()
        row: JsonRow = {"url": self.url, "records": self.num_records, "num_bytes": self.num_bytes}
        if choice.salt is not None:
            row |= {"unmarked": looked.num_unmarked, "unreadable": looked.num_unreadable}
        row |= {"quarantined": self.quarantined, "left": self.left or None}
        return row


def erase(
    urls: Sequence[str], choice: Choice, json: str | None, *, dry_run: bool, yes: bool
) -> None:
    """Delete the chosen records from all stores, or count them. Raises ConfigError, before anything
    was changed, for what is no store; NothingFound if nothing was there. Ends with `Exit.LEFT` if
    something may be left somewhere.

    What is chosen is listed before engines are told, since they take back what they wrote: so the
    report has all that went, also what an engine removed first."""
    _check_places(urls)
    with ExitStack() as closing:
        found = [_opened(closing, url, len(urls), writable=False) for url in urls]
        for each in found:
            _list(each, choice)
        why = _why(found, choice)
    is_of_person = choice.salt is not None or choice.prompt is not None
    if dry_run or (why and not (yes or is_of_person)):
        _show(found, choice, json, why, dry_run=dry_run)
        return
    if not why:
        num_bytes = format_size(sum(each.num_bytes for each in found))
        where = ", ".join(map(shown_url, urls))
        total = sum(each.num_records for each in found)
        confirm(f"delete {total:,} records, {num_bytes}, of {where}?", yes=yes)
    with ExitStack() as closing:
        listed = [each.listed for each in found]
        found = [_opened(closing, url, len(urls), writable=True) for url in urls]
        names, at = _names(found, choice), time.time()
        for each in found:
            _tell(each, names, at)
        for each, before in zip(found, listed, strict=True):
            if yes or not why:  # else what is stored by now was not agreed to
                _delete(each, choice, before)
        for each in found:
            _tell(each, names, at)
            if names and not (each.told or each.left):
                each.left = "the notice for engines could not be written: restart them"
        why = _why(found, choice)
    _show(found, choice, json, why, dry_run=False)


def _check_places(urls: Sequence[str]) -> None:
    """Raise ConfigError for two URLs of one store: its records would be counted twice."""
    parsed = parse_tiers(urls)
    paths = [os.path.realpath(url.path) for url in parsed if kind_of(url.scheme).is_directory]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"two URLs name one store, {printable(path)!r}; leave one out")


def _opened(closing: ExitStack, url: str, num_urls: int, *, writable: bool) -> _Erased:
    shown = shown_url(url)
    try:
        store = closing.enter_context(open_existing(url, writable=writable))
        quarantined = store.catalogue().facts().get("quarantined") or 0
    except StoreError as error:
        each = _Erased(shown, None, num_urls == 1)
        each.failed(error)
        return each
    return _Erased(shown, store, num_urls == 1, quarantined=int(quarantined))


def _names(found: Sequence[_Erased], choice: Choice) -> set[str]:
    """The names of what is chosen, for the notices: those of all stores, since an engine may use
    several. Raises ConfigError where the prefix of a server is wrong."""
    names: set[str] = set()
    for each in found:
        try:
            names |= set() if each.store is None else names_of_choice(each.store, choice)
        except StoreError as error:
            each.failed(error)
    return names


def _tell(each: _Erased, names: set[str], at: float) -> None:
    """Leave a notice, unless it is there. Another command may do so at the same time, and replace
    it, so look whether it is there."""
    each.told = False
    if each.store is None or not names:
        return
    for _ in range(_TRIES):
        with suppress(StoreError):
            text = each.store.catalogue().notice()
            told = [name for name, since in parse_notice(text).items() if since >= at]
            each.told = len(names.intersection(told)) == min(len(names), MAX_NAMES)
            if each.told:
                return
            each.store.catalogue().notice(add_to_notice(text, sorted(names), at))


def _list(each: _Erased, choice: Choice) -> None:
    """Note the chosen records of one store, until it fails."""

    def note(_store: Store, entry: Entry) -> bool:
        each.listed[entry.namespace, entry.key] = entry.stored_bytes
        return True

    _walk(each, choice, "looking", note)


def _delete(each: _Erased, choice: Choice, listed: dict[_Name, int]) -> None:
    """Delete the chosen records of one store, until it fails. Of those that were listed, count
    what is gone, too: an engine or another command was quicker."""

    def delete(store: Store, entry: Entry) -> bool:
        is_deleted = maintenance.delete_or_fail(store, entry, each.num_records)
        if is_deleted:
            listed.pop((entry.namespace, entry.key), None)
        return is_deleted

    _walk(each, choice, "deleting", delete)
    if each.store is None:
        return
    num_left = 0
    try:
        for (namespace, key), num_bytes in listed.items():
            if each.store.in_namespace(namespace).read(key, ()) is not None:
                num_left += 1
                continue
            each.num_gone += 1
            each.num_records += 1
            each.num_bytes += num_bytes
    except StoreError as error:
        each.failed(error)
    # By age, those that were used meanwhile are chosen no more.
    if num_left and choice.age is None and not each.left:
        each.left = f"{num_left} records are chosen no more, and still there: run it again"


def _walk(each: _Erased, choice: Choice, what: str, counts: Callable[[Store, Entry], bool]) -> None:
    """Do something with each chosen record of one store, and count it, until the store fails."""
    if each.store is None or each.left:
        return
    each.looked = Looked()
    try:
        with progress() as bar:
            for entry in bar.track(chosen(each.store, choice, each.looked), description=what):
                if counts(each.store, entry):
                    each.num_records += 1
                    each.num_bytes += entry.stored_bytes
    except StoreError as error:
        each.failed(error)
    if each.looked.num_unreadable and not each.left:
        each.left = f"{each.looked.num_unreadable} records could not be read"


def _why(found: Sequence[_Erased], choice: Choice) -> str:
    """Why nothing was found; empty if something was, or may be left."""
    if any(each.left or each.num_records for each in found):
        return ""
    reasons = [why_nothing(each.store, choice) for each in found if each.store is not None]
    return "; ".join(reasons)


def _notes(found: Sequence[_Erased], choice: Choice, *, dry_run: bool) -> list[str]:
    """What was not reached, and what became of the memory of engines."""
    notes = []
    num_gone = sum(each.num_gone for each in found)
    if num_gone:
        notes.append(
            f"{num_gone:,} of them were gone before their turn came: engines take back "
            "what they wrote."
        )
    if any(each.told for each in found) and not dry_run:
        notes.append(
            "Engines that use these stores drop it from memory within seconds; one of an older "
            "release does not: restart it."
        )
    if choice.salt is not None and not dry_run:
        notes.append(
            "Not reached: tiers and copies that are not named here; vLLM's own prefix cache, until "
            "its blocks are used again or reset_prefix_cache is called; journals."
        )
    if choice.salt is not None and any(each.looked and each.looked.num_unmarked for each in found):
        notes.append(
            "Records that say no salt had none, or are of an older release (found by their "
            "prompts: --chat, --tokens), or a host's own pages (found by --namespace, --tenant)."
        )
    if any(each.quarantined for each in found):
        notes.append("Damaged records in quarantine were not looked through.")
    return notes


def _show(
    found: Sequence[_Erased], choice: Choice, json: str | None, why: str, *, dry_run: bool
) -> None:
    num_records = sum(each.num_records for each in found)
    num_bytes = sum(each.num_bytes for each in found)
    rows = [each.row(choice) for each in found]
    notes = _notes(found, choice, dry_run=dry_run)
    value: JsonRow = {"dry_run": dry_run, "records": num_records, "num_bytes": num_bytes}
    value |= {"stores": list(rows), "notes": list(notes)}
    if why:
        if any(each.told for each in found):
            why += ". Engines that use these stores drop it from memory all the same"
        say_nothing(value, json, why)
    verb = "would be deleted" if dry_run else "deleted"
    said = f"{num_records:,} records, {format_size(num_bytes)} {verb}"
    is_left = any(each.left for each in found)
    columns = _COLUMNS if choice.salt is not None else {**_COLUMNS, "say no salt": ""}
    columns = {name: field for name, field in columns.items() if field}
    tables = [make_table(columns, rows)] if len(rows) > 1 or is_left or choice.salt else []
    emit(value, json, said, *tables, *notes)
    if is_left:
        raise typer.Exit(Exit.LEFT)
