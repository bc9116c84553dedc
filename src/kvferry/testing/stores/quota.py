"""A quota holds, makes room by recency, and never costs more than it must."""

from __future__ import annotations

from pathlib import Path

from kvferry.store.base import PutResult
from kvferry.testing.stores.hooks import StoreHooks, make_key, make_value, read_value, same_bytes

SIZE = 8191


class QuotaTests(StoreHooks):
    """One thread, `max_bytes` set."""

    def _room_for(self, num_values: int) -> int:
        return num_values * self.charge(SIZE)

    def test_the_quota_is_never_exceeded(self, tmp_path: Path) -> None:
        quota = self._room_for(4) + self.charge(1)
        with self.make_store(tmp_path, max_bytes=quota) as store:
            for number in range(23):
                value = make_value(1 + (number * 2731) % (2 * SIZE), number)
                assert store.put(make_key(number), [value]) is PutResult.STORED
                assert store.stat().used_bytes <= quota
                stored = [self.peek(store, make_key(i)) for i in range(number + 1)]
                assert sum(self.charge(len(v)) for v in stored if v is not None) <= quota
                assert stored[number] == value
            assert store.stat().max_bytes == quota

    def test_the_least_recently_put_goes_first(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=self._room_for(3)) as store:
            for number in range(4):
                self.settle(store)
                assert store.put(make_key(number), [make_value(SIZE)]) is PutResult.STORED
            assert store.open_read(make_key(0)) is None
            assert not store.contains(make_key(0))
            assert same_bytes(read_value(store, make_key(3)), make_value(SIZE))

    def test_a_touched_value_outlives_an_untouched_one(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=self._room_for(3)) as store:
            for number in range(3):
                store.put(make_key(number), [make_value(SIZE)])
                self.settle(store)
            store.touch([make_key(0)])
            self.settle(store)
            store.put(make_key(3), [make_value(SIZE)])
            assert self.peek(store, make_key(0)) is not None
            assert self.peek(store, make_key(1)) is None

    def test_of_one_touched_chain_the_root_outlives_the_end(self, tmp_path: Path) -> None:
        # A chain without its root is useless; without its end it is only shorter.
        with self.make_store(tmp_path, max_bytes=self._room_for(3)) as store:
            for number in range(3):
                store.put(make_key(number), [make_value(SIZE)])
                self.settle(store)
            store.touch(make_key(number) for number in range(3))
            self.settle(store)
            store.put(make_key(3), [make_value(SIZE)])
            assert self.peek(store, make_key(0)) is not None
            assert self.peek(store, make_key(2)) is None

    def test_reading_does_not_make_recent(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=self._room_for(3)) as store:
            for number in range(3):
                store.put(make_key(number), [make_value(SIZE)])
                self.settle(store)
            assert read_value(store, make_key(0)) is not None
            self.settle(store)
            store.put(make_key(3), [make_value(SIZE)])
            assert self.peek(store, make_key(0)) is None

    def test_a_value_that_can_never_fit_evicts_nothing(self, tmp_path: Path) -> None:
        quota = self._room_for(3)
        with self.make_store(tmp_path, max_bytes=quota) as store:
            for number in range(3):
                store.put(make_key(number), [make_value(SIZE, number)])
            too_large = make_value(quota + 1)
            assert store.put(make_key(9), [too_large]) is PutResult.NO_SPACE
            assert store.open_read(make_key(9)) is None
            for number in range(3):
                assert same_bytes(read_value(store, make_key(number)), make_value(SIZE, number))

    def test_an_existing_key_evicts_nothing(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=self._room_for(3)) as store:
            for number in range(3):
                store.put(make_key(number), [make_value(SIZE, number)])
            assert store.put(make_key(0), [make_value(SIZE)]) is PutResult.EXISTS
            for number in range(3):
                assert same_bytes(self.peek(store, make_key(number)), make_value(SIZE, number))

    def test_deleting_gives_the_space_back(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=self._room_for(3)) as store:
            for number in range(3):
                store.put(make_key(number), [make_value(SIZE)])
            store.delete(make_key(2))
            assert store.put(make_key(3), [make_value(SIZE)]) is PutResult.STORED
            for number in (0, 1, 3):
                assert self.peek(store, make_key(number)) is not None

    def test_stat_counts_what_is_held(self, tmp_path: Path) -> None:
        sizes = (1, 4097, SIZE)
        with self.make_store(tmp_path) as store:
            for number, size in enumerate(sizes):
                store.put(make_key(number), [make_value(size)])
            stat = store.stat()
            assert (stat.url, stat.max_bytes, stat.num_records) == (store.url, None, 3)
            if self.exact_accounting:
                assert stat.used_bytes == sum(map(self.charge, sizes))
            store.delete(make_key(1))
            assert store.stat().num_records == 2
            if self.exact_accounting:
                assert store.stat().used_bytes == self.charge(1) + self.charge(SIZE)
