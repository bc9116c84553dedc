"""The tier on every store: what was stored and evicted comes back after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.scripted_tier import (
    HAS_BACKPRESSURE,
    SECONDS,
    LookupResult,
    Scripted,
    content,
    scripted,
)
from tests.real_vllm.test_tier_schedules import is_load
from tests.servers.mooncake import MooncakeServer
from tests.servers.patience import make_patient
from tests.servers.places import AllServers, Place, name_of, valkey_place
from tests.servers.seaweed import SeaweedServer
from tests.servers.valkey import ValkeyCluster, ValkeyServer

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


@pytest.fixture
def servers(
    valkey_server: ValkeyServer,
    valkey_cluster: ValkeyCluster,
    seaweed: SeaweedServer,
    mooncake: MooncakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AllServers:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    make_patient(monkeypatch)
    return AllServers(valkey_server, valkey_cluster, seaweed, mooncake, tmp_path)


def wait_loaded(one: Scripted, number: int) -> None:
    """Look up until it hits: a server that a busy machine makes slow is a miss."""
    right = (LookupResult.HIT, content(number, one.row_bytes))
    wait_until(lambda: one.lookup(number) == right, f"chunk {number}", SECONDS)


@pytest.mark.parametrize("place", ["valkey", "cluster", "s3", "mooncake", "tiers"])
def test_what_was_evicted_comes_back_also_after_a_restart(
    place: str, servers: AllServers, vllm_config: Any, request: pytest.FixtureRequest
) -> None:
    url = servers.urls(name_of(request.node.name))[place]
    with scripted(vllm_config, url) as one:
        one.store(1, 2, 3, 4)
        one.store(5, 6, 7, 8)  # memory has four rows
        wait_loaded(one, 1)
    for number in (7, 2):
        with scripted(vllm_config, url) as one:
            assert one.lookup(9) == (LookupResult.MISS, None)
            wait_loaded(one, number)
            assert any(map(is_load, one.tier.counters.pop_all()))
            one.assert_nothing_is_held()


@pytest.fixture
def valkey() -> Iterator[Place]:
    with valkey_place() as place:
        yield place


PRESSURE = {
    "backpressure_cls": "EMABackpressureDetector",
    # Seconds for a MiB, of the last store alone: far above those of a row on a server that is
    # not paced, far below those on one that is. Half is forgotten in a second.
    "high_water_s": 30.0,
    "low_water_s": 15.0,
    "alpha": 1.0,
    "warmup_completions": 0,
    "decay_half_life_s": 1.0,
    "cooldown_s": 0.0,
}


class Offers:
    """Offers one new chunk after another.

    Attributes:
        given: those that vLLM gave to the tier; it drops the others.
    """

    def __init__(self, one: Scripted) -> None:
        self.one = one
        self.given: list[int] = []
        self._number = 0

    def next(self) -> bool:
        """Offer a chunk. Return whether it was given to the tier, and stored."""
        self._number += 1
        context = self.one.request()
        assert self.one.offer([self._number], context)
        is_given = bool(self.one.jobs)
        self.one.finish(context)
        self.one.until(lambda: not self.one.jobs)
        if is_given:
            self.given.append(self._number)
        return is_given

    def wait(self, *, given: bool) -> None:
        """Until some are given in a row, or until one is dropped."""
        wanted = [True] * 3 if given else [False]
        found: list[bool] = []

        def are_found() -> bool:
            found.append(self.next())
            return found[-len(wanted) :] == wanted

        wait_until(are_found, f"chunks are {'given' if given else 'dropped'}", SECONDS)


@pytest.mark.skipif(not HAS_BACKPRESSURE, reason="vLLM 0.29 has no backpressure")
def test_under_backpressure_stores_are_dropped_then_resume(valkey: Place, vllm_config: Any) -> None:
    with scripted(vllm_config, valkey.url, {"backpressure": PRESSURE}) as one:
        offers = Offers(one)
        offers.wait(given=True)
        valkey.proxy.limit(10)  # an answer of a few bytes takes half a second
        offers.wait(given=False)
        assert one.tier.bp_detector.is_under_pressure()
        valkey.proxy.pass_all()
        offers.wait(given=True)
        counted = one.tier.counters.pop_all()
        assert counted["put_stored"] == len(offers.given)
        assert counted.get("stores_late", 0) == counted.get("stores_dropped", 0) == 0
        one.store(*range(1001, 1005))  # memory has the others no more
        wait_loaded(one, offers.given[-1])
        one.assert_nothing_is_held()
