"""What a process writes, and takes back, once a command erased it."""

from __future__ import annotations

import time

import pytest

from kvferry.keys import salt_mark
from kvferry.observe import Counters
from kvferry.store.base import Value
from kvferry.store.erasures import (
    HEED_SECONDS,
    MAX_NAMES,
    Erasures,
    add_to_notice,
    name_of_key,
    name_of_mark,
    name_of_namespace,
    parse_notice,
)
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.peer import PeerStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from kvferry.transfer.auth import SharedKey
from kvferry.transfer.client import PeerClient
from kvferry.types import ChunkKey
from tests.record.samples import KEY, MARK, NAMESPACE, encode, golden, payload_of
from tests.store.servers.remote_client import DictClient

SCHEMA = golden("tiny")[0]
RECORD = encode(SCHEMA, payload_of(SCHEMA), mark=MARK)
OTHER_KEY = ChunkKey(bytes(32))
OTHER = encode(SCHEMA, payload_of(SCHEMA), key=OTHER_KEY, mark=salt_mark(NAMESPACE, "bob"))
NAMES = {
    "a salt": name_of_mark(MARK),
    "a key": name_of_key(KEY),
}


def drop_nothing(names) -> None:
    """Of a process without stores of its own."""


def wrote(erasures: Erasures, value: Value, seconds: float = 0.0) -> None:
    """A write has ended that took so long."""
    erasures.wrote(value, erasures._clock() - seconds)


class Notices:
    """The notice of a store, read by `erasures` without a thread."""

    is_failing = False

    def __init__(self) -> None:
        self.clock, self.text, self.deleted = FakeClock(), None, []
        self.counters = Counters()
        self.erasures = Erasures(
            lambda: {0: self.text}, self.delete, drop_nothing, self.counters, self.clock
        )
        self.erasures.look()

    def delete(self, namespace, key, stores):
        assert namespace == NAMESPACE
        assert stores in (None, [0])
        self.deleted.append(key)
        return [0] if self.is_failing else []

    def add(self, *names: str, at: float = 1.0) -> None:
        self.text = add_to_notice(self.text, names, at)
        self.erasures.look()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_what_was_erased_is_not_written_for_a_minute_and_all_else_is(name):
    notices = Notices()
    assert not notices.erasures.refuses((KEY, [RECORD]))
    notices.add(name)
    assert notices.erasures.refuses((KEY, [RECORD]))
    assert not notices.erasures.refuses((OTHER_KEY, [OTHER]))
    assert not notices.erasures.refuses((OTHER_KEY, [b"no record"]))
    notices.clock.advance(HEED_SECONDS + 1)
    notices.erasures.look()  # the notice is still there
    assert not notices.erasures.refuses((KEY, [RECORD]))
    notices.add(name, at=2.0)  # erased once more
    assert notices.erasures.refuses((KEY, [RECORD]))


def test_a_namespace_that_was_erased_is_all_of_its_records():
    notices = Notices()
    notices.add(name_of_namespace(NAMESPACE))
    assert notices.erasures.refuses((KEY, [RECORD]))
    assert notices.erasures.refuses((OTHER_KEY, [OTHER]))


def test_what_was_written_before_and_during_it_is_taken_back_and_nothing_else():
    notices = Notices()
    wrote(notices.erasures, (ChunkKey(b"o" * 32), [RECORD]))
    notices.clock.advance(HEED_SECONDS + 1)  # a record of long ago was there for the command
    notices.erasures.look()
    wrote(notices.erasures, (KEY, [RECORD]))
    wrote(notices.erasures, (OTHER_KEY, [OTHER]))
    notices.add(name_of_mark(MARK))
    assert notices.deleted == [KEY]
    wrote(notices.erasures, (KEY, [RECORD]))  # its write had begun before
    wrote(notices.erasures, (OTHER_KEY, [OTHER]))
    assert notices.deleted == [KEY, KEY]
    assert notices.counters["erased_records"] == 2


@pytest.mark.parametrize("is_gone", [True, False], ids=["until it is gone", "not for ever"])
def test_what_could_not_be_deleted_is_tried_again(is_gone):
    notices = Notices()
    notices.is_failing = True
    wrote(notices.erasures, (KEY, [RECORD]))
    notices.add(name_of_mark(MARK))
    notices.erasures.look()
    assert notices.deleted == [KEY] * len(notices.deleted)
    assert len(notices.deleted) > 1
    notices.is_failing = not is_gone
    notices.clock.advance(0.0 if is_gone else 3600.0)
    notices.erasures.look()
    num_tried = len(notices.deleted)
    notices.erasures.look()
    assert len(notices.deleted) == num_tried
    assert notices.counters["erased_records"] == 1


@pytest.mark.parametrize(("later", "is_kept"), [(-1.0, False), (HEED_SECONDS + 1.0, True)])
def test_a_write_that_hangs_is_taken_back_if_it_began_before_the_minute_had_ended(later, is_kept):
    notices = Notices()
    notices.clock.advance(10.0)
    notices.add(name_of_mark(MARK))
    notices.clock.advance(200.0)
    notices.add("mark:of others")
    wrote(notices.erasures, (KEY, [RECORD]), 200.0 - later)
    assert notices.deleted == ([] if is_kept else [KEY])


@pytest.mark.parametrize(
    ("answering", "is_kept"),
    [
        ([], False),  # one store that hangs keeps all from being heard
        ([()], False),
        ([("other",)], False),
        ([("it", "other")], True),
        ([("it",)], True),
    ],
)
def test_what_was_written_since_a_store_answered_last_is_taken_back(answering, is_kept):
    notices, texts = Notices(), {"it": None, "other": None}
    erasures = Erasures(lambda: texts, notices.delete, drop_nothing, Counters(), notices.clock)
    erasures.look()
    wrote(erasures, (KEY, [RECORD]))
    for stores in answering:
        notices.clock.advance(HEED_SECONDS + 1)
        texts = dict.fromkeys(stores)
        erasures.look()
    notices.clock.advance(200.0)
    texts = {"it": add_to_notice(None, [name_of_mark(MARK)], 1.0), "other": None}
    erasures.look()
    assert notices.deleted == ([] if is_kept else [KEY])


@pytest.mark.parametrize("order", [("near", "far"), ("far", "near")])
def test_of_stores_that_say_a_name_at_once_the_one_that_was_away_longest_decides(order):
    notices, texts = Notices(), {"near": None, "far": None}
    erasures = Erasures(lambda: texts, notices.delete, drop_nothing, Counters(), notices.clock)
    erasures.look()
    wrote(erasures, (KEY, [RECORD]))
    texts = {"near": None}
    for _ in range(2):
        notices.clock.advance(HEED_SECONDS + 1)
        erasures.look()
    texts = dict.fromkeys(order, add_to_notice(None, [name_of_mark(MARK)], 1.0))
    erasures.look()
    assert notices.deleted == [KEY]


def test_what_was_erased_is_not_read_while_much_is_taken_back():
    """Nor after that, for as long as a write may take."""
    clock, texts, heeded = FakeClock(), {"it": None}, []

    def delete(*_):
        clock.advance(1.0)
        return []

    def note(_names):
        heeded.append(erasures.refuses((KEY, [RECORD])))

    erasures = Erasures(lambda: texts, delete, note, Counters(), clock)
    erasures.look()
    for number in range(2 * int(HEED_SECONDS)):
        erasures.wrote((ChunkKey(number.to_bytes(32)), [RECORD]), clock())
    texts = {"it": add_to_notice(None, [name_of_mark(MARK)], 1.0)}
    erasures.look()
    note(())
    clock.advance(HEED_SECONDS + 1)
    note(())
    assert heeded == [True, True, False]


def test_a_server_that_answers_nothing_has_said_nothing():
    """An idle engine does not find out that it is away."""
    clock, client = FakeClock(), DictClient()
    store = RemoteStore("dict://x", client, Opening(namespace=NAMESPACE), clock=clock)
    with TieredStore([store], Counters(), clock=clock) as tiers:
        tiers._erasures.close(5.0)
        tiers._erasures.look()
        assert tiers.put(KEY, [RECORD]).is_there
        client.down = True
        for _ in range(2):
            clock.advance(HEED_SECONDS + 1)
            tiers._erasures.look()
        client.down = False
        store.catalogue().notice(add_to_notice(None, [name_of_mark(MARK)], time.time()))
        tiers._erasures.look()
        assert store.read(KEY, ()) is None


@pytest.mark.parametrize("is_failing", [False, True])
def test_what_is_stored_again_later_stays_once_nothing_older_is_left(is_failing):
    """Until then it is neither written nor read: a tier would copy it from where it is left."""
    notices = Notices()
    notices.is_failing = is_failing
    wrote(notices.erasures, (KEY, [RECORD]))
    notices.add(name_of_mark(MARK))
    notices.clock.advance(HEED_SECONDS + 1)
    assert notices.erasures.refuses((KEY, [RECORD])) is is_failing
    assert not notices.erasures.refuses((OTHER_KEY, [OTHER]))
    notices.is_failing = False
    notices.erasures.look()
    assert not notices.erasures.refuses((KEY, [RECORD]))
    num_tried = len(notices.deleted)
    wrote(notices.erasures, (KEY, [RECORD]))
    notices.erasures.look()
    assert len(notices.deleted) == num_tried


def test_of_a_store_that_is_opened_late_what_is_old_is_no_news():
    """Else each start would throw away its first minute, as long as the notice stands."""
    texts, now = {}, FakeClock()
    now.advance(1e9)
    erasures = Erasures(lambda: texts, [].append, drop_nothing, Counters(), now, wall=now)
    erasures.look()
    texts["late"] = add_to_notice(None, ["mark:00"], now() - 1200)
    texts["late"] = add_to_notice(texts["late"], ["mark:01"], now() + 60)
    now.advance(10 * 86400)  # an engine that runs for long, while the store is away
    erasures.look()
    assert list(erasures.since(0)) == ["mark:01"]
    texts["late"] = add_to_notice(texts["late"], ["mark:02"], 1.0)  # by a clock that is wrong
    for _ in range(3):
        erasures.look()
    assert list(erasures.since(0)) == ["mark:01", "mark:02"]
    texts["of the same command"] = texts["late"]
    erasures.look()
    assert len(erasures.since(0)) == 2
    texts["late"] = None  # the server lost it, and gets another
    erasures.look()
    texts["late"] = add_to_notice(None, ["mark:02", "mark:03"], 1.0)
    erasures.look()
    assert list(erasures.since(2)) == ["mark:03"]


NO_TIMES = ("NaN", "Infinity", "-1", "1e12", "1" + 400 * "0", '"b"', "null")


def test_what_two_stores_say_at_once_is_taken_back_once():
    notices, texts = Notices(), {"near": None, "far": None}
    erasures = Erasures(lambda: texts, notices.delete, drop_nothing, Counters(), notices.clock)
    erasures.look()
    wrote(erasures, (KEY, [RECORD]))
    texts = dict.fromkeys(texts, add_to_notice(None, [name_of_mark(MARK)], 1.0))
    erasures.look()
    assert notices.deleted == [KEY]


def test_a_store_that_did_not_answer_is_cleared_once_its_notice_is_read():
    notices, texts = Notices(), {"near": None, "far": None}
    erasures = Erasures(lambda: texts, notices.delete, drop_nothing, Counters(), notices.clock)
    erasures.look()
    second = ChunkKey(bytes([9]) * 32)
    wrote(erasures, (KEY, [RECORD]))
    wrote(erasures, (second, [RECORD]))
    wrote(erasures, (OTHER_KEY, [OTHER]))
    notice = add_to_notice(None, [name_of_mark(MARK)], 1.0)
    texts = {"near": notice}  # the other one fails, and keeps what it has
    for _ in range(2):
        erasures.look()
    assert notices.deleted == [KEY, second]
    notices.clock.advance(200.0)
    wrote(erasures, (KEY, [RECORD]))  # computed again, to stay
    texts = {"near": notice, "far": notice}
    for _ in range(2):
        erasures.look()
    assert notices.deleted == [KEY, second, second]
    assert list(erasures.since(0)) == [name_of_mark(MARK)]


@pytest.mark.parametrize(
    "text", [None, "", "[", "[" * 10**5, "5", *(f'{{"a": {each}}}' for each in NO_TIMES)]
)
def test_text_that_is_no_notice_names_nothing(text):
    assert parse_notice(text) == {}
    assert parse_notice(add_to_notice(text, ["mark:00"], 5.0)) == {"mark:00": 5.0}


def test_a_notice_is_bounded_and_forgets_the_oldest():
    text = add_to_notice(None, [f"key:{number}" for number in range(MAX_NAMES)], 1.0)
    found = parse_notice(add_to_notice(text, ["mark:00"], 2.0))
    assert len(found) == MAX_NAMES
    assert found["mark:00"] == 2.0


# -- in tiers -------------------------------------------------------------------------------------


def make_tiers(near, far) -> TieredStore:
    return TieredStore([near, far], Counters())


@pytest.mark.parametrize("name", [*NAMES.values(), name_of_namespace(NAMESPACE)])
def test_a_store_in_memory_drops_what_was_erased_however_old_it_is(name, tmp_path):
    """No command reaches it, and what was written in the minute before is not all that it has."""
    far, near = FileStore(tmp_path / "far"), MemoryStore("memory://near")
    with make_tiers(near, far) as tiers:
        erasures = tiers._erasures
        erasures.close(5.0)  # looks are made here
        erasures.look()
        other = encode(SCHEMA.with_namespace(bytes(32)), payload_of(SCHEMA), key=OTHER_KEY)
        for store in (near, far):
            store.put(KEY, [RECORD])
            store.put(OTHER_KEY, [other])
        far.catalogue().notice(add_to_notice(None, [name], 1.0))
        erasures.look()
        assert [key for key, _ in near.values()] == [OTHER_KEY]
        assert far.read(KEY, ()) is not None  # where a command deletes


@pytest.mark.parametrize("place", ["near", "far"])
def test_tiers_do_not_read_what_was_erased_and_landed_late(place, tmp_path):
    """The write of an engine that was killed, or of one that has not heard of it yet."""
    stores = {"near": FileStore(tmp_path / "near"), "far": FileStore(tmp_path / "far")}
    with make_tiers(*stores.values()) as tiers:
        erasures = tiers._erasures
        erasures.close(5.0)  # looks are made here
        erasures.look()
        stores["near"].catalogue().notice(add_to_notice(None, [name_of_mark(MARK)], 1.0))
        erasures.look()
        for key, record in ((KEY, RECORD), (OTHER_KEY, OTHER)):
            stores[place].put(key, [record])
        found = memoryview(bytearray(len(RECORD)))
        assert tiers.read(KEY, [(0, found)]) is None
        assert stores[place].read(KEY, ()) is None
        assert tiers.read(OTHER_KEY, [(0, found)]) == len(OTHER)


class Counted(WrapperStore):
    """Counts the deletions that are asked for."""

    num_deletions = 0

    def delete(self, key):
        self.num_deletions += 1
        return super().delete(key)


@pytest.mark.parametrize("kind", ["a peer", "a directory"])
def test_what_a_tier_that_is_only_read_holds_is_not_tried_again(kind, tmp_path):
    with FileStore(tmp_path / "far") as before:
        before.put(KEY, [RECORD])
    if kind == "a peer":
        far = PeerStore(PeerClient("127.0.0.1", 1, NAMESPACE, SharedKey(b"k" * 32)), Opening())
    else:
        far = FileStore(tmp_path / "far", read_only=True)
    near, far = FileStore(tmp_path / "near"), Counted(far)
    with make_tiers(near, far) as tiers:
        erasures = tiers._erasures
        erasures.close(5.0)  # looks are made here
        erasures.look()
        assert tiers.put(KEY, [RECORD]).is_there
        near.catalogue().notice(add_to_notice(None, [name_of_mark(MARK)], 1.0))
        for _ in range(3):
            erasures.look()
        assert near.read(KEY, ()) is None
        assert far.num_deletions == 1, "a peer's key is forgotten"


@pytest.mark.parametrize("said_in", ["near", "far"])
def test_a_close_takes_back_what_was_written_behind_an_erasure(said_in, tmp_path, monkeypatch):
    """An engine may end before the next look at the notices."""
    monkeypatch.setattr("kvferry.store.erasures.LOOK_SECONDS", 3600.0)
    places = {"near": tmp_path / "near", "far": tmp_path / "far"}
    near, far = map(FileStore, places.values())
    with make_tiers(near, far) as tiers:
        wait_until(lambda: tiers._erasures._known is not None, "the first look")
        notice = add_to_notice(None, [name_of_mark(MARK)], 1.0)
        {"near": near, "far": far}[said_in].catalogue().notice(notice)
        for key, record in ((KEY, RECORD), (OTHER_KEY, OTHER)):
            assert tiers.put(key, [record]).is_there
            wait_until(lambda key=key: far.read(key, ()) is not None, "the copy")
    for place in places.values():
        with FileStore(place) as store:
            assert store.read(KEY, ()) is None
            assert store.read(OTHER_KEY, ()) is not None


class Broken(FileStore):
    """Deletes nothing while `fault` is set, or raises it."""

    fault: bool | Exception = False

    def delete(self, key):
        if isinstance(self.fault, Exception):
            raise self.fault
        return not self.fault and super().delete(key)

    def catalogue(self):
        if isinstance(self.fault, Exception):
            raise self.fault
        return super().catalogue()


@pytest.fixture
def looked_at(tmp_path):
    """Two tiers with one record, whose notices are read by `look`."""
    near, far = Broken(tmp_path / "near"), Broken(tmp_path / "far")
    clock = FakeClock()
    with TieredStore([near, far], Counters(), clock=clock) as tiers:
        tiers._erasures.close(5.0)
        tiers._erasures.look()
        assert tiers.put(KEY, [RECORD]).is_there
        wait_until(lambda: far.read(KEY, ()) is not None, "the copy")
        yield tiers, near, far, clock
        near.fault = far.fault = False


def test_what_a_tier_could_not_delete_is_not_copied_from_it(looked_at):
    tiers, near, far, clock = looked_at
    far.fault = True
    near.catalogue().notice(add_to_notice(None, [name_of_mark(MARK)], 1.0))
    tiers._erasures.look()
    clock.advance(HEED_SECONDS + 1)
    assert tiers.read(KEY, [(0, memoryview(bytearray(len(RECORD))))]) is None
    far.fault = False
    tiers._erasures.look()
    assert near.read(KEY, ()) is far.read(KEY, ()) is None


@pytest.mark.parametrize("said_in", [0, 1])
def test_a_tier_that_fails_in_any_way_hides_no_notice_of_another(said_in, looked_at):
    tiers, *stores, _ = looked_at
    stores[1 - said_in].fault = RuntimeError("of a store that breaks its contract")
    notice = add_to_notice(None, [name_of_mark(MARK)], 1.0)
    stores[said_in].catalogue().notice(notice)
    tiers._erasures.look()
    assert stores[said_in].read(KEY, ()) is None
