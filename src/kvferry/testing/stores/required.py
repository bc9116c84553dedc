"""Tests that every store must pass: values, quota, racing threads, opening and closing."""

from __future__ import annotations

import functools
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.errors import FaultKind, StoreError
from kvferry.observe import Counters
from kvferry.store.base import (
    Buffer,
    PutResult,
    Store,
    Where,
)
from kvferry.testing.stores.abilities import ProbeTests, ScanTests
from kvferry.testing.stores.hooks import (
    StoreHooks,
    awkward_sizes,
    can_scan,
    make_key,
    make_value,
    read_value,
    run_together,
    same_bytes,
    wait_until,
)
from kvferry.types import ChunkKey

SIZE = 8191
"""Bytes of most values in tests with a quota."""

ROUNDS = 20
"""Number of races in a test, each with a new key."""


class ValueTests(StoreHooks):
    """Tests of values with one thread and no quota. The index is a hint; a read is the truth."""

    @pytest.mark.parametrize("num_bytes", awkward_sizes)
    def test_a_value_comes_back_as_it_was_put(self, store: Store, num_bytes: int) -> None:
        key, value = make_key(), make_value(num_bytes)
        assert store.put(key, [value]).result is PutResult.STORED
        assert store.where(key) is Where.HERE
        assert same_bytes(self.peek(store, key), value)
        assert same_bytes(read_value(store, key), value)

    def test_buffers_are_joined_whatever_they_are(self, store: Store) -> None:
        value = make_value(3 * 4099)
        parts: list[Buffer] = [value[at : at + 11] for at in range(0, 4103, 11)]
        parts += [b"", bytearray(value[4103:8000]), memoryview(bytearray(value[8000:]))]
        parts += [b"x"] * 2000  # more than IOV_MAX in one call
        assert store.put(make_key(), parts).result is PutResult.STORED
        assert same_bytes(read_value(store, make_key()), value + b"x" * 2000)

    def test_a_buffer_may_be_reused_after_put(self, store: Store) -> None:
        value = make_value(70_001)
        buffer = bytearray(value)
        store.put(make_key(), [buffer])
        buffer[:] = bytes(len(buffer))
        assert same_bytes(read_value(store, make_key()), value)

    def test_ranges_are_read_at_any_offset_and_end_where_the_value_ends(self, store: Store) -> None:
        value = make_value(9001)
        store.put(make_key(), [value])
        places = [(0, 9001), (1, 1), (4095, 2), (4096, 4096), (8999, 2), (5, 0)]
        buffers = [bytearray(length) for _, length in places]
        ranges = [
            (offset, memoryview(buffer))
            for (offset, _), buffer in zip(places, buffers, strict=True)
        ]
        assert store.read(make_key(), ranges) == len(value)
        for (offset, length), buffer in zip(places, buffers, strict=True):
            assert same_bytes(buffer, value[offset : offset + length])
        for each in ranges:
            assert store.read(make_key(), [each]) == len(value)
        assert store.read(make_key(), ()) == len(value)

    def test_reading_past_the_end_returns_what_is_there(self, store: Store) -> None:
        value = make_value(9001)
        store.put(make_key(), [value])
        buffers = [bytearray(b"?" * 100) for _ in range(3)]
        places = zip((9000, 9001, 2**40), buffers, strict=True)
        ranges = [(offset, memoryview(buffer)) for offset, buffer in places]
        assert store.read(make_key(), ranges) == 9001
        assert same_bytes(buffers[0], value[9000:] + b"?" * 99)
        assert same_bytes(buffers[1], b"?" * 100)
        assert same_bytes(buffers[2], b"?" * 100)

    def test_an_absent_key_is_none_and_false(self, store: Store) -> None:
        assert store.where(make_key()) is not Where.HERE
        assert store.read(make_key(), ()) is None
        assert store.delete(make_key()) is False
        store.discard(make_key(), "test")
        store.touch([make_key()])
        assert store.stat().num_records == 0

    def test_the_first_writer_wins_and_its_value_stands(self, store: Store) -> None:
        assert store.put(make_key(), [b"first"]).result is PutResult.STORED
        assert store.put(make_key(), [b"second, longer"]).result is PutResult.EXISTS
        assert read_value(store, make_key()) == b"first"
        assert store.stat().used_bytes >= self.charge(5)

    def test_values_put_together_are_each_as_if_put_alone(self, store: Store) -> None:
        assert store.put(make_key(1), [b"first"]).result is PutResult.STORED
        values = [(make_key(number), [make_value(SIZE + number, number)]) for number in range(10)]
        answers = store.put_all([*values, (make_key(0), [b"again"])])
        expected = [PutResult.STORED] * 11
        expected[1] = expected[10] = PutResult.EXISTS
        assert [each.result for each in answers] == expected
        assert same_bytes(read_value(store, make_key(1)), b"first")
        for number in (0, *range(2, 10)):
            assert same_bytes(
                read_value(store, make_key(number)), make_value(SIZE + number, number)
            )
        assert [each.result for each in store.put_all([])] == []

    def test_a_deleted_value_is_gone_and_can_be_put_again(self, store: Store) -> None:
        store.put(make_key(), [b"old"])
        assert store.delete(make_key()) is True
        assert store.delete(make_key()) is False
        assert store.where(make_key()) is not Where.HERE
        assert store.read(make_key(), ()) is None
        assert self.peek(store, make_key()) is None
        assert store.put(make_key(), [b"new"]).result is PutResult.STORED
        assert read_value(store, make_key()) == b"new"

    def test_a_discarded_value_is_not_served_and_can_be_put_again(self, tmp_path: Path) -> None:
        counters = Counters()
        with self.make_store(tmp_path, observer=counters) as store:
            store.put(make_key(), [b"rotten"])
            store.discard(make_key(), "bad_checksum")
            store.discard(make_key(), "bad_checksum")
            assert store.where(make_key()) is not Where.HERE
            assert store.read(make_key(), ()) is None
            assert counters["store_quarantined"] == 1
            assert store.put(make_key(), [b"sound"]).result is PutResult.STORED
            assert read_value(store, make_key()) == b"sound"

    def test_a_reason_to_discard_is_text_and_no_path(self, tmp_path: Path) -> None:
        root = tmp_path / "a" / "root"
        root.mkdir(parents=True)
        with self.make_store(root) as store:
            for number, reason in enumerate(["../../escaped", "/escaped", "", "x" * 5000, "a\0b"]):
                store.put(make_key(number), [b"rotten"])
                store.discard(make_key(number), reason)
                assert store.read(make_key(number), ()) is None
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_after_a_deadline_a_call_reads_and_writes_all_or_nothing(self, store: Store) -> None:
        value = make_value(8193)
        store.put(make_key(), [value])
        over = time.monotonic() - 1.0
        buffer = bytearray(8193)
        try:
            size = store.read(make_key(), [(0, memoryview(buffer))], over)
        except StoreError:
            pass
        else:  # a store in memory may ignore deadlines
            assert size == len(value)
            assert same_bytes(buffer, value)
        result = store.put(make_key(1), [value], over).result
        assert result in (PutResult.STORED, PutResult.FAILED)
        expected = value if result is PutResult.STORED else None
        assert same_bytes(read_value(store, make_key(1)), expected)

    def test_what_appears_behind_the_index_is_read(self, store: Store) -> None:
        value = make_value(5003)
        self.poke(store, make_key(), value)
        assert same_bytes(read_value(store, make_key()), value)
        assert store.put(make_key(), [b"later"]).result is PutResult.EXISTS

    def test_what_vanishes_behind_the_index_is_none_and_forgotten(self, store: Store) -> None:
        store.put(make_key(), [b"value"])
        self.poke(store, make_key(), None)
        assert store.read(make_key(), ()) is None
        assert store.where(make_key()) is not Where.HERE

    def test_a_store_verifies_nothing(self, store: Store) -> None:
        store.put(make_key(), [make_value(4097)])
        self.poke(store, make_key(), b"shorter")
        assert read_value(store, make_key()) == b"shorter"

    def test_values_under_similar_keys_do_not_mix(self, store: Store) -> None:
        first = make_key()
        last_byte = type(first)(first[:-1] + bytes([first[-1] ^ 1]))
        first_byte = type(first)(bytes([first[0] ^ 1]) + first[1:])
        for key in (first, last_byte, first_byte):
            assert store.put(key, [key]).result is PutResult.STORED
        for key in (first, last_byte, first_byte):
            assert same_bytes(read_value(store, key), key)


class QuotaTests(StoreHooks):
    """Tests with `max_bytes` set: the least recently used values go, and no more than must."""

    @contextmanager
    def _full_store(self, tmp_path: Path) -> Iterator[Store]:
        """Open a store that holds values 0, 1 and 2, put in this order, and has no more room."""
        with self.make_store(tmp_path, max_bytes=3 * self.charge(SIZE)) as store:
            for number in range(3):
                assert (
                    store.put(make_key(number), [make_value(SIZE, number)]).result
                    is PutResult.STORED
                )
                self.settle(store)
            yield store

    def test_the_quota_is_never_exceeded(self, tmp_path: Path) -> None:
        quota = 4 * self.charge(SIZE) + self.charge(1)
        with self.make_store(tmp_path, max_bytes=quota) as store:
            for number in range(23):
                value = make_value(1 + (number * 2731) % (2 * SIZE), number)
                assert store.put(make_key(number), [value]).result is PutResult.STORED
                assert store.stat().used_bytes <= quota
                stored = [self.peek(store, make_key(i)) for i in range(number + 1)]
                assert sum(self.charge(len(v)) for v in stored if v is not None) <= quota
                assert stored[number] == value
            assert store.stat().max_bytes == quota

    def test_the_least_recently_put_goes_first(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            assert store.put(make_key(3), [make_value(SIZE)]).result is PutResult.STORED
            assert store.read(make_key(0), ()) is None
            assert store.where(make_key(0)) is not Where.HERE
            assert same_bytes(read_value(store, make_key(3)), make_value(SIZE))

    def test_a_touched_value_outlives_an_untouched_one(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            store.touch([make_key(0)])
            self.settle(store)
            store.put(make_key(3), [make_value(SIZE)])
            assert self.peek(store, make_key(0)) is not None
            assert self.peek(store, make_key(1)) is None

    def test_of_one_touched_chain_the_root_outlives_the_end(self, tmp_path: Path) -> None:
        # A chain without its root is useless; without its end it is only shorter.
        with self._full_store(tmp_path) as store:
            store.touch(make_key(number) for number in range(3))
            self.settle(store)
            store.put(make_key(3), [make_value(SIZE)])
            assert self.peek(store, make_key(0)) is not None
            assert self.peek(store, make_key(2)) is None

    def test_reading_does_not_make_recent(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            assert read_value(store, make_key(0)) is not None
            self.settle(store)
            store.put(make_key(3), [make_value(SIZE)])
            assert self.peek(store, make_key(0)) is None

    def test_a_value_that_can_never_fit_evicts_nothing(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            too_large = make_value(3 * self.charge(SIZE) + 1)
            assert store.put(make_key(9), [too_large]).result is PutResult.NO_SPACE
            assert store.read(make_key(9), ()) is None
            for number in range(3):
                assert same_bytes(read_value(store, make_key(number)), make_value(SIZE, number))

    def test_of_values_put_together_those_are_stored_that_fit(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            too_large = make_value(3 * self.charge(SIZE) + 1)
            values = [(make_key(3), make_value(SIZE, 3)), (make_key(4), too_large)]
            values += [(make_key(number), make_value(SIZE, number)) for number in (5, 6, 7)]
            answers = store.put_all([(key, [value]) for key, value in values])
            expected = [PutResult.STORED, PutResult.NO_SPACE, *[PutResult.STORED] * 3]
            assert [each.result for each in answers] == expected
            assert answers[1].fault is not None
            assert answers[1].fault.kind is FaultKind.FULL
            assert store.stat().used_bytes <= 3 * self.charge(SIZE)
            for number in (5, 6, 7):
                assert same_bytes(read_value(store, make_key(number)), make_value(SIZE, number))

    def test_an_existing_key_evicts_nothing(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            assert store.put(make_key(0), [make_value(SIZE)]).result is PutResult.EXISTS
            for number in range(3):
                assert same_bytes(self.peek(store, make_key(number)), make_value(SIZE, number))

    def test_deleting_gives_the_space_back(self, tmp_path: Path) -> None:
        with self._full_store(tmp_path) as store:
            store.delete(make_key(2))
            assert store.put(make_key(3), [make_value(SIZE)]).result is PutResult.STORED
            for number in (0, 1, 3):
                assert self.peek(store, make_key(number)) is not None

    def test_stat_counts_what_is_held(self, store: Store) -> None:
        sizes = (1, 4097, SIZE)
        for number, size in enumerate(sizes):
            store.put(make_key(number), [make_value(size)])
        stat = store.stat()
        assert (stat.url, stat.max_bytes, stat.num_records) == (store.url, None, 3)
        assert stat.used_bytes == sum(map(self.charge, sizes))
        store.delete(make_key(1))
        assert store.stat().num_records == 2
        assert store.stat().used_bytes == self.charge(1) + self.charge(SIZE)

    def test_the_quota_holds_under_racing_writers(self, tmp_path: Path) -> None:
        size = 20_011
        quota = 5 * self.charge(size)
        with self.make_store(tmp_path, max_bytes=quota) as store:

            def write(writer: int) -> None:
                for number in range(ROUNDS):
                    answer = store.put(make_key(writer * ROUNDS + number), [make_value(size)])
                    assert answer.result in (PutResult.STORED, PutResult.NO_SPACE)

            run_together(*(functools.partial(write, writer) for writer in range(3)))
            held = [self.peek(store, make_key(number)) for number in range(3 * ROUNDS)]
            assert 0 < sum(value is not None for value in held) <= 5
            assert {value for value in held if value is not None} == {make_value(size)}
            assert store.stat().used_bytes <= quota
            # The race must not have lost room: the empty store must take all that the quota allows.
            for number in range(3 * ROUNDS):
                store.delete(make_key(number))
            for number in range(5):
                assert (
                    store.put(make_key(1000 + number), [make_value(size)]).result
                    is PutResult.STORED
                )
            for number in range(5):
                assert same_bytes(read_value(store, make_key(1000 + number)), make_value(size))


class RaceTests(StoreHooks):
    """Tests with several threads: values appear whole, one writer wins, one remover removes."""

    def test_readers_see_a_value_whole_or_not_at_all(self, tmp_path: Path) -> None:
        value = make_value(300_007)
        seen: list[bytes] = []

        def read_until_there(store: Store, number: int) -> None:
            deadline = time.monotonic() + self.patience_seconds
            while (found := read_value(store, make_key(number))) is None:
                assert time.monotonic() < deadline, "the value never appeared"
            seen.append(found)

        with self.make_store(tmp_path) as store:
            for number in range(ROUNDS):
                read = functools.partial(read_until_there, store, number)
                halves = [value[:150_001], value[150_001:]]
                write = functools.partial(store.put, make_key(number), halves)
                run_together(read, read, write)
        assert len(seen) == 2 * ROUNDS
        assert set(seen) == {value}

    def test_one_of_racing_writers_stores_and_the_others_find_it(self, store: Store) -> None:
        results: list[PutResult] = []
        for number in range(ROUNDS):
            results.clear()

            def write(writer: int, key: int = number) -> None:
                results.append(store.put(make_key(key), [make_value(70_001, writer)]).result)

            run_together(*(functools.partial(write, writer) for writer in range(3)))
            assert sorted(results) == ["exists", "exists", "stored"]
            assert read_value(store, make_key(number)) in [
                make_value(70_001, writer) for writer in range(3)
            ]
        assert store.stat().num_records == ROUNDS
        assert store.stat().used_bytes == ROUNDS * self.charge(70_001)

    def test_one_of_racing_deletes_deletes(self, store: Store) -> None:
        results: list[bool] = []
        for number in range(ROUNDS):
            results.clear()
            store.put(make_key(number), [b"value"])

            def remove(key: int = number) -> None:
                results.append(store.delete(make_key(key)))

            run_together(remove, remove, remove)
            assert sorted(results) == [False, False, True]
        assert store.stat().num_records == 0
        assert store.stat().used_bytes == 0

    def test_racing_discards_are_one(self, tmp_path: Path) -> None:
        counters = Counters()
        with self.make_store(tmp_path, observer=counters) as store:
            for number in range(ROUNDS):
                store.put(make_key(number), [b"rotten"])
                discard = functools.partial(store.discard, make_key(number), "bad_checksum")
                run_together(discard, discard, discard)
                assert store.read(make_key(number), ()) is None
            assert counters["store_quarantined"] == ROUNDS
            assert store.stat().num_records == 0


class LifecycleTests(StoreHooks):
    """Tests of opening and closing, and of what a closed store answers."""

    def test_every_ability_is_tested(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            abilities = {
                ScanTests: can_scan(store),
                ProbeTests: store.multi_process,
            }
        for tests, is_able in abilities.items():
            assert isinstance(self, tests) is is_able, f"{tests.__name__} and ability disagree"

    def test_it_says_what_it_is(self, store: Store) -> None:
        assert "://" in store.url
        assert store.multi_process in (True, False)
        assert store.stat().url == store.url

    def test_close_is_idempotent_and_leaves_no_thread(self, tmp_path: Path) -> None:
        gc.collect()  # threads of stores that earlier tests dropped are not ours
        before = set(threading.enumerate())
        store = self.make_store(tmp_path)
        store.put(make_key(), [make_value()])
        store.touch([make_key()])
        store.close()
        store.close()
        wait_until(
            lambda: set(threading.enumerate()) <= before,
            "all threads of the store end",
            self.patience_seconds,
        )

    def test_close_in_two_threads_is_one(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        run_together(store.close, store.close, store.close)

    def test_a_closed_store_answers_every_call(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        store.put(make_key(), [make_value()])
        store.close()
        late = [store.put(make_key(1), [b"late"])]
        late += store.put_all([(make_key(1), [b"late"])] * 2)
        faults = [store.accepts(), *(each.fault for each in late)]
        assert [each.result for each in late] == [PutResult.FAILED] * 3
        assert all(each is not None and "\n" not in each.text for each in faults)
        assert store.read(make_key(), ()) is None
        assert store.where(make_key()) is Where.ABSENT
        assert store.delete(make_key()) is False
        store.discard(make_key(), "late")
        store.touch([make_key()])
        assert store.stat().url == store.url
        assert self.peek(store, make_key(1)) is None
        if self.persistent:
            assert same_bytes(self.peek(store, make_key()), make_value())

    def test_closed_abilities_answer_too(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        store.put(make_key(), [make_value()])
        store.close()
        if isinstance(self, ScanTests):
            assert list(store.catalogue().scan()) == []
        store.probe([make_key()])
        store.learn([make_key(3)])
        assert store.where(make_key(3)) is Where.ABSENT
        assert store.wait_indexed(0.0) in (True, False)

    def test_a_store_opened_again_holds_what_its_kind_promises(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])
        with self.make_store(tmp_path) as again:
            expected = make_value() if self.persistent else None
            assert same_bytes(read_value(again, make_key()), expected)


class EmptyValueTests(StoreHooks):
    """Tests that an empty value counts as absent, so that the next put replaces it."""

    def test_an_empty_value_is_replaced(self, store: Store) -> None:
        key, value = make_key(), make_value(SIZE)
        self.poke(store, key, b"")
        assert not store.read(key, [])
        assert store.put(key, [value]).result is PutResult.STORED
        assert store.where(key) is Where.HERE
        assert same_bytes(read_value(store, key), value)

    def test_one_of_racing_writers_replaces_an_empty_value(self, store: Store) -> None:
        value = make_value(SIZE)
        for number in range(ROUNDS):
            key = make_key(number)
            self.poke(store, key, b"")
            results: list[PutResult] = []

            def put(key: ChunkKey = key, results: list[PutResult] = results) -> None:
                results.append(store.put(key, [value]).result)

            run_together(put, put, put, put)
            assert PutResult.STORED in results
            assert set(results) <= {PutResult.STORED, PutResult.EXISTS}
            assert same_bytes(read_value(store, key), value)


class RemoteStoreTests(ValueTests, RaceTests, LifecycleTests, EmptyValueTests):
    """Required tests of a store whose server has its own quota; they never give `max_bytes`."""


class StoreTests(ValueTests, RaceTests, LifecycleTests, QuotaTests):
    """Required tests of any other store."""
