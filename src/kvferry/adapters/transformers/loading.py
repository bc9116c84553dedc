"""Reads what a store has of the prompts of a call, and makes caches of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.adapters.transformers.arguments import Prompt
from kvferry.adapters.transformers.audit import Auditor
from kvferry.adapters.transformers.cache_copies import PlainForm, StoredRow, TreeForm
from kvferry.adapters.transformers.cache_tree import Part
from kvferry.adapters.transformers.call_journal import CallJournal
from kvferry.adapters.transformers.items import Items
from kvferry.adapters.transformers.states import StateRecords
from kvferry.contract.messages import LookupMiss
from kvferry.observe import Observer
from kvferry.store.record_client import RecordClient
from kvferry.types import ChunkKey


def _num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Return how many chunks begin within the first `num_tokens`."""
    return max(0, -(-num_tokens // chunk_tokens))


class Row(NamedTuple):
    """A row of a call: what can be stored of it, and under which keys."""

    prompt: Prompt
    keys: list[ChunkKey]
    """Of the whole chunks of `prompt.token_ids`."""


class Hit(NamedTuple):
    """A cache of what is stored of some rows of a call."""

    part: Part
    num_tokens: int
    """In the cache, of each of its rows."""


class _Stored(NamedTuple):
    """What the store has of one row."""

    row: StoredRow
    num_tokens: int
    """Behind the padding, if `StoredRow` leaves it out."""
    missed: LookupMiss = LookupMiss.ABSENT
    """Why no more chunks are read."""


class Loader:
    """Reads rows. Blocks; one thread at a time.

    Where a model can go on behind any chunk, all rows are in one cache, padded as in the batch, and
    the row whose stored prefix ends first limits the others. Where it can go on from states alone,
    those of several rows end at different places: rows that are alike in padding and in what is
    stored are in a cache together, without their padding.
    """

    def __init__(
        self,
        form: PlainForm | TreeForm,
        records: RecordClient,
        states: StateRecords | None,
        auditor: Auditor,
        journal: CallJournal,
        observer: Observer,
    ) -> None:
        self._form = form
        self._size = form.rows.schema.chunk_tokens
        self._records = records
        self._states = states
        self._auditor = auditor
        self._journal = journal
        self._observer = observer

    def load(self, rows: Sequence[Row], limit: int, items: Items, timeout: float) -> list[Hit]:
        """Return caches of the stored chunks of each row, at most `limit` tokens, padding included;
        without tokens where nothing is stored, or an audit fails. Each row is in one of them.

        Args:
            items: of the only row, placed; none for several rows. Nothing ends in one.
        """
        started = time.perf_counter()
        deadline = time.monotonic() + timeout
        if self._form.goes_on_anywhere:
            stored = self._as_many_of_each(rows, limit, items, deadline)
        else:
            stored = self._of_each(rows, limit, items, deadline)
        hits = [place for place, each in enumerate(stored) if each.row.images]
        if hits:
            longest = max(hits, key=lambda place: len(stored[place].row.images))
            prompt, keys = rows[longest]
            row = stored[longest].row
            if not self._auditor.agrees(keys, row, prompt.token_ids, items, timeout):
                hits = []
        if not hits:
            stored = [
                each._replace(row=StoredRow(each.row.num_padding, []), num_tokens=0)
                for each in stored
            ]
        ends = self._ends(stored, rows) if hits else [0] * len(rows)
        late = LookupMiss.DEADLINE if time.monotonic() >= deadline else None
        late = LookupMiss.OTHER_MODEL if self._auditor.has_failed else late
        self._journal.add(rows, ends, limit, [late or each.missed for each in stored])
        found = self._caches(stored, rows)
        self._observer.count("requests_missed", len(rows) - len(hits))
        for place in hits:
            self._observer.count("hits")
            self._observer.count("hit_tokens", ends[place] - rows[place].prompt.num_padding)
        if hits:
            self._observer.observe("load", time.perf_counter() - started)
        return found

    def _ends(self, stored: Sequence[_Stored], rows: Sequence[Row]) -> list[int]:
        """Return how many tokens of each row are stored, padding included."""
        if self._form.goes_on_anywhere:
            return [each.num_tokens for each in stored]
        pairs = zip(stored, rows, strict=True)
        return [row.prompt.num_padding + each.num_tokens for each, row in pairs]

    def _caches(self, stored: Sequence[_Stored], rows: Sequence[Row]) -> list[Hit]:
        alike: dict[tuple[int, int], list[int]] = {}
        for place, (each, row) in enumerate(zip(stored, rows, strict=True)):
            padding = 0 if self._form.goes_on_anywhere else row.prompt.num_padding
            alike.setdefault((padding, each.num_tokens), []).append(place)
        hits = []
        for (padding, num_tokens), places in alike.items():
            cache = self._form.cache_of([stored[place].row for place in places], num_tokens)
            hits.append(Hit(Part(cache, places, padding), num_tokens))
        return hits

    # ---- reading

    def _as_many_of_each(
        self, rows: Sequence[Row], limit: int, items: Items, deadline: float
    ) -> list[_Stored]:
        """Return the stored chunks of each row's first tokens, as many tokens for every row."""
        known: dict[ChunkKey, memoryview] = {}
        for prompt, keys in rows:
            images = self._images(keys, limit - prompt.num_padding, deadline, known)
            limit = min(limit, prompt.num_padding + len(images) * self._size)
        limit = items.cut(limit)
        stored = []
        for prompt, keys in rows:
            wanted = keys[: _num_chunks(limit - prompt.num_padding, self._size)]
            images = [known[key] for key in wanted]
            stored.append(_Stored(StoredRow(prompt.num_padding, images), limit))
        return stored

    def _of_each(
        self, rows: Sequence[Row], limit: int, items: Items, deadline: float
    ) -> list[_Stored]:
        """Return of each row the stored whole chunks up to where the model can go on."""
        known: dict[ChunkKey, memoryview] = {}
        states: dict[ChunkKey, bytes | None] = {}
        stored = []
        for prompt, keys in rows:
            images = self._images(keys, limit - prompt.num_padding, deadline, known)
            most = min(limit - prompt.num_padding, len(images) * self._size)
            whole = items.aligned_cut(max(most, 0), self._size) // self._size
            row = StoredRow(0, images[:whole])
            if self._states is not None:
                row = self._up_to_a_state(keys, row.images, deadline, states)
            is_behind = len(row.images) < whole
            missed = LookupMiss.BEHIND if is_behind else LookupMiss.ABSENT
            stored.append(_Stored(row, len(row.images) * self._size, missed))
        return stored

    def _images(
        self,
        keys: list[ChunkKey],
        num_tokens: int,
        deadline: float,
        known: dict[ChunkKey, memoryview],
    ) -> list[memoryview]:
        wanted = keys[: _num_chunks(num_tokens, self._size)]
        images = self._records.get_leading(wanted, deadline, known)
        known.update(zip(wanted, images, strict=False))
        return images

    def _up_to_a_state(
        self,
        keys: list[ChunkKey],
        images: list[memoryview],
        deadline: float,
        known: dict[ChunkKey, bytes | None],
    ) -> StoredRow:
        """Return the leading chunks at whose end a state is stored, and that state. A prompt leaves
        one behind its last chunk, and others where every prompt may; none in an item."""
        assert self._states is not None  # the caller asks it
        assert isinstance(self._form, TreeForm)  # only a tree has states
        tree = self._form.tree
        for number in range(len(images), 0, -1):
            chunk, num_tokens = keys[number - 1], number * self._size
            may_be = number == len(images) or num_tokens % tree.snapshot_tokens == 0
            if chunk not in known and (may_be or self._states.is_known(chunk)):
                state = self._states.read(chunk, num_tokens, deadline)
                known[chunk] = state if state is not None and tree.accepts(state) else None
            if (state := known.get(chunk)) is not None:
                return StoredRow(0, images[:number], state)
        if images:
            self._observer.count("miss_no_state")
        return StoredRow(0, [])
