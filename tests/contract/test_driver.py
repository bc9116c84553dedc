"""The order of one step, whatever the forward does, and what a host gets to see of the reports."""

from __future__ import annotations

import linecache
import logging
import sys
from itertools import count

import numpy as np
import pytest

from kvferry.contract import driver as driver_module
from kvferry.contract.asynchronous import REMEMBERED_REQUESTS
from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.promises import Reports
from kvferry.errors import ContractError
from kvferry.observe import Counters
from tests.contract.recording import LoadPlan, RecordingLayerwiseWorker, RecordingWorker

NORMAL_STEP = ["begin_step", "start_load", "save", "collect", "end_step"]


def ids(*names: str) -> frozenset[str]:
    return frozenset(names)


class Run:
    """A driver over a worker that reports `outputs`, one per step."""

    def __init__(
        self, *outputs: object, strict: bool = False, is_asynchronous: bool = True
    ) -> None:
        self.observer = Counters()
        self.worker = RecordingWorker(*outputs)
        if not is_asynchronous:
            self.worker.rules = Reports
        self.driver = StepDriver(self.worker, self.observer, strict=strict)

    def step(self, *, loads=(), finished=(), blocks=()) -> WorkerOutput:
        plan = LoadPlan(recving=ids(*loads), blocks=frozenset(blocks))
        with self.driver.step(plan, ids(*finished)) as step:
            pass
        return step.output

    @property
    def violations(self) -> int:
        return self.observer["contract_violation"]


# --- order -------------------------------------------------------------------------------------


def test_a3_a_step_runs_its_hooks_in_order_around_the_forward():
    run = Run()
    plan = Plan()
    with run.driver.step(plan, ids("gone")) as step:
        run.worker.calls.append("forward")
    assert run.worker.calls == [
        "begin_step", "start_load", "forward", "save", "collect", "end_step",
    ]  # fmt: skip
    assert run.worker.plans == [plan]
    assert run.worker.finished == [ids("gone")]
    assert step.output is EMPTY_OUTPUT


def test_a13_a_step_without_tokens_runs_every_hook():
    run = Run(WorkerOutput(stats={"n": 1}))
    output = run.driver.no_forward(Plan(), ids())
    assert run.worker.calls == NORMAL_STEP
    assert output.stats == {"n": 1}


def test_a_failed_forward_is_not_saved_but_collected_ended_and_raised():
    run = Run(WorkerOutput(invalid_block_ids=frozenset({3})))
    with pytest.raises(ZeroDivisionError), run.driver.step(Plan(), ids("gone")):
        raise ZeroDivisionError
    assert run.worker.calls == ["begin_step", "start_load", "collect", "end_step"]
    assert run.driver.output.invalid_block_ids == {3}
    run.step()
    assert run.worker.calls[4:] == NORMAL_STEP


@pytest.mark.parametrize(
    ("hook", "calls"),
    [
        ("begin_step", ["begin_step", "end_step"]),
        ("start_load", ["begin_step", "start_load", "end_step"]),
        ("save", ["begin_step", "start_load", "save", "end_step"]),
        ("collect", NORMAL_STEP),
        ("end_step", NORMAL_STEP),
    ],
)
def test_a_strict_driver_raises_a_fault_and_ends_the_step(hook, calls):
    worker = RecordingWorker(fail={hook})
    driver = StepDriver(worker, strict=True)
    with pytest.raises(OSError, match=f"{hook} failed"):
        driver.no_forward(Plan(), ids())
    assert worker.calls == calls
    worker.fail.clear()
    worker.calls.clear()
    driver.no_forward(Plan(), ids())
    assert worker.calls == NORMAL_STEP


class CtrlC:
    """Interrupts before a line of the driver is run: the one of this number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame, event, _argument):
        if frame.f_code.co_filename != driver_module.__file__:
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and text.strip() != "try:":  # which calls nothing: none comes there
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self

    def comes_in(self, call) -> bool:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def run_with_tokens(driver: StepDriver) -> None:
    with driver.step(Plan(), ids()):
        pass


@pytest.mark.parametrize("run", [run_with_tokens, lambda driver: driver.no_forward(Plan(), ids())])
def test_whenever_a_ctrl_c_comes_the_next_step_can_run(run):
    for number in count(1):
        worker = RecordingWorker()
        driver = StepDriver(worker)
        has_come = CtrlC(number).comes_in(lambda: run(driver))  # noqa: B023 - called at once
        worker.calls.clear()
        run(driver)
        assert worker.calls == NORMAL_STEP
        if not has_come:
            break
    assert number > 30


def test_a_step_inside_a_step_is_refused():
    run = Run()
    with run.driver.step(Plan(), ids()), pytest.raises(ContractError, match="open"):
        run.driver.begin(Plan())
    assert run.worker.calls == NORMAL_STEP


def test_ending_a_step_that_was_not_begun_is_refused():
    with pytest.raises(ContractError, match="not begun"):
        Run().driver.finish(ids())


def test_a_host_may_start_loads_after_the_forward_and_ask_before_it_ends_the_step():
    run = Run(WorkerOutput(stats={"n": 1}))
    run.driver.begin(Plan())
    run.worker.calls.append("forward")
    run.driver.start_load()
    assert run.driver.collect(ids()).stats == {"n": 1}
    assert run.driver.output.stats == {"n": 1}
    run.driver.end()
    assert run.worker.calls == ["begin_step", "forward", "start_load", "collect", "end_step"]
    assert run.step() is EMPTY_OUTPUT


@pytest.mark.parametrize("part", ["start_load", "save", "end"])
def test_a_part_of_a_step_outside_of_one_is_refused(part):
    run = Run()
    with pytest.raises(ContractError, match="not begun"):
        getattr(run.driver, part)()
    assert run.worker.calls == []


def test_layer_hooks_reach_a_worker_that_has_them_within_its_steps():
    assert StepDriver(RecordingWorker()).layerwise is None
    worker = RecordingLayerwiseWorker()
    driver = StepDriver(worker)

    def layer() -> list[str]:
        worker.calls.clear()
        driver.layerwise.wait_for_layer_load("a")
        driver.layerwise.save_layer("a", None, None)
        return worker.calls

    assert layer() == []
    with driver.step(Plan(), ids()):
        assert layer() == ["wait a", "save a"]
    assert layer() == []  # as in a warm-up run


# --- reports: async loads and delayed frees ----------------------------------------------------

# Violations; then of each step what the plan loads (+) and the host ends (!), what the worker
# reports, and what the host sees: r of an end of a load, f of a failed one, s of an end of sending.
REPORTS = {
    # The host dies of a second report. Preempted, looked up and loaded again: another load.
    "a6 once per plan": (1, "+r/->", "/r:r->r:r", "/r:r->", "+r/r:r->r:r"),
    "a6 of no plan": (1, "/r:stranger->"),
    "a10 abort while loading": (2, "+r/->", "!r/->", "/r:r->r:r", "/s:r->", "/r:r->"),
    "a10 sent while loading": (1, "+r/->", "!r/s:r->", "/r:r->r:r"),
    "never both of one request": (1, "+r/->", "!r/s:r r:r->r:r"),
    "a11 failed and ended at once": (0, "+r/r:r f:r->r:r f:r"),
    "a11 failed before its end": (1, "+r/f:r->", "/->", "/r:r->r:r f:r"),
    "a11 nothing of the next load": (1, "+r/f:r->", "/r:r->r:r f:r", "+r/r:r->r:r"),
    "a11 failed and never started": (1, "/f:r->", "+r/r:r->r:r"),
    "a9 once per life of an id": (1, "!r/->", "/s:r->s:r", "/s:r->", "!r/s:r->s:r"),
    "a9 in the step of the end": (0, "!r/s:r->s:r"),
    # Of a running request the host would die; later, its blocks would leak.
    "a9 before the end": (1, "/s:r->", "/->", "!r/->s:r", "/->"),
}


def report_of(words: str) -> WorkerOutput:
    said = [word.split(":") for word in words.split()]
    return WorkerOutput(
        finished_recving=ids(*(name for kind, name in said if kind == "r")),
        failed_recving=ids(*(name for kind, name in said if kind == "f")),
        finished_sending=ids(*(name for kind, name in said if kind == "s")),
    )


@pytest.mark.parametrize("row", REPORTS.values(), ids=REPORTS)
def test_the_host_sees_only_what_it_may(row):
    violations, *steps = row
    run = Run()
    for step in steps:
        given, _, rest = step.partition("/")
        reported, _, seen = rest.partition("->")
        run.worker.outputs = [report_of(reported)]
        loads = [given[1:]] if given[:1] == "+" else []
        ended = [given[1:]] if given[:1] == "!" else []
        output = run.step(loads=loads, finished=ended)
        assert output == report_of(seen), step
        assert (output is EMPTY_OUTPUT) == (seen == "")
    assert run.violations == violations


def test_the_memory_of_ended_requests_is_bounded():
    run = Run()
    run.step(finished=["old"])
    run.step(finished=[f"r{i}" for i in range(REMEMBERED_REQUESTS)])
    run.worker.outputs = [WorkerOutput(finished_sending=ids("old", "r7"))]
    assert run.step().finished_sending == {"r7"}


# --- reports of a worker without either --------------------------------------------------------


@pytest.mark.parametrize("name", ["finished_sending", "finished_recving", "failed_recving"])
def test_a_worker_that_declares_neither_reports_no_requests(name):
    bad = WorkerOutput(**{name: ids("r")}, invalid_block_ids=frozenset({4}))
    run = Run(bad, is_asynchronous=False)
    assert run.step(finished=["r"]) == WorkerOutput(invalid_block_ids=frozenset({4}))
    assert run.violations == 1
    strict = Run(bad, is_asynchronous=False, strict=True)
    with pytest.raises(ContractError, match="names its `rules`"):
        strict.step(finished=["r"])


@pytest.mark.parametrize("bad", [None, WorkerOutput(invalid_block_ids=frozenset({-1}))])
def test_its_malformed_reports_fail_every_block_of_the_plan(bad):
    run = Run(bad, is_asynchronous=False)
    assert run.step(blocks=[4, 5]).invalid_block_ids == {4, 5}
    assert run.violations == 1


# --- reports: blocks ---------------------------------------------------------------------------


def test_a11_invalid_blocks_pass_and_become_plain_integers():
    run = Run(WorkerOutput(invalid_block_ids=frozenset({np.int64(3), 5})))
    output = run.step()
    assert output.invalid_block_ids == {3, 5}
    assert {type(block) for block in output.invalid_block_ids} == {int}
    assert run.violations == 0


@pytest.mark.parametrize("bad", [-1, "7", 2.0, None])
def test_a11_a_malformed_block_id_fails_every_block_of_the_plan(bad):
    run = Run(WorkerOutput(invalid_block_ids=frozenset({bad, 40, np.int64(41)})))
    assert run.step(blocks=[4, 5]).invalid_block_ids == {4, 5, 40, 41}
    assert run.violations == 1


@pytest.mark.parametrize(
    "bad", [None, ({"r"}, None), {}, WorkerOutput(finished_recving=None, invalid_block_ids=[4])]
)
def test_a_report_of_another_type_fails_every_block_of_the_plan(bad):
    run = Run(bad)
    assert run.step(blocks=[4, 5]) == WorkerOutput(invalid_block_ids=frozenset({4, 5}))
    assert run.violations == 1


def test_a_malformed_report_keeps_the_failed_blocks_that_it_names():
    run = Run(WorkerOutput(finished_recving=None, invalid_block_ids=frozenset({7})))
    assert run.step(blocks=[4, 5]) == WorkerOutput(invalid_block_ids=frozenset({4, 5, 7}))


# --- reports: counted, logged once, or raised --------------------------------------------------


def test_a_violation_is_logged_once_per_rule_and_counted_each_time(caplog):
    bad = WorkerOutput(finished_recving=ids("a", "b"))
    run = Run(bad, bad)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        run.step()
        run.step()
    assert run.violations == 4
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "bad",
    [
        WorkerOutput(finished_recving=ids("r")),
        WorkerOutput(finished_sending=ids("r")),
        WorkerOutput(failed_recving=ids("r")),
        WorkerOutput(invalid_block_ids=frozenset({-1})),
        None,
    ],
)
def test_strict_raises_on_a_violation_and_still_ends_the_step(bad):
    run = Run(bad, strict=True)
    with pytest.raises(ContractError):
        run.step()
    assert run.worker.calls == NORMAL_STEP
    assert run.step() is EMPTY_OUTPUT
