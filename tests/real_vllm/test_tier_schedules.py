"""Any schedule of requests, jobs, resets, faults and restarts under vLLM's manager of tiers."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.real_vllm.scripted_tier import LookupResult, Scripted, content, scripted

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

DOES = st.sampled_from(
    [
        *("begin", "look", "look", "look", "offer", "offer", "step", "step", "end"),
        *("reset", "damage", "delete", "restart"),
    ]
)
NUMBERS = st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)
WAITS = st.booleans()
"""Whether all jobs end before the next step, so that what was looked up is there."""
STEPS = st.lists(st.tuples(DOES, NUMBERS, WAITS), min_size=10, max_size=30)


class Schedule:
    """Requests of one engine after another on one store.

    Attributes:
        epoch: of the weights; 0 are those of every start.
        num_loaded: rows that came from the store, of tiers that have stopped.
    """

    def __init__(self, vllm_config: Any, url: str, stack: ExitStack) -> None:
        self._config, self._url, self._stack = vllm_config, url, stack
        self._resets = self.num_loaded = 0
        self._start()

    def _start(self) -> None:
        self.epoch = 0
        self._open: list[Any] = []
        self._running = self._stack.enter_context(ExitStack())
        one = scripted(self._config, self._url)
        self._one: Scripted = self._running.enter_context(one)

    def fill(self) -> None:
        """Store chunks 1 to 8, of which memory keeps the last four."""
        self._one.store(1, 2, 3, 4)
        self._one.store(5, 6, 7, 8)

    def begin(self) -> None:
        self._open.append(self._one.request())

    def look(self, numbers: list[int]) -> None:
        for context in self._open[:2]:
            for number in numbers:
                found, held = self._one.look(number, context)
                if found is LookupResult.HIT:
                    assert held == content(number, self._one.row_bytes, self.epoch)

    def offer(self, numbers: list[int]) -> None:
        for context in self._open[-1:]:
            self._one.offer(numbers, context, self.epoch)

    def end(self) -> None:
        for context in self._open[:1]:
            self._one.finish(context)
        del self._open[:1]

    def step(self) -> None:
        self._one.step()

    def wait(self) -> None:
        self._one.step()
        self._one.until(lambda: not self._one.jobs)

    def reset(self) -> None:
        """The weights change."""
        self._one.reset()
        self._resets += 1
        self.epoch = self._resets

    def stop(self) -> None:
        """An engine ends while jobs are under way: each of them is reported, once."""
        jobs = set(self._one.jobs)
        self._running.close()
        reported = [each.job_id for each in self._one.tier.get_finished_jobs()]
        assert sorted(reported) == sorted(jobs)
        assert list(self._one.tier.get_finished_jobs()) == []
        counted = self._one.tier.counters.pop_all()
        assert counted.get("hook_failed", 0) == 0
        self.num_loaded += sum(number for name, number in counted.items() if is_load(name))

    def restart(self) -> None:
        self.stop()
        self._start()

    def settle(self) -> None:
        self.step()  # as vLLM's scheduler always does after look-ups
        while self._open:
            self.end()
        self._one.assert_nothing_is_held()

    def do(self, what: str, numbers: list[int]) -> None:
        if not self._open:
            self.begin()
        if what in ("look", "offer"):
            getattr(self, what)(numbers)
        else:
            getattr(self, what)()


def is_load(counter: str) -> bool:
    """Whether a counter is of rows that a store gave, such as `tier_reads/file/hit`."""
    return counter.startswith("tier_reads/") and counter.endswith("/hit")


def damage(store: Path, *, delete: bool) -> None:
    for record in sorted(store.glob("records/*/*.safetensors"))[:2]:
        with suppress(FileNotFoundError):
            if delete:
                record.unlink()
            else:
                held = bytearray(record.read_bytes())
                held[-1] ^= 1
                record.write_bytes(held)


def run(vllm_config: Any, steps: list[tuple[str, list[int], bool]], *, settles: bool) -> int:
    """Run a schedule on a filled store. Return how many rows the store gave."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        store = Path(folder) / "store"
        schedule = Schedule(vllm_config, store.as_uri(), stack)
        schedule.fill()
        for what, numbers, waits in steps:
            if what in ("damage", "delete"):
                damage(store, delete=what == "delete")
            else:
                schedule.do(what, numbers)
            if waits:
                schedule.wait()
        if settles:
            schedule.settle()
        schedule.stop()
    return schedule.num_loaded


def run_any(vllm_config: Any, **options: Any) -> int:
    """Run schedules that hypothesis draws. Return how many rows the stores gave."""
    loaded: list[int] = []

    @settings(deadline=None, suppress_health_check=list(HealthCheck), **options)
    @given(steps=STEPS, settles=st.booleans())
    def each(steps: list[tuple[str, list[int], bool]], *, settles: bool) -> None:
        loaded.append(run(vllm_config, steps, settles=settles))

    each()
    return sum(loaded)


def test_any_schedule_reports_each_job_once_and_holds_nothing(vllm_config: Any) -> None:
    assert run_any(vllm_config, max_examples=80) > 80


@pytest.mark.sweep
def test_any_schedule_of_a_new_seed(vllm_config: Any) -> None:
    assert run_any(vllm_config, max_examples=1000, derandomize=False, print_blob=True) > 1000
