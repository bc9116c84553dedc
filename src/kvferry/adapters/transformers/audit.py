"""Compares hits with what the model computes: is a record bad, or is it another model's?"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from kvferry.adapters.transformers.cache_copies import cache_of, gather
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.blocks.audit import Difference, compare
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import OTHER_KV
from kvferry.observe import Observer
from kvferry.store.base import Store
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class StoredPrefix(NamedTuple):
    """The leading chunks of a prompt that are stored."""

    keys: Sequence[ChunkKey]
    images: list[memoryview]
    token_ids: list[int]
    """Of the prompt, without padding."""


class Auditor:
    """Decides how much of a hit may be used. A wrong model and a wrong record look alike at first:
    another prompt of the same store decides. Until then nothing is saved.

    Args:
        rows: the record layout.
        store: where records that differ are taken out.
        rate: the option `audit`.

    Attributes:
        is_other: the model computes other KV than is stored under its identity.
        draw: makes a random number from 0 to 1, without 1.
    """

    draw = staticmethod(random.random)  # replaced by tests

    def __init__(
        self,
        model: HostModel,
        rows: RankRows,
        store: Store,
        rate: str | float,
        observer: Observer,
    ) -> None:
        self._model = model
        self._rows = rows
        self._store = store
        self._rate = rate
        self._observer = observer
        self._has_passed = False
        # Records that differed. True: the model has stored the record again.
        self._differed: dict[ChunkKey, bool] = {}
        # Those of them that show a wrong record or another model, which is not known yet.
        self._suspects: list[ChunkKey] = []
        # Records before them, which agree: a hit of these alone decides nothing.
        self._not_evidence: set[ChunkKey] = set()
        self.is_other = False

    @property
    def is_undecided(self) -> bool:
        """Whether some record differs, and it is not known yet whether the model does."""
        return bool(self._suspects)

    def usable(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The leading keys whose records may be read."""
        return list(takewhile(lambda key: self._differed.get(key, True), keys))

    def savable(self, keys: list[ChunkKey], num_loaded: int) -> list[ChunkKey]:
        """The leading keys that a cache may be saved under whose first tokens were loaded: none
        behind a record that has been found wrong since."""
        loaded = keys[: -(-max(0, num_loaded) // self._rows.schema.chunk_tokens)]
        first = next((i for i, key in enumerate(loaded) if key in self._differed), len(keys))
        return keys[:first]

    def stored(self, keys: Iterable[ChunkKey]) -> None:
        """These were computed by the model itself, and stored."""
        self._differed.update(dict.fromkeys(self._differed.keys() & set(keys), True))

    def num_right(self, hit: StoredPrefix) -> int | None:
        """How many leading chunks of a hit may be used; the records behind them are not read again.
        None if the model failed.

        The first chunk is computed from nothing, and one of the others on top of those before it.
        If either differs, all are computed from nothing: this shows which records differ.
        """
        if not self._is_due():
            return len(hit.images)
        num_others = len(hit.images) - 1
        sample = [0, 1 + int(self.draw() * num_others)] if num_others else [0]
        excesses = []
        for number in sample:
            found = self._difference(hit, number)
            if found is None:
                return None
            excesses.append(found.excess)
        self._observer.count("audits")
        if max(excesses) <= 1:
            self._pass(hit)
            return len(hit.images)
        self._observer.count("audit_mismatch")
        differ = self._all_differences(hit)
        if differ is None:
            return None
        if differ:
            self._judge(hit, differ)
        return min(differ, default=len(hit.images))

    def _is_due(self) -> bool:
        if self._rate == "off":
            return False
        is_sampled = not isinstance(self._rate, str) and self.draw() < self._rate
        return is_sampled or not self._has_passed

    # ---- comparisons

    def _difference(self, hit: StoredPrefix, number: int) -> Difference | None:
        """Of one chunk, computed on top of those before it. None if the model failed."""
        cache = cache_of(hit.token_ids, hit.images[:number], self._rows, self._model)
        return self._of_next(hit, number, cache)

    def _all_differences(self, hit: StoredPrefix) -> dict[int, Difference] | None:
        """The chunks that differ from what the model computes from nothing. None if it failed."""
        cache = cache_of(hit.token_ids, (), self._rows, self._model)
        differ = {}
        for number in range(len(hit.images)):
            found = self._of_next(hit, number, cache)
            if found is None:
                return None
            if found.excess > 1:
                differ[number] = found
        return differ

    def _of_next(self, hit: StoredPrefix, number: int, cache: Any) -> Difference | None:  # noqa: ANN401
        """Append a chunk to a cache, and compare it with its record."""
        size = self._rows.schema.chunk_tokens
        first = number * size
        token_ids = hit.token_ids[first : first + size]
        if not self._model.compute(token_ids, cache, self._observer):
            return None
        computed = gather(self._rows, cache, self._model, 0, first)
        return compare(self._rows, computed, hit.images[number], self._model.tolerances)

    # ---- verdicts

    def _pass(self, hit: StoredPrefix) -> None:
        """A whole hit agrees with the model."""
        if self._suspects and set(hit.keys) <= self._not_evidence:
            return
        self._has_passed = True
        self._clear(())

    def _judge(self, hit: StoredPrefix, differ: dict[int, Difference]) -> None:
        """Some records differ from what the model computes for their tokens."""
        first = min(differ)
        bad = [hit.keys[number] for number in differ]
        self._differed.update(dict.fromkeys(bad, False))
        self._has_passed = False
        logger.warning(
            "the model computes other KV than is stored in record %s of %s: %s. This and what "
            "follows it is not loaded",
            hit.keys[first].hex(),
            self._store.url,
            differ[first].describe(self._rows),
        )
        if len(differ) < len(hit.keys) - first:
            # One behind it agrees: so the model is the one that stored it.
            self._clear(bad)
        elif not self._suspects:
            self._suspects = bad
            self._not_evidence = set(hit.keys[:first])
            logger.warning(
                "nothing is saved before a hit of another prompt shows whether the record or the "
                "model is another one"
            )
        else:
            self.is_other = True
            logger.warning(
                "two prompts of %s differ: this is another model than the one that stored them. "
                "Nothing is loaded or saved; if it was changed in memory, give it a "
                "weights_version. If it is the right one, remove the namespace %s from the store",
                self._store.url,
                self._rows.schema.namespace.hex(),
            )

    def _clear(self, bad: Sequence[ChunkKey]) -> None:
        """The model is the right one: the records that differ are taken out, and may be stored
        again."""
        taken = [*self._suspects, *bad]
        for key in taken:
            self._store.discard(key, OTHER_KV)
        if taken:
            self._observer.count("audit_bad_records", len(taken))
            logger.warning(
                "%d records of %s, from %s on, are wrong and were taken out of the store: the "
                "model agrees with others. They were saved from caches that were changed, or that "
                "another prompt was computed with",
                len(taken),
                self._store.url,
                taken[0].hex(),
            )
        self._suspects = []
        self._not_evidence = set()
