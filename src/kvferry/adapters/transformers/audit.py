"""Compares hits with what the model computes: is a record bad, or is it another model's?

`StoredKV.load` asks the `Auditor` before it uses a hit; `save` asks what may be stored.
"""

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
from kvferry.blocks.tolerance import DOUBTFUL, OTHER_KV, ROUNDING
from kvferry.observe import Observer
from kvferry.store.base import Store
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class StoredPrefix(NamedTuple):
    """The leading chunks of a prompt that are stored."""

    keys: Sequence[ChunkKey]
    images: list[memoryview]
    token_ids: list[int]
    """The whole prompt, without padding."""


class Auditor:
    """Decides how much of a hit may be used. Where a record differs from what the model computes,
    either may be wrong. A later record of the prompt that agrees, or a hit of another prompt,
    decides; until then nothing is saved.

    Args:
        rows: the record layout.
        store: the store, from which wrong records are discarded.
        rate: the option `audit`.

    Attributes:
        is_other: whether what is stored under the model's identity is another model's.
        draw: returns a random number from 0 to 1, without 1.
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
        # Differed, and not decided yet: wrong records, or records of another model.
        self._suspects: list[ChunkKey] = []
        # Records that agreed, before the suspects: a hit of these alone decides nothing.
        self._not_evidence: set[ChunkKey] = set()
        self.is_other = False
        self._has_told = False  # of a doubtful difference

    @property
    def is_undecided(self) -> bool:
        """Whether a record differs, and it is not known yet if the record or the model is wrong."""
        return bool(self._suspects)

    def usable(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the leading keys whose records may be read."""
        return list(takewhile(lambda key: self._differed.get(key, True), keys))

    def savable(self, keys: list[ChunkKey], num_loaded: int) -> list[ChunkKey]:
        """Return the leading keys under which a cache with `num_loaded` tokens from the store may
        be saved: those before its first loaded chunk whose record has ever differed."""
        loaded = keys[: -(-max(0, num_loaded) // self._rows.schema.chunk_tokens)]
        first = next((i for i, key in enumerate(loaded) if key in self._differed), len(keys))
        return keys[:first]

    def stored(self, keys: Iterable[ChunkKey]) -> None:
        """Note that the model itself computed these chunks, and that they were stored."""
        self._differed.update(dict.fromkeys(self._differed.keys() & set(keys), True))

    def num_right(self, hit: StoredPrefix) -> int | None:
        """Return how many leading chunks of a hit may be used; later records are not read again.
        None if the model failed.

        If an audit is due, computes the first chunk from nothing, and one other on top of the
        stored ones before it. If either differs, computes all from nothing to find which differ.
        """
        if not self._is_due():
            return len(hit.images)
        numbers = range(1, len(hit.images))
        others = [number for number in numbers if hit.keys[number] not in self._not_evidence]
        sample = [0, others[int(self.draw() * len(others))]] if others else [0]
        compared = []
        for number in sample:
            found = self._difference(hit, number)
            if found is None:
                return None
            compared.append(found)
        self._observer.count("audits")
        worst = max(compared)  # by excess
        if worst.excess <= 1:
            if worst.excess > DOUBTFUL:
                self._doubt(worst)
            self._pass({hit.keys[number] for number in sample})
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
        """Compare one chunk, computed on top of the stored ones before it; None if that failed."""
        cache = cache_of(hit.token_ids, hit.images[:number], self._rows, self._model)
        return self._of_next(hit, number, cache)

    def _all_differences(self, hit: StoredPrefix) -> dict[int, Difference] | None:
        """Return the chunks that differ from what the model computes from nothing, by number; None
        if it failed."""
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
        """Append a chunk's KV to a cache, and compare it with its record; None if that failed."""
        size = self._rows.schema.chunk_tokens
        first = number * size
        token_ids = hit.token_ids[first : first + size]
        if not self._model.compute(token_ids, cache, self._observer):
            return None
        computed = gather(self._rows, cache, self._model, 0, first)
        return compare(self._rows, computed, hit.images[number], self._model.tolerances)

    # ---- verdicts

    def _doubt(self, difference: Difference) -> None:
        """Note a difference that is nearly a mismatch."""
        self._observer.count("audit_doubtful")
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "%s, in %s: %s", ROUNDING, self._store.url, difference.describe(self._rows)
            )

    def _pass(self, compared: set[ChunkKey]) -> None:
        """Note that the compared chunks of a hit agree with the model."""
        if self._suspects and compared <= self._not_evidence:
            return
        self._has_passed = True
        self._clear(())

    def _judge(self, hit: StoredPrefix, differ: dict[int, Difference]) -> None:
        """Decide whether the records that differ are wrong, or another model's."""
        first = min(differ)
        bad = [hit.keys[number] for number in differ]
        self._differed.update(dict.fromkeys(bad, False))
        self._has_passed = False
        logger.warning(
            "the model's KV differs from that in record %s of %s: %s. This record and those after "
            "it are not loaded",
            hit.keys[first].hex(),
            self._store.url,
            differ[first].describe(self._rows),
        )
        if len(differ) < len(hit.keys) - first:
            # A record behind the first differing one agrees: so this model stored the records.
            self._clear(bad)
        elif not self._suspects:
            self._suspects = bad
            self._not_evidence = set(hit.keys[:first])
            logger.warning(
                "nothing is saved until a hit of another prompt shows which is wrong, the record "
                "or the model"
            )
        else:
            self.is_other = True
            logger.warning(
                "two prompts of %s differ: another model stored them. Nothing is loaded or saved. "
                "If this model was changed in memory, give it a weights_version. If it is the "
                "right one, remove the namespace %s from the store. If it only rounds otherwise "
                'than where the records were stored, set the option audit to "off"',
                self._store.url,
                self._rows.schema.namespace.hex(),
            )

    def _clear(self, bad: Sequence[ChunkKey]) -> None:
        """Take the suspects and `bad` out of the store: the model is the right one. They may be
        stored again."""
        taken = [*self._suspects, *bad]
        for key in taken:
            self._store.discard(key, OTHER_KV)
        if taken:
            self._observer.count("audit_bad_records", len(taken))
            logger.warning(
                "%d records of %s, from %s on, are wrong and were taken out of the store: the "
                "model agrees with others. They were saved from caches that were changed, or were "
                "of another prompt",
                len(taken),
                self._store.url,
                taken[0].hex(),
            )
        self._suspects = []
        self._not_evidence = set()
