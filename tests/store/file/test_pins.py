"""Pinned records: what stays, what still goes, and how many there may be."""

from __future__ import annotations

import pytest

from kvferry.errors import ConfigError, StoreError
from kvferry.store.catalogue import Indexed
from kvferry.store.file.store import FileSettings, FileStore
from kvferry.store.memory import MemoryStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.types import ChunkKey

SIZE = 8192
KEYS = [ChunkKey(bytes([number]) * 32) for number in range(12)]


@pytest.fixture
def clock():
    return FakeClock(0.0)


@pytest.fixture
def opened(tmp_path, clock):
    def make(**options: object) -> FileStore:
        settings = FileSettings(wall=lambda: 1e9 + clock())
        given = {"max_bytes": 8 * SIZE, "background": False, "settings": settings, **options}
        store = FileStore(tmp_path, **given)
        store.maintain()
        return store

    return make


def put(store, *indexes, clock):
    for index in indexes:
        clock.advance(1)
        assert store.put(KEYS[index], [bytes(SIZE)]).result == "stored"


def there(store) -> list[int]:
    return [index for index, key in enumerate(KEYS) if store.read(key, ()) is not None]


def test_pinned_records_stay_until_their_time(opened, clock):
    with opened() as store:
        put(store, *range(8), clock=clock)
        assert store.catalogue().pin([KEYS[0], KEYS[2], KEYS[11]], 1e9 + 100) == 2
        put(store, 8, 9, clock=clock)
        assert {0, 2, 8, 9} <= set(there(store))
        assert not {1, 3} & set(there(store))
        pinned = {entry.key: entry.pinned_until for entry in store.catalogue().scan()}
        assert (pinned[KEYS[0]], pinned[KEYS[9]]) == (1e9 + 100, 0.0)
        assert store.catalogue().pin([KEYS[2]], 0.0) == 1
        clock.advance(100)
        store.maintain()
        assert all(entry.pinned_until == 0.0 for entry in store.catalogue().scan())
        put(store, 10, 11, clock=clock)
        assert not {0, 2} & set(there(store))


def test_pins_take_half_of_the_quota_and_the_rest_is_still_stored(opened, clock):
    with opened() as store:
        put(store, *range(8), clock=clock)
        assert store.catalogue().pin(KEYS[:4], 1e9 + 1000) == 4
        assert store.catalogue().pin(KEYS[:4], 1e9 + 2000) == 4  # again, and longer
        with pytest.raises(ConfigError, match="half of the quota"):
            store.catalogue().pin([KEYS[4]], 1e9 + 1000)
        put(store, 8, 9, 10, 11, clock=clock)
        assert set(there(store)) >= {0, 1, 2, 3, 11}
        assert store.catalogue().pin(KEYS, 1.0) >= 5
        put(store, *set(range(12)) - set(there(store)), clock=clock)


def test_gc_leaves_them_and_delete_does_not(opened, clock):
    with opened() as store:
        put(store, *range(6), clock=clock)
        store.catalogue().pin([KEYS[1]], 1e9 + 1000)
        clock.advance(100)
        store.catalogue().gc(older_than_seconds=50)
        assert there(store) == [1]
        store.catalogue().gc(max_bytes=0)
        assert there(store) == [1]
        assert store.delete(KEYS[1])
        assert there(store) == []


def test_another_process_keeps_them_and_the_recent_are_in_order(opened, clock):
    with opened() as store, opened() as other:
        put(store, *range(8), clock=clock)
        store.catalogue().pin([KEYS[3], KEYS[5]], 1e9 + 1000)
        assert [entry.key for entry in other.catalogue().recent(4)] == [
            KEYS[i] for i in (7, 6, 5, 4)
        ]
        other.catalogue().gc(max_bytes=0)
        assert there(store) == [3, 5]


def test_what_cannot_pin_says_so(opened, tmp_path):
    with opened(max_bytes=None) as store, pytest.raises(ConfigError, match="has no quota"):
        store.catalogue().pin(KEYS, 2e9)
    with opened(read_only=True) as store, pytest.raises(StoreError, match="read-only"):
        store.catalogue().pin(KEYS, 2e9)
    others = FileSettings(index_file=tmp_path / "index")
    with opened(settings=others) as store, pytest.raises(StoreError, match="index of their own"):
        store.catalogue().pin(KEYS, 2e9)


def test_an_eviction_passes_over_no_pinned_record(opened, clock):
    """The index of the table finds what may go: a store with many pins is not searched."""
    with opened() as store, store.index.database.transaction(writes=False) as db:
        plan = db.execute(
            "EXPLAIN QUERY PLAN SELECT key FROM records WHERE pinned_until = 0 ORDER BY last_used"
        ).fetchall()
        assert "USING INDEX records_by_use (pinned_until=?)" in plan[0][3]


def pins(store) -> dict[int, float]:
    """By index of the key, seconds from the start of the clock."""
    return {
        KEYS.index(entry.key): entry.pinned_until - 1e9
        for entry in store.catalogue().scan()
        if entry.pinned_until
    }


def test_a_client_does_not_shorten_the_pin_of_an_operator(opened, clock):
    with opened() as store:
        put(store, 0, clock=clock)
        store.catalogue().pin(KEYS[:1], 1e9 + 1000)
        assert store.catalogue().pin(KEYS[:1], 1e9 + 10, by_client=True) == 0
        assert pins(store) == {0: 1000.0}
        assert store.catalogue().pin(KEYS[:1], 1e9 + 2000, by_client=True) == 1
        assert pins(store) == {0: 2000.0}


def test_clients_pin_a_quarter_of_the_quota_and_commands_as_much_again(opened, clock):
    with opened() as store:
        put(store, *range(8), clock=clock)
        for index in range(2):
            store.catalogue().pin([KEYS[index]], 1e9 + 1000, by_client=True)
        with pytest.raises(ConfigError):
            store.catalogue().pin([KEYS[2]], 1e9 + 1000, by_client=True)
        assert list(pins(store)) == [0, 1]
        assert store.catalogue().pin([KEYS[4], KEYS[5]], 1e9 + 1000) == 2
        with pytest.raises(ConfigError):
            store.catalogue().pin([KEYS[0]], 1e9 + 5000, by_client=True)
        put(store, 8, 9, clock=clock)


def test_a_client_may_pin_where_nothing_is_evicted(opened, clock):
    with opened(max_bytes=None) as store:
        put(store, 0, clock=clock)
        assert store.catalogue().pin(KEYS[:1], 1e9 + 1000, by_client=True) == 1


def test_of_tiers_those_that_can_pin_do(opened, clock):
    with opened() as store, TieredStore([MemoryStore("a"), store]) as tiers:
        put(store, 0, clock=clock)
        memory, directory = tiers.catalogues()
        assert directory.pin(KEYS[:2], 1e9 + 100, by_client=True) == 1
        assert pins(store) == {0: 100.0}
        assert not isinstance(memory, Indexed)
