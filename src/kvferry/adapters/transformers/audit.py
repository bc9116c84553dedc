"""Compares hits with what the model computes itself. `StoredKV` asks before it uses a hit."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import torch

from kvferry.adapters.transformers.cache_copies import CacheForm, StoredRow
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import Items
from kvferry.blocks.audit import Difference, compare
from kvferry.blocks.tolerance import DOUBTFUL, OTHER_KV, ROUNDING
from kvferry.observe import Observer
from kvferry.record.check import MissReason
from kvferry.store.base import Store
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class Auditor:
    """Decides whether a hit may be used: some of its records are compared with what the model
    computes. `StoredKV` stores only what it computed itself, so a record that differs shows another
    model under this name, or broken hardware: it is taken out, and nothing is read or written any
    more. A record with NaN or Inf shows a bad step of an older release: it goes with those behind
    it, and the cache goes on.

    Args:
        form: how caches and records correspond.
        store: the store, from which a record that differs is discarded.
        rate: the option `audit`.

    Attributes:
        has_failed: whether a record differed.
        draw: returns a random number from 0 to 1, without 1.
    """

    draw = staticmethod(random.random)  # replaced by tests

    def __init__(
        self,
        model: HostModel,
        form: CacheForm,
        store: Store,
        rate: str | float,
        observer: Observer,
    ) -> None:
        self._model = model
        self._form = form
        self._rows = form.rows
        self._store = store
        self._rate = rate
        self._observer = observer
        self._has_passed = False
        self._has_told = False  # of a doubtful difference
        self.has_failed = False

    def agrees(
        self,
        keys: Sequence[ChunkKey],
        images: list[memoryview],
        token_ids: list[int],
        items: Items,
    ) -> bool:
        """Whether a hit may be used. If an audit is due, computes the first chunk from nothing, and
        one other, drawn at random, on top of the stored ones before it, unless only states can be
        gone on from.

        Args:
            keys: keys of the leading chunks of a prompt.
            images: their records.
            token_ids: the prompt, without padding.
            items: of the prompt, placed. Those that a compared chunk overlaps are computed whole.
        """
        if not self._is_due():
            return True
        bad = next((at for at, each in enumerate(images) if not self._is_finite(each)), None)
        if bad is not None:
            self._observer.count("records_corrupt")
            for key in keys[bad:]:
                self._store.discard(key, MissReason.NOT_FINITE)
            return False
        self._observer.count("audits")
        numbers = [0]
        if len(images) > 1 and self._form.goes_on_anywhere:
            numbers.append(1 + int(self.draw() * (len(images) - 1)))
        differences = []
        for number in numbers:
            difference = self._difference(images, number, token_ids, items)
            if difference is None:
                return False
            if difference.excess > 1:
                self._fail(keys[number], difference)
                return False
            differences.append(difference)
        if max(differences).excess > DOUBTFUL:
            self._doubt(max(differences))
        self._has_passed = True
        return True

    def _is_due(self) -> bool:
        if self._rate == "off":
            return False
        is_sampled = not isinstance(self._rate, str) and self.draw() < self._rate
        return is_sampled or not self._has_passed

    def _difference(
        self, images: list[memoryview], number: int, token_ids: list[int], items: Items
    ) -> Difference | None:
        """Compare a chunk, computed on top of the stored ones before it, with its record. None if
        it was computed with NaN or Inf, which shows nothing of the record."""
        size = self._rows.schema.chunk_tokens
        first = number * size
        begin, stop = items.cut(first), items.cover(first + size)
        cache = self._form.cache_of([StoredRow(0, images[: -(-begin // size)])], begin)
        ids, inputs = torch.tensor([token_ids[begin:stop]]), items.inputs(begin, stop)
        cache = self._form.compute(ids, cache, begin, inputs)
        computed = self._form.gather(cache, 0, first)
        if not self._is_finite(computed):
            return None
        return compare(self._rows, computed, images[number], self._form.tolerances)

    def _is_finite(self, image: memoryview) -> bool:
        return self._rows.leaves(image, {}).are_finite

    def _doubt(self, difference: Difference) -> None:
        """Note a difference that is nearly a mismatch."""
        self._observer.count("audit_doubtful")
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "%s, in %s: %s", ROUNDING, self._store.url, difference.describe(self._rows)
            )

    def _fail(self, key: ChunkKey, difference: Difference) -> None:
        self.has_failed = True
        self._store.discard(key, OTHER_KV)
        self._observer.count("audit_mismatch")
        logger.warning(
            "the model's KV differs from that in record %s of %s: %s. Another model has this name, "
            "or hardware is broken: the record was taken out, and this StoredKV reads and writes "
            "nothing more. If this model was changed in memory, give it a weights_version; if it "
            "is the right one, remove the namespace %s from the store; if it only rounds otherwise "
            'than where the records were stored, set the option audit to "off"',
            key.hex(),
            self._store.url,
            difference.describe(self._rows),
            self._rows.schema.namespace.hex(),
        )
