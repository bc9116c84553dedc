"""Servers that fail while vLLM serves from them: it answers on, right and in time, and uses them
again.

The prompts are stored on the server, and the engine's memory is too small to keep them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
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
from tests.servers.places import (
    FAULT_SECONDS,
    FAULTS,
    Place,
    assert_said_if_busy,
    assert_said_once,
    valkey_place,
)

NUM_STORED, NUM_TOKENS = 4, 650
HIT = expected_hit(NUM_TOKENS)
MEMORY = "3MiB"  # five records, of one prompt
LOAD_SECONDS = 1.0
# A first look-up that asks, and what a busy machine adds.
SLACK_SECONDS = 0.25 + 30.0
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
def traffic(
    pool: Pool, models: dict[str, Path], oracle: Oracle, make_prompt: MakePrompt
) -> Iterator[Traffic]:
    """To a new engine, when all stored prompts are found."""
    prompts = [make_prompt(NUM_TOKENS) for _ in range(NUM_STORED)]
    own = list(oracle(prompts))
    process = pool.get("using servers")
    with valkey_place() as place:
        connector = kvferry(place.url, memory_bytes=MEMORY, load_timeout_seconds=LOAD_SECONDS)
        with process.engine(models["plain"], connector):
            traffic = Traffic(place, process, prompts, own)
            traffic.wait_used()
            yield traffic


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_costs_its_hits_and_is_used_again(fault: str, traffic: Traffic) -> None:
    begin, end = FAULTS[fault]
    fails = fault in ("killed", "stopped", "cut")
    said = {"full": "answers, but"}.get(fault, "not used until" if fails else "")
    begin(traffic.place)
    try:
        traffic.rounds(lambda: not said or any(said in line for line in traffic.lines()))
    finally:
        end(traffic.place)
    traffic.wait_used()
    if fails:
        assert_said_once(traffic.lines(), NUM_STORES)
    else:
        assert_said_if_busy(traffic.lines(), "it has no room for a value", num_stores=NUM_STORES)
