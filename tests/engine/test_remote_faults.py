"""Servers that fail while an engine serves: it answers on, right and in time, and uses them again.

Half of the prompts are stored on the server, and the engine's memory is too small to keep them, so
each of these is a hit from there while the server answers, and is computed while it does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from kvferry.cache.deciding import policy
from kvferry.engine import LLM, SamplingParams
from kvferry.store.base import ASK_SECONDS
from tests.engine.rank_threads import ThreadedLLM
from tests.engine.test_llm import prompt
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
from tests.servers.valkey import ask

pytestmark = pytest.mark.slow

CHUNK_TOKENS, NUM_TOKENS = 32, 230
HIT = NUM_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
NUM_STORED = 6
LOAD_SECONDS = 1.0
# What a busy machine adds to a request.
SLACK_SECONDS = 4.0
# Ten, and what a busy machine adds: its loads are cut short, too.
BACK_SECONDS = 10.0 + 30.0
# Not what is promised, but the end of waiting for it.
WAITED_SECONDS = 150.0
CLOSE_SECONDS = 10.0
FIRST = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)
RECORD_BYTES = 28 << 10


class ColdLogits:
    """First logits of prompts by seed, of an engine without a store, and how long it takes."""

    def __init__(self, path) -> None:
        self._llm = LLM(path, prefix_caching=False)
        self._logits: dict[int, np.ndarray] = {}
        self.seconds = 0.0

    def of(self, seed: int) -> np.ndarray:
        if seed not in self._logits:
            started = time.monotonic()
            (completion,) = self._llm.generate([prompt(NUM_TOKENS, seed)], FIRST)
            self.seconds = max(self.seconds, time.monotonic() - started)
            self._logits[seed] = completion.first_logits
        return self._logits[seed]

    def close(self) -> None:
        self._llm.close()


@pytest.fixture(autouse=True)
def patient():
    """A load is cut short and refused only where it is very slow: the servers' faults are what is
    tested, and not how busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MIN_WAIT_SECONDS", LOAD_SECONDS)
        patch.setattr(policy, "SLACK_SECONDS", LOAD_SECONDS)
        yield


@pytest.fixture(scope="module")
def cold(model_dir):
    logits = ColdLogits(model_dir())
    yield logits
    logits.close()


class Traffic:
    """Requests to one engine, each of which is checked."""

    def __init__(self, llm: LLM, cold: ColdLogits) -> None:
        self.llm = llm
        self._cold = cold
        self._count = 0

    def ask(self, seed: int) -> int:
        """Tokens that the store brought."""
        expected = self._cold.of(seed)
        started = time.monotonic()
        (completion,) = self.llm.generate([prompt(NUM_TOKENS, seed)], FIRST)
        seconds = time.monotonic() - started
        limit = self._cold.seconds + ASK_SECONDS + LOAD_SECONDS + SLACK_SECONDS
        assert seconds <= limit, f"{seconds:.2f} s, and {self._cold.seconds:.2f} s cold"
        assert len(completion.token_ids) == 1
        assert np.abs(completion.first_logits - expected).max() <= 1e-3
        return completion.num_external_tokens

    def round(self) -> int:
        """One stored prompt, the next one at each call, and a new one; how much was stored."""
        self._count += 1
        found = self.ask(self._count % NUM_STORED)
        assert self.ask(1000 + self._count) == 0
        return found

    def rounds(self, seconds: float, until: Callable[[], bool] = lambda: True) -> int:
        """Traffic for so long at least, and until this is so; how many of the stored prompts were
        found."""
        end = time.monotonic() + seconds
        num_found = 0
        while time.monotonic() < end or not until():
            num_found += self.round() > 0
            assert time.monotonic() < end + WAITED_SECONDS, "what is waited for does not come"
        return num_found

    def wait_used(self) -> None:
        """Traffic until stored prompts are found again. Each of them, as some may still be in the
        engine's memory; not in a row, as a busy machine may cut some short."""
        started = time.monotonic()
        missing = set(range(NUM_STORED))
        while missing:
            if self.round() == HIT:
                missing.discard(self._count % NUM_STORED)
            assert time.monotonic() - started <= BACK_SECONDS, "the store is not used again"


@contextmanager
def serving(path, cold, url, *, make=LLM, **config):
    """Traffic to an engine that finds the stored prompts on a server. Its end is bounded, too."""
    options = {
        "chunk_tokens": CHUNK_TOKENS,
        "audit": "off",
        "load_timeout_seconds": LOAD_SECONDS,
        "memory_bytes": 20 * RECORD_BYTES,  # fewer than three prompts
    }
    with make(path, store=url, connector_options=options, prefix_caching=False, **config) as llm:
        yield Traffic(llm, cold)
        started = time.monotonic()
        llm.close()
        seconds = time.monotonic() - started
    assert seconds <= CLOSE_SECONDS


@contextmanager
def serving_hits(path, cold, url):
    """The same, when the prompts are stored and found."""
    with serving(path, cold, url) as traffic:
        for seed in range(NUM_STORED):
            traffic.ask(seed)
            assert traffic.llm.drain(60.0)
        traffic.wait_used()  # a busy machine may cut some loads short
        yield traffic


def said(caplog, text):
    """Whether it is in the log, when it is asked."""
    return lambda: text in caplog.text


@pytest.fixture
def valkey():
    with valkey_place() as place:
        yield place


@pytest.fixture
def s3(seaweed, monkeypatch, request):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    with s3_place(seaweed, name_of(request.node.name)) as place:
        yield place


@pytest.fixture
def memory_of_others(mooncake, request):
    with mooncake_place(mooncake, name_of(request.node.name)) as place:
        yield place


@pytest.fixture
def values_of_others(tmp_path):
    with mooncake_values_place(tmp_path) as place:
        yield place


# Where values pass the proxy.
THROUGH_PROXY = ["valkey", "s3", "values_of_others"]
PLACES = ["valkey", "s3", "memory_of_others"]


@pytest.fixture(params=PLACES)
def place(request):
    return request.getfixturevalue(request.param)


def change_password(place):
    place.server.ask("CONFIG", "SET", "requirepass", "new")
    # Connections that stand stay logged in.
    ask(place.server.port, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes", password="new")


BREAKS = {
    "killed": (Place.kill, Place.start),  # it comes back empty
    "stopped": (
        lambda place: place.server.process.pause(),
        lambda place: place.server.process.resume(),
    ),
    "values cut": (
        lambda place: place.proxy.cut_after(RECORD_BYTES // 2),
        lambda place: place.proxy.pass_all(),
    ),
    "another password": (
        change_password,
        lambda place: ask(place.server.port, "CONFIG", "SET", "requirepass", "", password="new"),
    ),
}
"""How a server begins to fail every request, and how that ends."""
CELLS = [
    *(("killed", place) for place in PLACES),
    *(("stopped", place) for place in PLACES),
    *(("values cut", place) for place in THROUGH_PROXY),
    ("another password", "valkey"),
]


@pytest.mark.parametrize(("fault", "place"), CELLS, indirect=["place"])
def test_a_server_that_fails_costs_its_hits_says_it_once_and_is_used_again(
    model_dir, cold, fault, place, caplog
):
    begin, end = BREAKS[fault]
    with serving_hits(model_dir(), cold, place.url) as traffic:
        begin(place)
        try:
            traffic.rounds(FAULT_SECONDS, said(caplog, "not used until"))
        finally:
            end(place)
        traffic.wait_used()
    assert_said_once(caplog.messages)


@pytest.mark.parametrize(
    ("make", "config"),
    [(LLM, {}), (ThreadedLLM, {"tensor_parallel_size": 2})],
    ids=["one rank", "two ranks"],
)
def test_an_engine_ends_while_its_server_is_stopped(model_dir, cold, place, caplog, make, config):
    with (
        ExitStack() as undo,
        serving(model_dir(), cold, place.url, make=make, **config) as traffic,
    ):
        traffic.ask(0)
        place.server.process.pause()
        undo.callback(place.server.process.resume)
        for seed in range(100, 102):
            traffic.ask(seed)  # saves it, or tries to
    # Each rank has a store of its own.
    (late,) = assert_said_if_busy(caplog.messages, "did not finish within", num_stores=2)
    assert late <= 1, caplog.messages


def test_another_tier_serves_while_one_is_stopped(model_dir, cold, valkey, s3, caplog):
    with ExitStack() as undo:
        with serving_hits(model_dir(), cold, [valkey.url, s3.url]) as traffic:
            valkey.server.process.pause()
            undo.callback(valkey.server.process.resume)
            num_found = traffic.rounds(FAULT_SECONDS, said(caplog, f"{valkey.url}: not used"))
            until = time.monotonic() + BACK_SECONDS
            while num_found < 2:
                num_found += traffic.round() > 0
                assert time.monotonic() < until, "the other tier does not serve"
            valkey.server.process.resume()
            traffic.wait_used()
            # The other tier has all that was found.
            traffic.rounds(0.0, said(caplog, f"{valkey.url}: used again"))
        of_valkey = [line for line in caplog.messages if valkey.url in line]
        assert_said_once(of_valkey)
        assert_said_if_busy([line for line in caplog.messages if line not in of_valkey])
