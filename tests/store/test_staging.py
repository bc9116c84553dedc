"""Slots of staging memory."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.record.schema import ALIGN, RecordSchema
from kvferry.store.staging import Content, Kept, Staging
from kvferry.testing.host import make_groups
from kvferry.types import ChunkKey

SCHEMA = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=8, groups=make_groups())


PREPARED = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="memory is not prepared here",
)


def test_every_slot_is_given_out_once_and_none_overlaps():
    staging = Staging(5 * ALIGN + 1, ALIGN - 7)
    slots = [staging.acquire() for _ in range(5)]
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert staging.acquire() is None
    for slot in slots:
        staging.view(slot)[:] = bytes([slot]) * ALIGN
    assert [set(staging.view(slot)) for slot in slots] == [{slot} for slot in slots]


def test_the_last_slot_returned_is_the_next_one_used():
    staging = Staging(4 * ALIGN, ALIGN)
    first, second = staging.acquire(), staging.acquire()
    staging.release(first)
    staging.release(second)
    assert staging.num_free == 4
    assert [staging.acquire(), staging.acquire()] == [second, first]


def test_what_is_kept_free_for_others_is_not_given():
    staging = Staging(4 * ALIGN, ALIGN)
    assert staging.acquire(keep_free=3) is not None
    assert staging.acquire(keep_free=3) is None
    assert staging.num_free == 3


def test_too_little_and_too_much_are_refused():
    with pytest.raises(ConfigError, match="staging_bytes=4096"):
        Staging(4096, 4096)
    with pytest.raises(ConfigError, match="set it lower"):
        Staging(1 << 61, 4096)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@PREPARED
def test_prepared_memory_is_there_before_it_is_used_and_keeps_what_it_holds():
    size = 64 << 20
    staging = Staging(4 * size, size)
    before = resident_bytes()
    view = staging.view(staging.acquire())
    view[:8] = b"contents"
    staging.prepare(size)
    assert size * 0.9 < resident_bytes() - before < size * 1.5
    assert view[:8] == b"contents"
    staging.prepare(100 * size)  # more than there is


@PREPARED
def test_preparing_stops_when_it_is_told_to_and_goes_on_there():
    size = 64 << 20
    staging = Staging(2 * size, size)
    before = resident_bytes()
    pieces = iter(range(16))
    staging.prepare(size, lambda: next(pieces, None) is not None)
    assert size * 0.4 < resident_bytes() - before < size * 0.6
    staging.prepare(size)
    assert size * 0.9 < resident_bytes() - before < size * 1.1
    staging.prepare(size, pytest.fail)  # nothing to do: not asked


@PREPARED
def test_a_system_that_cannot_prepare_memory_is_no_fault(monkeypatch):
    monkeypatch.setattr("kvferry.store.staging._MADV_POPULATE_WRITE", 9999)
    staging = Staging(4 * ALIGN, ALIGN)
    staging.prepare(ALIGN)
    assert staging.num_free == 4


def take(staging: Staging, key: ChunkKey) -> Kept | None:
    [kept] = staging.take_all([key])
    return kept


def content(number: int) -> Content:
    return Content(ChunkKey(bytes([number]) * 32), 0, SCHEMA, None)


def test_a_kept_slot_is_found_by_its_key_until_it_is_taken():
    staging = Staging(8 * ALIGN, ALIGN, keep_bytes=4 * ALIGN)
    slot, held = staging.acquire(), content(1)
    staging.release(slot, content=held)
    assert (staging.num_kept, staging.num_free) == (1, 8)
    assert take(staging, content(2).key) is None
    assert take(staging, held.key) == Kept(slot, held)
    assert take(staging, held.key) is None
    assert staging.num_free == 7


def test_kept_slots_are_given_out_last_and_the_longest_unused_first():
    staging = Staging(4 * ALIGN, ALIGN, keep_bytes=2 * ALIGN)
    slots = [staging.acquire() for _ in range(4)]
    for number in (0, 1):
        staging.release(slots[number], content=content(number))
    for number in (2, 3):
        staging.release(slots[number])
    taken = take(staging, content(0).key)
    staging.release(taken.slot, content=taken.content)  # used after number 1
    assert [staging.acquire() for _ in range(5)] == [3, 2, 1, 0, None]


def test_no_more_is_kept_than_allowed_nor_than_half_of_all():
    assert Staging(8 * ALIGN, ALIGN, keep_bytes=8 * ALIGN).max_kept == 4
    staging = Staging(8 * ALIGN, ALIGN, keep_bytes=2 * ALIGN)
    for number, slot in enumerate([staging.acquire() for _ in range(3)]):
        staging.release(slot, content=content(number))
    assert take(staging, content(0).key) is None
    assert staging.num_kept == 2
    staging.release_oldest(Kept(staging.acquire(), content(9)))
    assert take(staging, content(9).key) is None
    assert (staging.num_kept, staging.num_free) == (2, 8)
    assert Staging(8 * ALIGN, ALIGN).max_kept == 0


def test_what_is_kept_twice_is_kept_once():
    staging = Staging(8 * ALIGN, ALIGN, keep_bytes=4 * ALIGN)
    first, second = staging.acquire(), staging.acquire()
    staging.release(first, content=content(1))
    staging.release(second, content=content(1))
    assert (staging.num_kept, staging.num_free) == (1, 8)
    assert take(staging, content(1).key).slot == second


def test_what_is_brought_in_as_oldest_goes_before_all_others():
    staging = Staging(4 * ALIGN, ALIGN, keep_bytes=2 * ALIGN)
    slots = [staging.acquire() for _ in range(4)]
    staging.release(slots[0], content=content(0))
    staging.release_oldest(Kept(slots[1], content(1)))
    assert [staging.acquire() for _ in range(3)] == [slots[1], slots[0], None]


class Mark:
    reached = False

    def poll(self) -> bool:
        return self.reached


def test_what_a_device_still_reads_is_kept_when_it_is_through():
    staging = Staging(8 * ALIGN, ALIGN, keep_bytes=4 * ALIGN)
    mark = Mark()
    staging.release(staging.acquire(), after=mark, content=content(1))
    assert take(staging, content(1).key) is None
    assert staging.num_free == 7
    mark.reached = True
    assert staging.num_free == 8
    assert take(staging, content(1).key) is not None


def test_a_mark_that_cannot_be_read_frees_no_slot_twice():
    class Broken(Mark):
        def poll(self) -> bool:
            if not self.reached:
                raise RuntimeError("the device is gone")
            return True

    staging = Staging(8 * ALIGN, ALIGN, keep_bytes=4 * ALIGN)
    good, broken = Mark(), Broken()
    slots = [staging.acquire() for _ in range(8)]
    staging.release(slots[0], after=good, content=content(1))
    staging._draining.append((slots[1], broken))
    good.reached = True
    with pytest.raises(RuntimeError):
        staging.acquire()
    broken.reached = True
    assert staging.num_free == 2
    assert take(staging, content(1).key).slot == slots[0]
    assert [staging.acquire(), staging.acquire()] == [slots[1], None]


@PREPARED
def test_memory_is_prepared_again_when_slots_go_on_being_held():
    size = 16 << 20
    staging = Staging(8 * size, size, keep_bytes=4 * size)
    staging.prepare(2 * size)
    slots = [staging.acquire(), staging.acquire()]
    before = resident_bytes()
    staging.prepare(2 * size)
    assert 1.8 * size < resident_bytes() - before < 2.5 * size
    staging.release(slots[0])
    before = resident_bytes()
    staging.prepare(2 * size)
    assert resident_bytes() - before < size / 2
