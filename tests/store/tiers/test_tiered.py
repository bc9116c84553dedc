"""Several stores as one: where values are read and written, and what a failing one costs."""

from __future__ import annotations

import math
import threading
import time

import pytest

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.observe import Counters, Observer
from kvferry.record.check import ReadFault
from kvferry.store.base import COMPUTED_WRONG, NO_DEADLINE, Put, PutResult, Where
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Health, Patience
from kvferry.store.tiers.tier import Tier, Unopened
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import INJECTED, FailingStore, Gate, StallingStore
from kvferry.testing.stores import (
    ProbeTests,
    RemoteStoreTests,
    make_key,
    make_value,
    read_value,
)
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from tests.store.servers.remote_client import DictClient
from tests.store.tiers.states import is_at_work, num_waiting, rest, settle, state

SPACE = b"n" * 32
SIZE = 1000
MAX_FAILURES = Patience().max_failures
DOWN = Fault(FaultKind.AWAY, "down")
QUICK = Patience(look_seconds=0.01)
"""Of threads whose clock a test moves."""


class TestTieredStore(ProbeTests, RemoteStoreTests):
    """Two servers; what is stored is counted where it is nearest."""

    persistent = True

    @pytest.fixture(autouse=True)
    def _servers(self):
        self.servers = {}

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        assert max_bytes is None
        tiers = []
        for name in ("near", "far"):
            client = DictClient(self.servers.setdefault((tmp_path, name), {}))
            counts = (name == "near" and observer) or Observer()
            opening = Opening(namespace=SPACE, observer=counts)
            tiers.append(RemoteStore(f"{name}://test", client, opening))
        return OfNearest(tiers, tmp_path)

    def poke(self, store, key, value):
        for name in ("near", "far"):
            values = self.servers[store.tmp_path, name]
            if value is None:
                values.pop(f"{SPACE.hex()}/{key.hex()}", None)
            else:
                values[f"{SPACE.hex()}/{key.hex()}"] = value

    def peek(self, store, key):
        return self.servers[store.tmp_path, "near"].get(f"{SPACE.hex()}/{key.hex()}")


class OfNearest(TieredStore):
    """Counts what the nearest tier has, as the suite counts each value once."""

    def __init__(self, stores, tmp_path):
        super().__init__(stores)
        self.stores = stores
        self.tmp_path = tmp_path

    def stat(self):
        return self.stores[0].stat()._replace(url=self.url)


def lose(store, number=0):
    """Have a tier find that its medium does not answer."""
    store._tiers[number]._event(lambda health: health.is_lost(DOWN))


@pytest.fixture
def make_tiers():
    stores = []

    def make(*tiers, **options):
        stores.append(TieredStore(tiers, **{"patience": QUICK, **options}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def copies(counts):
    return {
        name: count for name, count in counts.snapshot().items() if name.startswith("tier_copies/")
    }


def held(store, number=0):
    return read_value(store, make_key(number)) is not None


class PutsSeveral(WrapperStore):
    """Notes how many values came at once."""

    values_per_put = 4

    def __init__(self, inner):
        super().__init__(inner)
        self.seen = []

    def put_all(self, values, deadline=NO_DEADLINE):
        self.seen.append(len(values))
        return super().put_all(values, deadline)


def several(count):
    return [(make_key(number), [make_value(SIZE, number)]) for number in range(count)]


def test_values_put_together_reach_a_store_as_it_shares_their_cost(make_tiers):
    near, far = PutsSeveral(MemoryStore()), MemoryStore()
    store = make_tiers(near, far)
    assert store.values_per_put == 4
    assert [each.result for each in store.put_all(several(10))] == [PutResult.STORED] * 10
    assert near.seen == [4, 4, 2]
    wait_until(lambda: all(held(far, number) for number in range(10)), "the other has them, too")


def test_of_values_put_together_a_farther_tier_takes_what_the_nearest_does_not(make_tiers):
    near, far = MemoryStore(max_bytes=100), MemoryStore()
    near.put(make_key(0), [b"there"])
    store = make_tiers(near, far)
    assert [each.result for each in store.put_all(several(3))] == [
        PutResult.EXISTS,
        PutResult.STORED,
        PutResult.STORED,
    ]
    assert not held(near, 1)
    assert held(far, 1)
    assert held(far, 2)


def test_of_values_put_together_none_waits_for_a_store_that_failed(make_tiers):
    near = FailingStore(MemoryStore(), operations=["put"])
    store = make_tiers(near)
    assert [each.result for each in store.put_all(several(10))] == [PutResult.FAILED] * 10
    assert near.num_failed == 1


def test_what_only_a_far_tier_has_is_read_and_brought_nearer(make_tiers):
    near, far = MemoryStore(), MemoryStore()
    far.put(make_key(), [make_value()])
    counts = Counters()
    store = make_tiers(near, far, observer=counts)
    assert store.where(make_key()) is Where.HERE
    assert read_value(store, make_key()) == make_value()
    wait_until(lambda: held(near), "it is near")
    assert read_value(store, make_key()) == make_value()
    assert counts["tier_read_bytes/memory1"] <= len(make_value())
    assert counts["tier_reads/memory/hit"] >= 1


def test_counts_of_the_tiers_add_up(make_tiers):
    near, far = MemoryStore(), MemoryStore()
    for number in range(3):
        near.put(make_key(number), [b"value"])
    for number in range(5):
        far.put(make_key(number), [b"value"])
    counts = Counters()
    store = make_tiers(near, far, observer=counts)
    for number in range(8):
        store.read(make_key(number), ())
    assert (counts["tier_reads/memory/hit"], counts["tier_reads/memory/miss"]) == (3, 5)
    assert (counts["tier_reads/memory1/hit"], counts["tier_reads/memory1/miss"]) == (2, 3)


def test_a_value_that_a_farther_tier_lost_is_written_there_again(make_tiers):
    near, far = MemoryStore(), MemoryStore()
    store = make_tiers(near, far)
    store.put(make_key(), [b"value"])
    settle(store)
    assert far.delete(make_key())
    assert store.put(make_key(), [b"value"]).result is PutResult.EXISTS
    wait_until(lambda: held(far), "it has it again")


def test_a_wrong_record_that_was_brought_nearer_goes_from_both(make_tiers):
    near, far = MemoryStore(), MemoryStore()
    far.put(make_key(), [b"wrong"])
    store = make_tiers(near, far)
    assert store.read(make_key(), [(0, memoryview(bytearray(5)))]) == 5
    wait_until(lambda: held(near), "it is near")
    store.discard(make_key(), "bad_checksum")
    assert not held(near)
    assert not held(far)


@pytest.mark.parametrize(
    ("reason", "is_left"),
    [
        (ReadFault.BAD_CHECKSUM, True),
        (ReadFault.WRONG_SIZE, True),
        (ReadFault.NOT_FINITE, False),
        (COMPUTED_WRONG, False),
    ],
)
def test_a_farther_copy_of_a_wrong_record_may_be_right_but_not_of_what_was_written_so(
    make_tiers, reason, is_left
):
    near, far = MemoryStore(), MemoryStore()
    store = make_tiers(near, far)
    store.put(make_key(), [b"value"])
    wait_until(lambda: held(far), "the copy")
    assert store.read(make_key(), [(0, memoryview(bytearray(5)))]) == 5
    store.discard(make_key(), reason)
    assert not held(near)
    assert held(far) is is_left


def test_a_store_whose_index_is_being_made_is_not_written_to_and_refuses_nothing(
    make_tiers, caplog, tmp_path
):
    """It takes values as soon as the index is complete, without a pause."""
    root = tmp_path / "kv"
    with FileStore(root, background=False) as before:
        before.put(make_key(), [b"value"])
    for each in root.glob("index*"):
        each.unlink()
    inner = FileStore(root, max_bytes=1 << 20, background=False)
    store = make_tiers(inner, MemoryStore(), clock=FakeClock())
    assert inner.accepts().kind is FaultKind.INDEXING
    assert store.accepts() is None, "the other tier takes them"
    alone = make_tiers(inner, clock=FakeClock())
    assert alone.accepts().kind is FaultKind.INDEXING
    for each in (alone.put(make_key(1), [b"value"]), inner.put(make_key(1), [b"value"])):
        assert (each.result, each.fault.kind) == (PutResult.FAILED, FaultKind.INDEXING)
    rest(alone)
    assert (state(alone), caplog.messages) == ("up", [])
    behind = make_tiers(MemoryStore(), inner, clock=FakeClock())
    assert behind.put(make_key(2), [b"value"]).is_there
    inner.maintain()
    assert alone.accepts() is inner.accepts() is None
    assert alone.put(make_key(1), [b"value"]).result is PutResult.STORED
    wait_until(lambda: held(inner, 2), "what waited for the index was copied")


def said(caplog):
    return [record.message.removeprefix("store memory://: ") for record in caplog.records]


class Full(MemoryStore):
    is_full = True

    def put(self, *args):
        return Put.failed(Fault(FaultKind.FULL, "full")) if self.is_full else super().put(*args)


def test_closing_does_not_wait_for_a_tier_that_takes_nothing():
    far = FailingStore(MemoryStore(), operations={"put"})
    patience = Patience(look_seconds=0.01, close_seconds=300.0)
    store = TieredStore([MemoryStore(), far], clock=FakeClock(), patience=patience)
    for number in range(100):
        store.put(make_key(number), [b"value"])
    wait_until(lambda: far.num_failed == 1, "one failed")
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 50.0
    assert far.num_failed == 1


def test_closing_does_not_wait_for_a_trial_that_hangs():
    gate, clock, far = Gate(), FakeClock(), MemoryStore()
    store = TieredStore(
        [MemoryStore(), StallingStore(far, gate=gate, operations={"read"})],
        clock=clock,
        patience=Patience(look_seconds=0.01, close_seconds=300.0),
    )
    lose(store, 1)
    clock.advance(1.0)
    assert gate.wait_for_arrival()
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 50.0
    gate.release()


class Deadlines(MemoryStore):
    """Keeps the deadline of each write; takes nothing while `is_away`."""

    def __init__(self):
        super().__init__()
        self.deadlines = []
        self.is_away = False

    def put(self, key, buffers, deadline=math.inf):
        self.deadlines.append(deadline)
        return INJECTED if self.is_away else super().put(key, buffers)

    def read(self, *args):
        if self.is_away:
            raise StoreError(FaultKind.AWAY, "away")
        return super().read(*args)


def test_a_write_holds_a_thread_for_seconds_only(make_tiers):
    near, far, clock = Deadlines(), Deadlines(), FakeClock()
    store = make_tiers(near, far, clock=clock)
    store.put(make_key(0), [b"value"], clock() + 30)
    store.put(make_key(1), [b"value"])
    settle(store)
    assert near.deadlines == far.deadlines == [clock() + QUICK.write_seconds] * 2


def test_a_write_that_fails_while_the_store_is_away_is_not_said(make_tiers, caplog):
    class GoesAway(MemoryStore):
        def put(self, *args):
            lose(store)
            return INJECTED

    store = make_tiers(GoesAway(), clock=FakeClock())
    store.put(make_key(), [b"value"])
    rest(store)
    assert len(caplog.records) == 1
    assert "not used" in caplog.text


def test_what_a_close_cuts_short_is_not_said(caplog):
    store = TieredStore([MemoryStore()])
    store.close()
    lose(store)
    assert not caplog.records


def test_the_oldest_write_is_dropped_for_a_new_one(make_tiers):
    gate = Gate()
    counts = Counters()
    far = MemoryStore()
    store = make_tiers(
        MemoryStore(),
        StallingStore(far, gate=gate, operations={"put"}),
        observer=counts,
        patience=Patience(max_waiting=3),
    )
    started = time.monotonic()
    store.put(make_key(0), [b"value"])
    assert gate.wait_for_arrival()
    for number in range(1, 7):
        store.put(make_key(number), [b"value"])
    assert time.monotonic() - started < 30
    assert counts["tier_copies/memory1/dropped"] == 3
    gate.release()
    wait_until(lambda: held(far, 6), "the last is written")
    assert [held(far, number) for number in range(7)] == [True, *[False] * 3, *[True] * 3]


def test_closing_waits_for_what_is_behind_but_not_for_ever():
    far = MemoryStore()
    store = TieredStore([MemoryStore(), far], patience=Patience(close_seconds=20.0))
    store.put(make_key(), [b"value"])
    closing = threading.Event()
    far.close = closing.set  # it would drop its values
    store.close()
    assert closing.is_set()
    assert held(far)
    gate = Gate()
    store = TieredStore(
        [MemoryStore(), StallingStore(MemoryStore(), gate=gate)],
        patience=Patience(close_seconds=0.2),
    )
    store.put(make_key(), [b"value"])
    assert gate.wait_for_arrival()
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started < 15
    gate.release()


class Slow(MemoryStore):
    """A read takes `seconds` by the clock of its tier, and fails."""

    def __init__(self, clock):
        super().__init__()
        self.clock, self.seconds = clock, 0.0

    def read(self, *args):
        self.clock.advance(self.seconds)
        raise StoreError(FaultKind.LATE, "no answer in time")


@pytest.mark.parametrize(
    ("given", "took", "num_failures"),
    [
        (math.inf, 0.0, MAX_FAILURES),
        (5.0, 0.1, MAX_FAILURES),
        (5.0, 5.0, 1),
        (math.inf, QUICK.long_seconds, 1),
        (QUICK.long_seconds, QUICK.long_seconds, 1),
        (0.1, 0.1, None),
        (0.1, 2 * QUICK.long_seconds, None),
    ],
    ids=[
        "quick",
        "quicker than it must be",
        "all its time",
        "long",
        "enough time",
        "no time",
        "stalled",
    ],
)
def test_a_read_that_takes_long_costs_one_wait(make_tiers, given, took, num_failures):
    """One that had hardly any time says nothing."""
    clock = FakeClock()
    slow, counts = Slow(clock), Counters()
    store = make_tiers(slow, clock=clock, observer=counts)
    slow.seconds, num_tried = took, 0  # of a trial, too
    while state(store) == "up" and num_tried < 10:
        with pytest.raises(StoreError):
            store.read(make_key(), (), clock() + given)
        num_tried += 1
        rest(store)
    assert num_tried == (num_failures or 10)
    assert counts["tier_reads/memory/failed"] == num_tried


def test_while_a_tier_is_away_nothing_waits_for_it(make_tiers):
    far, clock, counts = MemoryStore(), FakeClock(), Counters()
    store = make_tiers(MemoryStore(), far, observer=counts, clock=clock)
    lose(store, 1)
    for number in range(20):
        assert store.put(make_key(number), [b"value"]).result is PutResult.STORED
    assert num_waiting(store, 1) == 0
    assert copies(counts) == {"tier_copies/memory1/away": 20}
    clock.advance(QUICK.longest_pause_seconds)
    wait_until(lambda: state(store, 1) == "up", "it is used again")
    store.put(make_key(20), [b"value"])
    settle(store)
    assert [held(far, number) for number in (0, 20)] == [False, True]


def test_a_tier_has_a_thread_only_while_there_is_work(make_tiers):
    before = threading.enumerate()  # those of another test may hang for a while

    def num_at_work():
        new = [thread for thread in threading.enumerate() if thread not in before]
        return sum(thread.name == "kvferry-tier" for thread in new)

    far, clock = MemoryStore(), FakeClock()
    store = make_tiers(MemoryStore(), far, clock=clock)
    store.put(make_key(), [b"value"])
    wait_until(lambda: held(far), "it is copied")
    wait_until(lambda: num_at_work() == 0, "nothing is to be done")
    lose(store, 1)
    assert num_at_work() == 1
    clock.advance(QUICK.longest_pause_seconds)
    wait_until(lambda: state(store, 1) == "up", "it is used again")
    wait_until(lambda: num_at_work() == 0, "nothing is to be done")


def test_nothing_is_brought_to_a_tier_that_takes_nothing(make_tiers):
    near, far, counts = MemoryStore(max_bytes=1), MemoryStore(), Counters()
    far.put(make_key(), [b"value"])
    store = make_tiers(near, far, observer=counts, clock=FakeClock())
    for _ in range(10):
        assert held(store)
    wait_until(lambda: counts["tier_writes/memory/no_space"], "it is tried")
    rest(store)
    assert counts["tier_writes/memory/no_space"] == 1
    assert copies(counts) == {"tier_copies/memory/no_space": 1}


@pytest.mark.parametrize("is_there", [False, True])
def test_a_copy_under_way_brings_back_nothing_that_was_removed(make_tiers, is_there):
    """And removes nothing that another one stored."""
    gate = Gate()
    near, far = MemoryStore(), MemoryStore()
    store = make_tiers(near, StallingStore(far, gate=gate, operations={"put"}))
    store.put(make_key(), [b"value"])
    assert gate.wait_for_arrival()
    store.delete(make_key())
    if is_there:
        far.put(make_key(), [b"of another engine"])
    gate.release()
    settle(store)
    assert held(far) is is_there


def test_two_who_find_a_near_copy_wrong_leave_the_far_one(make_tiers):
    near, far = MemoryStore(), MemoryStore()
    near.put(make_key(), [b"wrong"])
    far.put(make_key(), [b"value"])
    store = make_tiers(near, far)
    for _ in range(2):
        assert read_value(store, make_key()) == b"wrong"
    for _ in range(2):
        store.discard(make_key(), "bad_checksum")
    assert read_value(store, make_key()) == b"value"


def test_a_right_value_that_replaces_one_under_way_reaches_every_tier(make_tiers):
    gate = Gate()
    near, far = MemoryStore(), MemoryStore()
    store = make_tiers(near, StallingStore(far, gate=gate, operations={"put"}))
    store.put(make_key(), [b"wrong"])
    assert gate.wait_for_arrival()
    store.discard(make_key(), "bad_checksum")
    assert store.put(make_key(), [b"right"]).result is PutResult.STORED
    gate.release()
    wait_until(lambda: read_value(far, make_key()) == b"right", "the far one has it")


def test_what_the_target_has_is_not_read_again(make_tiers):
    """As when each rank of an engine brings the same record nearer."""

    class CountsReads(MemoryStore):
        num_reads = 0
        hidden_from = None  # a thread; the one that copies may look before `held` has returned

        def read(self, key, ranges, deadline=math.inf):
            self.num_reads += bool(ranges)
            is_hidden = self.hidden_from == threading.get_ident()
            return None if is_hidden else super().read(key, ranges, deadline)

    near, far = CountsReads(), CountsReads()
    far.put(make_key(), [b"value"])
    store = make_tiers(near, far)
    assert held(store)
    settle(store)
    num_reads = far.num_reads
    other = make_tiers(near, far)  # of another rank, which has just read it from the far tier
    near.hidden_from = threading.get_ident()
    assert held(other)
    settle(other)
    assert far.num_reads == num_reads + 1


def test_what_waits_for_a_full_tier_is_copied_once_it_has_room_and_the_source_answers(make_tiers):
    near, far, clock, counts = Deadlines(), Full(), FakeClock(), Counters()
    store = make_tiers(near, far, clock=clock, observer=counts)
    for number in range(20):
        store.put(make_key(number), [b"value"])
    rest(store)
    assert num_waiting(store, 1) == 19
    clock.advance(QUICK.first_pause_seconds)
    rest(store)
    assert num_waiting(store, 1) == 18, "one of them tries whether there is room"
    near.is_away, far.is_full = True, False
    for _ in range(MAX_FAILURES):
        with pytest.raises(StoreError):
            store.read(make_key(), ())
    wait_until(lambda: state(store) == "away", "it was tried")
    clock.advance(QUICK.longest_pause_seconds)
    rest(store)
    assert num_waiting(store, 1) == 18, "there is room, but the source does not answer"
    near.is_away = False
    clock.advance(QUICK.longest_pause_seconds)
    settle(store)
    assert [held(far, number) for number in range(20)] == [False] * 2 + [True] * 18
    assert copies(counts) == {
        "tier_copies/memory1/no_space": 2,
        "tier_copies/memory1/stored": 18,
    }


def test_a_read_that_never_returns_leaves_the_tier_alone(make_tiers):
    """As on a mount that hangs: it holds its thread, and no more of them."""
    gate, clock, counts = Gate(), FakeClock(), Counters()
    near, far = MemoryStore(), MemoryStore()
    near.put(make_key(), [b"value"])
    far.put(make_key(1), [b"value"])
    slow = StallingStore(far, gate=gate, operations={"read"})
    store = make_tiers(near, slow, clock=clock, observer=counts)
    reader = threading.Thread(target=store.read, args=(make_key(1), (), clock() + 1.0))
    reader.start()
    assert gate.wait_for_arrival()
    clock.advance(QUICK.hang_seconds)
    store.probe([make_key(1)])
    assert state(store, 1) == "up"
    clock.advance(1.5)
    store.probe([make_key(1)])
    assert state(store, 1) == "away"
    assert store.where(make_key(1)) is not Where.HERE
    assert held(store)
    assert store.read(make_key(), ()) == 5
    with pytest.raises(StoreError, match="memory1 away: a read does not end"):
        store.read(make_key(5), ())
    assert counts["tier_reads/memory1/away"] == 1
    gate.release()
    reader.join()
    clock.advance(QUICK.longest_pause_seconds)
    wait_until(lambda: state(store, 1) == "up", "it is used again")


class Unsteady(MemoryStore):
    """Fails to read while `fails`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.fails = False

    def read(self, *args, **kwargs):
        if self.fails:
            raise StoreError(FaultKind.AWAY, "down")
        return super().read(*args, **kwargs)


def test_a_store_that_fails_as_soon_as_it_is_open_stays_open():
    """Three reads may fail between the moment that it is used and the end of its opening."""
    clock, store = FakeClock(), Unsteady()

    class AtOnce(Tier):
        def _event(self, event):
            super()._event(event)
            if event is Health.opened:
                for _ in range(MAX_FAILURES):
                    with pytest.raises(StoreError):
                        self.ask(make_key(), (), math.inf)
                self.try_if_due()
                store.fails = False

    store.fails = True
    tier = AtOnce(
        Unopened("late://x", lambda _may_create: store), "late", 0, Observer(), clock, QUICK
    )
    tier.try_if_due()
    assert tier.up is None
    clock.advance(QUICK.longest_pause_seconds)
    tier.try_if_due()
    assert tier.up is store
    assert [each.result for each in tier.put_all([(make_key(), [b"value"])], math.inf)] == [
        PutResult.STORED
    ]


def test_a_store_that_may_not_be_asked_yet_accepts_no_writes():
    """Another thread looks between the event that takes it back and the moment that it is used."""
    clock, during = FakeClock(), []
    tier = Tier(MemoryStore(), "memory", 0, Observer(), clock, QUICK)
    tier._event(lambda health: health.is_lost(DOWN))
    clock.advance(QUICK.longest_pause_seconds)

    def taken_back(health):
        line = health.trial_answered()
        during.append(tier.accepts())
        return line

    tier._event(taken_back)
    assert during != [None]
    assert tier.accepts() is None


def test_a_tier_that_got_no_thread_when_its_store_failed_gets_one_later(make_tiers, monkeypatch):
    clock, inner = FakeClock(), Unsteady()

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    store = make_tiers(inner, clock=clock)
    inner.fails = True
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(MAX_FAILURES):
            with pytest.raises(StoreError):
                store.read(make_key(), ())
    assert is_at_work(store)  # a trial is due
    store.put(make_key(), [b"value"])
    wait_until(lambda: state(store) == "away", "it was tried")


def test_tiers_share_the_time_to_wait_for_their_indexes(make_tiers):
    clock = FakeClock()
    timeouts = []

    class Indexing(MemoryStore):
        def wait_indexed(self, timeout):
            timeouts.append(timeout)
            clock.advance(3.0)
            return True

    store = make_tiers(Indexing(), Indexing(), Indexing(), clock=clock)
    assert store.wait_indexed(5.0)
    assert timeouts == [5.0, 2.0, 0.0]
