"""Optional abilities that only look: scan, probe, stamp and watch."""

from __future__ import annotations

import time
from pathlib import Path

from kvferry.store.base import (
    Entry,
    Stamp,
    Store,
    SupportsProbe,
    SupportsScan,
    SupportsStamp,
    SupportsWatch,
)
from kvferry.testing.stores.hooks import StoreHooks, make_key, make_value, wait_until


def _scan(store: Store) -> dict[bytes, Entry]:
    assert isinstance(store, SupportsScan)
    entries = list(store.scan())
    by_key: dict[bytes, Entry] = {entry.key: entry for entry in entries}
    assert len(by_key) == len(entries), "a key was listed twice"
    return by_key


class ScanTests(StoreHooks):
    """For stores with `SupportsScan`."""

    def test_scan_lists_every_value_once(self, tmp_path: Path) -> None:
        sizes = (1, 4096, 9001)
        with self.make_store(tmp_path) as store:
            before = time.time()
            for number, size in enumerate(sizes):
                store.put(make_key(number), [make_value(size)])
            entries = _scan(store)
            assert {key: entry.num_bytes for key, entry in entries.items()} == {
                make_key(number): size for number, size in enumerate(sizes)
            }
            # Batched recency and the clocks of file systems are coarse.
            assert all(abs(entry.last_used - before) < 60 for entry in entries.values())

    def test_scan_leaves_out_what_was_deleted_or_discarded(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            for number in range(3):
                store.put(make_key(number), [b"value"])
            store.delete(make_key(0))
            store.discard(make_key(1), "bad_leaf")
            assert set(_scan(store)) == {make_key(2)}

    def test_values_may_come_and_go_during_a_scan(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            for number in range(40):
                store.put(make_key(number), [b"value"])
            assert isinstance(store, SupportsScan)
            found = set()
            for position, entry in enumerate(store.scan()):
                found.add(entry.key)
                store.delete(make_key(39 - position))
                store.put(make_key(100 + position), [b"later"])
            never_touched_before_listed = found & {make_key(number) for number in range(40)}
            assert never_touched_before_listed
            assert found <= {make_key(number) for number in range(141)}


class ProbeTests(StoreHooks):
    """For stores with `SupportsProbe`, which are those that several processes share."""

    def test_the_first_fill_completes(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            for number in range(7):
                store.put(make_key(number), [b"value"])
        with self.make_store(tmp_path) as again:
            assert isinstance(again, SupportsProbe)
            assert again.wait_indexed(self.patience_seconds)
            assert again.stat().index_complete
            assert again.stat().num_records == 7
            assert all(again.contains(make_key(number)) for number in range(7))

    def test_waiting_for_the_index_ends_in_time(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            assert isinstance(store, SupportsProbe)
            started = time.monotonic()
            store.wait_indexed(0.0)
            assert time.monotonic() - started < 5

    def test_a_probe_finds_what_another_instance_stored(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as writer, self.make_store(tmp_path) as reader:
            assert isinstance(reader, SupportsProbe)
            assert reader.wait_indexed(self.patience_seconds)
            keys = [make_key(number) for number in range(5)]
            for key in keys[:3]:
                writer.put(key, [b"value"])
            reader.probe(keys)
            wait_until(
                lambda: all(reader.contains(key) for key in keys[:3]),
                "probed keys become known",
                self.patience_seconds,
            )
            assert not reader.contains(keys[3])
            assert not reader.contains(keys[4])

    def test_a_flood_of_probes_blocks_nobody(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            assert isinstance(store, SupportsProbe)
            started = time.monotonic()
            for number in range(500):
                store.probe([make_key(number), make_key(number + 1)])
            assert time.monotonic() - started < 5
            store.put(make_key(0), [b"value"])
            assert store.contains(make_key(0))


def _stamp(store: Store) -> Stamp | None:
    assert isinstance(store, SupportsStamp)
    return store.stamp(make_key())


def _tells(before: Stamp, now: Stamp | None) -> bool:
    """Whether whoever read a value at `before` learns that it may be another one by `now`."""
    if now is None or now.value != before.value or before.changes is None:
        return True
    return now.changes != before.changes


class StampTests(StoreHooks):
    """For stores with `SupportsStamp`."""

    def test_a_source_bears_the_stamp_of_its_value(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            assert _stamp(store) is None
            store.put(make_key(), [make_value()])
            source = store.open_read(make_key())
            assert source is not None
            with source:
                now = _stamp(store)
                assert source.stamp is not None
                assert now is not None
                assert source.stamp.value == now.value

    def test_a_stamp_tells_what_was_written_behind_the_api(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            assert before is not None
            self.poke(store, make_key(), make_value(number=1))
            now = _stamp(store)
            assert now is not None
            assert _tells(before, now)
            assert now.written or now.value != before.value
            self.poke(store, make_key(), make_value(5000))
            longer = _stamp(store)
            assert longer is not None
            assert longer.value != before.value

    def test_a_stamp_that_has_settled_tells_what_is_written_later(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])

            def settled() -> bool:
                stamp = _stamp(store)
                return stamp is not None and stamp.changes is not None

            wait_until(settled, "a stamp settles", self.patience_seconds)
            before = _stamp(store)
            assert before is not None
            assert _stamp(store) == before
            self.poke(store, make_key(), make_value(number=1))
            assert _tells(before, _stamp(store))

    def test_a_stamp_tells_that_a_value_went_and_came_back(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            assert before is not None
            store.delete(make_key())
            assert _stamp(store) is None
            store.put(make_key(), [make_value(number=1)])
            assert _tells(before, _stamp(store))

    def test_a_noted_use_is_no_write(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            store.touch([make_key()])
            self.settle(store)
            now = _stamp(store)
            assert before is not None
            assert now is not None
            assert now.value == before.value
            assert not now.written or now.changes == before.changes


class WatchTests(StoreHooks):
    """For stores with `SupportsWatch`, on a system that tells of changes."""

    def _watching(self, tmp_path: Path) -> Store:
        store = self.make_store(tmp_path)
        assert isinstance(store, SupportsWatch)
        assert store.watch()
        assert store.watch()
        return store

    @staticmethod
    def _is_unchanged(store: Store, since: Stamp | None) -> bool:
        assert isinstance(store, SupportsWatch)
        assert since is not None
        return store.is_unchanged(make_key(), since)

    def test_what_nobody_touched_is_unchanged(self, tmp_path: Path) -> None:
        with self._watching(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            assert self._is_unchanged(store, before)
            for number in range(1, 20):
                store.put(make_key(number), [make_value(number=number)])
            source = store.open_read(make_key())
            assert source is not None
            with source:
                assert self._is_unchanged(store, source.stamp)
            assert self._is_unchanged(store, before)

    def test_a_change_is_known_at_once(self, tmp_path: Path) -> None:
        with self._watching(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            self.poke(store, make_key(), make_value(number=1))
            assert not self._is_unchanged(store, before)
            assert not self._is_unchanged(store, before)
            assert self._is_unchanged(store, _stamp(store))

    def test_a_removal_is_known_at_once(self, tmp_path: Path) -> None:
        with self._watching(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            store.delete(make_key())
            assert not self._is_unchanged(store, before)

    def test_a_noted_use_is_no_change(self, tmp_path: Path) -> None:
        with self._watching(tmp_path) as store:
            store.put(make_key(), [make_value()])
            before = _stamp(store)
            store.touch([make_key()])
            self.settle(store)
            assert self._is_unchanged(store, before)

    def test_without_watching_nothing_is_known(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])
            assert not self._is_unchanged(store, _stamp(store))
