"""What the times of a file tell of what was done to it."""

from __future__ import annotations

import errno
import os
import time

import pytest

from kvferry.errors import StoreError
from kvferry.testing.stores import make_key, make_value


@pytest.fixture
def store(bench):
    """A store whose clock is far ahead of its files: nothing was changed just now."""
    store = bench.open()
    store.put(make_key(), [make_value()])
    return store


def write_in_place(path):
    with path.open("r+b") as file:
        file.write(b"x")


def append(path):
    with path.open("ab") as file:
        file.write(b"x")


def test_a_record_left_alone_keeps_its_stamp(store, bench):
    before = store.stamp(make_key())
    assert before.changes is not None
    bench.path(make_key()).read_bytes()
    with store.open_read(make_key()) as source:
        assert source.stamp == before
    assert store.stamp(make_key()) == before


@pytest.mark.parametrize(
    "change",
    [write_in_place, append, lambda path: os.truncate(path, 100)],
)
def test_a_write_is_told_from_a_noted_use(store, bench, change):
    before = store.stamp(make_key())
    store.touch([make_key()])
    store.maintain()
    noted = store.stamp(make_key())
    assert (noted.value, noted.written) == (before.value, False)
    assert noted.changes != before.changes
    change(bench.path(make_key()))
    written = store.stamp(make_key())
    assert written.written
    assert written != noted


def test_a_record_replaced_by_one_of_the_same_size_and_times_is_another(store, bench):
    before, path = store.stamp(make_key()), bench.path(make_key())
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(make_value(number=1))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)
    assert store.stamp(make_key()).value != before.value


def test_what_changed_within_the_last_two_seconds_has_no_settled_stamp(bench):
    ahead = 0.0
    store = bench.open(wall=lambda: time.time() + ahead)
    store.put(make_key(), [make_value()])
    assert store.stamp(make_key()).changes is None
    ahead = 2.5
    assert store.stamp(make_key()).changes is not None
    ahead = -3600  # as if the clock of a server were that much before ours
    assert store.stamp(make_key()).changes is None


def test_what_is_no_file_has_no_stamp(store, bench):
    path = bench.path(make_key())
    path.unlink()
    assert store.stamp(make_key()) is None
    path.mkdir()
    assert store.stamp(make_key()) is None
    path.rmdir()
    path.symlink_to("/etc/hostname")
    assert store.stamp(make_key()) is None


def test_a_medium_that_fails_is_an_error(store, bench):
    bench.io.fail["lstat"] = errno.EIO
    with pytest.raises(StoreError, match="looked at"):
        store.stamp(make_key())
    assert bench.counters["store_read_failed"] == 1
