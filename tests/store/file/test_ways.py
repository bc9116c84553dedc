"""Writes pass by the page cache while the disk keeps up; else the faster way is taken."""

from __future__ import annotations

import errno
import mmap

import pytest

from kvferry.store.base import PutResult
from kvferry.store.file import ways as module
from kvferry.store.file.fileio import O_DIRECT
from kvferry.store.file.ways import (
    LEARN_EVERY,
    LOOK_EVERY,
    LOOK_EVERY_MOST,
    MARGIN,
    SAMPLES,
    WORTH_BYTES,
    Ways,
)
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key, make_value
from tests.store.file.conftest import FaultyIO

pytestmark = pytest.mark.skipif(not O_DIRECT, reason="not a Linux system")

RECORD_BYTES = 1 << 20


@pytest.fixture(autouse=True)
def busy(request, monkeypatch) -> None:
    """No disk keeps up, but in tests that say so."""
    if getattr(request, "param", True):
        monkeypatch.setattr(module, "BUSY", -1.0)


not_busy = pytest.mark.parametrize("busy", [False], indirect=True)


class Machine:
    """Seconds per MiB that each way takes."""

    def __init__(self, *, cached, direct) -> None:
        self.clock = FakeClock()
        self.ways = Ways(self.clock)
        self.cached, self.direct = cached, direct

    def write(self, count=1) -> list[bool]:
        """Which of so many writes went past the page cache."""
        taken = []
        for _ in range(count):
            direct = self.ways.choose_direct()
            with self.ways.timed(RECORD_BYTES, direct=direct):
                self.clock.advance(self.direct if direct else self.cached)
            taken.append(direct)
        return taken


LEARNING = SAMPLES * LEARN_EVERY
"""Writes until both ways are known."""


@not_busy
@pytest.mark.parametrize(("direct", "keeps_up"), [(0.06, True), (0.18, False)])
def test_a_disk_that_keeps_up_is_not_compared(direct, keeps_up):
    """Sixteen records of a MiB every four seconds."""
    machine = Machine(cached=0.001, direct=direct)
    taken = []
    for _ in range(20):
        taken += machine.write(16)
        machine.clock.advance(4.0 - 16 * direct if taken[-1] else 4.0)
    assert all(taken) is keeps_up


@not_busy
def test_a_disk_that_would_keep_up_again_is_used_again():
    machine = Machine(cached=0.01, direct=0.1)
    machine.write(1000)  # one after another
    assert machine.write(LOOK_EVERY).count(True) <= 1
    machine.clock.advance(60.0)
    assert machine.write(8) == 8 * [True]
    machine.write(1000)
    machine.direct = 0.001
    machine.write(LOOK_EVERY_MOST)
    assert machine.write(100) == 100 * [True]


def test_of_the_first_writes_some_go_through_the_page_cache():
    one = [True] * (LEARN_EVERY - 1) + [False]
    assert Machine(cached=0.1, direct=1).write(LEARNING) == one * SAMPLES


@pytest.mark.parametrize(
    ("direct", "is_direct"), [(0.6, True), (1.0, True), (MARGIN, True), (1.3, False)]
)
def test_the_page_cache_is_taken_only_if_it_is_faster(direct, is_direct):
    machine = Machine(cached=1.0, direct=direct)
    machine.write(LEARNING)
    assert 1 <= machine.write(3 * LOOK_EVERY).count(not is_direct) <= 3  # looks


@pytest.mark.parametrize(("cached", "direct"), [(0.1, 1.0), (3.0, 1.0), (1.0, 30.0)])
def test_looks_take_a_small_part_of_the_time(cached, direct):
    machine = Machine(cached=cached, direct=direct)
    machine.write(LEARNING)
    taken = machine.write(8 * LOOK_EVERY_MOST)
    seconds = {way: taken.count(way) * (direct if way else cached) for way in (False, True)}
    used = direct < cached
    assert seconds[not used] <= seconds[used] / 16
    assert taken.count(not used) >= 8


def test_a_change_is_noticed_in_both_directions():
    machine = Machine(cached=0.5, direct=1.0)
    machine.write(4 * LOOK_EVERY)
    machine.cached = 10.0  # the host gives no more memory for nothing
    assert machine.write(LOOK_EVERY)[8:].count(False) <= 1
    machine.cached = 0.5
    machine.write(8 * LOOK_EVERY_MOST)
    assert machine.write(LOOK_EVERY).count(True) <= 1


@pytest.mark.parametrize("times", [3.0, 1000.0])
@pytest.mark.parametrize("first", [0, LEARNING - 2, LEARNING - 1, LEARNING, 2 * LEARNING])
@pytest.mark.parametrize("cached", [1.0, 1.2, 2.0])
def test_one_slow_write_changes_little(times, first, cached):
    machine = Machine(cached=cached, direct=1.0)
    machine.write(first)
    machine.direct, machine.cached = times, times * cached
    machine.write()
    machine.direct, machine.cached = 1.0, cached
    machine.write(LEARNING)
    assert machine.write(LOOK_EVERY).count(False) <= 1


def test_a_write_that_fails_says_nothing_of_its_way():
    machine = Machine(cached=1.0, direct=1.0)

    def fail() -> None:
        with machine.ways.timed(RECORD_BYTES, direct=True):
            machine.clock.advance(100.0)
            raise OSError(errno.ENOSPC, "full")

    for _ in range(LEARNING):
        with pytest.raises(OSError, match="full"):
            fail()
        machine.write()
    assert machine.write(LOOK_EVERY).count(False) <= 1


class TimedIO(FaultyIO):
    """A disk on which O_DIRECT works whatever is below, and time that writes take by their way."""

    def __init__(self, clock, *, cached, direct) -> None:
        super().__init__()
        self._clock = clock
        self._seconds = {False: cached, True: direct}
        self._direct: set[int] = set()
        self.ways: list[bool] = []
        self.refused = ("", 0)

    def _refuse(self, call) -> None:
        name, number = self.refused
        if name == call:
            raise OSError(number, errno.errorcode[number])

    def open(self, path, flags):
        if flags & O_DIRECT:
            self._refuse("open")
        fd = super().open(path, flags & ~O_DIRECT)
        if flags & O_DIRECT:
            self._direct.add(fd)
        return fd

    def close(self, fd):
        self._direct.discard(fd)
        super().close(fd)

    def pwritev(self, fd, buffers, offset):
        if fd in self._direct:
            self._refuse("pwritev")
        count = super().pwritev(fd, buffers, offset)
        if count >= RECORD_BYTES // 2:  # not of a ledger
            self.ways.append(fd in self._direct)
            self._clock.advance(self._seconds[fd in self._direct])
        return count


def aligned(value) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(value)))
    view[:] = value
    return view


@pytest.mark.parametrize(
    ("options", "seconds", "expected"),
    [
        ({}, {"cached": 0.005, "direct": 0.001}, 2 * (3 * [True] + [False]) + 4 * [True]),
        ({}, {"cached": 0.001, "direct": 0.0011}, 3 * (3 * [True] + [False])),
        ({}, {"cached": 0.001, "direct": 0.002}, 2 * (3 * [True] + [False]) + 4 * [False]),
        ({"direct_io": "off"}, {"cached": 0.005, "direct": 0.001}, 12 * [False]),
        ({"direct_io": "on"}, {"cached": 0.001, "direct": 0.005}, 12 * [True]),
    ],
)
def test_a_store_writes_the_way_its_machine_is_fast(bench, monkeypatch, options, seconds, expected):
    monkeypatch.setattr("kvferry.store.file.ways.LEARN_EVERY", 4)
    monkeypatch.setattr("kvferry.store.file.ways.LOOK_EVERY", 4)
    bench.io = TimedIO(bench.clock, **seconds)
    store = bench.open(**options)
    values = [make_value(RECORD_BYTES, number) for number in range(len(expected))]
    for number, value in enumerate(values):
        assert store.put(make_key(number), [aligned(value)]) is PutResult.STORED
    assert bench.io.ways == expected
    for number, value in enumerate(values):
        assert bench.path(make_key(number)).read_bytes() == value
    assert store.stat().used_bytes == len(expected) * RECORD_BYTES


@pytest.mark.parametrize("num_bytes", [WORTH_BYTES - 4096, RECORD_BYTES + 1])
def test_small_or_unaligned_records_go_through_the_page_cache(bench, num_bytes):
    bench.io = TimedIO(bench.clock, cached=1.0, direct=0.001)
    store = bench.open()
    for number in range(6):
        store.put(make_key(number), [aligned(make_value(num_bytes))])
    assert bench.io.ways == 6 * [False]


@pytest.mark.parametrize("options", [{}, {"direct_io": "on"}])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.EIO])
@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_what_a_disk_does_not_take_directly_goes_through_the_page_cache(
    bench, options, number, call
):
    bench.io = TimedIO(bench.clock, cached=1.0, direct=0.001)
    bench.io.refused = (call, number)
    store = bench.open(**options)
    for index in range(4):
        value = make_value(RECORD_BYTES + index * 4096, index)
        assert store.put(make_key(index), [aligned(value)]) is PutResult.STORED
        assert bench.path(make_key(index)).read_bytes() == value
    assert bench.io.ways == 4 * [False]


def test_a_full_disk_is_full_either_way(bench):
    bench.io = TimedIO(bench.clock, cached=1.0, direct=0.001)
    bench.io.refused = ("pwritev", errno.ENOSPC)
    store = bench.open(direct_io="on")
    assert store.put(make_key(), [aligned(make_value(RECORD_BYTES))]) is PutResult.NO_SPACE
    assert store.stat().used_bytes == 0
    assert not bench.path(make_key()).exists()
