"""Threads for blocking work."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter

import pytest

from kvferry.processors import NICENESS
from kvferry.store.io_pool import IOPool
from kvferry.testing.stores.hooks import PATIENCE_SECONDS, wait_until
from tests.servers.process import let_run


@pytest.fixture
def pool():
    pool = IOPool(3, "test")
    yield pool
    assert pool.close(5)


def test_spread_does_every_item_once_and_tells_what_failed(pool):
    done = Counter()

    def work(item):
        done[item] += 1
        if item % 7 == 0:
            raise ValueError(item)

    for _ in range(50):
        done.clear()
        errors = pool.spread(range(40), work)
        assert done == Counter(range(40))
        assert [error and error.args[0] for error in errors] == [
            item if item % 7 == 0 else None for item in range(40)
        ]


def test_spread_uses_threads_of_the_pool_and_waits_for_what_they_began(pool):
    together = threading.Barrier(3, timeout=30)
    names, ended = set(), []

    def work(item):
        together.wait()  # passes only if three items are worked on at a time
        names.add(threading.current_thread().name)
        let_run(0.01 * item)
        ended.append(item)

    assert pool.spread(range(3), work) == [None] * 3
    assert sorted(ended) == [0, 1, 2]
    assert len(names) == 3


def test_spread_alone_stays_on_its_thread(pool):
    names = set()
    pool.spread(range(9), lambda _item: names.add(threading.current_thread().name), alone=True)
    assert names == {threading.current_thread().name}


def test_spread_does_not_wait_for_threads_that_hang(pool):
    gate, done = threading.Event(), []
    hanging = [pool.submit(lambda _job: gate.wait(30)) for _ in range(3)]
    try:
        pool.spread(range(5), done.append)
        assert done == list(range(5))
        assert not any(job.poll() for job in hanging)
    finally:
        gate.set()


def test_an_interrupted_spread_leaves_nothing_under_way(pool):
    is_here, begun, ended = threading.Event(), threading.Event(), threading.Event()
    main = threading.current_thread()

    def work(_item):
        if threading.current_thread() is main:
            is_here.set()
            begun.wait(30)
            raise KeyboardInterrupt
        begun.set()
        is_here.wait(30)  # else this thread might take both items
        let_run(0.05)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        pool.spread(range(2), work)
    assert ended.is_set()


def test_spread_on_a_closed_pool_does_the_work_itself():
    pool = IOPool(3, "test")
    assert pool.close(1)
    done = []
    pool.spread(range(5), done.append)
    assert done == list(range(5))


def test_spread_without_a_thread_does_the_work_itself(pool, monkeypatch):
    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done = []
    assert pool.spread(range(5), done.append) == [None] * 5
    assert done == list(range(5))


def test_a_job_starts_a_thread_only_if_none_is_free(pool):
    def name_of(_job):
        return threading.current_thread().name

    assert pool.submit(name_of).wait(30)
    gate = threading.Event()
    hangs = [pool.submit(lambda _job: gate.wait(60)) for _ in range(2)]
    found = []
    for _ in range(9):
        job = pool.submit(name_of)
        assert job.wait(30), "it does not wait for those that hang"
        found.append(job.result)
    gate.set()
    assert all(job.wait(30) for job in hangs)
    assert len(set(found)) == 1
    others = IOPool(3, "other")
    for _ in range(9):
        assert others.submit(name_of).wait(30)
    assert others.close(30)
    assert len(others._threads) == 1


def test_callers_at_once_start_no_more_threads_than_the_pool_may_have():
    for _ in range(20):
        pool, together = IOPool(1, "narrow"), threading.Barrier(8, timeout=30)

        def call(pool=pool, together=together):
            together.wait()
            pool.submit(lambda _job: None)

        callers = [threading.Thread(target=call) for _ in range(8)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        names = [thread.name for thread in threading.enumerate()]
        assert pool.close(30)
        assert sum(name.startswith("narrow") for name in names) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system ties no threads")
def test_threads_do_not_share_the_processor_that_an_engine_thread_is_tied_to():
    cpus = os.sched_getaffinity(0)
    found = []

    def engine():
        os.sched_setaffinity(0, {min(cpus)})
        pool = IOPool(1, "tied")
        job = pool.submit(lambda _job: os.sched_getaffinity(0))
        assert job.wait(30)
        found.append(job.result)
        assert os.sched_getaffinity(0) == {min(cpus)}
        pool.close(5)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert found == [cpus]


def test_jobs_that_can_wait_leave_half_of_the_threads_to_others():
    pool = IOPool(4, "test")
    for _ in range(2):  # one that failed holds no thread from then on
        hanging, together = threading.Event(), threading.Barrier(2, timeout=60)

        def hang(_job, hanging=hanging):
            assert hanging.wait(60)
            raise ValueError

        waiting = [pool.submit(hang, can_wait=True) for _ in range(5)]
        others = [pool.submit(lambda _job, both=together: both.wait()) for _ in range(2)]
        assert all(job.wait(60) and job.error is None for job in others)
        assert not any(job.poll() for job in waiting)
        hanging.set()
        assert all(job.wait(60) for job in waiting)
    assert pool.close(60)


def test_jobs_that_wait_when_a_pool_is_closed_are_done():
    pool, hanging, done = IOPool(2, "test"), threading.Event(), []
    pool.submit(lambda _job: hanging.wait(60), can_wait=True)
    for number in range(3):
        pool.submit(lambda _job, number=number: done.append(number), can_wait=True)
    closing = threading.Thread(target=pool.close, args=[60])
    closing.start()
    wait_until(lambda: pool._closed, "it is being closed")
    hanging.set()
    closing.join()
    assert sorted(done) == [0, 1, 2]


@pytest.mark.skipif(sys.platform != "linux", reason="all threads of a process are as nice")
def test_threads_run_after_those_of_the_engine_whoever_starts_them(pool):
    def niceness(_job):
        return os.getpriority(os.PRIO_PROCESS, 0)

    def started_by_a_thread_of_the_pool(_job):
        inner = IOPool(1, "inner")
        found = inner.submit(niceness)
        assert found.wait(PATIENCE_SECONDS)
        assert inner.close(PATIENCE_SECONDS)
        return found.result

    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    jobs = [pool.submit(niceness), pool.submit(started_by_a_thread_of_the_pool)]
    assert all(job.wait(PATIENCE_SECONDS) for job in jobs)
    assert [job.result for job in jobs] == [min(own + NICENESS, 19)] * 2
    assert os.getpriority(os.PRIO_PROCESS, os.getpid()) == own


def test_a_process_ends_although_a_job_hangs():
    code = (
        "import threading; from kvferry.store.io_pool import IOPool; "
        "IOPool(1, 'test').submit(lambda _: threading.Event().wait())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_SECONDS)
