from __future__ import annotations

import pytest

from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.store.base import PutResult, Where
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key, make_value, read_value


def test_every_store_is_its_own_also_under_one_name():
    with MemoryStore("same") as first, MemoryStore("same") as second:
        assert first.url == second.url == "memory://same"
        first.put(make_key(), [b"value"])
        assert second.read(make_key(), ()) is None


@pytest.mark.parametrize("max_bytes", [0, -1])
def test_a_quota_that_holds_nothing_is_refused(max_bytes):
    with pytest.raises(ConfigError, match=str(max_bytes)):
        MemoryStore(max_bytes=max_bytes)


def test_evictions_are_counted_in_values_and_bytes():
    counters = Counters()
    with MemoryStore(max_bytes=10, observer=counters) as store:
        for number, size in enumerate([3, 4, 3, 7]):
            assert store.put(make_key(number), [make_value(size)]).result is PutResult.STORED
        assert counters["store_evicted_records"] == 2
        assert counters["store_evicted_bytes"] == 7
        assert store.stat().used_bytes == 10
        assert [store.where(make_key(number)) is Where.HERE for number in range(4)] == [
            False,
            False,
            True,
            True,
        ]


def test_a_value_that_fills_the_quota_exactly_fits():
    with MemoryStore(max_bytes=10) as store:
        assert store.put(make_key(), [make_value(10)]).result is PutResult.STORED
        assert store.put(make_key(1), [make_value(11)]).result is PutResult.NO_SPACE
        assert read_value(store, make_key()) == make_value(10)


def test_scan_says_when_a_value_was_used():
    clock = FakeClock(start=50.0)
    with MemoryStore(clock=clock) as store:
        store.put(make_key(0), [b"a"])
        store.put(make_key(1), [b"b"])
        clock.advance(9)
        store.touch([make_key(0), make_key(7)])
        assert {e.key: e.last_used for e in store.catalogue().scan()} == {
            make_key(0): 59.0,
            make_key(1): 50.0,
        }
