"""Tests of a store's optional abilities (scan, probe, index), and a stateful test that runs actions
on a store and a dict and compares both after each."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.store.base import PutResult, Store, Where
from kvferry.store.catalogue import Entry
from kvferry.testing.stores.hooks import (
    StoreHooks,
    can_scan,
    make_key,
    make_value,
    read_value,
    same_bytes,
    wait_until,
)
from kvferry.types import ChunkKey

QUOTA = 20_000
"""Two or three large values fill this quota, so that evictions are frequent."""

numbers = st.integers(0, 7)
sizes = st.one_of(st.sampled_from([1, 4096, 4097, 8191, 12_001, QUOTA]), st.integers(1, QUOTA))


def _scan(store: Store) -> dict[bytes, Entry]:
    entries = list(store.catalogue().scan())
    by_key: dict[bytes, Entry] = {entry.key: entry for entry in entries}
    assert len(by_key) == len(entries), "a key was listed twice"
    return by_key


class ScanTests(StoreHooks):
    """Tests of stores that list their values."""

    def test_scan_lists_every_value_once(self, store: Store) -> None:
        sizes = (1, 4096, 9001)
        before = time.time()
        for number, size in enumerate(sizes):
            store.put(make_key(number), [make_value(size)])
        entries = _scan(store)
        assert {key: entry.stored_bytes for key, entry in entries.items()} == {
            make_key(number): self.takes(make_value(size)) for number, size in enumerate(sizes)
        }
        # Batched recency and the clocks of file systems are coarse.
        assert all(abs(entry.last_used - before) < 60 for entry in entries.values())

    def test_scan_leaves_out_what_was_deleted_or_discarded(self, store: Store) -> None:
        for number in range(3):
            store.put(make_key(number), [b"value"])
        store.delete(make_key(0))
        store.discard(make_key(1), "bad_checksum")
        assert set(_scan(store)) == {make_key(2)}

    def test_values_may_come_and_go_during_a_scan(self, store: Store) -> None:
        for number in range(40):
            store.put(make_key(number), [b"value"])
        found = set()
        for position, entry in enumerate(store.catalogue().scan()):
            found.add(entry.key)
            store.delete(make_key(39 - position))
            store.put(make_key(100 + position), [b"later"])
        never_touched_before_listed = found & {make_key(number) for number in range(40)}
        assert never_touched_before_listed
        assert found <= {make_key(number) for number in range(141)}


class ProbeTests(StoreHooks):
    """Tests of stores that several processes share."""

    def test_waiting_for_the_index_ends_in_time(self, store: Store) -> None:
        started = time.monotonic()
        store.wait_indexed(0.0)
        assert time.monotonic() - started < self.patience_seconds

    def test_a_probe_finds_what_another_instance_stored(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as writer, self.make_store(tmp_path) as reader:
            assert reader.wait_indexed(self.patience_seconds)
            keys = [make_key(number) for number in range(5)]
            for key in keys[:3]:
                writer.put(key, [b"value"])

            def are_known() -> bool:
                reader.probe(keys)  # once more if a server is late, as the next request does
                return all(reader.where(key) is Where.HERE for key in keys[:3])

            wait_until(are_known, "probed keys become known", self.patience_seconds)
            assert reader.where(keys[3]) is not Where.HERE
            assert reader.where(keys[4]) is not Where.HERE

    def test_keys_that_are_asked_for_again_are_found_as_another_instance_stores_them(
        self, tmp_path: Path
    ) -> None:
        with self.make_store(tmp_path) as writer, self.make_store(tmp_path) as reader:
            assert reader.wait_indexed(self.patience_seconds)
            keys = [make_key(number) for number in range(5)]

            def has_come(number: int) -> bool:
                assert reader.probe(keys[number:], again=True) is not Where.ABSENT, (
                    "another instance may store them"
                )
                return reader.where(keys[number]) is Where.HERE

            assert not any(has_come(number) for number in range(5))
            for number, key in enumerate(keys):
                writer.put(key, [b"value"])
                wait_until(partial(has_come, number), "it comes", self.patience_seconds)
        assert reader.probe(keys, again=True) is Where.ABSENT, (
            "of a closed store, nothing more comes"
        )

    def test_what_is_absent_when_asked_again_is_not_known_any_more(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as writer, self.make_store(tmp_path) as reader:
            assert reader.wait_indexed(self.patience_seconds)
            writer.put(make_key(), [b"value"])

            def says(is_there: bool) -> bool:
                found = reader.where(make_key()) is Where.HERE
                if found is not None:  # else it is being asked for
                    reader.probe([make_key()], again=True)
                return found is is_there

            wait_until(partial(says, True), "it comes", self.patience_seconds)
            assert writer.delete(make_key())
            wait_until(partial(says, False), "it is gone", self.patience_seconds)

    def test_a_flood_of_probes_blocks_no_caller(self, store: Store) -> None:
        started = time.monotonic()
        for number in range(500):
            store.probe([make_key(number), make_key(number + 1)])
        assert time.monotonic() - started < self.patience_seconds
        store.put(make_key(0), [b"value"])
        assert store.where(make_key(0)) is Where.HERE


class IndexTests(StoreHooks):
    """Tests of stores that several processes share, and whose index lists what is there."""

    def test_the_first_fill_completes(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            for number in range(7):
                store.put(make_key(number), [b"value"])
        with self.make_store(tmp_path) as again:
            assert again.wait_indexed(self.patience_seconds)
            assert again.stat().index_complete
            assert again.stat().num_records == 7
            assert all(again.where(make_key(number)) is Where.HERE for number in range(7))


class StoreMachine(RuleBasedStateMachine):
    """Actions on a store and a dict with values under eight keys, with and without a quota.

    Without a quota the store must equal the dict. With a quota, the store may evict values, but
    only when it needs room for a new one. The test removes these from the dict; all others must
    stay.

    `vanished_bytes` is the size of values that were removed behind the store's back or quarantined.
    A correct store may still count them.
    """

    hooks: StoreHooks
    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvferry-store-"))
        self.model: dict[ChunkKey, bytes] = {}
        self.vanished_bytes = 0
        self.max_bytes: int | None = None
        self.resources = ExitStack()
        self.resources.callback(shutil.rmtree, self.root, ignore_errors=True)

    @initialize(has_quota=st.booleans())
    def open(self, has_quota: bool) -> None:
        self.max_bytes = QUOTA if has_quota else None
        self._open()

    def _open(self) -> None:
        store = self.hooks.make_store(self.root, max_bytes=self.max_bytes)
        self.store = self.resources.enter_context(store)

    def _charge(self) -> int:
        return sum(self.hooks.charge(len(value)) for value in self.model.values())

    @rule(number=numbers, size=sizes, variant=st.integers(0, 2))
    def put(self, number: int, size: int, variant: int) -> None:
        key, value = make_key(number), make_value(size, variant)
        needed = self._charge() + self.vanished_bytes + self.hooks.charge(size)
        may_evict = self.max_bytes is not None and needed > self.max_bytes
        buffers = [value[: size // 2], value[size // 2 :]]
        result = self.store.put(key, buffers).result
        if key in self.model:
            assert result is PutResult.EXISTS
            return
        if result is PutResult.NO_SPACE and may_evict and self.vanished_bytes:
            # The store counted vanished values. After `settle` its count must be right.
            self.hooks.settle(self.store)
            result = self.store.put(key, buffers).result
        assert result is PutResult.STORED
        assert self.store.where(key) is Where.HERE
        if may_evict:
            for evicted in [k for k in self.model if self.hooks.peek(self.store, k) is None]:
                assert self.store.read(evicted, ()) is None
                del self.model[evicted]
        self.model[key] = value

    @precondition(lambda self: self.max_bytes is not None)
    @rule(number=numbers)
    def put_too_large(self, number: int) -> None:
        key = make_key(number)
        expected = PutResult.EXISTS if key in self.model else PutResult.NO_SPACE
        assert self.store.put(key, [bytes(QUOTA + 1)]).result is expected

    @rule(number=numbers)
    def delete(self, number: int) -> None:
        was_there = self.model.pop(make_key(number), None) is not None
        assert self.store.delete(make_key(number)) is was_there

    @rule(number=numbers)
    def discard(self, number: int) -> None:
        value = self.model.pop(make_key(number), None)
        self.store.discard(make_key(number), "bad_checksum")
        if value is not None:
            self.vanished_bytes += self.hooks.charge(len(value))

    @rule(number=numbers)
    def lose(self, number: int) -> None:
        value = self.model.pop(make_key(number), None)
        if value is not None:
            self.hooks.poke(self.store, make_key(number), None)
            self.hooks.settle(self.store)
            self.vanished_bytes += self.hooks.charge(len(value))

    @rule(touched=st.lists(numbers, max_size=8))
    def touch(self, touched: list[int]) -> None:
        self.store.touch(make_key(number) for number in touched)

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self._open()
        self.hooks.settle(self.store)
        if not self.hooks.persistent:
            self.model.clear()
            self.vanished_bytes = 0

    @invariant()
    def holds_what_the_dict_holds(self) -> None:
        for number in range(8):
            key = make_key(number)
            assert same_bytes(read_value(self.store, key), self.model.get(key))
            if key not in self.model:  # the read above found nothing, so the index knows
                assert self.store.where(key) is not Where.HERE

    @invariant()
    def counts_are_right(self) -> None:
        used_bytes = self.store.stat().used_bytes
        if self.max_bytes is not None:
            assert used_bytes <= self.max_bytes
        assert self._charge() <= used_bytes <= self._charge() + self.vanished_bytes

    @invariant()
    def scan_lists_what_the_dict_holds(self) -> None:
        if can_scan(self.store):
            listed = {entry.key: entry.stored_bytes for entry in self.store.catalogue().scan()}
            takes = self.hooks.takes
            assert listed == {key: takes(value) for key, value in self.model.items()}

    def teardown(self) -> None:
        self.resources.close()


def store_machine(hooks: StoreHooks) -> type[StoreMachine]:
    """Make the stateful test of one kind of store. pytest collects its `.TestCase`."""
    return type(f"{type(hooks).__name__}Machine", (StoreMachine,), {"hooks": hooks})
