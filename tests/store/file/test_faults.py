"""A medium that refuses: answers, counts, and no exception."""

from __future__ import annotations

import errno
import os
import shutil

import pytest

from kvferry.errors import StoreError
from kvferry.store.base import PutResult, Where
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.stores import make_key, make_value, read_value
from tests.store.file import storing


@pytest.mark.parametrize(
    ("number", "result", "counter"),
    [
        (errno.ENOSPC, PutResult.NO_SPACE, "store_put_no_space"),
        (errno.EDQUOT, PutResult.NO_SPACE, "store_put_no_space"),
        (errno.EIO, PutResult.FAILED, "store_put_failed"),
        (errno.EROFS, PutResult.FAILED, "store_put_failed"),
        (errno.EACCES, PutResult.FAILED, "store_put_failed"),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwritev", "link", "mkdir"])
def test_a_failing_write_is_an_answer_and_gives_its_space_back(
    bench, call, number, result, counter
):
    store = bench.open(max_bytes=100_000)
    store.put(make_key(0), [make_value(5000)])
    bench.io.fail[call] = number
    assert store.put(make_key(1), [make_value(5000)]).result is result
    assert bench.counters[counter] == 1
    bench.io.fail.clear()
    assert store.put(make_key(2), [make_value(5000)]).result is PutResult.STORED
    assert store.stat().used_bytes == 10_000
    assert read_value(store, make_key(1)) is None
    assert read_value(store, make_key(2)) == make_value(5000)


@pytest.mark.parametrize("call", ["pwritev", "link"])
def test_values_put_together_on_a_full_disk_leave_nothing(bench, call):
    store = bench.open(max_bytes=100_000)
    values = [(make_key(number), [make_value(2000 + number)]) for number in range(8)]
    bench.io.fail[call] = errno.ENOSPC
    assert [each.result for each in store.put_all(values)] == [PutResult.NO_SPACE] * 8
    assert bench.counters["store_put_no_space"] <= 3
    assert storing.disk_bytes(bench.root) == store.stat().used_bytes == 0
    bench.io.fail.clear()
    bench.clock.advance(60.0)
    assert [each.result for each in store.put_all(values)] == [PutResult.STORED] * 8
    storing.assert_index_agrees(bench.root)


def test_of_values_put_together_none_is_tried_after_one_that_failed(bench):
    store = bench.open()
    bench.io.fail["pwritev"] = errno.EIO
    before = bench.io.calls["pwritev"]
    values = [(make_key(number), [b"value"]) for number in range(8)]
    assert [each.result for each in store.put_all(values)] == [PutResult.FAILED] * 8
    assert bench.io.calls["pwritev"] == before + 1


def test_a_key_that_is_none_leaves_nothing_of_the_values_before_it(bench):
    store = bench.open()
    with pytest.raises(ValueError, match="32 bytes"):
        store.put_all([(make_key(), [b"value"]), (b"short", [b"value"])])
    assert storing.disk_bytes(bench.root) == 0


def test_values_put_together_share_a_transaction(bench):
    store = bench.open(max_bytes=100_000)
    store.put(make_key(), [b"value"])
    statements = []
    with store.index.database.transaction(writes=False) as db:
        db.set_trace_callback(statements.append)
    store.put_all([(make_key(number), [make_value(100)]) for number in range(1, 9)])
    assert [line for line in statements if line.startswith("BEGIN")] == ["BEGIN IMMEDIATE"]
    assert store.stat().num_records == 9


def test_a_full_disk_costs_nothing(bench, caplog):
    """Its tier leaves it alone for a while."""
    with TieredStore([bench.open()], bench.counters, clock=bench.clock) as store:
        bench.io.fail["pwritev"] = errno.ENOSPC
        for number in range(50):
            assert not store.put(make_key(number), [b"x"]).is_there
        assert bench.io.calls["link"] == 0
        assert bench.counters["store_put_no_space"] == 1
        assert bench.counters["tier_writes/file/skipped"] == 49
        for tries in range(2, 9):
            bench.clock.advance(Patience().longest_pause_seconds)
            assert not store.put(make_key(0), [b"x"]).is_there
            assert not store.put(make_key(0), [b"x"]).is_there
            assert bench.counters["store_put_no_space"] == tries
        bench.io.fail.clear()
        bench.clock.advance(Patience().longest_pause_seconds)
        assert store.put(make_key(0), [b"x"]).result is PutResult.STORED
        assert store.put(make_key(1), [b"x"]).result is PutResult.STORED
    assert sum("file" in each.getMessage() for each in caplog.records) == 2  # of store and tier


def test_without_hard_links_records_are_renamed_into_place(bench):
    store = bench.open(max_bytes=100_000)
    for number, refusal in enumerate([errno.EPERM, errno.EOPNOTSUPP]):
        bench.io.fail["link"] = refusal
        assert store.put(make_key(number), [make_value(4097)]).result is PutResult.STORED
        assert store.put(make_key(number), [make_value(4097)]).result is PutResult.EXISTS
        assert read_value(store, make_key(number)) == make_value(4097)
    assert store.stat().used_bytes == 2 * 4097
    assert store.delete(make_key(0))
    assert store.stat().used_bytes == 4097


def test_short_writes_are_continued(bench):
    store = bench.open()
    bench.io.largest_write = 1000
    value = make_value(9001)
    assert (
        store.put(make_key(), [value[:8000], value[8000:8017], value[8017:]]).result
        is PutResult.STORED
    )
    assert bench.io.calls["pwritev"] >= 9
    assert read_value(store, make_key()) == value


def test_a_record_that_cannot_be_opened_is_an_error_and_an_absent_one_is_not(bench):
    store = bench.open()
    store.put(make_key(), [b"value"])
    bench.io.fail["open"] = errno.EIO
    with pytest.raises(StoreError) as caught:
        store.read(make_key(), ())
    assert isinstance(caught.value.__cause__, OSError)
    bench.io.fail.clear()
    bench.io.fail["preadv"] = errno.EIO
    with pytest.raises(StoreError):
        store.read(make_key(), [(0, memoryview(bytearray(5)))])


def test_a_notice_that_cannot_be_read_is_not_taken_for_none(bench):
    catalogue = bench.open().catalogue()
    assert catalogue.notice() is None
    bench.io.fail["open"] = errno.EIO
    with pytest.raises(StoreError):
        catalogue.notice()


def test_a_discard_that_fails_still_takes_the_record_out_of_the_index(bench):
    store = bench.open()
    store.put(make_key(), [b"rotten"])
    bench.io.fail["rename"] = errno.EROFS
    store.discard(make_key(), "bad_checksum")
    store.probe([make_key()])
    store.maintain()
    assert store.where(make_key()) is not Where.HERE


def test_failing_removals_leave_counts_exact(bench):
    store = bench.open()
    for number in range(4):
        store.put(make_key(number), [make_value(1000)])
    bench.io.fail["unlink"] = errno.EIO
    assert store.delete(make_key(0)) is False
    bench.io.fail.clear()
    store.delete(make_key(1))
    store.maintain()
    on_disk = len(list(store.catalogue().scan()))
    assert store.stat().used_bytes == on_disk * 1000
    assert on_disk == 3


@pytest.mark.parametrize("recreated", [True, False])
def test_a_store_removed_under_us_fails_softly_and_comes_back(bench, recreated):
    store = bench.open(max_bytes=100_000)
    store.put(make_key(0), [b"value"])
    shutil.rmtree(bench.root)
    if recreated:
        bench.open()
    assert store.read(make_key(0), ()) is None
    store.touch([make_key(0)])
    store.discard(make_key(0), "test")
    assert store.delete(make_key(0)) is False
    store.put(make_key(1), [b"value"])
    bench.clock.advance(120)
    store.maintain()
    assert store.put(make_key(2), [b"value"]).result is PutResult.STORED
    assert read_value(store, make_key(2)) == b"value"
    assert store.stat().used_bytes == sum(entry.stored_bytes for entry in store.catalogue().scan())


def test_a_link_that_was_made_is_counted_whatever_the_answer(bench, monkeypatch):
    """A network file system that lost its first answer says EEXIST to the second request."""
    link = os.link

    def asked_twice(*args, **named):
        link(*args, **named)
        link(*args, **named)

    monkeypatch.setattr(os, "link", asked_twice)
    store = bench.open(max_bytes=100_000)
    assert store.put(make_key(), [make_value(5000)]).result is PutResult.STORED
    assert read_value(store, make_key()) == make_value(5000)
    assert store.stat().used_bytes == 5000
    assert bench.open(max_bytes=100_000).stat().used_bytes == 5000
