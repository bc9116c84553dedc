"""Compares hits with what the model computes itself. `StoredKV` asks before it uses a hit."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvferry.adapters.transformers.cache_copies import CacheForm, StoredRow, TreeForm
from kvferry.adapters.transformers.cache_leaves import Path, name_of, relative_error
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import Items
from kvferry.adapters.transformers.states import StateRecords
from kvferry.blocks.audit import compare
from kvferry.blocks.tolerance import DOUBTFUL, OTHER_KV, ROUNDING, SHALLOW_LAYERS
from kvferry.observe import Observer
from kvferry.record.check import ReadFault
from kvferry.store.base import Store
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class _Found(NamedTuple):
    """By how much something stored differs from what was computed."""

    excess: float
    """As a multiple of the tolerance. Above 1 it is not this model's."""
    text: str
    keys: list[ChunkKey]
    """Of the records that hold it."""


class Auditor:
    """Decides whether a hit may be used: some of its records are compared with what the model
    computes. `StoredKV` stores only what it computed itself, so a record that differs shows another
    model under this name, or broken hardware: it is taken out, and nothing is read or written any
    more. A record with NaN or Inf shows a bad step of an older release: it goes with those behind
    it, and the cache goes on.

    Args:
        form: how caches and records correspond.
        states: the records of states; None: the model keeps none.
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
        states: StateRecords | None,
        store: Store,
        rate: str | float,
        observer: Observer,
    ) -> None:
        self._model = model
        self._form = form
        self._rows = form.rows
        self._states = states
        self._store = store.in_namespace(form.namespace.digest)
        self._rate = rate
        self._observer = observer
        self._has_passed = False
        self._has_told = False  # of a doubtful difference
        self.has_failed = False

    def agrees(
        self,
        keys: Sequence[ChunkKey],
        stored: StoredRow,
        token_ids: list[int],
        items: Items,
        timeout: float,
    ) -> bool:
        """Whether a hit may be used. If an audit is due, computes the first chunk from nothing, and
        one other, drawn at random, on top of the stored ones before it. Where only states can be
        gone on from: the state at the end of the hit, from the stored one before it, or from
        nothing.

        Args:
            keys: keys of the leading chunks of a prompt.
            stored: their records.
            token_ids: the prompt, without padding.
            items: of the prompt, placed. Those that a compared chunk overlaps are computed whole.
            timeout: seconds for reading a state.
        """
        if not self._is_due():
            return True
        images = stored.images
        bad = next((at for at, each in enumerate(images) if not self._is_finite(each)), None)
        if bad is not None:
            self._observer.count("records_corrupt")
            for key in keys[bad:]:
                self._store.discard(key, ReadFault.NOT_FINITE)
            return False
        self._observer.count("audits")
        numbers = [0]
        if len(images) > 1 and self._form.goes_on_anywhere:
            numbers.append(1 + int(self.draw() * (len(images) - 1)))
        parts = [partial(self._of_chunk, number) for number in numbers]
        if stored.state is not None:
            parts.append(partial(self._of_state, timeout))
        found = []
        for part in parts:
            each = part(keys, stored, token_ids, items)
            if each is None:
                return False
            if each.excess > 1:
                self._fail(each)
                return False
            found.append(each)
        if max(found).excess > DOUBTFUL:
            self._doubt(max(found))
        self._has_passed = True
        return True

    def _is_due(self) -> bool:
        if self._rate == "off":
            return False
        is_sampled = not isinstance(self._rate, str) and self.draw() < self._rate
        return is_sampled or not self._has_passed

    def _of_chunk(
        self, number: int, keys: Sequence[ChunkKey], stored: StoredRow, token_ids: list[int],
        items: Items,
    ) -> _Found | None:  # fmt: skip
        """Compare a chunk, computed on top of the stored ones before it, with its record. None if
        it was computed with NaN or Inf, which shows nothing of the record."""
        size = self._rows.schema.chunk_tokens
        first = number * size
        begin, stop = items.cut(first), items.cover(first + size)
        before = stored.images[: -(-begin // size)]
        cache = self._form.cache_of([StoredRow(0, before)], begin)
        ids, inputs = torch.tensor([token_ids[begin:stop]]), items.inputs(begin, stop)
        cache = self._form.compute(ids, cache, begin, inputs)
        computed = self._form.gather(cache, 0, first)
        if not self._is_finite(computed):
            return None
        found = compare(self._rows, computed, stored.images[number], self._form.tolerances)
        return _Found(found.excess, found.describe(self._rows), [keys[number]])

    def _of_state(
        self, timeout: float, keys: Sequence[ChunkKey], stored: StoredRow, token_ids: list[int],
        items: Items,
    ) -> _Found | None:  # fmt: skip
        """Compare the state at the end of a hit, computed on top of the stored one before it, with
        its records. None if one of the two has NaN or Inf."""
        assert isinstance(self._form, TreeForm)  # only a tree has states
        assert self._states is not None
        assert stored.state is not None
        tree, size = self._form.tree, self._rows.schema.chunk_tokens
        parts = self._states.keys(keys[len(stored.images) - 1])
        if not all(map(_is_finite, tree.tensors_of(stored.state))):
            self._observer.count("records_corrupt")
            for key in parts:
                self._store.discard(key, ReadFault.NOT_FINITE)
            return None
        before = self._before(keys, stored, items, timeout)
        begin, end = len(before.images) * size, len(stored.images) * size
        cache = self._form.cache_of([before], begin)
        ids, inputs = torch.tensor([token_ids[begin:end]]), items.inputs(begin, end)
        cache = self._form.compute(ids, cache, begin, inputs)
        computed = tree.tensors_of(tree.state(cache))
        limit = self._form.tolerances[str(self._model.model.dtype).removeprefix("torch.")].error
        worst = _Found(-1.0, "", parts)
        theirs_of = tree.tensors_of(stored.state)
        for law, ours, theirs in zip(tree.states, computed, theirs_of, strict=True):
            if not _is_finite(ours):
                return None
            error = relative_error(ours, theirs)
            excess = error / (limit * _widening(law.path))
            text = f"state {name_of(law.path)} has an error of {error:.2%}"
            worst = max(worst, _Found(excess, text, parts))
        return worst

    def _before(
        self, keys: Sequence[ChunkKey], stored: StoredRow, items: Items, timeout: float
    ) -> StoredRow:
        """Return the last chunks before the end of a hit at whose end a state can be read, and that
        state; no chunks if there is none."""
        assert isinstance(self._form, TreeForm)  # only a tree has states
        assert self._states is not None
        size = self._rows.schema.chunk_tokens
        for number in range(len(stored.images) - 1, 0, -1):
            chunk, num_tokens = keys[number - 1], number * size
            if items.cut(num_tokens) == num_tokens and self._states.is_known(chunk):
                # Chunks were computed meanwhile: the time for reading begins anew.
                deadline = time.monotonic() + timeout
                state = self._states.read(chunk, num_tokens, deadline)
                if state is not None and self._form.tree.accepts(state):
                    return StoredRow(0, stored.images[:number], state)
        return StoredRow(0, [])

    def _is_finite(self, image: memoryview) -> bool:
        return self._rows.leaves(image, {}).are_finite

    def _doubt(self, found: _Found) -> None:
        """Note a difference that is nearly a mismatch."""
        self._observer.count("audit_doubtful")
        if not self._has_told:
            self._has_told = True
            logger.warning("%s, in %s: %s", ROUNDING, self._store.url, found.text)

    def _fail(self, found: _Found) -> None:
        self.has_failed = True
        for key in found.keys:
            self._store.discard(key, OTHER_KV)
        self._observer.count("audit_mismatch")
        logger.warning(
            "the model's KV differs from that in record %s of %s: %s. Another model has this name, "
            "or hardware is broken: the record was taken out, and this StoredKV reads and writes "
            "nothing more. If this model was changed in memory, give it a weights_version; if it "
            "is the right one, remove the namespace %s from the store; if it only rounds otherwise "
            'than where the records were stored, set the option audit to "off"',
            found.keys[0].hex(),
            self._store.url,
            found.text,
            self._rows.schema.namespace.hex(),
        )


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


def _widening(path: Path) -> float:
    """Return how much more rounding is allowed to a leaf by its layer, as to KV."""
    layer = next((int(part) for part in path if part.isdecimal()), 0)
    return max(1.0, math.sqrt(layer / SHALLOW_LAYERS))
