"""A host that breaks a rule is told, in tests of an engine; one that keeps them hears nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import MISS, LookupResult, Plan, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.errors import ContractError
from kvferry.observe import Counters

SIZE = 4


class Promising(SchedulerRole):
    """Has the first 16 tokens of every prompt. Notes the tokens of each step that it sees."""

    def __init__(self):
        self.seen = []

    def lookup(self, request, num_local_tokens):
        count = 16 - num_local_tokens
        return LookupResult(count) if count > 0 else MISS

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        pass

    def build_plan(self, step):
        self.seen.append([each.num_computed_tokens for each in step.scheduled])
        return Plan()

    def update_output(self, output):
        pass


class Host:
    """An engine of one request at a time. `mistake`: what it does wrong."""

    def __init__(self, guard, mistake=""):
        self.guard, self.mistake = guard, mistake
        self.preempted, self.steps = set(), []

    def admit(self, request, local=8):
        hit = self.guard.lookup(request, local).num_tokens
        first = 0 if self.mistake == "uses block 0" else 1
        request.blocks = list(range(first, first + 12))
        taken = hit + SIZE if self.mistake == "takes too much" else hit
        if self.mistake != "allocates in silence":
            self.guard.update_after_alloc(request, (request.blocks,), taken)
        request.computed = local + hit

    def step(self, request, count, invalid=()):
        ahead = SIZE * (self.mistake == "runs ahead")
        entry = SimpleNamespace(
            request=request, block_ids=(request.blocks,), num_scheduled_tokens=count,
            num_computed_tokens=request.computed + ahead,
        )  # fmt: skip
        self.plan(entry)
        if self.mistake == "plans twice":
            self.plan(entry)
        if self.mistake == "plans a step twice":
            self.guard.build_plan(self.steps[-1])
        request.computed += count
        output = WorkerOutput(invalid_block_ids=frozenset(invalid))
        self.guard.update_output(output)
        if invalid and self.mistake != "goes on after a failed load":
            request.computed = min(map(request.blocks.index, invalid)) * SIZE

    def plan(self, *entries):
        step = SimpleNamespace(
            scheduled=entries, preempted_request_ids=self.preempted, finished_request_ids=()
        )
        self.preempted = set()
        self.steps.append(step)
        self.guard.build_plan(step)

    def serve(self, name="r"):
        request = SimpleNamespace(request_id=name, all_token_ids=list(range(37)))
        if self.mistake != "shows no request":
            self.guard.on_new_request(request)
        self.admit(request)
        # Of two blocks of a load, the second fails.
        self.step(request, 10, invalid=request.blocks[3:4])
        while request.computed < 37:
            self.step(request, min(7, 37 - request.computed))
        request.all_token_ids += (5, 6)
        self.preempted = {name}
        self.plan()
        if self.mistake == "resumes in silence":
            request.computed = 0
        else:
            self.admit(request, local=0)
        while request.computed < 39:
            self.step(request, 9 if request.computed < 30 else 39 - request.computed)
        self.guard.request_finished(request, (request.blocks,))
        if self.mistake == "ends twice":
            self.guard.request_finished(request, (request.blocks,))
        if self.mistake == "goes on after the end":
            self.step(request, 1)


MISTAKES = {
    "runs ahead": "20 tokens of 'r' are computed: 16 were local, loaded or scheduled",
    "takes too much": "takes 12 tokens for 'r': 8 promised",
    "allocates in silence": "'r' without update_after_alloc.*8 tokens were promised",
    "resumes in silence": "'r' without update_after_alloc",
    "plans twice": r"a second plan for tokens \[16, 26\) of 'r'",
    "plans a step twice": "a second plan for one step",
    "uses block 0": r"tokens \[0, 9\) of 'r' in block 0",
    "shows no request": "'r' is looked up: the host did not show it",
    "goes on after a failed load": "26 tokens of 'r' are computed: 12 were",
    "ends twice": "'r' is finished: the host .* has ended it",
    "goes on after the end": "'r' is scheduled: the host .* has ended it",
}


def test_a_host_that_keeps_the_rules_hears_nothing():
    counters = Counters()
    host = Host(GuardedScheduler(Promising(), counters, block_size=SIZE, strict=True))
    host.serve()
    host.serve()  # an id may be used again
    assert counters["contract_violation"] == counters["hook_failed"] == 0
    assert len(host.steps) > 10


@pytest.mark.parametrize(("mistake", "said"), MISTAKES.items())
def test_a_host_that_breaks_a_rule_is_told(mistake, said):
    counters = Counters()
    guard = GuardedScheduler(Promising(), counters, block_size=SIZE, strict=True)
    if mistake == "uses block 0":
        guard._role.lookup = lambda *_: MISS  # a hit may begin with null blocks, before a window
    with pytest.raises(ContractError, match=said):
        Host(guard, mistake).serve()
    assert counters["contract_violation"] == 1


BEFORE, AFTER = [[16], [12], [19], [26], [33], []], [[0], [9], [18], [27], [36]]
RIGHT = [*BEFORE, *AFTER]
"""Where the steps of a right host begin, before and after it is preempted."""

SEEN = {
    "runs ahead": [[]] * 11,
    "takes too much": RIGHT,  # of its promise no more than was loaded
    "allocates in silence": [[]] * 9,
    "resumes in silence": [*BEFORE, *[[]] * 5],
    "plans twice": RIGHT,
    "plans a step twice": RIGHT,
    "uses block 0": [[8], *BEFORE[1:], *[[]] * 5],  # it holds local tokens until then
    "shows no request": RIGHT,
    "goes on after a failed load": [[16], [], [], [], *AFTER],
    "ends twice": RIGHT,
    "goes on after the end": [*RIGHT, []],
}
"""What a role sees of a host that breaks a rule: nothing whose blocks are in doubt."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_guard_that_is_not_strict_counts_and_hides_what_is_in_doubt(mistake):
    counters, role = Counters(), Promising()
    guard = GuardedScheduler(role, counters, block_size=SIZE)
    if mistake == "uses block 0":
        role.lookup = lambda *_: MISS
    Host(guard, mistake).serve()
    assert counters["contract_violation"] >= 1
    assert counters["hook_failed"] == 0
    assert role.seen == SEEN[mistake]


def test_a_guard_of_a_host_that_does_not_show_all_checks_none():
    counters, role = Counters(), Promising()
    guard = GuardedScheduler(role, counters, block_size=SIZE, checks_host=False)
    Host(guard, "runs ahead").serve()
    assert counters["contract_violation"] == 0
    assert [each[0] - SIZE for each in role.seen if each] == [each[0] for each in RIGHT if each]


def test_a_strict_guard_raises_what_the_role_raises():
    class Broken(Promising):
        def build_plan(self, step):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Host(GuardedScheduler(Broken(), block_size=SIZE, strict=True)).serve()
