"""Random traffic of one engine after another over a server that fails again and again: what is
found is right, and no job and no row is left."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.real_vllm.test_tier_faults import LATE
from tests.real_vllm.test_tier_schedules import Schedule
from tests.servers.places import FAULTS, Place, valkey_place
from tests.servers.process import let_run

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

DOES = ("begin", "look", "look", "look", "look", "offer", "offer", "end", "step", "step")
NUMBERS = range(1, 33)
"""Of the chunks: memory has rows for a few of them."""

FORWARD_SECONDS = 0.01
"""The most that a step computes."""

SOAK_SECONDS = 600.0


@pytest.fixture
def valkey() -> Iterator[Place]:
    with valkey_place() as place:
        yield place


class Soak:
    """Rounds of traffic, each without a fault, with one, and after it. While there is a fault, the
    engine resets its cache and restarts, too.

    Attributes:
        done: how often what was done.
    """

    def __init__(self, vllm_config: Any, place: Place, stack: ExitStack, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self._place = place
        self._source = random.Random(seed)
        self._schedule = Schedule(vllm_config, place.url, stack, **LATE)

    def round(self, fault: str, num_steps: int) -> None:
        begin, end = FAULTS[fault]
        self._traffic(num_steps)
        begin(self._place)
        for what in self._source.sample(("reset", "restart"), 2):
            self._traffic(num_steps // 2)
            self._do(what)
        self._traffic(num_steps // 2)
        if self._source.random() < 0.5:
            self._schedule.settle()
        end(self._place)
        self._traffic(num_steps)
        self._schedule.settle()
        self.done[fault] += 1
        self._do(self._source.choice(("reset", "restart", "step")))

    def stop(self) -> None:
        self._schedule.settle()
        self._schedule.stop()
        self.done["looks"] = self._schedule.num_looks
        self.done["hits"] = self._schedule.num_hits
        self.done["loaded"] = self._schedule.num_loaded

    def _traffic(self, num_steps: int) -> None:
        self._do("begin")
        for _ in range(num_steps):
            self._do(self._source.choice(DOES))
            self._schedule.step()
            let_run(self._source.random() * FORWARD_SECONDS)

    def _do(self, what: str) -> None:
        self._schedule.do(what, self._source.sample(NUMBERS, self._source.randint(1, 4)))
        self.done[what] += 1


def soak(
    vllm_config: Any, place: Place, is_over: Callable[[int], bool], num_steps: int, seed: int
) -> Counter[str]:
    """All faults in turn, until it is over after so many rounds."""
    with ExitStack() as stack:
        one = Soak(vllm_config, place, stack, seed)
        faults = list(FAULTS)
        number = 0
        while not is_over(number):
            one.round(faults[number % len(faults)], num_steps)
            number += 1
        one.stop()
    return one.done


def test_traffic_over_a_server_that_fails_in_every_way(valkey: Place, vllm_config: Any) -> None:
    done = soak(vllm_config, valkey, lambda rounds: rounds == len(FAULTS), 60, seed=1)
    assert done["loaded"] > 0


@pytest.mark.sweep
@pytest.mark.timeout(2 * SOAK_SECONDS)
def test_ten_minutes_of_faults(valkey: Place, vllm_config: Any) -> None:
    until = time.monotonic() + SOAK_SECONDS
    seed = random.randrange(1 << 32)
    print("seed", seed)
    done = soak(vllm_config, valkey, lambda _: time.monotonic() > until, 400, seed)
    print(dict(done))
    assert all(done[fault] for fault in FAULTS)
    assert done["loaded"] > 0
