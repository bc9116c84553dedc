"""Slots that are made ahead: fewer looks at ledgers, and nobody has to make room for them."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from kvferry.store.base import PutResult
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import Layout
from kvferry.store.file.ledger import MAX_PENDING
from kvferry.store.file.slots import MOST_AT_ONCE
from kvferry.store.file.usage import read_usage
from kvferry.testing.stores import make_key, make_value, read_value

SIZE = 4001
MANY = 1 << 30


def put_stretch(store, first, num_records=16, size=SIZE):
    for number in range(first, first + num_records):
        value = make_value(size, number)
        assert store.put(make_key(number), [value]) is PutResult.STORED


def read_ledgers(bench):
    return read_usage(FileIO(), Layout(str(bench.root)))


def temporary_files(bench):
    return list(bench.root.glob("writers/*/tmp/*"))


def test_a_second_stretch_takes_one_look_at_the_ledgers_and_one_write(bench):
    store, _other = bench.open(max_bytes=MANY), bench.open(max_bytes=MANY)
    put_stretch(store, 0)
    store.maintain()
    bench.io.calls.clear()
    put_stretch(store, 100)
    assert bench.io.calls["pwritev"] == 16 + 1
    assert bench.io.calls["preadv"] == 2
    assert temporary_files(bench) == []
    assert all(read_value(store, make_key(100 + n)) == make_value(SIZE, 100 + n) for n in range(16))


def test_a_first_stretch_makes_no_more_than_it_needs(bench):
    store = bench.open(max_bytes=MANY)
    for number, num_ahead in enumerate([0, 0, 1, 0, 3, 2, 1, 0, 7]):
        put_stretch(store, number, 1)
        assert len(temporary_files(bench)) == num_ahead


def test_a_stretch_longer_than_the_last_one_goes_on_by_small_steps(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 5)
    store.maintain()
    for number, num_ahead in enumerate([4, 3, 2, 1, 0, 0, 0, 1]):
        put_stretch(store, 100 + number, 1)
        assert len(temporary_files(bench)) == num_ahead


def test_a_look_in_the_middle_of_a_stretch_does_not_end_it(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 5)
    store._volume.rest()
    put_stretch(store, 5, 11)
    store.maintain()
    put_stretch(store, 100, 1)
    assert len(temporary_files(bench)) == 15


def test_never_more_than_the_largest_number_at_once(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 100)
    store.maintain()
    put_stretch(store, 200, 1)
    assert len(temporary_files(bench)) == MOST_AT_ONCE - 1


def test_what_is_not_used_is_given_back_and_never_counts_as_used_here(bench):
    store, other = bench.open(max_bytes=MANY), bench.open(max_bytes=MANY)
    put_stretch(store, 0, 9)
    assert len(temporary_files(bench)) == 7
    assert store.stat().used_bytes == 9 * SIZE
    assert read_ledgers(bench).num_bytes == 16 * SIZE
    store._volume.rest()
    assert len(temporary_files(bench)) == 7, "there may be more to store"
    store._volume.rest()
    assert temporary_files(bench) == []
    usage = read_ledgers(bench)
    assert (usage.num_bytes, usage.num_records, usage.quiet) == (9 * SIZE, 9, True)
    other.maintain()
    assert other.stat().used_bytes == 9 * SIZE


def test_finished_writes_are_cleared_from_the_ledger_once_there_is_time(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 1)
    assert not read_ledgers(bench).quiet
    store._volume.rest()
    assert read_ledgers(bench).quiet
    before = bench.io.calls["pwritev"]
    store._volume.rest()
    assert bench.io.calls["pwritev"] == before


def test_a_store_that_only_seems_full_does_not_wait_for_its_own_ledger(bench):
    store = bench.open(max_bytes=10_000, index=False)
    put_stretch(store, 0, 2, size=5000)
    for number in range(2):
        bench.path(make_key(number)).unlink()
    assert store.put(make_key(2), [make_value(5000)]) is PutResult.NO_SPACE
    put_stretch(store, 3, 1, size=0)
    while store._volume.upkeep._reconcile() == 0.0:
        pass
    assert store.stat().used_bytes == 0


def test_a_repair_does_not_wait_for_what_is_reserved_ahead(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 9)
    bench.path(make_key(3)).unlink()
    assert store.repair().corrected_bytes == -SIZE


def test_others_find_room_for_pending_writes_while_slots_are_made(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0)
    store.maintain()
    pending = [store.begin(make_key(1000 + number), 10) for number in range(MAX_PENDING - 4)]
    put_stretch(store, 100, 1)
    assert len(temporary_files(bench)) == len(pending) + 1
    pending += [store.begin(make_key(2000 + number), 10) for number in range(4)]
    assert not any(isinstance(session, PutResult) for session in pending)
    assert store.begin(make_key(3000), 10) is PutResult.NO_SPACE
    assert bench.counters["store_put_busy"] == 1
    for session in pending:
        store.abort(session)
    assert store.stat().used_bytes == 17 * SIZE
    put_stretch(store, 200)


def test_slots_of_sizes_that_went_out_of_use_keep_no_write_from_its_entry(bench):
    store = bench.open()
    for index in range(40):  # something is used between any two looks
        put_stretch(store, 100 * index, 9, size=1000 + index)
        store._volume.rest()
    sessions = [store.begin(make_key(10_000 + number), 10) for number in range(8)]
    assert not any(isinstance(session, PutResult) for session in sessions)


def test_sizes_that_went_out_of_use_are_forgotten(bench):
    store = bench.open()
    for index in range(300):
        put_stretch(store, 10 * index, 4, size=1000 + index)
        store._volume.rest()
    assert len(store._volume.membership.current.slots._ready) < 40


def test_all_that_is_reserved_ahead_is_bounded(bench):
    store = bench.open(max_bytes=64 * 30 * SIZE)
    for index in range(4):
        put_stretch(store, 100 * index, 12, size=SIZE + index)
        assert store._volume.membership.current.slots.num_bytes <= 31 * SIZE


def test_slots_go_with_the_registration_that_made_them(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 9)
    volume, first = store._volume, store._volume.membership.current
    assert first.slots.num_bytes
    taken = bench.open(max_bytes=MANY)
    into = Path(taken._volume.membership.current.writer.path) / "absorbed"
    into.mkdir(exist_ok=True)
    Path(first.writer.path).rename(into / first.writer.id)
    taken.maintain()
    assert store.put(make_key(100), [make_value(SIZE)]) is PutResult.FAILED
    put_stretch(store, 101, 9)
    second = volume.membership.current
    assert second is not first
    volume.writing.give_back(first.slots.take_all())  # as a thread does that still has it
    assert second.slots.num_bytes
    store._volume.rest(always=True)
    assert read_ledgers(bench).num_bytes == 18 * SIZE


def test_a_store_closed_while_slots_are_made_leaves_none(bench, monkeypatch):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 8)
    fits = store._volume.quota.fits

    def close_first() -> bool:
        answer = fits()
        store.close()
        return answer

    monkeypatch.setattr(store._volume.quota, "fits", close_first)
    store.put(make_key(100), [make_value(SIZE)])
    assert temporary_files(bench) == []
    assert read_ledgers(bench).num_records == len(list(bench.root.glob("records/*/*")))
    assert read_ledgers(bench).quiet


def test_what_a_failing_medium_would_not_take_back_is_tried_again(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 9)
    bench.io.fail["pwritev"] = errno.EIO
    store._volume.rest(always=True)
    bench.io.fail.clear()
    assert read_ledgers(bench).num_records == 16
    store._volume.rest()
    assert read_ledgers(bench).num_records == 9


def test_closing_gives_everything_back(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 9)
    store.close()
    assert temporary_files(bench) == []
    assert read_ledgers(bench).num_bytes == 9 * SIZE


def test_no_more_is_reserved_ahead_than_there_is_room_for(bench):
    quota = 320 * SIZE
    store = bench.open(max_bytes=quota)
    put_stretch(store, 0, 5)
    store.maintain()
    put_stretch(store, 10, 1, size=quota - 8 * SIZE)
    for number, num_ahead in enumerate([2, 1, 0]):
        bench.io.calls.clear()
        put_stretch(store, 20 + number, 1)
        assert len(temporary_files(bench)) == num_ahead
        assert bench.io.calls["unlink"] == 1, "its own"
    assert read_ledgers(bench).num_bytes == quota
    assert bench.counters["store_evicted_records"] == 0


def test_what_is_reserved_ahead_goes_before_any_record(bench):
    """Records of another size, and another store, take the room; then one more record comes."""
    quota = 320 * SIZE
    store, other = bench.open(max_bytes=quota), bench.open(max_bytes=quota)
    put_stretch(store, 0, 6)
    store.maintain()
    put_stretch(store, 10, 1)
    assert read_ledgers(bench).num_bytes == (7 + 4) * SIZE
    put_stretch(other, 20, 1, size=quota - 11 * SIZE)
    put_stretch(store, 30, 1, size=4 * SIZE)
    assert bench.counters["store_evicted_records"] == 0
    assert read_ledgers(bench).num_bytes == quota
    assert temporary_files(bench) == []


def test_slots_in_a_directory_that_is_gone_are_not_used(bench):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0, 9)
    for writer in (bench.root / "writers").iterdir():
        shutil.rmtree(writer)
    assert store.put(make_key(20), [make_value(SIZE)]) is PutResult.FAILED
    put_stretch(store, 21, 9)
    assert bench.counters["store_writer_fenced"] == 1
    store.maintain()
    # The records before were counted in what is gone: the reconciliation finds them.
    assert store.stat().used_bytes == 18 * SIZE


@pytest.mark.parametrize("call", ["open", "pwritev", "listdir"])
def test_slots_that_cannot_be_made_leave_nothing_behind(bench, call):
    store = bench.open(max_bytes=MANY)
    put_stretch(store, 0)
    store.maintain()
    bench.io.fail[call] = errno.ENOSPC
    assert store.put(make_key(100), [make_value(SIZE)]) is PutResult.NO_SPACE
    bench.io.fail.clear()
    assert temporary_files(bench) == []
    assert store.stat().used_bytes == 16 * SIZE
    put_stretch(store, 100)
    assert store.stat().used_bytes == 32 * SIZE


def test_sizes_that_all_differ_are_forgotten(bench):
    store = bench.open()
    for size in range(1, 600):
        store.put(make_key(size), [make_value(size)])
    assert len(store._volume.membership.current.slots._used) < 300
    assert temporary_files(bench) == []
