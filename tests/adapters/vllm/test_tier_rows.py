"""Rows of a host's tier: each job ends once, in time, and no wrong byte reaches a row."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.adapters.rows import RowsOptions
from kvferry.adapters.vllm import tier_rows
from kvferry.adapters.vllm.tier_rows import TierRows
from kvferry.config import build_config
from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.observe import Counters
from kvferry.record.schema import RecordSchema
from kvferry.store.base import CLOSED, PutResult, Where
from kvferry.store.memory import MemoryStore
from kvferry.testing.faults import CorruptingStore, FailingStore, Gate, StallingStore, flip_bit
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore

ROW_BYTES = 1000
NUM_ROWS = 8
SCHEMA = RecordSchema.for_rows(namespace=bytes(32), chunk_tokens=16, row_bytes=ROW_BYTES)
SECONDS = 60.0


def key(number: int) -> bytes:
    return bytes([number]) * 36


def content(number: int, epoch: int = 0) -> np.ndarray:
    return np.full(ROW_BYTES, 1 + number + NUM_ROWS * epoch, np.uint8)


class Host:
    """Memory of a host, and a tier behind it."""

    def __init__(self, store, **options) -> None:
        self.rows = np.zeros((NUM_ROWS, ROW_BYTES), np.uint8)
        self.counts = Counters()
        schema = options.pop("schema", SCHEMA)
        self.tier = TierRows(store, schema, self.rows, self.counts, io_threads=2, **options)
        self.job = 0

    def store(self, numbers, places=None) -> int:
        places = list(range(len(numbers))) if places is None else places
        for place, number in zip(places, numbers, strict=True):
            self.rows[place % NUM_ROWS] = content(number)
        return self._submit(self.tier.store, [key(each) for each in numbers], places)

    def load(self, numbers, request="r", places=None) -> int:
        self.rows[:] = 0
        places = list(range(len(numbers)))[::-1] if places is None else places
        return self._submit(self.tier.load, [key(each) for each in numbers], places, request)

    def _submit(self, submit, *args) -> int:
        self.job += 1
        submit(self.job, *args)
        return self.job

    def ended(self):
        """The next jobs that end."""
        found = []

        def some_ended() -> bool:
            found.extend(self.tier.finished())
            return bool(found)

        wait_until(some_ended, "a job ends", SECONDS)
        return found


@pytest.fixture
def host():
    made = []

    def make(store, **options):
        made.append(Host(store, **options))
        return made[-1]

    yield make
    for each in made:
        each.tier.close(SECONDS)


@pytest.fixture
def filled():
    """A store with rows 0 to 3."""
    store = MemoryStore()
    one = Host(store)
    one.store([0, 1, 2, 3])
    (done,) = one.ended()
    assert done.success
    assert done.num_bytes == 4 * ROW_BYTES
    return store


def test_rows_are_found_and_brought(host, filled):
    one = host(filled)
    assert [one.tier.lookup(key(each), "r") for each in (0, 3, 4)] == [True, True, False]
    job = one.load([0, 3])
    (done,) = one.ended()
    assert (done.job_id, done.success, done.moved) == (job, True, [key(0), key(3)])
    assert (one.rows[1] == content(0)).all()
    assert (one.rows[0] == content(3)).all()
    assert one.tier.finished() == []


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("values", ["float16", "float32", ""])
def test_a_row_that_is_not_finite_is_not_stored_where_its_dtype_is_known(host, values, value):
    schema = RecordSchema.for_rows(
        namespace=bytes(32), chunk_tokens=16, row_bytes=ROW_BYTES, values=values
    )
    store = MemoryStore()
    one = host(store, schema=schema)
    numbers = one.rows[1].view(values or "float16")
    numbers[-5] = value  # of one head in the last layer
    one.tier.store(1, [key(0), key(1), key(2)], [0, 1, 2])
    (done,) = one.ended()
    is_stored = not values
    assert done.success == is_stored
    assert list(done.moved) == [key(0), *([key(1)] if is_stored else []), key(2)]
    assert one.counts["save_not_finite"] == (not is_stored)
    numbers[-5] = 1.0  # computed again, rightly
    one.tier.store(2, [key(1)], [1])
    (done,) = one.ended()
    assert done.success


def test_what_is_loaded_was_used(host):
    """vLLM calls `touch` in some releases only."""
    probe = MemoryStore()
    one = host(probe)
    one.store([0])
    one.ended()
    store = MemoryStore(max_bytes=3 * probe.stat().used_bytes)
    one = host(store)
    for number in (0, 1, 2):
        one.store([number])
        one.ended()
    one.load([0])
    one.ended()
    one.store([3])
    one.ended()
    assert [one.tier.lookup(key(each), "s") for each in range(4)] == [True, False, True, True]


def test_a_failed_load_names_its_keys_and_is_a_miss_for_its_request(host, filled):
    one = host(CorruptingStore(filled, damage=flip_bit(-1)))
    assert one.tier.lookup(key(1), "r")
    one.load([1, 5])
    (done,) = one.ended()
    assert (done.success, done.moved) == (False, [])
    assert not one.rows.any()
    assert one.tier.lookup(key(1), "r") is False
    one.tier.forget("r")
    assert one.tier.lookup(key(1), "s") is False  # it was taken out
    assert one.counts["loads_failed"] == 2


def test_a_load_that_fails_in_part_names_what_came_and_misses_the_rest(host, filled):
    """A first row that fails takes no other with it, unlike in vLLM's file tier."""
    one = host(filled)
    one.load([5, 1, 2])
    (done,) = one.ended()
    assert (done.success, done.moved) == (False, [key(1), key(2)])
    assert (one.rows[:2] == [content(2), content(1)]).all()
    assert [one.tier.lookup(key(each), "r") for each in (5, 1, 2)] == [False, True, True]


def test_a_row_that_there_is_not_fails_its_job_alone(host, filled):
    one = host(filled)
    one.store([6], places=[NUM_ROWS])
    assert not one.ended()[0].success
    one.load([1], places=[NUM_ROWS])
    assert not one.ended()[0].success
    one.load([1])
    assert one.ended()[0].success


def test_a_failed_load_is_not_promoted_again_though_the_store_seems_to_have_it(host, filled):
    one = host(FailingStore(filled, operations=["read"]))
    assert one.tier.lookup(key(1), "r")
    one.load([1])
    assert not one.ended()[0].success
    assert one.tier.lookup(key(1), "r") is False
    assert one.tier.lookup(key(1), "another") is True


def test_a_hung_load_fails_in_time_and_its_rows_are_left_alone(host, filled, monkeypatch):
    gate, late = Gate(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(late))
    monkeypatch.setattr(tier_rows, "time", clock)
    one = host(StallingStore(filled, gate=gate, operations=["read"]), load_seconds=SECONDS)
    assert one.tier.lookup(key(1), "r")
    one.load([1, 2])
    assert gate.wait_for_arrival()
    late.append(SECONDS)
    (done,) = one.ended()
    assert (done.success, done.moved) == (False, [])
    # The store is not asked again for a while.
    assert one.tier.lookup(key(3), "another") is False
    one.rows[:] = 9
    gate.release()
    one.tier.close(SECONDS)
    assert (one.rows == 9).all()


def test_a_store_that_takes_nothing_ends_a_job_at_once(host):
    class Away(WrapperStore):
        def accepts(self):
            return CLOSED

    one = host(Away(MemoryStore()))
    one.store([1])
    (done,) = one.tier.finished()
    assert not done.success
    assert one.counts["stores_dropped"] == 1


def test_what_is_stored_already_is_not_stored_again(host, filled):
    one = host(FailingStore(filled, operations=["put"]))
    one.store([0, 1])
    (done,) = one.ended()
    assert done.success
    assert one.tier.take_stored() == []


def test_a_drain_ends_every_job(host, filled):
    gate = Gate()
    one = host(StallingStore(filled, gate=gate))
    jobs = {one.load([1]), one.load([2])}
    one.tier.drain(0.05)
    assert {done.job_id for done in one.tier.finished()} == jobs
    gate.release()


def test_closing_does_not_call_a_job_late_that_ended(host):
    one = host(MemoryStore())
    job = one.store([1])
    assert one.tier._jobs[job].batch.wait(SECONDS)
    one.tier.close(SECONDS)
    (done,) = one.tier.finished()
    assert done.success
    assert one.counts["stores_late"] == 0


@pytest.mark.parametrize("end", ["poll", "drain", "close"])
def test_a_late_job_is_counted_once_though_its_copy_goes_on(host, monkeypatch, end):
    copying, go_on = threading.Event(), threading.Event()

    def copy(_target, _source) -> None:
        copying.set()
        go_on.wait(SECONDS)

    monkeypatch.setattr(np, "copyto", copy)
    monkeypatch.setattr(tier_rows, "STORE_SECONDS", 0.0)
    monkeypatch.setattr(tier_rows, "DRAIN_SECONDS", 0.05)
    one = host(MemoryStore())
    job = one.store([1])
    assert copying.wait(SECONDS)
    try:
        for _ in range(2):
            if end == "poll":
                assert one.tier.finished() == []
            else:
                one.tier.drain(0.0) if end == "drain" else one.tier.close(0.0)
    finally:
        go_on.set()
    (done,) = one.ended()
    assert (done.job_id, done.success) == (job, False)
    assert one.counts["stores_late"] == 1


def test_an_epoch_reads_nothing_of_the_one_before(host, filled):
    one = host(filled)
    assert one.tier.lookup(key(1), "r")
    one.tier.drain()
    one.tier.begin_epoch(bytes([1]) * 32)
    assert one.tier.lookup(key(1), "r") is False
    one.store([1])
    assert one.ended()[0].success
    one.tier.forget("r")
    assert one.tier.lookup(key(1), "r") is True


def test_a_store_that_asks_its_medium_is_waited_for(host):
    answers: dict[bytes, Where] = {}

    class Server(WrapperStore):
        probed = 0

        def where(self, asked):
            return answers.get(asked, Where.ABSENT)

        def probe(self, keys, **_how):
            Server.probed += bool(keys)
            for each in keys:
                answers.setdefault(each, Where.ASKED)
            return Where.ASKED

    one = host(Server(MemoryStore()))
    assert [one.tier.lookup(key(each), "r") for each in range(5)] == [None] * 5
    one.tier.flush()
    assert Server.probed == 1  # for each step
    first, second = list(answers)[:2]
    answers[first], answers[second] = Where.HERE, Where.ABSENT
    assert [one.tier.lookup(key(each), "r") for each in range(2)] == [True, False]
    wait_until(lambda: one.tier.lookup(key(4), "r") is not None, "an answer", SECONDS)
    assert one.tier.lookup(key(4), "r") is False


def test_the_misses_of_a_step_are_asked_about_together(host):
    asked = []

    class Known(WrapperStore):
        def probe(self, keys, **_how):
            if keys:
                asked.append(len(keys))
            return Where.ABSENT

    one = host(Known(MemoryStore()))
    for step in range(2):
        found = [one.tier.lookup(key(10 * step + each), "r") for each in range(5)]
        assert found == [False] * 5
        one.tier.flush()
    assert asked == [5, 5]


def test_removed_rows_are_told_once(host, filled):
    one = host(filled)
    before = {entry.key for entry in filled.catalogue().scan()}
    one.store([6])
    assert one.ended()[0].success
    (record,) = {entry.key for entry in filled.catalogue().scan()} - before
    one.store([7])
    assert one.ended()[0].success
    assert one.tier.take_stored() == [key(6), key(7)]
    assert one.tier.take_removed() == []
    filled.delete(record)
    assert one.tier.take_removed() == [key(6)]
    assert one.tier.take_removed() == []


@pytest.mark.parametrize("store", ["peer://127.0.0.1:5", ["file:///x", "Peer://127.0.0.1:5"]])
def test_peers_are_no_store_of_rows(store):
    """They hold no rows, so that a host would never find any."""
    with pytest.raises(ConfigError, match=r"^a tier: store: peer://.* no rows of") as raised:
        build_config(RowsOptions, {"store": store}, where="a tier")
    assert "\n" not in str(raised.value)


class Chaos(WrapperStore):
    """Every call may fail, answer wrongly or take its time, as drawn."""

    def __init__(self, inner, draw) -> None:
        super().__init__(inner)
        self._draw = draw

    def read(self, asked, ranges, deadline=0.0):
        what = next(self._draw)
        if what == "fail":
            raise StoreError(FaultKind.REFUSED, "drawn")
        size = self.inner.read(asked, ranges, deadline)
        if what == "damage" and size is not None and ranges[-1][1]:
            ranges[-1][1][-1] ^= 1
        return size

    def put(self, asked, buffers, deadline=0.0):
        what = next(self._draw)
        return PutResult.FAILED if what == "fail" else self.inner.put(asked, buffers, deadline)


WHAT = st.sampled_from(["right", "right", "right", "fail", "damage"])
DOES = st.sampled_from(["store", "load", "load", "poll", "drain", "epoch", "forget", "touch"])


class Draw:
    """Faults in turn. Threads draw them, in an order of their own."""

    def __init__(self, faults) -> None:
        self._faults = faults
        self._number = itertools.count()

    def __next__(self):
        return self._faults[next(self._number) % len(self._faults)]


class Schedule:
    """Jobs of a host, of which any may be under way.

    Attributes:
        moved: rows that loads filled, each with the right content.
    """

    def __init__(self, faults) -> None:
        self.one = Host(Chaos(MemoryStore(), Draw(faults)))
        self.jobs: dict[int, tuple[str, list[int], list[int]]] = {}
        self.free = set(range(NUM_ROWS))
        self.epoch = self.moved = 0

    def do(self, does, numbers) -> None:
        if does in ("store", "load"):
            if len(self.free) >= len(numbers):
                self.submit(does, numbers)
        elif does in ("drain", "epoch"):
            self.one.tier.drain()
            self.collect()
            assert not self.jobs
            if does == "epoch":
                self.epoch += 1
                self.one.tier.begin_epoch(bytes([self.epoch]) * 32)
        elif does == "forget":
            self.one.tier.forget("r")
        elif does == "touch":
            self.one.tier.touch(map(key, numbers))
        self.collect()

    def submit(self, does, numbers) -> None:
        one, keys = self.one, [key(each) for each in numbers]
        places = [self.free.pop() for _ in numbers]
        one.job += 1
        self.jobs[one.job] = does, places, numbers
        if does == "store":
            for place, number in zip(places, numbers, strict=True):
                one.rows[place] = content(number, self.epoch)
            one.tier.store(one.job, keys, places)
        else:
            one.rows[places] = 0
            for each in keys:
                one.tier.lookup(each, "r")
            one.tier.load(one.job, keys, places, "r")

    def collect(self) -> None:
        for done in self.one.tier.finished():
            does, places, numbers = self.jobs.pop(done.job_id)  # KeyError: reported twice
            self.free.update(places)
            if does == "load":
                self.check(places, numbers, done.moved)

    def check(self, places, numbers, moved) -> None:
        for place, number in zip(places, numbers, strict=True):
            if key(number) in moved:
                assert (self.one.rows[place] == content(number, self.epoch)).all()
        self.moved += len(moved)

    def wait(self) -> None:
        def all_ended() -> bool:
            self.collect()
            return not self.jobs

        wait_until(all_ended, "all jobs end", SECONDS)

    def end(self) -> None:
        self.one.tier.close(SECONDS)
        self.collect()
        assert not self.jobs
        assert self.free == set(range(NUM_ROWS))


NUMBERS = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)


def run_any(**options) -> int:
    """Run schedules that hypothesis draws; return how many rows were loaded."""
    moved = []

    @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
    @given(
        steps=st.lists(st.tuples(DOES, NUMBERS, st.booleans()), min_size=5, max_size=20),
        faults=st.lists(WHAT, min_size=1, max_size=20),
    )
    def run(steps, faults):
        schedule = Schedule(faults)
        schedule.do("store", [0, 1, 2, 3])
        for does, numbers, waits in steps:
            schedule.do(does, numbers)
            if waits:
                schedule.wait()
        schedule.end()
        moved.append(schedule.moved)

    run()
    return sum(moved)


def test_any_schedule_reports_each_job_once_and_right():
    assert run_any(max_examples=200) > 100


@pytest.mark.sweep
def test_any_schedule_of_a_new_seed():
    assert run_any(max_examples=2000, derandomize=False, print_blob=True) > 1000
