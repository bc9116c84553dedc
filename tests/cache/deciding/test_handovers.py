"""One engine prefills, another decodes, and a store that both share is all that is between them."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from hypothesis import HealthCheck, example, given, settings

from kvferry.adapters.vllm.connector import connector_options
from kvferry.cache.deciding.policy import FEW
from kvferry.cache.deciding.scheduler import EARLY_PER_STEP
from kvferry.cache.deciding.search import Awaiting, Search, wait_of
from kvferry.cache.deciding.searches import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS
from kvferry.contract.handover import read_handover
from kvferry.contract.spec import Mode
from kvferry.store.base import PutResult, Where
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ExtraKeys, KVGroup
from tests.cache.keeping import open_store
from tests.contract.test_handover import ANY_PARAMS
from tests.store.servers.remote_client import DictClient

CHUNK = 8
PROMPT = list(range(41))
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""What proxies send to the engine that prefills."""

LIMIT = 5.0
"""The operator's cap of the waiting, by the option's default."""


class SlowClient(DictClient):
    """A server on which values appear when the test says so."""

    def __init__(self, values=None) -> None:
        super().__init__(values)
        self.held_back: dict[str, bytes] = {}
        self.order: list[str] = []  # the keys of prompts in hex, as values are put in any order
        self.is_open = threading.Event()

    def put(self, name, buffers, deadline, *, replaces=False):
        if self.is_open.is_set():
            return super().put(name, buffers, deadline, replaces=replaces)
        self.held_back.setdefault(name, b"".join(buffers))
        return PutResult.STORED

    def release(self, count: int = 1000) -> None:
        """Let the first values appear, in the order of their chunks."""
        for name in self.in_order()[:count]:
            self.values[name] = self.held_back.pop(name)

    def in_order(self) -> list[str]:
        """The names that are held back, in the order of their chunks; those of no prefill last."""
        place = {key: at for at, key in enumerate(self.order)}
        last = len(place)
        return sorted(self.held_back, key=lambda name: place.get(name.rpartition("/")[2], last))


@pytest.fixture
def server():
    return DictClient()


@pytest.fixture
def make_engine(make_host):
    """A host with a client of its own of one server. Only the test moves its clock."""

    def make(client, clock=None, **options):
        clock = clock or FakeClock()
        store = RemoteStore("memory://server", client, clock=clock)
        host = make_host(store=store, clock=clock, **options)
        host.client = client
        return host

    return make


def prefill(host, prompt=PROMPT, params=ASKED, *, settles=True, name="prefill"):
    """The parameters of a prefill's answer."""
    request = host.admitted(name, prompt, handover=read_handover(params))
    host.prefill(request)
    request.all_token_ids.append(7)
    client = getattr(host, "client", None)
    if isinstance(client, SlowClient):
        keys = host.scheduler.requests.by_id[name].keys.keys
        client.order += [key.hex() for key in keys]
    answer = host.finish(request)
    if settles:
        host.settle()
    return answer


def decode(host, params, prompt=PROMPT, name="decode", **how):
    request = host.run(name, prompt, handover=read_handover(params), **how)
    return request.num_external_tokens


def until_awaited(host, prompt, params):
    """A request that waits for its producer: the store has answered that something is missing."""
    request = host.add("waiting", prompt, handover=read_handover(params))
    await_producer(host, request)
    return request


def await_producer(host, request) -> Search:
    """Look a request up until it waits for its producer. Return its search."""

    def waits() -> bool:
        assert host.scheduler.lookup(request, 0).num_tokens is None
        return isinstance(search_of(host, request).state, Awaiting)

    wait_until(waits, "the store has answered")
    return search_of(host, request)


def search_of(host, request) -> Search:
    return host.scheduler.requests.by_id[request.request_id].search


def let_come(host, request, come) -> None:
    """Let chunks come that a request awaits, and let the pause end after which the store is asked
    for them. No question under way may see them, or miss some of them."""
    wait_until(lambda: not host.parts[0].store._keys._asked, "the store has answered")
    come()
    host.parts[0].context.clock.advance(search_of(host, request).looks.pause)


# -- what the producer says -----------------------------------------------------------------------


def test_a_prefill_says_where_its_chunks_are(make_engine, server):
    host = make_engine(server)
    answer = prefill(host)
    stamp = answer.pop("kvferry")
    assert answer.pop("remote_engine_id")
    assert answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": "prefill",
        "remote_host": None,
        "remote_port": None,
        "remote_block_ids": [[]],
        "remote_num_tokens": 41,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "pull",
        "remote_blocks_expiry_time": None,
    }
    keys = sorted(name.rpartition("/")[2] for name in server.values)
    assert stamp.pop("key") in keys
    namespace = host.scheduler.requests.namespace.hex()
    assert stamp == {"v": 1, "namespace": namespace[:16], "chunks": 5}


def fetches(host) -> int:
    """Chunks that were read so far."""
    return host.observer.snapshot().get("fetch_count", 0)


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}, {"remote_decoder": {}}, [1]],
)
def test_who_did_not_ask_is_told_nothing(make_engine, server, params):
    assert prefill(make_engine(server), params=params) is None


def test_a_prompt_shorter_than_a_chunk_has_an_answer_without_chunks(make_engine, server):
    answer = prefill(make_engine(server), [1, 2, 3])
    assert answer["kvferry"]["chunks"] == 0
    assert answer["kvferry"]["key"] is None
    host = make_engine(server)
    assert decode(host, answer, [1, 2, 3]) == 0
    assert host.observer["remote_prefills"] == 1
    assert host.observer["remote_prefills_computed"] == 0


def test_a_request_that_is_not_cached_has_no_answer(make_engine, server):
    host = make_engine(server)
    hidden = ExtraKeys(cacheable=False)
    request = host.admitted("r", PROMPT, extra_keys=hidden, handover=read_handover(ASKED))
    host.prefill(request)
    assert host.finish(request) is None


def test_what_is_held_and_no_longer_stored_is_stored_again(make_engine, server):
    """Another engine sees the store, not this engine's memory."""
    host = make_engine(server)
    host.run("before", PROMPT)
    host.settle()
    keys = set(server.values)
    server.values.clear()
    for name in keys:
        host.parts[0].store._keys.forget(bytes.fromhex(name.rpartition("/")[2]))
    request = host.add("prefill", PROMPT, handover=read_handover(ASKED))
    host.admit(request, num_local_tokens=40)
    answer = host.complete(request)
    host.settle()
    assert set(server.values) == keys
    assert decode(make_engine(server), answer) == 40


def test_a_chunk_that_found_no_slot_is_not_promised(make_engine, server):
    """The consumer does not wait for it."""
    host = make_engine(server, num_slots=2)
    answer = prefill(host)
    assert answer["kvferry"]["chunks"] < 5
    reader = make_engine(server)
    assert decode(reader, answer) == 8 * answer["kvferry"]["chunks"]


# -- what the consumer does -----------------------------------------------------------------------


def test_a_decode_waits_for_chunks_that_are_on_their_way(make_engine):
    client = SlowClient()
    answer = prefill(make_engine(client))
    host = make_engine(client)
    request = until_awaited(host, PROMPT, answer)
    for _ in range(20):
        host.step([])
        assert host.scheduler.lookup(request, 0).num_tokens is None
    let_come(host, request, client.release)
    assert host.admit(request) == 40


def test_what_has_come_is_fetched_while_the_rest_is_computed(make_engine):
    client = SlowClient()
    answer = prefill(make_engine(client))
    host = make_engine(client)
    request = until_awaited(host, PROMPT, answer)
    let_come(host, request, lambda: client.release(3))

    def steps_until(count: int):
        def is_so() -> bool:
            assert host.scheduler.lookup(request, 0).num_tokens is None
            host.step([])
            return fetches(host) == count

        return is_so

    wait_until(steps_until(3), "three chunks are fetched")
    let_come(host, request, client.release)
    assert host.admit(request) == 40


def test_what_comes_late_has_as_much_time_to_be_fetched(make_engine):
    """A host that computes a long prompt of another request asks after seconds only."""
    client, clock = SlowClient(), FakeClock()
    answer = prefill(make_engine(client))
    client.release(3)
    host = make_engine(client, clock)
    host.scheduler.policy.saw_compute(10_000, 0.01)  # so a fetch has a quarter of a second
    request = until_awaited(host, PROMPT, answer)
    while fetches(host) < 3:
        host.step([])
        assert host.scheduler.lookup(request, 0).num_tokens is None
    host.step([])
    assert host.scheduler.lookup(request, 0).num_tokens is None
    clock.advance(2.0)
    let_come(host, request, client.release)
    assert host.admit(request) == 40


def test_what_came_while_the_host_did_not_look_is_found_after_the_deadline(make_engine):
    """And the others have as much time again."""
    awaited = Awaited(make_engine)
    host, request = awaited.host, awaited.request
    awaited.come(2)
    awaited.clock.advance(LIMIT + 1)  # a step

    def are_fetched() -> bool:
        assert host.scheduler.lookup(request, 0).num_tokens is None
        host.step([])
        return fetches(host) == 2

    wait_until(are_fetched, "what came is fetched")
    awaited.clock.advance(LIMIT - 1)
    awaited.come()
    assert host.admit(request) == 40


def test_a_host_that_looks_twice_only_finds_at_the_second_look_what_came_between(make_engine):
    """The store had not answered at the first, and the time to wait is over at the second."""
    client, clock = SlowClient(), FakeClock()
    answer = prefill(make_engine(client))
    host = make_engine(client, clock)
    client.gate.clear()
    request = host.add("r", PROMPT, handover=read_handover(answer))
    assert host.scheduler.lookup(request, 0).num_tokens is None
    client.gate.set()
    let_come(host, request, client.release)
    clock.advance(LIMIT + 1)
    assert host.admit(request) == 40


def test_a_decode_that_comes_before_its_prefill_waits_for_it(make_engine, server):
    """With a proxy that sends both at once, nothing tells what the producer will store."""
    host = make_engine(server)
    params = {"do_remote_prefill": True, "remote_host": "10.1.2.3", "remote_port": 7777}
    request = until_awaited(host, PROMPT, params)
    let_come(host, request, lambda: prefill(make_engine(server)))
    assert host.admit(request) == 40


@pytest.mark.parametrize("has_some", [False, True])
def test_what_does_not_come_is_computed_after_the_deadline(make_engine, has_some, caplog):
    """Its producer was killed."""
    caplog.set_level(logging.INFO)
    client, clock = SlowClient(), FakeClock()
    answer = prefill(make_engine(client))
    if has_some:
        client.release(2)
    host = make_engine(client, clock)
    request = until_awaited(host, PROMPT, answer)
    while fetches(host) < 2 * has_some:
        host.step([])
        assert host.scheduler.lookup(request, 0).num_tokens is None
    clock.advance(LIMIT - 0.1)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    clock.advance(0.2)
    assert host.admit(request) == 16 * has_some
    host.prefill(request)
    assert host.observer["remote_prefills_computed"] == 1
    assert host.observer["miss_tokens/not_produced"] == 40 - 16 * has_some
    [line] = [r.getMessage() for r in caplog.records if "another engine" in r.getMessage()][-1:]
    assert "not_produced" in line
    assert "the rest did not come" in line


class Awaited:
    """A request whose chunks come one by one, and that has no other time than the test's."""

    def __init__(self, make_engine, num_local_tokens=0, **options) -> None:
        self.num_local_tokens = num_local_tokens
        self.client, self.clock = SlowClient(), FakeClock()
        answer = prefill(make_engine(self.client))
        self.host = make_engine(self.client, self.clock, **options)
        self.request = until_awaited(self.host, PROMPT, answer)

    def come(self, count: int = 1000) -> None:
        let_come(self.host, self.request, lambda: self.client.release(count))

    def one_comes(self) -> None:
        before = fetches(self.host)
        self.come(1)

        def is_fetched() -> bool:
            answer = self.host.scheduler.lookup(self.request, self.num_local_tokens)
            assert answer.num_tokens is None
            self.host.step([])
            return fetches(self.host) == before + 1

        wait_until(is_fetched, "one more chunk is fetched")

    def come_late(self, count: int) -> None:
        """Let chunks come one by one, each just before the limit."""
        for _ in range(count):
            self.clock.advance(LIMIT - 0.5)
            self.one_comes()


def test_each_chunk_that_comes_gives_the_others_as_much_time_again(make_engine):
    """The prefill takes longer than the limit, and makes progress."""
    awaited = Awaited(make_engine)
    awaited.come_late(4)
    awaited.clock.advance(LIMIT - 0.5)
    awaited.come()
    assert awaited.host.admit(awaited.request) == 40
    assert awaited.host.observer["remote_prefills_computed"] == 0


def test_the_store_is_asked_again_after_longer_and_longer_pauses_until_a_chunk_comes(make_engine):
    awaited = Awaited(make_engine)
    looks = search_of(awaited.host, awaited.request).looks

    def has_asked(seconds: float):
        """It waits now for so long, until it asks again."""

        def is_so() -> bool:
            assert awaited.host.scheduler.lookup(awaited.request, 0).num_tokens is None
            return looks.pause == seconds

        return is_so

    pause = FIRST_PAUSE_SECONDS
    while pause < LAST_PAUSE_SECONDS:
        wait_until(has_asked(pause), "the store is asked, and nothing has come")
        assert looks.until == awaited.clock() + pause
        awaited.clock.advance(0.9 * pause)
        assert has_asked(pause)(), "before the pause is over"
        awaited.clock.advance(0.1 * pause + 0.001)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
    wait_until(has_asked(LAST_PAUSE_SECONDS), "the pause does not get longer")
    awaited.come(1)
    wait_until(has_asked(FIRST_PAUSE_SECONDS), "a chunk came")


def test_a_prefill_that_stops_in_the_middle_is_waited_for_once_more(make_engine):
    awaited = Awaited(make_engine)
    awaited.come_late(2)
    awaited.clock.advance(LIMIT - 0.1)
    assert awaited.host.scheduler.lookup(awaited.request, 0).num_tokens is None
    awaited.clock.advance(0.2)
    assert awaited.host.admit(awaited.request) == 16
    assert awaited.host.observer["miss_tokens/not_produced"] == 24


def test_a_request_that_was_preempted_does_not_wait_once_more(make_engine):
    """What it computed itself is no progress of its prefill."""
    awaited = Awaited(make_engine)
    host, request = awaited.host, awaited.request
    awaited.clock.advance(LIMIT + 0.1)
    assert host.admit(request) == 0
    host.step([request], tokens=16)
    host.settle()
    host.preempt(request)
    assert host.scheduler.lookup(request, 0).num_tokens == 16


def test_progress_counts_behind_what_only_this_engine_has(make_engine):
    """The first chunk was evicted from the store; the others come one by one."""
    awaited = Awaited(make_engine, num_local_tokens=CHUNK)
    awaited.client.held_back.pop(awaited.client.in_order()[0])
    awaited.come_late(3)
    awaited.come()
    assert awaited.host.admit(awaited.request, num_local_tokens=CHUNK) == 32


def test_requests_that_wait_leave_half_of_the_slots(make_engine):
    awaited = Awaited(make_engine, num_slots=6)
    host = awaited.host
    for _ in range(3):
        awaited.one_comes()
    awaited.come(1)
    store, keys = host.parts[0].store, host.scheduler.requests.by_id["waiting"].keys.keys

    def is_found() -> bool:
        assert host.scheduler.lookup(awaited.request, 0).num_tokens is None
        return store.where(keys[3]) is Where.HERE

    wait_until(is_found, "the fourth chunk is found")
    for _ in range(5):
        assert host.scheduler.lookup(awaited.request, 0).num_tokens is None
        host.step([])
    assert (fetches(host), host.pool.num_taken) == (3, 3)
    awaited.come()
    assert host.admit(awaited.request) == 40


AT_ONCE = {"do_remote_prefill": True}
"""Of a proxy that asks prefill and decode at one time."""

LOOK = 0.25


class Waiting:
    """A decode whose requests wait for a prefill, on a clock of the test."""

    def __init__(self, make_engine, client) -> None:
        self.clock = FakeClock()
        self.host = make_engine(client, self.clock)
        self.num_requests = 0

    def begin(self, params=AT_ONCE):
        self.num_requests += 1
        prompt = [self.num_requests, *PROMPT[1:]]
        return self.host.add(str(self.num_requests), prompt, handover=read_handover(params))

    def wait(self, request) -> float:
        """How long a request waits until it is admitted, in seconds: `LIMIT`, `LOOK` or 0, as the
        store may be asked once more at the end of a wait."""
        began_at = self.clock()
        while self.host.scheduler.lookup(request, 0).num_tokens is None:
            self.host.step([])
            self.clock.advance(0.01)
        seconds = self.clock() - began_at
        self.host.admit(request)
        self.host.prefill(request)
        self.host.finish(request)
        [wait] = [each for each in (0, LOOK, LIMIT) if each - 0.02 <= seconds < each + 1.1 * LOOK][
            -1:
        ]
        return wait

    def waits(self, count: int) -> list[float]:
        return [self.wait(self.begin()) for _ in range(count)]


@pytest.fixture
def apart(make_engine, server):
    """A decode that shares no store with its prefill."""
    return Waiting(make_engine, server)


def test_who_waits_in_vain_soon_only_looks_and_now_and_then_waits_again(apart, caplog):
    assert apart.waits(4) == [LIMIT, LOOK, LOOK, LOOK]
    for pause in (2, 4, 8, 16, 32, 60, 60):
        assert caplog.text.count("nothing came of 3 handovers") == (pause > 4)
        apart.clock.advance(pause * LIMIT - 4)
        assert apart.waits(1) == [LOOK]
        apart.clock.advance(4)
        assert apart.waits(3) == [LIMIT, LOOK, LOOK]
    [line] = [text for text in caplog.messages if "nothing came of 3 handovers" in text]
    assert "memory://server" in line
    assert "serve" in line


def test_of_requests_that_come_together_one_tries(apart):
    apart.waits(1)
    apart.clock.advance(2 * LIMIT)
    requests = [apart.begin() for _ in range(3)]
    for request in requests:
        assert apart.host.scheduler.lookup(request, 0).num_tokens is None
    apart.clock.advance(LOOK)

    def answers() -> list[int | None]:
        return [apart.host.scheduler.lookup(request, 0).num_tokens for request in requests]

    wait_until(lambda: answers() == [None, 0, 0], "two have asked once more at most")


def test_a_burst_of_waits_in_vain_counts_once(apart, caplog):
    requests = [apart.begin() for _ in range(FEW + 1)]
    for request in requests:
        assert apart.host.scheduler.lookup(request, 0).num_tokens is None
    apart.clock.advance(LIMIT)
    assert {apart.wait(request) for request in requests} <= {0, LOOK}
    assert "nothing came of" not in caplog.text
    apart.clock.advance(2 * LIMIT)
    assert apart.waits(2) == [LIMIT, LOOK]


@pytest.mark.parametrize("comes", ["at a look", "at a try"])
def test_a_chunk_that_comes_ends_the_doubt(make_engine, comes):
    client = SlowClient()
    apart = Waiting(make_engine, client)
    assert apart.waits(2) == [LIMIT, LOOK]
    if comes == "at a try":
        apart.clock.advance(2 * LIMIT)
    request = apart.begin()
    await_producer(apart.host, request)
    prefill(make_engine(client), request.all_token_ids)
    let_come(apart.host, request, client.release)
    assert apart.host.admit(request) == 40
    apart.host.prefill(request)
    apart.host.finish(request)
    assert apart.waits(2) == [LIMIT, LOOK]


def test_some_chunks_of_a_prefill_that_stops_end_the_doubt(make_engine):
    client = SlowClient()
    apart = Waiting(make_engine, client)
    assert apart.waits(2) == [LIMIT, LOOK]
    request = apart.begin()
    await_producer(apart.host, request)
    apart.host.settle()
    client.held_back.clear()  # what the first two requests saved
    prefill(make_engine(client), request.all_token_ids)
    let_come(apart.host, request, lambda: client.release(2))

    def are_fetched() -> bool:
        assert apart.host.scheduler.lookup(request, 0).num_tokens is None
        apart.host.step([])
        return fetches(apart.host) == 2

    wait_until(are_fetched, "what came is fetched")
    apart.clock.advance(LIMIT + 1)
    assert apart.host.admit(request) == 16
    apart.host.prefill(request)
    apart.host.finish(request)
    assert apart.waits(2) == [LIMIT, LOOK]


def test_a_peer_that_is_about_to_have_chunks_for_ever_is_no_other_store(make_engine, monkeypatch):
    """It says itself what it lacks."""
    monkeypatch.setattr(RemoteStore, "learn", lambda *_: True)
    where = RemoteStore.where

    def is_coming(store, key):
        found = where(store, key)
        return Where.COMING if found is Where.ABSENT else found

    monkeypatch.setattr(RemoteStore, "where", is_coming)
    client = SlowClient()
    prefiller, apart = make_engine(client), Waiting(make_engine, client)
    for number in range(1, 3):
        prompt = [number, *PROMPT[1:]]
        answer = prefill(prefiller, prompt, name=str(number))
        request = apart.begin({**answer, "remote_host": "10.0.0.1", "remote_port": 7100})
        assert apart.wait(request) == LIMIT
    assert apart.waits(2) == [LIMIT, LOOK]


def test_a_prefill_that_stops_in_the_middle_is_no_wait_in_vain(make_engine):
    awaited = Awaited(make_engine)
    awaited.come_late(2)
    awaited.clock.advance(LIMIT + 0.1)
    assert awaited.host.admit(awaited.request) == 16
    apart = Waiting(make_engine, awaited.client)
    apart.host, apart.clock = awaited.host, awaited.clock
    assert apart.waits(2) == [LIMIT, LOOK]


def test_what_is_there_at_the_first_look_is_no_wait(make_engine, server):
    """Nor is one that the host did not need: it had the prompt itself."""
    apart = Waiting(make_engine, server)
    answer = prefill(make_engine(server))
    for name in ("once", "twice"):
        assert decode(apart.host, answer, name=name) == 40
        apart.clock.advance(LIMIT + 1)
    request = apart.begin()
    apart.host.scheduler.lookup(request, 40)
    apart.clock.advance(LIMIT + 1)
    apart.host.admit(request, num_local_tokens=40)
    assert apart.waits(2) == [LIMIT, LOOK]
    assert decode(apart.host, answer, name="in doubt") == 40
    assert apart.waits(1) == [LOOK], "what was there says nothing of what may come"


@pytest.mark.parametrize("num_local", [16, 40])
def test_what_the_host_has_itself_by_now_did_not_come(apart, num_local):
    """For example, because another request began as this one does. Neither does the wait get
    longer, nor do later ones."""
    assert apart.waits(2) == [LIMIT, LOOK]
    request = apart.begin()
    search = await_producer(apart.host, request)
    until = search.state.until
    apart.host.scheduler.lookup(request, num_local)
    assert wait_of(search.state, search.wanted.plan, 0).until == until
    apart.clock.advance(LOOK + 0.1)
    assert apart.host.admit(request, num_local_tokens=num_local) == 0
    assert apart.waits(1) == [LOOK]


def test_the_wait_for_a_slow_prefill_has_a_bound(make_engine, monkeypatch):
    monkeypatch.setattr("kvferry.cache.deciding.handovers.MOST_WAITS", 2)
    awaited = Awaited(make_engine)
    awaited.come_late(2)
    awaited.clock.advance(1.1)
    assert awaited.host.admit(awaited.request) == 16


def test_a_request_does_not_wait_longer_because_others_wait(make_engine):
    awaited = Awaited(make_engine)
    params = {"do_remote_prefill": True, "remote_host": "p", "remote_port": 1}
    awaited.clock.advance(LIMIT - 0.5)
    other = awaited.host.add("other", PROMPT, handover=read_handover(params))
    assert awaited.host.scheduler.lookup(other, 0).num_tokens is None
    awaited.clock.advance(0.6)
    assert awaited.host.scheduler.lookup(other, 0).num_tokens is None
    assert awaited.host.admit(awaited.request) == 0


def test_other_requests_do_not_wait_for_what_one_waits_for(make_engine):
    client, clock = SlowClient(), FakeClock()
    answer = prefill(make_engine(client))
    host = make_engine(client, clock)
    until_awaited(host, PROMPT, answer)
    wait_until(lambda: client.asked, "the server was asked")
    other = host.add("other", PROMPT)
    wait_until(lambda: not host.parts[0].store._keys._asked, "the questions were answered")
    assert host.scheduler.lookup(other, 0) == (0, False, "absent")


def test_chunks_are_waited_for_while_there_is_a_store_in_which_they_may_appear(make_host):
    class Leaving(WrapperStore):
        is_up = True

        def probe(self, keys, **how):
            found = self.inner.probe(keys, **how)
            return found if self.is_up else Where.ABSENT

    alone = make_host(store=MemoryStore())
    request = alone.add("alone", PROMPT, handover=read_handover(AT_ONCE))
    assert alone.scheduler.lookup(request, 0) == (0, False, "not_produced")
    store = Leaving(RemoteStore("memory://server", DictClient()))
    host = make_host(store=store, clock=FakeClock())
    request = until_awaited(host, PROMPT, AT_ONCE)
    store.is_up = False
    host.parts[0].context.clock.advance(LAST_PAUSE_SECONDS)
    wait_until(lambda: host.scheduler.lookup(request, 0).num_tokens == 0, "it waits no more")


def test_who_only_takes_what_is_there_does_not_wait(make_engine, server):
    params = {"remote_kv_source": {"remote_host": "10.1.2.3", "remote_port": 7777}}
    host = make_engine(server)
    assert decode(host, params) == 0
    assert host.observer["miss_tokens/absent"] == 40
    prefill(make_engine(server))
    assert decode(make_engine(server), params) == 40


def test_the_dialect_of_offloading_tiers_is_read(make_engine, server):
    assert prefill(make_engine(server), params={"remote_decoder": {"kv_request_id": "r"}}) is None
    params = {"remote_prefiller": {"kv_request_id": "r", "remote_host": "p", "remote_port": 1}}
    assert decode(make_engine(server), params) == 40


NO_WAIT = {
    "another version": ({"v": 2}, "other_producer", "version 2"),
    "another model": ({"namespace": "0123456789abcdef"}, "other_producer", "0123456789abcdef"),
    "other tokens": ({"key": "ab" * 32}, "other_tokens", "other tokens"),
    "more chunks than there are": ({"chunks": 6}, "other_tokens", "other tokens"),
    "no stamp of ours": ({"v": "1"}, "other_producer", "version 0"),
}


@pytest.mark.parametrize("change", NO_WAIT)
def test_a_mismatch_is_a_miss_with_its_reason_and_without_a_wait(make_engine, change, caplog):
    caplog.set_level(logging.INFO)
    client = SlowClient()
    stamp, reason, words = NO_WAIT[change]
    answer = prefill(make_engine(client))
    answer["kvferry"] |= stamp
    host = make_engine(client)
    assert decode(host, answer) == 0
    assert host.observer[f"miss_tokens/{reason}"] == 40
    assert any(words in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("names", "expected"),
    [((b"weights 1", b"weights 1"), 40), ((b"weights 1", b"weights 2"), 0), (None, 0)],
    ids=["same weights", "other weights", "weights without a name"],
)
def test_after_a_reset_a_prefill_hands_over_if_its_weights_are_the_same(
    make_engine, server, tmp_path, names, expected
):
    file = tmp_path / "weights"
    options = {"weights_version_file": str(file)} if names else {}
    if names:
        file.write_bytes(names[0])
    prefiller = make_engine(server, **options)
    prefill(prefiller, list(range(100, 141)))
    if names:
        file.write_bytes(names[1])
    assert prefiller.scheduler.reset()
    answer = prefill(prefiller, name="after the reset")
    host = make_engine(server)  # in whose time nothing can be waited for
    assert decode(host, answer) == expected
    assert host.observer["miss_tokens/other_producer"] == 40 - expected


def test_the_journal_has_the_reason_and_the_log_one_line(make_engine, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    answer = prefill(make_engine(SlowClient()))
    answer["kvferry"]["v"] = 2
    host = make_engine(SlowClient(), record=str(tmp_path / "journal"))
    caplog.clear()
    request = host.admitted("decode", PROMPT, handover=read_handover(answer))
    host.preempt(request)
    host.admit(request)  # admitted again: it was logged
    host.complete(request)
    host.scheduler.close()
    line = json.loads((tmp_path / "journal").read_text())
    assert line["misses"] == {"other_producer": 40, "partial": 1}
    assert line["why"] == "its stamp has version 2, not 1"
    said = [each.getMessage() for each in caplog.records if "another engine" in each.getMessage()]
    assert said == [
        "request decode, prefilled by another engine: of 41 tokens 40 computed (other_producer), "
        "1 computed (partial); its stamp has version 2, not 1"
    ]


def test_the_blocks_of_another_kind_of_engine_are_not_waited_for(make_engine, server):
    nixl = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 4, 5]],
        "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h",
        "remote_port": 5600, "tp_size": 1,
    }  # fmt: skip
    host = make_engine(server)
    assert decode(host, nixl) == 0
    assert host.observer["miss_tokens/other_producer"] == 40


def test_a_template_with_a_clock_is_a_miss_of_what_follows_the_clock(make_engine, server):
    answer = prefill(make_engine(server))
    host = make_engine(server)
    assert decode(host, answer, [*PROMPT[:24], 99, *PROMPT[25:]]) == 24
    assert host.observer["miss_tokens/other_tokens"] == 16
    assert host.observer["remote_prefills_computed"] == 1


def test_children_that_wait_at_once_share_each_fetch(make_engine, server):
    answer = prefill(make_engine(server))
    client = DictClient(server.values)
    host = make_engine(client, load_timeout_seconds=30.0)
    children = [host.add(f"{n}_r", PROMPT, handover=read_handover(answer)) for n in range(2)]
    store, keys = host.parts[0].store, host.scheduler.requests.by_id["0_r"].keys.keys
    wait_until(
        lambda: all(store.where(each) is Where.HERE for each in keys), "all are known to be there"
    )
    client.gate.clear()
    for _ in range(3):
        assert [host.scheduler.lookup(each, 0).num_tokens for each in children] == [None, None]
        host.step([])
    client.gate.set()
    assert [host.admit(each) for each in children] == [40, 40]
    host.step(children, tokens=1)
    for each in children:
        host.check(each)
        host.finish(each)
    host.settle()
    assert fetches(host) == 5
    assert host.scheduler.is_idle


def test_a_refused_request_starts_nothing(make_engine, server):
    """Hosts send a stub with the parameters of the request through the engine, and abort it."""
    answer = prefill(make_engine(server))
    client = DictClient(server.values)
    host = make_engine(client)
    stub = host.add("stub", [0], handover=read_handover(answer))
    host.scheduler.request_finished(stub, ())
    assert host.scheduler.is_idle
    assert not client.asked


@pytest.mark.parametrize("phase", ["queued", "waiting", "fetched", "admitted"])
def test_a_client_that_goes_leaves_nothing_behind(make_engine, phase):
    client = SlowClient()
    answer = prefill(make_engine(client))
    host = make_engine(client)
    request = host.add("r", PROMPT, handover=read_handover(answer))
    if phase != "queued":
        assert host.scheduler.lookup(request, 0).num_tokens is None
    if phase in ("fetched", "admitted"):
        let_come(host, request, client.release)
    if phase == "fetched":
        while host.scheduler.lookup(request, 0).num_tokens is None:
            host.step([])
    if phase == "admitted":
        host.admit(request)
        host.finish(request)
    else:
        host.scheduler.request_finished(request, ())
    host.settle()
    assert host.scheduler.is_idle
    assert host.pool.num_taken == 0


def test_a_request_in_the_queue_is_fetched_before_the_host_looks_it_up(make_engine, server):
    """All places to run are taken."""
    answer = prefill(make_engine(server))
    host = make_engine(server)
    request = host.add("queued", PROMPT, handover=read_handover(answer))

    def is_held() -> bool:
        host.step([])
        return host.scheduler.is_idle

    wait_until(is_held, "its chunks are held")
    assert fetches(host) == 5
    assert host.scheduler.lookup(request, 0).num_tokens == 40


def test_requests_in_the_queue_leave_half_of_the_slots(make_engine, server):
    writer = make_engine(server)
    prompts = [[n] * 41 for n in range(6)]
    answers = [prefill(writer, prompt, name=f"p{n}") for n, prompt in enumerate(prompts)]
    host = make_engine(server, num_slots=16)
    for n, prompt in enumerate(prompts):
        host.add(f"d{n}", prompt, handover=read_handover(answers[n]))
    store = host.parts[0].store
    keys = [key for state in host.scheduler.requests.by_id.values() for key in state.keys.keys]
    wait_until(
        lambda: all(store.where(each) is Where.HERE for each in keys), "all are known to be there"
    )

    def is_settled() -> bool:
        host.step([])
        return host.pool.num_taken >= 8 and host.pool.is_idle

    wait_until(is_settled, "what may be fetched is held")
    for _ in range(5):
        host.step([])
    assert host.pool.num_taken < 8 + 5


def test_a_step_looks_up_a_few_of_a_long_queue_and_each_in_its_turn(make_host):
    class Asked(WrapperStore):
        def __init__(self, inner):
            super().__init__(inner)
            self.keys = []

        def where(self, key):
            self.keys.append(key)
            return self.inner.where(key)

    client, clock = SlowClient(), FakeClock()
    store = Asked(RemoteStore("memory://server", client, clock=clock))
    host = make_host(store=store, clock=clock)
    for number in range(50):
        waiting = read_handover({"do_remote_prefill": True})
        host.add(f"{number}", [number] * 41, handover=waiting)
    states = host.scheduler.requests.by_id.values()
    expected = [state.keys.keys[0] for state in states]
    wait_until(lambda: client.asked and not store.inner._keys._asked, "the store was asked")
    asked = []
    for _ in range(26):
        store.keys.clear()
        host.step([])
        assert 0 < len(set(store.keys)) <= EARLY_PER_STEP
        asked += dict.fromkeys(store.keys)
    assert asked[:50] == asked[50:100] == expected


# -- turns ----------------------------------------------------------------------------------------


def test_the_next_turn_finds_what_the_decode_generated(make_engine, server):
    answer = prefill(make_engine(server))
    decoder = make_engine(server, save_generated=True)
    request = decoder.admitted("decode", PROMPT, handover=read_handover(answer))
    decoder.prefill(request)
    for token in range(100, 124):
        request.all_token_ids.append(token)
        decoder.prefill(request, budget=1)
    request.all_token_ids.append(1)
    back = decoder.finish(request)
    decoder.settle()
    assert (back["do_remote_decode"], back["do_remote_prefill"]) == (True, False)
    assert back["kvferry"]["chunks"] == 8
    history = [*request.all_token_ids, *range(30)]
    prefiller = make_engine(server)
    second = prefiller.add("turn 2", history, handover=read_handover(back))
    assert prefiller.admit(second) == 64
    prefiller.prefill(second)
    assert prefiller.finish(second)["do_remote_prefill"] is True


def test_an_edited_history_is_computed_at_once(make_engine):
    client = SlowClient()
    client.is_open.set()
    answer = prefill(make_engine(client))
    decoder = make_engine(client, save_generated=True)
    request = decoder.run("decode", PROMPT, handover=read_handover(answer))
    assert request.num_external_tokens == 40
    edited = make_engine(client)
    back = {**answer, "do_remote_decode": True, "do_remote_prefill": False}
    assert decode(edited, back, [*PROMPT[:8], *range(50, 90)]) == 8
    assert edited.observer["miss_tokens/other_tokens"] == 36


# -- shapes ---------------------------------------------------------------------------------------

WINDOWED = tuple(
    KVGroup(
        num_layers=2, num_kv_heads=2, content_size=8, dtype="float32", block_size=4, window=window
    )
    for window in (None, 12)
)


@pytest.mark.parametrize("groups", [None, WINDOWED], ids=["full", "window"])
def test_several_ranks_and_a_directory(make_host, tmp_path, groups):
    """Two ranks prefill, one decodes, and nothing but a directory is between them."""
    stores = [open_store(tmp_path / "store") for _ in range(2)]
    writer = make_host(rank_stores=stores, store=stores[0], world_size=2, groups=groups)
    answer = prefill(writer)
    assert answer["tp_size"] == 2
    reader = make_host(store=open_store(tmp_path / "store"), groups=groups)
    assert decode(reader, answer) == 40


def test_two_engines_of_one_user_need_no_store_in_their_options(make_host, tmp_path, monkeypatch):
    """vLLM's connector gives both the same one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    producer = make_host(**connector_options(None), mode=Mode.WRITE)
    consumer = make_host(**connector_options(None), mode=Mode.READ, load_timeout_seconds=30.0)
    assert decode(consumer, prefill(producer)) == 40
    assert consumer.observer["hit_tokens/file"] == 40


def test_a_directory_waits_for_another_process(make_host, tmp_path):
    clock = FakeClock()
    reader = make_host(store=open_store(tmp_path / "store"), clock=clock)
    request = until_awaited(reader, PROMPT, {"do_remote_prefill": True})
    prefill(make_host(store=open_store(tmp_path / "store")))
    clock.advance(LAST_PAUSE_SECONDS)
    assert reader.admit(request) == 40


# -- what clients write ---------------------------------------------------------------------------


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(params=ANY_PARAMS)
# Those that stop or hang engines with NIXL's connector, and more.
@example(params={"do_remote_prefill": True})
@example(params={"do_remote_prefill": True, "remote_block_ids": []})
@example(params={"do_remote_prefill": True, "remote_block_ids": "abc", "remote_port": None})
@example(params={"do_remote_prefill": True, "remote_block_ids": [[]], "remote_engine_id": [1]})
@example(params={"do_remote_prefill": True, "do_remote_decode": True, "remote_num_tokens": "9"})
@example(params={"do_remote_prefill": True, "remote_num_tokens": 0})
@example(params={"remote_prefiller": {"remote_host": ["x"], "remote_port": -1}})
def test_parameters_of_any_form_end_in_a_right_answer(make_engine, params):
    client, clock = SlowClient(), FakeClock()
    host = make_engine(client, clock)
    request = host.add("r", PROMPT, handover=read_handover(params))
    host.scheduler.lookup(request, 0)
    clock.advance(LIMIT + 1)
    assert host.admit(request) == 0
    host.complete(request)
    host.settle()
    assert host.scheduler.is_idle
    assert host.pool.num_taken == 0
    host.close()
    host.parts[0].store.close()


def test_a_look_up_asks_a_store_once_about_a_chunk_that_is_awaited(make_host):
    asked = []

    class Counts(WrapperStore):
        def where(self, key):
            asked.append(key)
            return super().where(key)

    store = Counts(RemoteStore("memory://server", DictClient()))
    host = make_host(store=store, clock=FakeClock())
    request = until_awaited(host, PROMPT, AT_ONCE)
    first = search_of(host, request).wanted.keys[0]
    for pause in (0.0, LAST_PAUSE_SECONDS):  # within the pause, and when the store is asked again
        host.parts[0].context.clock.advance(pause)
        asked.clear()
        assert host.scheduler.lookup(request, 0).num_tokens is None
        assert asked == [first]
