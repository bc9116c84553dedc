"""Stores that fail under vLLM's manager of tiers: right or a miss, in time, and nothing is held.

The manager asserts in the engine's core where a job is reported twice, or one that it never gave.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.scripted_tier import (
    NUM_ROWS,
    LookupResult,
    Scripted,
    content,
    scripted,
)
from tests.real_vllm.stalled_file import stalled
from tests.servers.places import FAULT_SECONDS, FAULTS, Place, valkey_place

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

NUM_STORED = 2 * NUM_ROWS
LOAD_SECONDS = 1.0
# A look-up that asks for a first time, and a load.
LATEST_SECONDS = LOAD_SECONDS + 0.25
# With a step, of most look-ups; and the most that a machine which stalls adds to any.
MEDIAN_SECONDS = LATEST_SECONDS + 0.5
LIMIT_SECONDS = LATEST_SECONDS + 15.0
BACK_SECONDS = 120.0
LATE = {"load_timeout_seconds": LOAD_SECONDS}
FAILED_STORES = ("put_failed", "put_no_space", "stores_dropped", "stores_late")


class Traffic:
    """Requests of one chunk each, all checked: twice as many are stored as memory has rows, so that
    each is asked for after it left memory.

    Attributes:
        missed: stored chunks that were computed again.
        took: seconds of each look-up; of a stored chunk and of a new one in turn.
    """

    def __init__(self, one: Scripted) -> None:
        self.missed = 0
        self.took: list[float] = []
        self._one = one
        self._turn = self._epoch = 0
        self._new = count(NUM_STORED + 1)
        for number in range(1, NUM_STORED + 1):
            one.store(number)

    def round(self) -> bool:
        """A stored chunk, and whether it hit; then a new one."""
        self._turn += 1
        hit = self._ask(self._turn % NUM_STORED + 1)
        self.missed += not hit
        assert not self._ask(next(self._new))
        return hit

    def rounds(self, until: Callable[[], bool]) -> None:
        """Traffic for as long as a fault lasts at least, and until this is so. Most look-ups end in
        time."""
        self.took.clear()
        end = time.monotonic() + FAULT_SECONDS
        while time.monotonic() < end or not until():
            self.round()
            assert time.monotonic() < end + BACK_SECONDS, "what is waited for does not come"
        for took in (self.took[::2], self.took[1::2]):
            assert statistics.median(took) < MEDIAN_SECONDS

    def reset(self) -> None:
        """The weights change: what is stored before is not found again."""
        self._one.reset()
        self._epoch += 1

    def wait_used(self) -> None:
        """Traffic until each stored chunk was found."""
        until = time.monotonic() + BACK_SECONDS
        missing = set(range(NUM_STORED))
        while missing:
            if self.round():
                missing.discard(self._turn % NUM_STORED)
            assert time.monotonic() < until, "the store is not used again"

    @property
    def failed_stores(self) -> int:
        return sum(self._one.tier.counters[name] for name in FAILED_STORES)

    def _ask(self, number: int) -> bool:
        began = time.monotonic()
        found, held = self._one.lookup(number)
        self.took.append(time.monotonic() - began)
        assert self.took[-1] < LIMIT_SECONDS
        if found is LookupResult.HIT:
            assert held == content(number, self._one.row_bytes, self._epoch)
            return True
        context = self._one.request()  # vLLM computes the chunk, and offers it
        self._one.offer([number], context, self._epoch)
        self._one.finish(context)
        self._one.step()  # as after every request; a look-up that misses at once makes none
        return False


@pytest.fixture
def valkey() -> Iterator[Place]:
    with valkey_place() as place:
        yield place


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_is_a_miss_in_time(fault: str, valkey: Place, vllm_config: Any) -> None:
    begin, end = FAULTS[fault]
    with scripted(vllm_config, valkey.url, LATE) as one:
        traffic = Traffic(one)
        traffic.wait_used()
        missed, failed = traffic.missed, traffic.failed_stores
        begin(valkey)
        if fault == "full":
            traffic.rounds(until=lambda: traffic.failed_stores > failed)
        else:
            traffic.rounds(until=lambda: traffic.missed > missed)
        one.assert_nothing_is_held()
        traffic.reset()
        traffic.round()
        end(valkey)
        traffic.wait_used()
        one.assert_nothing_is_held()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("no right to mount a file system here: run as root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_means_not_storing(small_disk: Path, vllm_config: Any) -> None:
    with scripted(vllm_config, (small_disk / "store").as_uri(), LATE) as one:
        traffic = Traffic(one)
        traffic.rounds(until=lambda: traffic.failed_stores > 0)
        traffic.wait_used()  # what was stored before is there
        one.assert_nothing_is_held()


def test_a_read_that_hangs_fails_in_time_and_writes_nothing_later(
    tmp_path: Path, vllm_config: Any
) -> None:
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        one.store(1)
    (record,) = (tmp_path / "records").glob("*/*.safetensors")
    took = []
    for _ in range(3):
        with stalled(record) as file, scripted(vllm_config, tmp_path.as_uri(), LATE) as one:
            began = time.monotonic()
            assert one.lookup(1)[0] is LookupResult.MISS
            took.append(time.monotonic() - began)
            assert file.asked.is_set()
            one.store(2, 3, 4, 5)
            file.release()
            for number in (2, 3, 4, 5):
                assert one.lookup(number) == (LookupResult.HIT, content(number, one.row_bytes))
            one.assert_nothing_is_held()
    assert statistics.median(took) < MEDIAN_SECONDS
    assert max(took) < LIMIT_SECONDS
