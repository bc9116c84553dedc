"""Who is dead, who takes over, and what a writer does that was taken for dead."""

from __future__ import annotations

import os

import pytest

from kvferry.store.base import PutResult
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.layout import Layout
from kvferry.store.file.ledger import (
    COPY_BYTES,
    Intent,
    Ledger,
    Net,
    Owner,
    decode,
    encode,
    is_alive,
    read_ledger,
    this_process,
)
from kvferry.store.file.membership import Membership
from kvferry.store.file.usage import read_usage
from kvferry.store.file.writer import Writer
from kvferry.testing.stores import make_key, make_value, read_value

ELSEWHERE = Owner(b"another host 16b", 4242, 17)


def make_remote(bench, store) -> Writer:
    """A writer of a machine whose processes cannot be seen from here."""
    return Writer(FileIO(), Layout(str(bench.root)), ELSEWHERE, bench.wall)


def test_a_ledger_survives_its_encoding():
    ledger = Ledger(
        owner=ELSEWHERE,
        sequence=2**40,
        heartbeat=1.5,
        closed=True,
        net=Net(2**50, 2**49, 3, 4),
        finished_batch=9,
        intent=Intent(10, 11, 12),
        absorbed={f"{n:016x}" for n in range(1, 17)},
        pending={n: n * n for n in range(1, 129)},
    )
    copy = encode(ledger)
    assert len(copy) == COPY_BYTES
    assert decode(copy) == ledger
    assert decode(encode(Ledger(owner=ELSEWHERE))) == Ledger(owner=ELSEWHERE)


@pytest.mark.parametrize("position", [0, 9, 20, 70, 300, COPY_BYTES - 1])
def test_a_torn_copy_gives_way_to_the_one_before(bench, position):
    writer = make_remote(bench, bench.open())
    writer.reserve({1: 1000})
    writer.reserve({2: 500})
    path = f"{writer.path}/ledger"
    newest = read_ledger(FileIO(), writer.path)
    assert newest.net == Net(1500, 0, 2, 0)
    with open(path, "r+b") as file:
        both = file.read()
        copy = next(i for i in (0, 1) if decode(both[i * COPY_BYTES :][:COPY_BYTES]) == newest)
        file.seek(copy * COPY_BYTES + position)
        file.write(bytes([both[copy * COPY_BYTES + position] ^ 1]))
    assert read_ledger(FileIO(), writer.path).net == Net(1000, 0, 1, 0)
    writer.close(1.0)


def test_a_process_is_dead_when_it_is_gone_or_its_pid_is_anothers():
    me = this_process(os.getpid())
    assert is_alive(me)
    assert is_alive(me._replace(start=0))
    assert not is_alive(me._replace(start=me.start + 1))
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    child = this_process(pid)
    while is_alive(child):
        pass
    os.waitpid(pid, 0)
    assert not is_alive(child), "gone for good"


def test_a_writer_elsewhere_is_dead_after_a_minute_of_silence(bench):
    store = bench.open(max_bytes=10_000)
    store.maintain()
    remote = make_remote(bench, store)
    remote.reserve({1: 9000})
    bench.clock.advance(61)
    store.maintain()
    bench.clock.advance(61)
    bench.wall.advance(61)
    remote.beat()
    store.maintain()
    assert not remote.is_fenced(), "it gave a sign of life"
    bench.clock.advance(61)
    store.maintain()
    assert remote.is_fenced()
    remote.close(1.0)


def test_the_clock_of_a_writer_elsewhere_may_be_off_but_not_by_much(bench):
    store = bench.open()
    store.maintain()
    remote = make_remote(bench, store)
    bench.wall.advance(500)
    store.maintain()
    assert not remote.is_fenced()
    bench.wall.advance(200)
    store.maintain()
    assert remote.is_fenced()
    remote.close(1.0)


def test_what_a_dead_writer_had_reserved_comes_back_under_pressure(bench):
    store = bench.open(max_bytes=10_000)
    remote = make_remote(bench, store)
    number, path = remote.new_temporary()
    with open(path, "wb"):
        pass
    remote.reserve({number: 9000})
    assert store.put(make_key(1), [make_value(5000)]) is PutResult.NO_SPACE
    remote.close(1.0)
    bench.wall.advance(601)
    assert store.put(make_key(1), [make_value(5000)]) is PutResult.STORED
    assert store.stat().used_bytes == 5000


def test_a_writer_taken_for_dead_counts_nothing_twice_and_goes_on(bench):
    """A process that stood still for long, then finds its directory taken over."""
    other = bench.open(max_bytes=100_000)
    stalled = bench.open(max_bytes=100_000)
    stalled.put(make_key(0), [make_value(3000)])
    session = stalled.begin(make_key(1), 5000)
    assert stalled.write_at(session, 0, [make_value(4000)])
    writer = session.partition("/")[0]
    # What recovery does with a writer it holds for dead.
    taken = bench.root / "writers" / other.begin(make_key(9), 1).partition("/")[0] / "absorbed"
    taken.mkdir()
    (bench.root / "writers" / writer).rename(taken / writer)
    other._volume.upkeep.recover()

    assert not stalled.write_at(session, 0, [b"late"])
    assert stalled.commit(session, b"late") is PutResult.FAILED
    assert stalled.delete(make_key(5)) is False
    assert stalled.put(make_key(2), [make_value(700)]) is PutResult.STORED
    assert read_value(stalled, make_key(0)) == make_value(3000)
    assert read_value(stalled, make_key(1)) is None
    usage = read_usage(FileIO(), Layout(str(bench.root)))
    assert usage.num_bytes == 3000 + 700 + 1
    assert stalled.stat().used_bytes == usage.num_bytes


def test_joining_makes_a_writer_visible_only_with_its_ledger(bench):
    bench.open()
    seen = []

    class Watching(FileIO):
        def mkdir(self, path):
            super().mkdir(path)
            seen.append(read_usage(FileIO(), Layout(str(bench.root))))

    membership = Membership(Watching(), Layout(str(bench.root)), bench.wall, create=True)
    membership.join()
    assert len(seen) >= 2
    membership.leave(1.0)


def test_the_sum_never_misses_a_writer_that_moves(bench):
    """Whatever happens between any two system calls of the reader, the sum is right."""
    store = bench.open()
    store.put(make_key(0), [make_value(1000)])
    for step in range(1, 12):
        dead = bench.open()
        dead.put(make_key(step), [make_value(1000)])
        dead.close()

        class Interrupted(FileIO):
            left = step

            def _tick(self):
                self.left -= 1
                if self.left == 0:
                    store._volume.upkeep.recover()

            def listdir(self, path):
                self._tick()
                names = super().listdir(path)
                self._tick()
                return names

            def open(self, path, flags):
                self._tick()
                return super().open(path, flags)

        usage = read_usage(Interrupted(), Layout(str(bench.root)))
        assert usage.num_bytes == (step + 1) * 1000


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("end", ["close", "commit", "abort"])
def test_a_forked_child_cannot_end_the_sessions_of_its_parent(bench, end):
    store = bench.open(max_bytes=100_000)
    session = store.begin(make_key(), 1000)
    child = os.fork()
    if child == 0:
        arguments = {"close": (), "commit": (session, b"head"), "abort": (session,)}[end]
        getattr(store, end)(*arguments)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert read_value(store, make_key()) is None
    assert store.write_at(session, 0, [make_value(1000)])
    assert store.commit(session, make_value(1000)[:10]) is PutResult.STORED
    assert read_value(store, make_key()) == make_value(1000)
    assert read_usage(FileIO(), Layout(str(bench.root))).num_bytes == 1000
