"""Threads on one store: values appear whole, one writer wins, one remover removes."""

from __future__ import annotations

import functools
from pathlib import Path

from kvferry.observe import Counters
from kvferry.store.base import PutResult, Store
from kvferry.testing.stores.hooks import (
    StoreHooks,
    make_key,
    make_value,
    read_value,
    run_together,
    same_bytes,
)

ROUNDS = 20


class RaceTests(StoreHooks):
    """Several threads; each race is run `ROUNDS` times with fresh keys."""

    def test_readers_see_a_value_whole_or_not_at_all(self, tmp_path: Path) -> None:
        value = make_value(300_007)
        seen: list[bytes] = []

        def read_until_there(store: Store, number: int) -> None:
            found = None
            for _ in range(100_000):
                found = read_value(store, make_key(number))
                if found is not None:
                    break
            assert found is not None, "the value never appeared"
            seen.append(found)

        with self.make_store(tmp_path) as store:
            for number in range(ROUNDS):
                read = functools.partial(read_until_there, store, number)
                halves = [value[:150_001], value[150_001:]]
                write = functools.partial(store.put, make_key(number), halves)
                run_together(read, read, write)  # type: ignore[arg-type]  # result unused
        assert len(seen) == 2 * ROUNDS
        assert set(seen) == {value}

    def test_one_of_racing_writers_stores_and_the_others_find_it(self, tmp_path: Path) -> None:
        results: list[PutResult] = []
        with self.make_store(tmp_path) as store:
            for number in range(ROUNDS):
                results.clear()

                def write(writer: int, key: int = number) -> None:
                    results.append(store.put(make_key(key), [make_value(70_001, writer)]))

                run_together(*(functools.partial(write, writer) for writer in range(3)))
                assert sorted(results) == ["exists", "exists", "stored"]
                assert read_value(store, make_key(number)) in [
                    make_value(70_001, writer) for writer in range(3)
                ]
            assert store.stat().num_records == ROUNDS
            if self.exact_accounting:
                assert store.stat().used_bytes == ROUNDS * self.charge(70_001)

    def test_one_of_racing_deletes_deletes(self, tmp_path: Path) -> None:
        results: list[bool] = []
        with self.make_store(tmp_path) as store:
            for number in range(ROUNDS):
                results.clear()
                store.put(make_key(number), [b"value"])

                def remove(key: int = number) -> None:
                    results.append(store.delete(make_key(key)))

                run_together(remove, remove, remove)
                assert sorted(results) == [False, False, True]
            assert store.stat().num_records == 0
            if self.exact_accounting:
                assert store.stat().used_bytes == 0

    def test_racing_discards_are_one(self, tmp_path: Path) -> None:
        counters = Counters()
        with self.make_store(tmp_path, observer=counters) as store:
            for number in range(ROUNDS):
                store.put(make_key(number), [b"rotten"])
                discard = functools.partial(store.discard, make_key(number), "bad_leaf")
                run_together(discard, discard, discard)
                assert store.open_read(make_key(number)) is None
            assert counters["store_quarantined"] == ROUNDS
            assert store.stat().num_records == 0

    def test_the_quota_holds_under_racing_writers(self, tmp_path: Path) -> None:
        size = 20_011
        quota = 5 * self.charge(size)
        with self.make_store(tmp_path, max_bytes=quota) as store:

            def write(writer: int) -> None:
                for number in range(ROUNDS):
                    result = store.put(make_key(writer * ROUNDS + number), [make_value(size)])
                    assert result in (PutResult.STORED, PutResult.NO_SPACE)

            run_together(*(functools.partial(write, writer) for writer in range(3)))
            held = [self.peek(store, make_key(number)) for number in range(3 * ROUNDS)]
            assert 0 < sum(value is not None for value in held) <= 5
            assert {value for value in held if value is not None} == {make_value(size)}
            assert store.stat().used_bytes <= quota
            # What the race did must not have lost room: a full quota's worth fits when it is empty.
            for number in range(3 * ROUNDS):
                store.delete(make_key(number))
            for number in range(5):
                assert store.put(make_key(1000 + number), [make_value(size)]) is PutResult.STORED
            for number in range(5):
                assert same_bytes(read_value(store, make_key(1000 + number)), make_value(size))
