"""Optional abilities that only look: scan and probe."""

from __future__ import annotations

import time
from pathlib import Path

from kvferry.store.base import (
    Entry,
    Store,
    SupportsProbe,
    SupportsScan,
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
