"""Peers as stores: the suite of stores, and peers that are away, hang, lie or are someone else."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.observe import Counters, Observer
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.store.base import CLOSED, COMPUTED_WRONG, Put, PutResult, Where
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.recordio import RecordRead, read_record
from kvferry.store.servers.peer import MAX_WRONG, PeerStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.store.url import open_one, open_store
from kvferry.testing.faults import CorruptingStore, flip_bit
from kvferry.testing.stores import ProbeTests, RemoteStoreTests, make_key, make_value, read_value
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from kvferry.transfer.base import Bounds, KeyState
from kvferry.transfer.server import Listen, PeerServer
from kvferry.types import KVGroup
from tests.servers.peer import running_peer
from tests.servers.process import free_ports, let_run
from tests.store.servers.remote_client import DictClient
from tests.transfer.lending import DictLoan, Relay

pytestmark = pytest.mark.usefixtures("patient_calls")

SPACE = bytes(32)


def soon(seconds=30.0):
    return time.monotonic() + seconds


class Serving:
    """Peers, each with a memory of its own, and what opens them."""

    def __init__(self, root):
        self._key_file = root / "peers.key"
        self._key_file.touch(0o600)
        self._key_file.write_bytes(b"k" * 32)
        self.resources = ExitStack()

    def start(self, lender, port=0, **options):
        listen = Listen(port=port, key_file=str(self._key_file))
        return self.resources.enter_context(PeerServer(lender, lambda: SPACE, listen, **options))

    def url(self, *ports):
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        return f"peer://{hosts}?key_file={self._key_file}"

    def open(self, *ports, **options):
        return self.resources.enter_context(open_one(self.url(*ports), Opening(**options)))


@pytest.fixture
def serving(tmp_path):
    serving = Serving(tmp_path)
    yield serving
    serving.resources.close()


@pytest.fixture
def memory():
    """With a value, which peers serve."""
    made = MemoryStore()
    made.put(make_key(), [b"value"])
    return made


@pytest.fixture
def peer(serving, memory):
    return serving.open(serving.start(memory).address[1])


@pytest.fixture
def relay():
    """Factory of relays to a port."""
    with ExitStack() as stack:
        yield lambda port: stack.enter_context(Relay(port))


class PeerBeside(WrapperStore):
    """A peer that is read over its connection, and written to in the memory that it serves."""

    def __init__(self, peer, server, memory, observer):
        super().__init__(peer)
        self.server, self.memory, self._observer = server, memory, observer
        self._closed = False

    def put(self, key, buffers, deadline=float("inf")):
        if self._closed:
            return Put.failed(CLOSED)
        result = self.memory.put(key, buffers)
        self.inner._keys.learn(key)
        return result

    def delete(self, key):
        self.inner.delete(key)
        return not self._closed and self.memory.delete(key)

    def discard(self, key, reason):
        self.inner.discard(key, reason)
        if not self._closed and self.memory.delete(key) and self._observer:
            self._observer.count("store_quarantined")

    def stat(self):
        found = self.memory.stat()
        return self.inner.stat()._replace(
            num_records=found.num_records, used_bytes=found.used_bytes
        )

    def close(self):
        self._closed = True
        self.inner.close()
        self.server.close()


class TestPeer(ProbeTests, RemoteStoreTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _memories(self):
        self.memories = {}

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        serving = Serving(tmp_path)
        memory = self.memories.setdefault(tmp_path, MemoryStore())
        server = serving.start(memory)
        peer = serving.open(server.address[1], observer=observer or Observer())
        (tmp_path / "peers.key").unlink()
        return PeerBeside(peer, server, memory, observer)

    def poke(self, store, key, value):
        store.memory.delete(key)
        if value is not None:
            store.memory.put(key, [value])

    def peek(self, store, key):
        return read_value(store.memory, key)

    # What follows is of stores that are written to.
    test_an_empty_value_is_replaced = None
    test_one_of_racing_writers_replaces_an_empty_value = None


def test_a_peer_is_only_read(peer):
    assert peer.accepts().kind is FaultKind.READ_ONLY
    assert peer.put(make_key(1), [b"other"]).result is PutResult.FAILED
    assert not peer.delete(make_key())
    peer.discard(make_key(), "bad_checksum")
    assert read_value(peer, make_key()) == b"value"
    with pytest.raises(StoreError, match="cannot list"):
        list(peer.catalogue().scan())


def test_as_a_tier_a_peer_gets_no_values_and_says_nothing(peer, memory, caplog):
    near, far = MemoryStore(), MemoryStore()
    with TieredStore([near, peer, far]) as tiers:
        assert tiers.accepts() is None
        assert tiers.put(make_key(1), [b"own"]).result is PutResult.STORED
        wait_until(lambda: far.where(make_key(1)) is Where.HERE, "the far tier has it")
        assert read_value(tiers, make_key()) == b"value"
        wait_until(lambda: near.where(make_key()) is Where.HERE, "it is brought nearer")
    with TieredStore([peer]) as alone:
        assert alone.accepts().kind is FaultKind.READ_ONLY
        assert alone.put(make_key(2), [b"own"]).result is PutResult.FAILED
    assert memory.stat().num_records == 1
    assert caplog.messages == []


def test_pending_is_neither_a_hit_nor_an_absence_that_is_remembered(serving):
    class Making(MemoryStore):
        is_made = False

        def lend(self, key, seconds):
            is_pending = key == make_key() and not self.is_made
            return KeyState.PENDING if is_pending else super().lend(key, seconds)

    memory = Making()
    memory.put(make_key(), [b"value"])
    peer = serving.open(serving.start(memory).address[1])
    peer.probe([make_key(), make_key(1)])
    wait_until(lambda: peer.where(make_key()) is not Where.ASKED, "the answer is there")
    said = [peer.where(make_key(number)) for number in range(3)]
    assert said == [Where.COMING, Where.ABSENT, Where.ABSENT]
    assert peer.read(make_key(), ()) is None
    memory.is_made = True
    peer.probe([make_key()])  # once: of an absence that is remembered, nothing would be asked
    wait_until(lambda: peer.where(make_key()) is Where.HERE, "it is found")


def test_what_an_engine_stored_is_not_taken_for_what_its_peer_has(serving):
    """A worker's save is in the nearest tier that takes values, however near a peer is."""
    shared = RemoteStore("memory://shared", DictClient())
    peer = serving.open(serving.start(MemoryStore()).address[1])
    with TieredStore([peer, shared]) as tiers:
        assert tiers.learn([make_key()])
        assert (peer.where(make_key()), shared.where(make_key())) == (Where.ABSENT, Where.HERE)


def test_what_a_peer_is_assumed_to_have_is_known_until_it_is_asked_or_read(serving):
    port = serving.start(MemoryStore()).address[1]
    with TieredStore([MemoryStore(), serving.open(port)]) as tiers:
        keys = [make_key(number) for number in range(3)]
        assert not tiers.learn(keys, ("127.0.0.1", port + 1))
        assert not any(tiers.where(each) is Where.HERE for each in keys)
        assert tiers.learn(keys, ("127.0.0.1", port))
        assert all(tiers.where(each) is Where.HERE for each in keys)
        assert tiers.read(keys[0], ()) is None
        assert tiers.probe(keys[1:2], again=True) is Where.ASKED
        wait_until(lambda: tiers.where(keys[1]) is Where.ABSENT, "the peer says what it lacks")
        assert [tiers.where(key) is Where.HERE for key in keys] == [False, False, True]


def assert_fails_until_it_is_left_alone(peers):
    """Of a peer that is away, nothing is known, and nothing is asked."""

    def is_left_alone() -> bool:
        with pytest.raises(StoreError) as caught:
            peers.read(make_key(), (), soon())
        return " away: " in str(caught.value)

    wait_until(is_left_alone, "it is left alone")


def test_of_several_peers_each_is_asked_for_what_it_has(serving):
    memories = [MemoryStore(), MemoryStore()]
    for number, memory in enumerate(memories):
        memory.put(make_key(number), [make_value(1000, number)])
    servers = [serving.start(memory) for memory in memories]
    peers = serving.open(*(server.address[1] for server in servers))
    for number in range(2):
        assert read_value(peers, make_key(number)) == make_value(1000, number)
    assert peers.read(make_key(2), ()) is None
    servers[0].close()
    assert_fails_until_it_is_left_alone(peers)
    for _ in range(20):
        assert read_value(peers, make_key(1)) == make_value(1000, 1)
    peers.probe([make_key(1)])
    wait_until(lambda: peers.where(make_key(1)) is Where.HERE, "it is known")


def test_of_several_peers_the_one_that_has_a_value_is_named(serving):
    memories = [MemoryStore(), MemoryStore()]
    for number, memory in enumerate(memories):
        memory.put(make_key(number), [b"value"])
    ports = [serving.start(memory).address[1] for memory in memories]
    counts = Counters()
    urls = ["memory://", serving.url(*ports)]
    with open_store(urls, namespace=SPACE, observer=counts) as store:
        store.probe([make_key(0), make_key(1)])
        wait_until(
            lambda: all(store.where(make_key(n)) is Where.HERE for n in range(2)), "both are known"
        )
        for number, port in enumerate(ports):
            name = f"peer 127.0.0.1:{port}"
            assert store.tier_of(make_key(number)) == name
            assert read_value(store, make_key(number)) == b"value"
            assert counts[f"tier_reads/{name}/hit"] >= 1
        assert [tier.name for tier in store.tiers()] == [
            "memory",
            *(f"peer 127.0.0.1:{port}" for port in ports),
        ]
    with open_store(serving.url(ports[0]), namespace=SPACE) as store:
        assert read_value(store, make_key(0)) == b"value"
        assert store.tier_of(make_key(0)) == "peer"


def test_a_peer_that_is_not_known_to_have_a_value_is_asked_last(serving):
    """Also after farther tiers."""
    memories = [MemoryStore(), MemoryStore()]
    memories[1].put(make_key(), [b"value"])
    urls = [serving.url(*(serving.start(memory).address[1] for memory in memories)), "memory://"]
    counts = Counters()
    with open_store(urls, namespace=SPACE, observer=counts) as store:
        names = [tier.name for tier in store.tiers()]

        def asked():
            return [
                sum(counts[f"tier_reads/{each}/{end}"] for end in ("hit", "miss")) for each in names
            ]

        assert store.read(make_key(), (), soon()) == len(b"value")
        assert asked() == [1, 1, 1]
        assert store.read(make_key(), (), soon()) == len(b"value")
        assert asked() == [1, 2, 1], "now it is known"
        assert store.read(make_key(1), (), soon()) is None
        assert asked() == [2, 3, 2]


def test_a_dead_peer_is_left_alone_and_found_again(serving, memory, caplog):
    server = serving.start(memory)
    port = server.address[1]
    with open_store(serving.url(port), namespace=SPACE) as peer:
        assert read_value(peer, make_key()) == b"value"
        server.close()
        assert_fails_until_it_is_left_alone(peer)
        serving.start(memory, port)

        def is_back():
            peer.probe([make_key()])
            return peer.where(make_key()) is Where.HERE

        wait_until(is_back, "it is used again")
        wait_until(lambda: len(caplog.messages) == 2, "both are logged")
    left, used = caplog.messages
    assert "not used until it answers" in left
    assert "used again" in used


# -- records ------------------------------------------------------------------------------------

GROUP = KVGroup(num_layers=3, num_kv_heads=2, content_size=64, dtype="float32", block_size=16)
SCHEMA = RecordSchema.for_groups(namespace=SPACE, chunk_tokens=32, groups=(GROUP,))


def make_record(number=0):
    payload = random.Random(number).randbytes(SCHEMA.payload_bytes)
    table = leaf_digests(SCHEMA.components[0], memoryview(payload))
    return SCHEMA.encode_head(make_key(number), 0, table) + payload


def fetch(store, rows, number=0, observer=None):
    """Why a read missed, and the rows that it got."""
    buffer = bytearray(SCHEMA.num_bytes_of(rows))
    head = memoryview(bytearray(SCHEMA.head_bytes))
    read = RecordRead(
        key=make_key(number), first_token=0, head=head, rows=[(rows, memoryview(buffer))]
    )
    return read_record(store, SCHEMA, read, observer or Counters(), soon()), bytes(buffer)


def test_a_rank_reads_and_verifies_the_rows_that_it_holds(serving):
    memory, record = MemoryStore(), make_record()
    memory.put(make_key(), [record])
    peer = serving.open(serving.start(memory).address[1])
    for rows in (RowRange(0, 0, 6), RowRange(0, 1, 2), RowRange(0, 4, 6)):
        start = SCHEMA.offset_of(rows)
        expected = record[start : start + SCHEMA.num_bytes_of(rows)]
        assert fetch(peer, rows) == (None, expected)


class Lying(CorruptingStore):
    """Lends other bytes than it has."""

    def lend(self, key, seconds):
        loan = self.inner.lend(key, seconds)
        if loan is None or (self._keys is not None and key not in self._keys):
            return loan
        return loan._replace(content=self._damage(loan.content))

    def release(self, loan):
        self.inner.release(loan)


def test_other_bytes_are_no_hit_and_remove_nothing_at_the_peer(serving, caplog):
    memory, counters = MemoryStore(), Counters()
    for number in range(MAX_WRONG + 1):
        memory.put(make_key(number), [make_record(number)])
    # The last bit of the payload, which the last row alone has.
    damage = flip_bit(8 * SCHEMA.record_bytes - 1)
    wrong = [make_key(number) for number in range(MAX_WRONG)]
    server = serving.start(Lying(memory, damage=damage, keys=wrong))
    port = server.address[1]
    last, first = RowRange(0, 5, 6), RowRange(0, 0, 1)
    peer = serving.open(port, observer=counters)
    assert fetch(peer, first)[0] is None
    for number in range(MAX_WRONG):
        assert fetch(peer, last, MAX_WRONG)[0] is None
        assert fetch(peer, last, number)[0] == "bad_checksum"
    assert counters["peer_wrong_records"] == MAX_WRONG
    assert memory.stat().num_records == MAX_WRONG + 1
    with pytest.raises(StoreError, match=f"sent {MAX_WRONG} wrong records"):
        peer.read(make_key(MAX_WRONG), (), soon())
    server.close()
    serving.start(memory, port)
    assert fetch(peer, last)[0] is None


def test_a_peer_is_not_blamed_for_what_another_one_sent(serving):
    memories = MemoryStore(), MemoryStore()
    memories[1].put(make_key(), [make_record()])
    honest = serving.start(memories[0])
    liar = serving.start(Lying(memories[1], damage=flip_bit(-1)))
    counters = Counters()
    peers = serving.open(honest.address[1], liar.address[1], observer=counters)
    assert fetch(peers, RowRange(0, 0, 6))[0] is not None
    assert counters["peer_wrong_records"] == 1


def test_a_peer_is_not_blamed_for_what_its_reader_computed_wrong(serving):
    memory, counters = MemoryStore(), Counters()
    for number in range(MAX_WRONG):
        memory.put(make_key(number), [make_record(number)])
    peer = serving.open(serving.start(memory).address[1], observer=counters)
    for number in range(MAX_WRONG):
        assert fetch(peer, RowRange(0, 0, 6), number)[0] is None
        peer.discard(make_key(number), COMPUTED_WRONG)
    assert counters["peer_wrong_records"] == 0
    peer.discard(make_key(0), ReadFault.BAD_CHECKSUM)
    assert counters["peer_wrong_records"] == 1  # that it sent the record is still known


class OneSlot:
    """Lends one record, from a slot that another chunk gets when the test says so."""

    def __init__(self, content):
        self.slot, self.is_here = bytearray(content), True

    def lend(self, key, seconds):
        return DictLoan((memoryview(self.slot),)) if self.is_here else None

    def release(self, loan):
        pass


LONG = KVGroup(num_layers=48, num_kv_heads=8, content_size=512, dtype="float32", block_size=16)


@pytest.mark.parametrize("seconds", [30.0, 0.3], ids=["while lent", "after the loan"])
def test_a_slot_that_is_reused_in_mid_read_is_a_miss_and_no_blame(serving, relay, seconds):
    schema = RecordSchema.for_groups(namespace=SPACE, chunk_tokens=32, groups=(LONG,))
    payload = random.Random(5).randbytes(schema.payload_bytes)
    table = leaf_digests(schema.components[0], memoryview(payload))
    lender = OneSlot(schema.encode_head(make_key(), 0, table) + payload)
    server = serving.start(lender, bounds=Bounds(answer_seconds=seconds))
    between, counters = relay(server.address[1]), Counters()
    between.fault = 2 << 20, "held"
    peer = serving.open(between.port, observer=counters)
    rows, head = RowRange(0, 0, 48 * 8), memoryview(bytearray(schema.head_bytes))
    buffer = memoryview(bytearray(schema.payload_bytes))
    read = RecordRead(key=make_key(), first_token=0, head=head, rows=[(rows, buffer)])
    with ThreadPoolExecutor(1) as pool:
        missed = pool.submit(read_record, peer, schema, read, counters, soon())
        # On a machine that stalls, the loan may end before so much has come.
        wait_until(lambda: between.reached or missed.done(), "a part of the record has come")
        if seconds < 1:
            wait_until(lambda: server.num_connections == 0, "the server has given it up")
        lender.is_here = False
        lender.slot[:] = bytes(len(lender.slot))
        between.resume.set()
        assert missed.result(60) == ("absent" if seconds > 1 else "io_error")
    assert counters["peer_wrong_records"] == 0


# -- processes ----------------------------------------------------------------------------------


@pytest.fixture
def other_process(tmp_path):
    """A peer in another process."""
    root = tmp_path / "kv"
    with open_one(root.as_uri()) as store:
        for number in range(4):
            store.put(make_key(number), [make_value(4 << 20, number)])
    with running_peer(root, SPACE, tmp_path) as peer:
        yield peer


def test_a_peer_that_is_stopped_ends_with_the_deadline_and_goes_on_later(other_process):
    with open_one(other_process.url) as store:
        assert read_value(store, make_key()) == make_value(4 << 20)
        other_process.process.pause()
        started = time.monotonic()
        with pytest.raises(StoreError, match="no answer in time"):
            store.read(make_key(), (), started + 0.3)
        with pytest.raises(StoreError):  # a connection that no process greets
            store.read(make_key(), (), soon(0.3))
        assert time.monotonic() - started < 20
        other_process.process.resume()
        assert read_value(store, make_key(1)) == make_value(4 << 20, 1)


def test_a_peer_that_is_killed_in_mid_read_is_one_error_until_it_is_back(other_process):
    outcomes = []
    with open_one(other_process.url) as store:

        def read_on():
            buffer = memoryview(bytearray(4 << 20))
            while True:
                try:
                    assert store.read(make_key(), [(0, buffer)], soon()) == 4 << 20
                except StoreError as error:
                    outcomes.append(str(error))
                    return
                assert buffer == make_value(4 << 20)

        threads = [threading.Thread(target=read_on) for _ in range(2)]
        for thread in threads:
            thread.start()
        let_run(random.Random(3).random() / 5)
        other_process.process.kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert len(outcomes) == 2
        other_process.start()
        assert read_value(store, make_key(2)) == make_value(4 << 20, 2)


# -- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("peer://127.0.0.1", "no port"),
        ("peer://127.0.0.1:7000/prefix", "an address only"),
        ("peer://user:word@127.0.0.1:7000", "an address only"),
        ("peer://10.0.0.1:7000", "no key is given"),
        ("peer://127.0.0.1:7000,worker-1:7000", "no key is given"),
        ("peer://127.0.0.1:7000?key_file=relative", "absolute"),
        ("peer://127.0.0.1:7000?key_file=/no/such/file", "cannot be read"),
        ("peer://127.0.0.1:7000?max_bytes=1GiB", "unknown"),
        ("peer://:7000", "names no peer"),
        ("peer:///path", "names no peer"),
        ("peer://[fe80::1%1]:7000", "names no peer"),
        ("peer://[fe80::1%eth0]:7000", "names no peer"),
    ],
)
def test_a_url_that_is_no_peer_is_refused(url, part, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=part) as caught:
        open_one(url)
    assert "word" not in str(caught.value)


def test_a_peer_that_does_not_exist_is_no_error_at_the_start(serving):
    (port,) = free_ports(1)
    with open_store(serving.url(port)) as store:
        assert store.where(make_key()) is not Where.HERE
    unresolved = serving.url(port).replace("127.0.0.1", "no.such.host.invalid")
    with open_store(unresolved) as store, pytest.raises(StoreError, match=r"no\.such\.host"):
        store.read(make_key(), (), soon())


def test_an_engine_that_lists_itself_finds_nothing_more(peer, memory):
    """It asks itself for what it lacks, and does not pass questions on: no circle can be."""
    with TieredStore([memory, peer]) as store:
        assert store.read(make_key(1), (), soon()) is None
        assert read_value(store, make_key()) == b"value"


def test_a_store_of_another_namespace_gets_nothing(serving, memory):
    peer = serving.open(serving.start(memory).address[1], namespace=b"o" * 32)
    with pytest.raises(StoreError, match="another model, configuration or tenant"):
        peer.read(make_key(), ())
    assert isinstance(peer, PeerStore)
