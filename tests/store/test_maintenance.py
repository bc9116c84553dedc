"""What `shrink` and `estimate` choose, over a store of which only the listing counts."""

from __future__ import annotations

import time

import pytest

from kvferry.store.base import Where
from kvferry.store.catalogue import Entry
from kvferry.store.maintenance import estimate, shrink
from kvferry.store.memory import MemoryCatalogue, MemoryStore
from kvferry.types import ChunkKey

HOUR = 3600.0
SIZE = 100


class Listed(MemoryStore):
    """A server's listing: values of `SIZE` bytes, last used so many hours ago, or at a time that it
    does not know (None)."""

    def __init__(self, *hours: float | None) -> None:
        super().__init__("memory://")
        now = time.time()
        self.entries = [
            Entry(ChunkKey(bytes([n]) * 32), SIZE, 0.0 if ago is None else now - HOUR * ago)
            for n, ago in enumerate(hours)
        ]
        for entry in self.entries:
            self.put(entry.key, [memoryview(bytes(SIZE))])

    def catalogues(self):
        return [_Catalogue(self)]

    def left(self) -> list[int]:
        return [n for n, each in enumerate(self.entries) if self.where(each.key) is Where.HERE]


class _Catalogue(MemoryCatalogue):
    def scan(self):
        return iter(self._store.entries)


@pytest.mark.parametrize(
    ("hours", "max_values", "age_hours", "left"),
    [
        ((1, 2, 3), 2, None, [0, 1]),
        ((1, 2, 3), None, 2.5, [0, 1]),
        ((1, 2, 3), 1, 2.5, [0]),
        ((1, None, 3), 2, None, [0, 2]),
        ((1, None, 3), None, 2.5, [0, 1]),
        ((1, None, 3), 2, 2.5, [0, 1]),  # once the old value is gone, the rest fits
        ((9, None), 1, 2.5, [1]),
    ],
)
def test_what_is_too_old_goes_and_then_what_does_not_fit(hours, max_values, age_hours, left):
    store = Listed(*hours)
    limits = (
        None if max_values is None else max_values * SIZE,
        None if age_hours is None else age_hours * HOUR,
    )
    expected = estimate(store, store.catalogue().scan(), *limits)
    report = shrink(store, *limits)
    assert store.left() == left
    assert report.removed_records == expected.removed_records == len(hours) - len(left)
    assert report.used_bytes == len(left) * SIZE
