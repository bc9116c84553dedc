"""Values go in and come out; absent is None; the index is a hint and the read is the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.observe import Counters
from kvferry.store.base import Buffer, PutResult
from kvferry.testing.stores.hooks import (
    StoreHooks,
    awkward_sizes,
    make_key,
    make_value,
    read_value,
    same_bytes,
)


class ValueTests(StoreHooks):
    """One thread, no quota."""

    @pytest.mark.parametrize("num_bytes", awkward_sizes)
    def test_a_value_comes_back_as_it_was_put(self, tmp_path: Path, num_bytes: int) -> None:
        key, value = make_key(), make_value(num_bytes)
        with self.make_store(tmp_path) as store:
            assert store.put(key, [value]) is PutResult.STORED
            assert store.contains(key)
            assert same_bytes(self.peek(store, key), value)
            assert same_bytes(read_value(store, key), value)

    def test_buffers_are_joined_whatever_they_are(self, tmp_path: Path) -> None:
        value = make_value(3 * 4099)
        parts: list[Buffer] = [
            value[i : i + 11] for i in range(0, 4099, 11)
        ]  # more than IOV_MAX in one call
        parts += [b"", bytearray(value[4099:8000])]
        parts += [memoryview(bytearray(value[8000:]))]
        whole = b"".join(parts)
        with self.make_store(tmp_path) as store:
            assert store.put(make_key(), [*parts, *[b"x"] * 2000]) is PutResult.STORED
            assert same_bytes(read_value(store, make_key()), whole + b"x" * 2000)

    def test_a_buffer_may_be_reused_after_put(self, tmp_path: Path) -> None:
        value = make_value(70_001)
        buffer = bytearray(value)
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [buffer])
            buffer[:] = bytes(len(buffer))
            assert same_bytes(read_value(store, make_key()), value)

    def test_ranges_are_read_at_any_offset_and_end_where_the_value_ends(
        self, tmp_path: Path
    ) -> None:
        value = make_value(9001)
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [value])
            source = store.open_read(make_key())
            assert source is not None
            with source:
                assert source.size == len(value)
                for offset, length in [(0, 9001), (1, 1), (4095, 2), (4096, 4096), (8999, 2)]:
                    buffer = bytearray(length)
                    assert source.read_into(memoryview(buffer), offset) == length
                    assert same_bytes(buffer, value[offset : offset + length])

    def test_reading_past_the_end_returns_what_is_there(self, tmp_path: Path) -> None:
        value = make_value(9001)
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [value])
            source = store.open_read(make_key())
            assert source is not None
            with source:
                buffer = bytearray(b"?" * 100)
                assert source.read_into(memoryview(buffer), 9000) == 1
                assert same_bytes(buffer, value[9000:] + b"?" * 99)
                assert source.read_into(memoryview(buffer), 9001) == 0
                assert source.read_into(memoryview(buffer), 2**40) == 0
                assert source.read_into(memoryview(bytearray(0)), 0) == 0

    def test_an_absent_key_is_none_and_false(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            assert not store.contains(make_key())
            assert store.open_read(make_key()) is None
            assert store.delete(make_key()) is False
            store.discard(make_key(), "test")
            store.touch([make_key()])
            assert store.stat().num_records == 0

    def test_the_first_writer_wins_and_its_value_stands(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            assert store.put(make_key(), [b"first"]) is PutResult.STORED
            assert store.put(make_key(), [b"second, longer"]) is PutResult.EXISTS
            assert read_value(store, make_key()) == b"first"
            assert store.stat().used_bytes >= self.charge(5)

    def test_a_deleted_value_is_gone_and_can_be_put_again(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [b"old"])
            assert store.delete(make_key()) is True
            assert store.delete(make_key()) is False
            assert not store.contains(make_key())
            assert store.open_read(make_key()) is None
            assert self.peek(store, make_key()) is None
            assert store.put(make_key(), [b"new"]) is PutResult.STORED
            assert read_value(store, make_key()) == b"new"

    def test_a_discarded_value_is_not_served_and_can_be_put_again(self, tmp_path: Path) -> None:
        counters = Counters()
        with self.make_store(tmp_path, observer=counters) as store:
            store.put(make_key(), [b"rotten"])
            store.discard(make_key(), "bad_leaf")
            store.discard(make_key(), "bad_leaf")
            assert not store.contains(make_key())
            assert store.open_read(make_key()) is None
            assert counters["store_quarantined"] == 1
            assert store.put(make_key(), [b"sound"]) is PutResult.STORED
            assert read_value(store, make_key()) == b"sound"

    def test_a_reason_to_discard_is_text_and_no_path(self, tmp_path: Path) -> None:
        root = tmp_path / "a" / "root"
        root.mkdir(parents=True)
        with self.make_store(root) as store:
            for number, reason in enumerate(["../../escaped", "/escaped", "", "x" * 5000, "a\0b"]):
                store.put(make_key(number), [b"rotten"])
                store.discard(make_key(number), reason)
                assert store.open_read(make_key(number)) is None
        assert [path.name for path in tmp_path.iterdir()] == ["a"]

    def test_an_open_value_stays_readable_when_it_is_deleted(self, tmp_path: Path) -> None:
        value = make_value(8193)
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [value])
            source = store.open_read(make_key())
            assert source is not None
            with source:
                store.delete(make_key())
                buffer = bytearray(8193)
                assert source.read_into(memoryview(buffer), 0) == 8193
                assert same_bytes(buffer, value)
            source.close()

    def test_what_appears_behind_the_index_is_read(self, tmp_path: Path) -> None:
        value = make_value(5003)
        with self.make_store(tmp_path) as store:
            self.poke(store, make_key(), value)
            assert same_bytes(read_value(store, make_key()), value)
            assert store.put(make_key(), [b"later"]) is PutResult.EXISTS

    def test_what_vanishes_behind_the_index_is_none_and_forgotten(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [b"value"])
            self.poke(store, make_key(), None)
            assert store.open_read(make_key()) is None
            assert not store.contains(make_key())

    def test_a_store_verifies_nothing(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value(4097)])
            self.poke(store, make_key(), b"shorter")
            assert read_value(store, make_key()) == b"shorter"

    def test_values_under_similar_keys_do_not_mix(self, tmp_path: Path) -> None:
        first = make_key()
        last_byte = type(first)(first[:-1] + bytes([first[-1] ^ 1]))
        first_byte = type(first)(bytes([first[0] ^ 1]) + first[1:])
        with self.make_store(tmp_path) as store:
            for key in (first, last_byte, first_byte):
                assert store.put(key, [key]) is PutResult.STORED
            for key in (first, last_byte, first_byte):
                assert same_bytes(read_value(store, key), key)
