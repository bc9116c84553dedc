"""A small connector for tests of the guards. It keeps whole blocks in a dict, each under the tokens
up to the block's end."""

from __future__ import annotations

from typing import Any

from kvferry.contract.asynchronous import AsyncPromises, AsyncReports
from kvferry.contract.messages import (
    ASK_AGAIN,
    EMPTY_OUTPUT,
    FinishResult,
    LookupResult,
    Plan,
    WorkerOutput,
)  # fmt: skip
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import Roles
from kvferry.contract.worker import WorkerRole


class DictPlan(Plan, frozen=True, kw_only=True):
    """`loads` and `saves` hold pairs (key, block id), `recving` pairs (request id, its loads), and
    `sending` request ids."""

    loads: tuple[Any, ...] = ()
    recving: tuple[Any, ...] = ()
    saves: tuple[Any, ...] = ()
    sending: tuple[str, ...] = ()

    def filled_blocks(self):
        loads = [*self.loads, *(load for _, loads in self.recving for load in loads)]
        return frozenset(block for _, block in loads)

    def started_loads(self):
        return frozenset(request_id for request_id, _ in self.recving)


class DictScheduler(SchedulerRole):
    """Tests may change what it does while it runs.

    Attributes:
        ask_again: how often it answers "ask again" about each request.
        closed: names of the halves in the order in which they were closed.
    """

    rules = AsyncPromises

    def __init__(
        self, store: dict, *, block_size=4, is_async=False, delay_free=False, ask_again=0
    ) -> None:
        self.store, self.block_size = store, block_size
        self.is_async, self.delay_free, self.ask_again = is_async, delay_free, ask_again
        self.asked: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.loads: list = []
        self.recving: list = []
        self.loading: set[str] = set()
        self.sending: list[str] = []
        self.closed: list[str] = []

    def empty_plan(self):
        return DictPlan()

    def keys(self, tokens, first, last):
        size = self.block_size
        return [(tuple(tokens[: end + size]), end // size) for end in range(first, last, size)
                if end + size <= last]  # fmt: skip

    def lookup(self, request, num_local_tokens):
        tokens, name = request.all_token_ids, request.request_id
        limit = len(tokens) if self.is_async else len(tokens) - 1
        count = 0
        for key, _ in self.keys(tokens, num_local_tokens, limit):
            if key not in self.store:
                break
            count += self.block_size
        if count and self.asked.get(name, 0) < self.ask_again:
            self.asked[name] = self.asked.get(name, 0) + 1
            return ASK_AGAIN
        self.starts[name] = num_local_tokens
        return LookupResult(count, self.is_async and count > 0)

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        if not num_external_tokens:
            return
        first = self.starts.get(request.request_id, 0)
        keys = self.keys(request.all_token_ids, first, first + num_external_tokens)
        loads = tuple((key, block_ids[0][index]) for key, index in keys)
        if self.is_async:
            self.recving.append((request.request_id, loads))
            self.loading.add(request.request_id)
        else:
            self.loads.extend(loads)

    def build_plan(self, step):
        saves = []
        for item in step.scheduled:
            first = item.num_computed_tokens // self.block_size * self.block_size
            last = item.num_computed_tokens + item.num_scheduled_tokens
            for key, index in self.keys(item.request.all_token_ids, first, last):
                saves.append((key, item.block_ids[0][index]))
        plan = DictPlan(
            loads=tuple(self.loads), recving=tuple(self.recving), saves=tuple(saves),
            sending=tuple(self.sending),
        )  # fmt: skip
        self.loads, self.recving, self.sending = [], [], []
        return plan

    def update_output(self, output):
        self.loading -= output.finished_recving

    def request_finished(self, request, block_ids):
        if self.delay_free and request.request_id not in self.loading and block_ids[0]:
            self.sending.append(request.request_id)
            return FinishResult(True, {"blocks": len(block_ids[0])})
        return FinishResult(False)

    def close(self):
        self.closed.append("scheduler")


class DictWorker(WorkerRole):
    """Tests may change what it does while it runs.

    Attributes:
        steps_per_load: steps that an async load takes.
        steps_per_free: steps that a delayed free takes.
        lose: keys that fail to load.
        fail_whole: whether it reports the request of an async load that failed, not its blocks.
    """

    rules = AsyncReports

    def __init__(self, store: dict, *, closed: list[str] | None = None) -> None:
        self.store = store
        self.closed = [] if closed is None else closed
        self.steps_per_load, self.steps_per_free = 2, 1
        self.lose: set = set()
        self.fail_whole = False
        self.kv: dict = {}
        self.plan = DictPlan()
        self.pending: list = []
        self.sending: list[list] = []
        self.invalid: set[int] = set()

    def register_kv_caches(self, kv_caches):
        self.kv = kv_caches

    def begin_step(self, plan):
        self.plan = plan

    def _load(self, loads) -> set[int]:
        """Return the blocks that failed."""
        failed = set()
        for key, block in loads:
            is_lost = key in self.lose
            failed |= {block} if is_lost else set()
            for layer, kv in enumerate(self.kv.values()):
                kv[block] = 1000 if is_lost else self.store[key][layer]
        return failed

    def start_load(self):
        self.invalid |= self._load(self.plan.loads)
        self.pending.extend(
            [request_id, loads, self.steps_per_load] for request_id, loads in self.plan.recving
        )

    def save(self):
        if not self.invalid:
            for key, block in self.plan.saves:
                self.store[key] = [kv[block].clone() for kv in self.kv.values()]

    def collect(self, finished_request_ids):
        self.sending.extend([name, self.steps_per_free] for name in self.plan.sending)
        done, failed = set(), set()
        for entry in self.pending:
            entry[2] -= 1
            if entry[2] == 0:
                done.add(entry[0])
                bad = self._load(entry[1])
                if bad and self.fail_whole:
                    failed.add(entry[0])
                else:
                    self.invalid |= bad
        self.pending = [entry for entry in self.pending if entry[2]]
        for entry in self.sending:
            entry[1] -= 1
        sent = {name for name, left in self.sending if not left}
        self.sending = [entry for entry in self.sending if entry[1]]
        invalid, self.invalid = self.invalid, set()
        if not done and not sent and not invalid:
            return EMPTY_OUTPUT
        return WorkerOutput(
            finished_recving=frozenset(done), finished_sending=frozenset(sent),
            failed_recving=frozenset(failed), invalid_block_ids=frozenset(invalid),
        )  # fmt: skip

    def end_step(self):
        self.plan = DictPlan()

    def close(self):
        self.closed.append("worker")


def dict_roles(store: dict | None = None, worker=DictWorker, **options) -> Roles:
    """Return both halves for the embedded engine."""
    store = {} if store is None else store
    scheduler = DictScheduler(store, block_size=16, **options)
    return Roles(scheduler, worker(store, closed=scheduler.closed))


class Faulty:
    """Raises at chosen calls of chosen hooks, before or after it calls the real hook."""

    def __init__(self, faults) -> None:
        self.faults = dict(faults)  # (hook, n-th call): "before" | "after"
        self.calls: dict[str, int] = {}

    def call(self, role, hook, *args):
        number = self.calls[hook] = self.calls.get(hook, 0) + 1
        when = self.faults.get((hook, number))
        if when == "before":
            raise OSError(f"{hook} {number}")
        result = getattr(role, hook)(*args)
        if when == "after":
            raise OSError(f"{hook} {number}")
        return result


def _delegate(base, rules, hooks):
    def make(hook):
        def method(self, *args):
            return self.faulty.call(self.role, hook, *args)

        return method

    def init(self, role, faulty):
        self.role, self.faulty = role, faulty

    return type(
        f"Faulty{base.__name__}",
        (base,),
        {"__init__": init, "rules": rules, **{h: make(h) for h in hooks}},
    )


SCHEDULER_HOOKS = [
    "on_new_request", "lookup", "update_after_alloc", "build_plan", "empty_plan", "update_output",
    "request_finished", "take_events", "take_stats", "has_work", "reset", "close",
]  # fmt: skip
WORKER_HOOKS = [
    "register_kv_caches", "begin_step", "start_load", "save",
    "collect", "end_step", "close",
]  # fmt: skip
FaultyScheduler = _delegate(SchedulerRole, AsyncPromises, SCHEDULER_HOOKS)
FaultyWorker = _delegate(WorkerRole, AsyncReports, WORKER_HOOKS)
