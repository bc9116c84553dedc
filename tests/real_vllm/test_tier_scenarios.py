"""What vLLM's own tests of tiers show of its tiers, shown of ours.

The scenarios are those of `tests/v1/kv_offload/tiering` (`test_fs_tier.py` and
`test_tiering_offloading.py`) of vLLM 0.32 and 0.33; docs/vllm.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.scripted_tier import (
    NUM_ROWS,
    PLACES,
    SECONDS,
    TIER,
    JobResult,
    Locality,
    LookupResult,
    ReqContext,
    Scripted,
    TieringOffloadingSpec,
    TransferJob,
    content,
    key,
    scripted,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


class Jobs:
    """Jobs given to the tier itself, without a manager, and waited for by its drain.

    Attributes:
        one: whose memory they are of.
    """

    def __init__(self, one: Scripted) -> None:
        self.one = one
        self._number = 1000

    def store(self, numbers: list[int], places: list[int] | None = None) -> JobResult:
        for place, number in enumerate(numbers):
            self.one.row(place)[:] = content(number, self.one.row_bytes)
        return self._run(numbers, places or list(range(len(numbers))), "stores")

    def load(self, numbers: list[int], places: list[int], request: str = "r") -> JobResult:
        return self._run(numbers, places, request)

    def submit(self, numbers: list[int], places: list[int], request: str) -> int:
        self._number += 1
        loads = request != "stores"
        job = TransferJob(
            job_id=self._number,
            keys=[key(number) for number in numbers],
            is_promotion=loads,
            req_context=ReqContext(req_id=request),
            **{PLACES: np.array(places, dtype=np.int32)},
        )
        (self.one.tier.submit_load if loads else self.one.tier.submit_store)(job)
        return self._number

    def _run(self, numbers: list[int], places: list[int], request: str) -> JobResult:
        number = self.submit(numbers, places, request)
        found: list[JobResult] = []

        def ends() -> bool:
            found.extend(self.one.tier.get_finished_jobs())
            return bool(found)

        # Not by its drain, which begins an epoch.
        wait_until(ends, "the job ends", SECONDS, interval=0.001)
        (result,) = found
        assert result.job_id == number
        return result

    def lookups(self, numbers: list[int], request: str = "r") -> list[LookupResult]:
        context = ReqContext(req_id=request)
        return [self.one.tier.lookup(key(number), context) for number in numbers]


@pytest.fixture
def one(tmp_path: Path, vllm_config: Any) -> Iterator[Scripted]:
    with scripted(vllm_config, tmp_path.as_uri()) as started:
        yield started


@pytest.fixture
def jobs(one: Scripted) -> Jobs:
    return Jobs(one)


def records_of(store: Path) -> list[Path]:
    return sorted(store.glob("records/*/*.safetensors"))


def flip(path: Path) -> None:
    held = bytearray(path.read_bytes())
    held[-1] ^= 1
    path.write_bytes(held)


# ---- of the file tier


def test_an_empty_tier_has_nothing(jobs: Jobs) -> None:
    assert jobs.lookups([1, 2]) == [MISS, MISS]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_what_is_stored_loads_into_other_rows_and_stays(
    count: int, jobs: Jobs, tmp_path: Path
) -> None:
    numbers = list(range(1, count + 1))
    assert jobs.store(numbers).success
    assert len(records_of(tmp_path)) == count
    assert jobs.lookups(numbers) == [HIT] * count
    places = [place + 2 for place in range(count)]
    for place in range(NUM_ROWS):
        jobs.one.row(place)[:] = bytes(jobs.one.row_bytes)
    assert jobs.load(numbers, places).success
    for number, place in zip(numbers, places, strict=True):
        assert bytes(jobs.one.row(place)) == content(number, jobs.one.row_bytes)
    assert len(records_of(tmp_path)) == count
    assert jobs.lookups(numbers) == [HIT] * count


def test_a_store_that_cannot_be_made_is_refused_at_start(vllm_config: Any) -> None:
    with (
        pytest.raises(ConfigError, match="/dev/null/store"),
        scripted(vllm_config, "file:///dev/null/store"),
    ):
        pass


@pytest.mark.parametrize("locality", ["local", ""])
def test_a_wrong_locality_is_refused_at_start(
    locality: str, tmp_path: Path, vllm_config: Any
) -> None:
    with (
        pytest.raises(ValueError, match="Locality"),
        scripted(vllm_config, tmp_path.as_uri(), {"locality": locality}),
    ):
        pass


def test_a_locality_is_the_tiers(tmp_path: Path, vllm_config: Any) -> None:
    with scripted(vllm_config, tmp_path.as_uri(), {"locality": "LOCAL"}) as one:
        assert one.tier.locality is Locality.LOCAL
        one.store(1)
        (event,) = [each for each in one.manager.take_events() if each.medium.value == "STORAGE"]
        assert event.locality is Locality.LOCAL


def test_without_kv_events_none_are_told(tmp_path: Path, vllm_config: Any) -> None:
    with scripted(vllm_config, tmp_path.as_uri(), enable_kv_cache_events=False) as one:
        one.store(1)
        assert list(one.tier.take_events()) == []


def test_a_load_of_what_is_not_there_fails(jobs: Jobs) -> None:
    result = jobs.load([9], [0])
    assert (result.success, result.successful_keys) == (False, None)


def test_a_failed_load_names_what_came_and_the_rest_misses_for_its_request(
    jobs: Jobs, tmp_path: Path
) -> None:
    numbers = [1, 2, 3]
    for number in numbers[:2]:
        assert jobs.store([number]).success
    before = records_of(tmp_path)
    assert jobs.store([3]).success
    assert jobs.lookups(numbers) == [HIT] * 3
    (bad,) = set(records_of(tmp_path)) - set(before)
    flip(bad)
    result = jobs.load(numbers, [0, 1, 2])
    assert (result.success, result.successful_keys) == (False, (key(1), key(2)))
    assert not bad.exists()
    assert jobs.lookups(numbers) == [HIT, HIT, MISS]
    assert jobs.lookups(numbers, "another") == [HIT, HIT, MISS]


def test_a_first_chunk_that_fails_takes_no_other_with_it(jobs: Jobs, tmp_path: Path) -> None:
    """Unlike vLLM's file tier, whose batch ends there."""
    assert jobs.store([1]).success
    (bad,) = records_of(tmp_path)
    assert jobs.store([2]).success
    assert jobs.lookups([1, 2]) == [HIT, HIT]
    flip(bad)
    assert jobs.load([1, 2], [0, 1]).successful_keys == (key(2),)
    assert jobs.lookups([1, 2]) == [MISS, HIT]


def test_a_row_that_there_is_not_fails_its_job(jobs: Jobs) -> None:
    assert not jobs.store([1], [NUM_ROWS]).success
    assert jobs.store([2]).success
    assert not jobs.load([2], [NUM_ROWS]).success


def test_jobs_are_reported_each_for_itself(jobs: Jobs) -> None:
    numbers = [jobs.submit([number], [number], "stores") for number in range(NUM_ROWS)]
    found: list[JobResult] = []

    def all_end() -> bool:
        found.extend(jobs.one.tier.get_finished_jobs())
        return len(found) == NUM_ROWS

    wait_until(all_end, "the jobs end", SECONDS, interval=0.001)
    assert sorted(result.job_id for result in found) == numbers
    assert all(result.success for result in found)


def test_a_shutdown_ends_what_is_under_way(tmp_path: Path, vllm_config: Any) -> None:
    with scripted(vllm_config, tmp_path.as_uri()) as one:
        jobs = Jobs(one)
        numbers = [jobs.submit([number], [number % NUM_ROWS], "stores") for number in range(10)]
    assert sorted(result.job_id for result in one.tier.get_finished_jobs()) == numbers


# ---- of the manager


def gone_from_memory(one: Scripted, *numbers: int) -> None:
    """Store chunks, and have others take their rows."""
    one.store(*numbers)
    one.store(*range(100, 100 + NUM_ROWS))


def test_a_chunk_that_cascades_is_pinned_until_it_is_stored(one: Scripted) -> None:
    context = one.request()
    assert one.offer([1, 2, 3, 4], context)
    assert len(one.jobs) == 1
    one.until(lambda: not one.jobs)
    one.finish(context)
    one.assert_nothing_is_held()


def test_a_failed_copy_from_the_device_does_not_cascade(one: Scripted, tmp_path: Path) -> None:
    context = one.request()
    with one.lock:
        assert one.manager.prepare_store([key(1)], context) is not None
        one.manager.complete_store([key(1)], context, success=False)
    one.finish(context)
    assert not one.jobs
    assert one.lookup(1) == (MISS, None)
    assert records_of(tmp_path) == []


def test_look_ups_of_a_step_are_one_job_for_each_request(one: Scripted) -> None:
    gone_from_memory(one, 1, 2, 3, 4)
    first, second = one.request(), one.request()
    asked = [(1, first), (2, first), (3, second), (4, second)]
    assert [one.look(number, context)[0] for number, context in asked] == [PENDING] * 4
    assert not one.jobs
    one.step()
    jobs = [each.transfer_job for each in one.jobs.values()]
    assert [list(job.keys) for job in jobs] == [[key(1), key(2)], [key(3), key(4)]]
    one.until(lambda: not one.jobs)
    assert [one.look(number, context)[0] for number, context in asked] == [HIT] * 4
    one.finish(first)
    one.finish(second)


def test_a_chunk_that_two_requests_ask_for_is_loaded_once(one: Scripted) -> None:
    gone_from_memory(one, 1)
    first, second = one.request(), one.request()
    assert [one.look(1, context)[0] for context in (first, second)] == [PENDING, PENDING]
    one.step()
    assert len(one.jobs) == 1
    one.until(lambda: not one.jobs)
    one.finish(first)
    held = one.look(1, second)
    assert held == (HIT, content(1, one.row_bytes))
    one.finish(second)


def test_a_promotion_that_fails_in_part_keeps_what_came(one: Scripted, tmp_path: Path) -> None:
    one.store(1)
    (bad,) = records_of(tmp_path)
    one.store(2, 3)
    one.store(*range(100, 100 + NUM_ROWS))
    flip(bad)
    context = one.request()
    assert [one.look(number, context)[0] for number in (1, 2, 3)] == [PENDING] * 3
    one.step()
    one.until(lambda: not one.jobs)
    assert [one.look(number, context)[0] for number in (1, 2, 3)] == [MISS, HIT, HIT]
    one.finish(context)
    one.assert_nothing_is_held()


def test_memory_that_is_full_of_what_is_pinned_is_a_miss(one: Scripted) -> None:
    gone_from_memory(one, 1)
    context = one.request()
    pinned = [key(each) for each in range(100, 100 + NUM_ROWS)]
    one.manager.prepare_load(pinned, context)
    assert one.look(1, context)[0] is MISS
    one.manager.complete_load(pinned, context)
    one.finish(context)
    assert one.lookup(1)[0] is HIT


def test_a_request_that_ends_while_its_load_is_under_way_leaves_nothing(one: Scripted) -> None:
    gone_from_memory(one, 1)
    context = one.request()
    assert one.look(1, context)[0] is PENDING
    one.step()
    one.finish(context)
    one.assert_nothing_is_held()


def test_metrics_are_defined_and_come_once(one: Scripted) -> None:
    config = {"secondary_tiers": [{**TIER, "store": "file:///unused"}]}
    defined = TieringOffloadingSpec.build_metric_definitions(config)
    name = "vllm:kvferry_tier_events"
    assert defined[name].labelnames == ("event",)
    one.store(1)
    told = one.manager.get_stats().data["data"][name]
    assert told[("put_stored",)] == 1
    again = one.manager.get_stats()
    assert again is None or ("put_stored",) not in again.data["data"].get(name, {})
