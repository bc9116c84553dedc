"""Opening, closing, and what a closed store answers."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

from kvferry.store.base import (
    PutResult,
    SupportsProbe,
    SupportsScan,
    SupportsShardedWrite,
)
from kvferry.testing.stores.abilities import ProbeTests, ScanTests
from kvferry.testing.stores.hooks import (
    StoreHooks,
    make_key,
    make_value,
    read_value,
    same_bytes,
    wait_until,
)
from kvferry.testing.stores.sharded import ShardedWriteTests


class LifecycleTests(StoreHooks):
    """From the constructor to after `close`."""

    def test_every_ability_is_tested(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            abilities = {
                ScanTests: isinstance(store, SupportsScan),
                ProbeTests: isinstance(store, SupportsProbe),
                ShardedWriteTests: isinstance(store, SupportsShardedWrite),
            }
        for tests, is_able in abilities.items():
            assert isinstance(self, tests) is is_able, f"{tests.__name__} and ability disagree"

    def test_it_says_what_it_is(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
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
        closers = [threading.Thread(target=store.close, daemon=True) for _ in range(3)]
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join(20)
        assert not any(closer.is_alive() for closer in closers)

    def test_a_closed_store_answers_every_call(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        store.put(make_key(), [make_value()])
        store.close()
        assert store.put(make_key(1), [b"late"]) is PutResult.FAILED
        assert store.open_read(make_key()) is None
        assert store.contains(make_key()) is False
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
        if isinstance(store, SupportsScan):
            assert list(store.scan()) == []
        if isinstance(store, SupportsProbe):
            store.probe([make_key()])
            assert store.wait_indexed(0.0) in (True, False)
        if isinstance(store, SupportsShardedWrite):
            assert store.begin(make_key(2), 4096) is PutResult.FAILED
            assert store.write_at("gone", 0, [b"x"]) is False
            assert store.commit("gone", b"x") is PutResult.FAILED
            store.abort("gone")

    def test_a_source_outlives_its_store(self, tmp_path: Path) -> None:
        store = self.make_store(tmp_path)
        store.put(make_key(), [make_value()])
        source = store.open_read(make_key())
        assert source is not None
        with source:
            store.close()
            buffer = bytearray(source.size)
            assert source.read_into(memoryview(buffer), 0) == source.size
            assert same_bytes(buffer, make_value())

    def test_a_store_opened_again_holds_what_its_kind_promises(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [make_value()])
        with self.make_store(tmp_path) as again:
            expected = make_value() if self.persistent else None
            assert same_bytes(read_value(again, make_key()), expected)
