"""Servers that fail while vLLM serves from them: it answers on, right and in time, and uses them
again.

The prompts are stored on the server, and the engine's memory is too small to keep them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    Answer,
    Engine,
    Oracle,
    Process,
    assert_same,
    expected_hit,
    kvferry,
)
from tests.servers.mooncake import MooncakeServer
from tests.servers.places import (
    FAULT_SECONDS,
    Place,
    assert_said_if_busy,
    assert_said_once,
    mooncake_place,
    mooncake_values_place,
    name_of,
    s3_place,
    valkey_place,
)
from tests.servers.seaweed import SECRET_KEY, SeaweedServer
from tests.servers.valkey import ask

NUM_STORED, NUM_TOKENS = 4, 650
HIT = expected_hit(NUM_TOKENS)
MEMORY = "3MiB"  # five records, of one prompt
RECORD_BYTES = 512 << 10
LOAD_SECONDS = 1.0
# A first look-up that asks, and what a busy machine adds.
SLACK_SECONDS = 0.25 + 5.0
BACK_SECONDS = 10.0 + 50.0
NUM_STORES = 2
"""Of vLLM's scheduler, and of its worker."""


class Traffic:
    """Requests to an engine that has a store on a server, each of which is checked.

    Attributes:
        place: the server.
    """

    def __init__(
        self, place: Place, process: Process, prompts: list[list[int]], own: list[Answer]
    ) -> None:
        self.place = place
        self._process = process
        self._log_start = process.log.stat().st_size
        self._engine = Engine(process)
        self._prompts = prompts
        self._own = own
        self._turn = 0
        self._salts = (f"new {number}" for number in count())
        # Of a first request, without what only the very first one does.
        self._cold_seconds = [self._ask(0, next(self._salts)).seconds or 0.0 for _ in range(2)][1]

    def round(self) -> int:
        """One of the stored prompts, the next one at each call, and a new one; how many tokens
        were stored."""
        self._turn += 1
        index = self._turn % NUM_STORED
        found = self._check(index, self._ask(index, None))
        assert self._check(index, self._ask(index, next(self._salts))) == 0
        return found

    def rounds(self, until: Callable[[], bool] = lambda: True) -> int:
        """Traffic for as long as a fault lasts at least, and until this is so; tokens found."""
        end = time.monotonic() + FAULT_SECONDS
        found = 0
        while time.monotonic() < end or not until():
            found += self.round()
            assert time.monotonic() < end + BACK_SECONDS, "what is waited for does not come"
        return found

    def wait_used(self) -> None:
        """Traffic until each stored prompt was found whole; not in a row, as a busy machine may cut
        some short."""
        until = time.monotonic() + BACK_SECONDS
        missing = set(range(NUM_STORED))
        while missing:
            if self.round() == HIT:
                missing.discard(self._turn % NUM_STORED)
            assert time.monotonic() < until, "the store is not used again"

    def lines(self) -> list[str]:
        """What the engine said of the store since it began: on a busy machine that may also be
        before a fault, and then it says less of the fault."""
        log = self._process.log.read_bytes()[self._log_start :]
        name = self.place.url.partition("?")[0]
        return [line for line in log.decode(errors="replace").splitlines() if name in line]

    def has_left_alone(self) -> bool:
        return any("not used until" in line for line in self.lines())

    def _ask(self, index: int, salt: str | None) -> Answer:
        self._process.call("reset", 30, connector=False)
        prompt = {"token_ids": self._prompts[index], "salt": salt}
        return self._engine.generate([prompt])[0]

    def _check(self, index: int, answer: Answer) -> int:
        assert_same([self._own[index]], [answer])
        limit = self._cold_seconds + LOAD_SECONDS + SLACK_SECONDS
        assert answer.seconds is not None
        assert answer.seconds <= limit, f"{answer.seconds:.2f} s, {self._cold_seconds:.2f} s cold"
        assert answer.cached is not None
        return answer.cached


@pytest.fixture
def valkey() -> Iterator[Place]:
    with valkey_place() as place:
        yield place


@pytest.fixture
def s3(seaweed: SeaweedServer, request: pytest.FixtureRequest) -> Iterator[Place]:
    with s3_place(seaweed, name_of(request.node.name)) as place:
        yield place


@pytest.fixture
def memory_of_others(mooncake: MooncakeServer, request: pytest.FixtureRequest) -> Iterator[Place]:
    with mooncake_place(mooncake, name_of(request.node.name)) as place:
        yield place


@pytest.fixture
def values_of_others(tmp_path: Path) -> Iterator[Place]:
    with mooncake_values_place(tmp_path) as place:
        yield place


ON_S3 = pytest.param("s3", marks=pytest.mark.sweep)
IN_MOONCAKE = pytest.param("memory_of_others", marks=pytest.mark.sweep)
OF_MOONCAKE = pytest.param("values_of_others", marks=pytest.mark.sweep)
ALL = pytest.mark.parametrize("traffic", ["valkey", ON_S3, IN_MOONCAKE], indirect=True)
THROUGH_PROXY = pytest.mark.parametrize("traffic", ["valkey", ON_S3, OF_MOONCAKE], indirect=True)
S3 = pytest.mark.parametrize("traffic", [ON_S3], indirect=True)
VALKEY = pytest.mark.parametrize("traffic", ["valkey"], indirect=True)


@pytest.fixture
def traffic(
    request: pytest.FixtureRequest,
    pool: Pool,
    seaweed: SeaweedServer,
    mooncake: MooncakeServer,
    models: dict[str, Path],
    oracle: Oracle,
    make_prompt: MakePrompt,
) -> Iterator[Traffic]:
    """To a new engine, when all stored prompts are found. `mooncake` makes its libraries known to
    the process, which serves all tests."""
    place: Place = request.getfixturevalue(request.param)
    prompts = [make_prompt(NUM_TOKENS) for _ in range(NUM_STORED)]
    own = list(oracle(prompts))
    process = pool.get("using servers", **seaweed.environment)
    connector = kvferry(place.url, memory_bytes=MEMORY, load_timeout_seconds=LOAD_SECONDS)
    with process.engine(models["plain"], connector):
        traffic = Traffic(place, process, prompts, own)
        traffic.wait_used()
        yield traffic


@ALL
def test_a_server_that_is_killed_and_comes_back_empty(traffic: Traffic) -> None:
    traffic.place.kill()
    traffic.rounds(traffic.has_left_alone)
    traffic.place.start()
    traffic.wait_used()
    assert_said_once(traffic.lines(), NUM_STORES)


@ALL
def test_a_server_that_stops_and_goes_on(traffic: Traffic) -> None:
    with ExitStack() as undo:
        traffic.place.server.process.pause()
        undo.callback(traffic.place.server.process.resume)
        traffic.rounds(traffic.has_left_alone)
    traffic.wait_used()
    assert_said_once(traffic.lines(), NUM_STORES)


@THROUGH_PROXY
def test_values_that_are_cut(traffic: Traffic) -> None:
    traffic.place.proxy.cut_after(RECORD_BYTES // 2)
    traffic.rounds(traffic.has_left_alone)
    traffic.place.proxy.pass_all()
    traffic.wait_used()
    assert_said_once(traffic.lines(), NUM_STORES)


@THROUGH_PROXY
def test_a_network_of_five_megabytes_a_second(traffic: Traffic) -> None:
    traffic.place.proxy.limit(5e6)
    traffic.rounds()
    traffic.place.proxy.pass_all()
    traffic.wait_used()
    assert_said_if_busy(traffic.lines(), num_stores=NUM_STORES)


@VALKEY
def test_a_full_server(traffic: Traffic) -> None:
    server = traffic.place.server
    used = re.search(rb"used_memory:(\d+)", server.ask("INFO", "memory"))
    server.ask("CONFIG", "SET", "maxmemory", used[1])
    found = traffic.rounds(lambda: any("answers, but" in line for line in traffic.lines()))
    until = time.monotonic() + BACK_SECONDS
    while not found:
        found = traffic.round()
        assert time.monotonic() < until, "a full server is not read"
    server.ask("CONFIG", "SET", "maxmemory", 0)
    traffic.wait_used()
    assert_said_if_busy(traffic.lines(), "it has no room for a value", num_stores=NUM_STORES)
    # The worker, which writes, says it once, and of a busy machine's late write perhaps instead.
    assert sum("answers, but" in line for line in traffic.lines()) == 1


@VALKEY
def test_values_that_are_evicted_under_reads(traffic: Traffic) -> None:
    server = traffic.place.server
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
    server.ask("CONFIG", "SET", "maxmemory", 16 << 20)
    traffic.rounds(lambda: b"evicted_keys:0\r" not in server.ask("INFO", "stats"))
    server.ask("CONFIG", "SET", "maxmemory", 0)
    traffic.wait_used()
    assert_said_if_busy(traffic.lines(), num_stores=NUM_STORES)


@VALKEY
def test_a_password_that_changes(traffic: Traffic) -> None:
    server = traffic.place.server
    server.ask("CONFIG", "SET", "requirepass", "new")
    # Connections that stand stay logged in.
    ask(server.port, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="new")
    assert traffic.rounds(traffic.has_left_alone) == 0
    ask(server.port, "CONFIG", "SET", "requirepass", "", password="new")
    traffic.wait_used()
    assert_said_once(traffic.lines(), NUM_STORES)


@S3
def test_a_secret_that_changes(traffic: Traffic) -> None:
    with ExitStack() as undo:
        traffic.place.server.take_secret("another")
        undo.callback(traffic.place.server.take_secret, SECRET_KEY)
        traffic.rounds(traffic.has_left_alone)
    traffic.wait_used()
    assert_said_once(traffic.lines(), NUM_STORES)
