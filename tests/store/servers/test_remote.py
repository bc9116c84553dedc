"""What all remote stores share: names, what is known of a server, and values that ranks write."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.errors import StoreError
from kvferry.observe import Counters, Observer
from kvferry.store.base import PutResult, Where
from kvferry.store.kind import Opening, ServerBounds
from kvferry.store.servers.remote import _REMEMBERED_NAMES, RemoteStore
from kvferry.store.servers.server_keys import FRESH_SECONDS, MAX_PROBES
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import (
    ProbeTests,
    RemoteStoreTests,
    ScanTests,
    make_key,
    read_value,
)
from kvferry.testing.stores.hooks import wait_until
from tests.store.servers.remote_client import DictClient

SPACE = b"n" * 32
PATIENT = ServerBounds(probe_seconds=20.0)
"""No probe fails because the machine is busy."""
MAX_TEXT_BYTES = PATIENT.max_text_bytes


class TestRemoteStore(ScanTests, ProbeTests, RemoteStoreTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _servers(self):
        self.servers: dict[str, dict[str, bytes]] = {}

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        assert max_bytes is None
        url = f"dict://{tmp_path}"
        values = self.servers.setdefault(url, {})
        return RemoteStore(
            url,
            DictClient(values),
            Opening(namespace=SPACE, observer=observer or Observer(), bounds=PATIENT),
        )

    def poke(self, store, key, value):
        values = self.servers[store.url]
        if value is None:
            values.pop(store.name_of(key), None)
        else:
            values[store.name_of(key)] = value

    def peek(self, store, key):
        return self.servers[store.url].get(store.name_of(key))


@pytest.fixture
def client():
    return DictClient()


@pytest.fixture
def make_store(client):
    stores = []

    def make(observer=None, **options):
        opening = Opening(namespace=SPACE, observer=observer or Observer(), bounds=PATIENT)
        stores.append(RemoteStore("dict://test", client, opening, **options))
        return stores[-1]

    yield make
    client.gate.set()
    for store in stores:
        store.close()


def test_a_key_is_asked_for_once_and_again_when_it_is_old(make_store, client):
    clock = FakeClock()
    store, key, absent = make_store(clock=clock), make_key(), make_key(1)
    client.put(store.name_of(key), [b"value"], time.monotonic() + 1)
    for num_asked in (1, 2):
        assert store.where(key) is Where.ABSENT
        store.probe([key, absent])
        wait_until(lambda: store.where(absent) is Where.ABSENT, "the question ends")
        assert store.where(key) is Where.HERE
        store.probe([key])
        assert len(client.asked) == num_asked
        clock.advance(FRESH_SECONDS + 1)


def test_while_a_probe_asks_a_key_is_neither_there_nor_not(make_store, client):
    clock = FakeClock()
    store = make_store(clock=clock)
    client.gate.clear()
    store.probe([make_key()])
    assert store.where(make_key()) is Where.ASKED
    assert store.where(make_key(1)) is Where.ABSENT
    clock.advance(1.0)  # longer than a look-up waits, which knows that itself
    assert store.where(make_key()) is Where.ASKED
    client.gate.set()
    wait_until(lambda: store.where(make_key()) is Where.ABSENT, "it is answered")


def test_an_answer_that_comes_between_two_looks_is_no_miss(make_store, client):
    store, key, last = make_store(clock=FakeClock()), make_key(), make_key(1)

    class AnsweredMeanwhile(bytes):
        """A key, whose answer comes just before it is looked up a second time."""

        num_looks = 0

        def __hash__(self):
            self.num_looks += 1
            if self.num_looks == 2:
                client.gate.set()
                wait_until(lambda: store.where(last) is Where.ABSENT, "the question ends")
            return super().__hash__()

    client.put(store.name_of(key), [b"value"], time.monotonic() + 1)
    client.gate.clear()
    store.probe([key, last])
    assert store.where(AnsweredMeanwhile(key)) is not Where.ABSENT
    assert store.where(key) is Where.HERE


class HeldClient(DictClient):
    """Has the answer of each read or question, and keeps it until the gate opens."""

    def __init__(self):
        super().__init__()
        self.answered = threading.Event()

    def _held(self, answer):
        self.answered.set()
        assert self.gate.wait(60)
        return answer

    def read(self, name, ranges, deadline):
        return self._held(super().read(name, ranges, deadline))

    def exists(self, names, deadline):
        return self._held(super().exists(names, deadline))

    def _enter(self, deadline):
        pass


@pytest.mark.parametrize("way", ["read", "probe"])
@pytest.mark.parametrize("is_stored_again", [False, True])
def test_a_call_that_began_before_a_key_was_removed_teaches_nothing(way, is_stored_again):
    """As that of a copy of a value that a reader finds wrong."""
    client, key, last = HeldClient(), make_key(), make_key(1)
    store = RemoteStore("dict://test", client, Opening(namespace=SPACE), clock=FakeClock())
    client.values[f"{SPACE.hex()}/{key.hex()}"] = b"wrong"
    client.gate.clear()
    call = {"read": lambda: store.read(key, ()), "probe": lambda: store.probe([key, last])}[way]
    thread = threading.Thread(target=call)
    thread.start()
    assert client.answered.wait(60)
    store.discard(key, "bad_checksum")
    if is_stored_again:
        assert store.put(key, [b"right"]).result is PutResult.STORED
    client.gate.set()
    thread.join(60)
    wait_until(lambda: store.where(last) is Where.ABSENT, "the probe ends")
    assert (store.where(key) is Where.HERE) is is_stored_again
    store.close()


def test_a_server_that_is_down_has_no_key(make_store, client):
    counts = Counters()
    store = make_store(observer=counts, clock=FakeClock())  # a look-up waits for the probe
    client.down = True
    store.probe([make_key()])
    wait_until(lambda: store.where(make_key()) is not Where.ASKED, "the probe ends")
    assert store.where(make_key()) is Where.ABSENT
    assert counts["store_probe_failed"] == 1
    assert store.put(make_key(), [b"value"]).result is PutResult.FAILED
    assert store.delete(make_key()) is False
    store.describe(SPACE, "text")
    with pytest.raises(StoreError):
        store.read(make_key(), ())


def test_no_more_is_asked_than_can_hit(make_store, client):
    store = make_store(clock=FakeClock())
    keys = [make_key(number) for number in range(1000)]
    for key in keys[:100]:
        client.put(store.name_of(key), [b"value"], time.monotonic() + 1)
    store.probe(keys)
    wait_until(lambda: store.where(keys[999]) is not Where.ASKED, "the probe ends")
    assert store.where(keys[999]) is Where.ABSENT
    assert [store.where(key) is Where.HERE for key in keys[:101]] == [True] * 100 + [False]
    assert [len(names) for names in client.asked] == [32, 64, 128, 256]


def test_an_absent_key_is_not_asked_for_again_at_once(make_store, client):
    clock = FakeClock()
    store = make_store(clock=clock)
    for seconds in (0.0, 0.5, 1.5):
        clock.advance(seconds)
        store.probe([make_key()])
        wait_until(lambda: store.where(make_key()) is Where.ABSENT, "the probe ends")
    assert len(client.asked) == 2


@pytest.mark.parametrize("again", [False, True])
def test_what_is_under_way_is_not_asked_for_again(make_store, client, again):
    counts = Counters()
    store = make_store(observer=counts, clock=FakeClock())
    client.gate.clear()
    for _ in range(4 * MAX_PROBES):
        store.probe([make_key()], again=again)
    assert counts["store_probe_dropped"] == 0
    client.gate.set()
    wait_until(lambda: store.where(make_key()) is Where.ABSENT, "the probe ends")
    assert len(client.asked) == 1


def test_keys_that_are_asked_for_again_are_asked_for_from_the_first_on(make_store, client):
    """A server of objects needs a request for each, and they are asked for many times."""
    store = make_store(clock=FakeClock())
    keys = [make_key(number) for number in range(100)]
    for num_there, num_asked in ((0, [4]), (0, [4]), (5, [4, 8, 16])):
        for key in keys[:num_there]:
            client.put(store.name_of(key), [b"value"], time.monotonic() + 1)
        client.asked.clear()
        assert store.probe(keys, again=True) is Where.ASKED
        wait_until(lambda: store.where(keys[99]) is Where.ABSENT, "the question ends")
        assert [len(names) for names in client.asked] == num_asked
        assert [store.where(key) is Where.HERE for key in keys[:6]] == [True] * num_there + [
            False
        ] * (6 - num_there)


def test_probes_for_which_there_is_no_thread_take_no_place_from_later_ones(
    make_store, client, monkeypatch
):
    counts = Counters()
    store = make_store(observer=counts, clock=FakeClock())
    keys = [make_key(number) for number in range(MAX_PROBES + 1)]
    for key in keys:
        client.put(store.name_of(key), [b"value"], time.monotonic() + 1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", lambda _thread: raises(RuntimeError))
        for key in keys:
            store.probe([key])
            assert store.where(key) is Where.ABSENT
    assert counts["store_probe_dropped"] == 0
    for key in (keys[0], keys[-1]):
        store.probe([key])
        wait_until(lambda key=key: store.where(key) is Where.HERE, "it is asked for")


def raises(error):
    raise error


def test_prompts_that_wait_are_asked_for_together(make_store, client):
    counts = Counters()
    store = make_store(observer=counts)
    keys = [make_key(number) for number in range(120)]
    for key in keys:
        client.put(store.name_of(key), [b"value"], time.monotonic() + 1)
    client.gate.clear()
    for key in keys:
        store.probe([key])
    client.gate.set()
    wait_until(lambda: all(store.where(each) is Where.HERE for each in keys), "all are known")
    assert len(client.asked) <= 4
    assert counts["store_probe_dropped"] == 0
    assert counts["store_probe_failed"] == 0


def test_probes_that_wait_are_few(make_store, client):
    counts = Counters()
    store = make_store(observer=counts)
    client.gate.clear()
    for number in range(4 * MAX_PROBES):  # each of two threads takes what waits when it begins
        store.probe([make_key(number)])
    assert counts["store_probe_dropped"] >= 8
    client.gate.set()


def test_values_of_all_namespaces_are_listed_and_read(make_store, client):
    store = make_store()
    store.put(make_key(), [b"mine"])
    other = RemoteStore("dict://test", client, Opening(namespace=b"o" * 32, bounds=PATIENT))
    other.put(make_key(1), [b"theirs"])
    other.describe(b"o" * 32, "theirs")
    client.values["a note"] = b"of somebody"
    assert store.catalogue().namespaces() == {SPACE: (1, 4), b"o" * 32: (1, 6)}
    entry, _ = sorted(store.catalogue().scan(), key=lambda entry: entry.key == make_key())
    assert entry.key == make_key(1)
    assert read_value(store, entry.key) is None  # a listing changes no read
    assert read_value(store.in_namespace(entry.namespace), entry.key) == b"theirs"
    assert store.catalogue().description(b"o" * 32) == "theirs"
    assert store.in_namespace(entry.namespace).delete(entry.key)
    assert store.catalogue().namespaces() == {SPACE: (1, 4), b"o" * 32: (0, 0)}


def test_a_listing_remembers_a_bounded_number_of_names():
    last = _REMEMBERED_NAMES
    names = record_names([*range(last + 1), last, 0])
    store = RemoteStore("dict://test", ListingClient(names), Opening(namespace=SPACE))
    numbers = [int.from_bytes(entry.key) for entry in store.catalogue().scan()]
    assert numbers == [*range(last + 1), 0]  # only what came long ago is listed again


class ListingClient(DictClient):
    """Lists the names given."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def scan(self, prefix, deadline):
        return ((name, 4, 0.0) for name in self.names)


def record_names(numbers):
    return (f"{SPACE.hex()}/{number:064x}" for number in numbers)


def test_a_long_listing_is_counted_though_names_come_twice():
    numbers = list(range(30_000))
    store = RemoteStore("dict://test", ListingClient(record_names(numbers + numbers)))
    assert store.catalogue().namespaces() == {SPACE: (30_000, 120_000)}


@pytest.mark.parametrize("text", [b"a" * (MAX_TEXT_BYTES + 1), b"\xff\x1b[31m"])
def test_a_description_that_is_none_is_told_from_none_at_all(make_store, client, text):
    client.values[f"{SPACE.hex()}/about.json"] = text
    said = make_store().catalogue().description(SPACE)
    assert said is not None
    assert len(said) <= MAX_TEXT_BYTES
    make_store().describe(SPACE, "mine")
    assert make_store().catalogue().description(SPACE) == "mine"


def test_a_description_is_replaced(make_store):
    store = make_store()
    assert store.catalogue().description(SPACE) is None
    store.describe(SPACE, "one")
    store.describe(SPACE, "two")
    assert make_store().catalogue().description(SPACE) == "two"


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.put(make_key(), [b"value"]),
        lambda store: store.catalogue().notice(),  # all that an idle engine does
    ],
    ids=["put", "notice"],
)
def test_a_description_that_the_server_lost_is_written_again(make_store, client, call):
    clock = FakeClock()
    store = make_store(clock=clock)
    store.describe(SPACE, "text")
    client.values.clear()
    call(store)
    assert store.catalogue().description(SPACE) is None
    clock.advance(11.0)
    call(store)
    assert store.catalogue().description(SPACE) == "text"


def test_a_closed_store_closes_its_client(make_store, client):
    store = make_store()
    store.close()
    assert client.is_closed
    store.describe(SPACE, "text")
    assert client.values == {}
