"""Servers that fail: every page is right or a miss, and every call ends in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import count

import pytest
import torch

from kvferry.store.base import ASK_SECONDS
from tests.adapters.sglang import host
from tests.adapters.sglang.conftest import Attach
from tests.adapters.sglang.host import chain
from tests.servers.places import FAULT_SECONDS, FAULTS, valkey_place

PROMPTS = (1, 2, 3)
NUM_PAGES = 3
LOAD_SECONDS = 1.0
# A look-up that asks, a load, and what a busy machine adds.
LIMIT_SECONDS = ASK_SECONDS + LOAD_SECONDS + 3.0
BACK_SECONDS = 120.0
FAILED_STORES = ("put_failed", "put_no_space", "stores_dropped", "stores_late")


class Traffic:
    """Prompts of three pages each, all checked. What misses is computed, and offered.

    Attributes:
        missed: prompts of `PROMPTS` that were computed again.
        seconds: of each prefetch.
    """

    def __init__(self, controller: host.Controller) -> None:
        self.missed = 0
        self.seconds: list[float] = []
        self._controller = controller
        self._new = count(max(PROMPTS) + 1)

    def round(self) -> bool:
        """All prompts, and a new one. Return whether all that is stored came back."""
        missed = sum(not self._ask(prompt) for prompt in PROMPTS)
        self.missed += missed
        assert not self._ask(next(self._new))
        return not missed

    def rounds(self, until: Callable[[], bool]) -> None:
        """Traffic for as long as a fault lasts at least, and until this is so."""
        end = time.monotonic() + FAULT_SECONDS
        while time.monotonic() < end or not until():
            self.round()
            assert time.monotonic() < end + BACK_SECONDS, "what is waited for does not come"

    def wait_used(self) -> None:
        until = time.monotonic() + BACK_SECONDS
        while not self.round():
            assert time.monotonic() < until, "the store is not used again"

    @property
    def failed_stores(self) -> int:
        return sum(self._controller.backend.counters[name] for name in FAILED_STORES)

    def _ask(self, prompt: int) -> bool:
        keys, pool = chain(NUM_PAGES, prompt), self._controller.pool
        written = [pool.fill(page, 100 * prompt + page) for page in range(NUM_PAGES)]
        began = time.monotonic()
        found = self._controller.prefetch(keys, [3, 4, 5])
        self.seconds.append(time.monotonic() - began)
        for page in range(found):
            assert torch.equal(pool.page(3 + page), written[page])
        if found < NUM_PAGES:
            self._controller.backup(keys, [0, 1, 2])
        return found == NUM_PAGES


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_costs_misses_in_time(fault: str, attach: Attach) -> None:
    begin, end = FAULTS[fault]
    with valkey_place() as place:
        controller = attach(store=place.url, load_timeout_seconds=LOAD_SECONDS)
        traffic = Traffic(controller)
        traffic.wait_used()
        missed, failed = traffic.missed, traffic.failed_stores
        traffic.seconds.clear()
        begin(place)
        if fault == "full":
            traffic.rounds(until=lambda: traffic.failed_stores > failed)
        else:
            traffic.rounds(until=lambda: traffic.missed > missed)
        assert statistics.median(traffic.seconds) < LIMIT_SECONDS
        end(place)
        traffic.wait_used()
        assert controller.backend.counters["hook_failed"] == 0
