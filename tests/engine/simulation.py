"""Runs the embedded engine's scheduler with a pretend model and connector; wrong KV always shows.

The "KV" of a token is a digest of all tokens up to it. The model computes it from the KV that the
previous token's block holds, and derives the next token from the last digest. So KV that was
overwritten, shared too early, not reloaded or taken from a failed load changes what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.contract.messages import (
    ASK_AGAIN,
    FREE_NOW,
    MISS,
    FinishResult,
    LookupResult,
    Plan,
    WorkerOutput,
)
from kvferry.contract.scheduler import SchedulerRole
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import Request
from kvferry.engine.scheduler import Scheduler
from kvferry.observe import Counters

ROOT = 17
GARBAGE = -1


def digest(previous: int, token: int) -> int:
    return hash((previous, token))


def digests(token_ids: Sequence[int]) -> list[int]:
    result, last = [], ROOT
    for token in token_ids:
        last = digest(last, token)
        result.append(last)
    return result


def next_token(last: int) -> int:
    return 3 + last % 1009


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the pretend model generates."""
    token_ids = list(prompt)
    for _ in range(count):
        token_ids.append(next_token(digests(token_ids)[-1]))
    return token_ids[len(prompt) :]


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Load:
    """A load that the scheduler role promised: its blocks, and the KV that belongs in them."""

    request_id: str
    block_ids: list[int]
    content: list[list[int]]
    is_async: bool

    def is_into(self, request: Request) -> bool:
        """Whether the request waits for this load. It does not if the load was abandoned; the
        blocks are then lent to it."""
        return request.request_id == self.request_id and set(self.block_ids) <= set(
            request.block_ids
        )


class Choices:
    """The choices of the pretend connector. Tests replace the methods."""

    def lookup(self, request: Request, num_local_tokens: int, limit: int) -> LookupResult:
        """Return a legal answer of at most `limit` blocks."""
        return MISS

    def failed_from(self, load: Load) -> int | None:
        """Return the index of the first block that a load fails to bring; None if it succeeds."""
        return None

    def ends_now(self, load: Load) -> bool:
        """Whether an async load ends in this step."""
        return True

    def fails_whole(self, load: Load) -> bool:
        """Whether a failed async load is reported by request id instead of block ids."""
        return False

    def delays_free(self, request: Request) -> bool:
        return False

    def sent_now(self, request_id: str) -> bool:
        return True

    def rotten(self, block_ids: list[int]) -> list[int]:
        """Return which of these blocks, already in use, turn out to have been loaded wrongly."""
        return []

    def strangers(self) -> frozenset[str]:
        """Return ids to report although no request waits for them."""
        return frozenset()


class PretendRole(SchedulerRole):
    """A scheduler role that keeps to the contract and records the calls to it."""

    def __init__(self, choices: Choices, block_size: int, is_stored: Callable[[int], bool]) -> None:
        self.choices = choices
        self.block_size = block_size
        self.is_stored = is_stored
        self.promised: dict[str, LookupResult] = {}
        self.new_loads: list[Load] = []
        self.started_async: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.saving: dict[str, list[tuple[int, int]]] = {}  # slots of computed tokens
        self.plans = 0
        self.pending = False

    def on_new_request(self, request):
        self.calls.append(("new", request.request_id))

    def lookup(self, request, num_local_tokens):
        size = self.block_size
        assert num_local_tokens % size == 0
        assert num_local_tokens < len(request.all_token_ids), "the last token is always computed"
        content = digests(request.all_token_ids)
        limit = 0
        while (end := num_local_tokens + (limit + 1) * size) <= len(content):
            if not self.is_stored(content[end - 1]):
                break
            limit += 1
        result = self.choices.lookup(request, num_local_tokens, limit)
        # A look-up after a load means that the load failed from its first block on. The scheduler
        # then makes no second call of `update_after_alloc` for it.
        self.started_async.discard(request.request_id)
        self.promised.pop(request.request_id, None)
        if result.num_tokens is not None:
            self.promised[request.request_id] = result
            total = num_local_tokens + result.num_tokens
            assert total < len(content) or (result.is_async and total <= len(content))
        self.calls.append(("lookup", request.request_id, num_local_tokens, result.num_tokens))
        return result

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        request_id = request.request_id
        self.calls.append(("alloc", request_id, num_external_tokens))
        if request_id in self.started_async:
            assert num_external_tokens == 0, "the second call of an async load"
            self.started_async.discard(request_id)
            return
        promise = self.promised.pop(request_id, MISS)
        assert num_external_tokens == promise.num_tokens
        if not num_external_tokens:
            return
        size = self.block_size
        assert num_external_tokens % size == 0
        start = request.num_computed_tokens - num_external_tokens
        assert start % size == 0
        content = digests(request.all_token_ids)
        blocks = range(start // size, request.num_computed_tokens // size)
        self.new_loads.append(
            Load(
                request_id,
                [block_ids[0][index] for index in blocks],
                [content[index * size : (index + 1) * size] for index in blocks],
                promise.is_async,
            )
        )
        if promise.is_async:
            self.started_async.add(request_id)

    def build_plan(self, step):
        self.plans += 1
        scheduled = [entry.request.request_id for entry in step.scheduled]
        assert len(scheduled) == len(set(scheduled)), "a request is in a step twice"
        for entry in step.scheduled:
            (table,) = entry.block_ids
            end = entry.num_computed_tokens + entry.num_scheduled_tokens
            assert entry.num_scheduled_tokens > 0
            assert end <= len(entry.request.all_token_ids)
            assert len(table) * self.block_size >= end, "the table does not cover the step"
        assert set(scheduled).isdisjoint(step.preempted_request_ids)
        return Plan()

    def update_output(self, output):
        self.calls.append(("output",))

    def request_finished(self, request, block_ids):
        request_id = request.request_id
        self.calls.append(("finished", request_id, len(block_ids[0])))
        loading = request_id in self.started_async
        self.started_async.discard(request_id)
        if loading or not self.choices.delays_free(request):
            return FREE_NOW
        self.saving[request_id] = [
            (block_ids[0][position // self.block_size], position % self.block_size)
            for position in range(request.num_computed_tokens)
        ]
        return FinishResult(delay_free=True)

    def has_pending_work(self):
        return self.pending

    def count(self, *call: Any) -> int:
        return sum(1 for made in self.calls if made[: len(call)] == call)


class Simulation:
    """Drives a scheduler, and checks everything after every step."""

    def __init__(
        self,
        choices: Choices | None = None,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
        everything_stored: bool = True,
        **config: Any,
    ) -> None:
        self.choices = choices or Choices()
        self.clock = FakeClock()
        self.observer = Counters()
        self.stored: set[int] = set()
        self.block_size = block_size
        self.role = PretendRole(
            self.choices, block_size, lambda end: everything_stored or end in self.stored
        )
        config = {"max_batched_tokens": 16, "max_num_seqs": 4, **config}
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            EngineConfig(block_size=block_size, **config),
            self.pool,
            self.role,
            observer=self.observer,
            clock=self.clock,
        )
        self.kv = [[GARBAGE] * block_size for _ in range(num_blocks)]
        self.requests: dict[str, Request] = {}
        self.running: set[str] = set()
        self.loading: list[Load] = []
        self.lent: dict[str, list[int]] = {}
        self.num_requests = 0
        self.sampled: list[str] = []

    def add(self, prompt: Sequence[int], max_tokens: int = 3, **kwargs: Any) -> Request:
        request = Request(
            f"r{self.num_requests}",
            list(prompt),
            max_total_tokens=len(prompt) + max_tokens,
            **kwargs,
        )
        self.num_requests += 1
        self.requests[request.request_id] = request
        self.scheduler.add(request)
        self.check()
        return request

    def abort(self, request: Request) -> bool:
        aborted = self.scheduler.abort(request.request_id)
        self._remember_lent(request)
        self.check()
        return aborted

    def step(self):
        plans = self.role.plans
        step = self.scheduler.schedule()
        assert self.role.plans == plans + 1, "one plan per step"
        self.running -= step.preempted_request_ids
        self.running |= {entry.request.request_id for entry in step.scheduled}
        output = self._start_loads()
        output = self._rot(output)
        self.forward(step)
        output = self._collect(output)
        self.scheduler.update(step, output, self.sample)
        for request in self.requests.values():
            self._remember_lent(request)
        self.check()
        return step

    def run(self, limit: int = 500) -> None:
        """Step until nothing is left to do; more than `limit` steps mean that it hangs."""
        for _ in range(limit):
            if not self.scheduler.has_work():
                return
            self.step()
            self.clock.now += 0.001
        raise AssertionError(f"still working after {limit} steps: {self.requests}")

    def check(self) -> None:
        self.scheduler.check_integrity()
        for request in self.requests.values():
            if any(load.is_into(request) for load in self.loading):
                continue
            expected = digests(request.all_token_ids)
            for position in range(request.num_computed_tokens):
                found = self._slot(request, position)
                assert found == expected[position], f"{request!r} has wrong KV at {position}"

    # ---- the pretend model

    def _slot(self, request: Request, position: int) -> int:
        block = request.block_ids[position // self.block_size]
        return self.kv[block][position % self.block_size]

    def forward(self, step) -> None:
        self.last: dict[str, int] = {}
        for entry in step.scheduled:
            request, first = entry.request, entry.num_computed_tokens
            last = ROOT if first == 0 else self._slot(request, first - 1)
            for position in range(first, first + entry.num_scheduled_tokens):
                last = digest(last, request.all_token_ids[position])
                block = request.block_ids[position // self.block_size]
                assert block != 0, "the null block is written"
                self.kv[block][position % self.block_size] = last
            self.last[request.request_id] = last
            self.stored.update(digests(request.all_token_ids))

    def sample(self, request: Request) -> int:
        self.sampled.append(request.request_id)
        return next_token(self.last[request.request_id])

    # ---- the pretend worker

    def _start_loads(self) -> WorkerOutput:
        invalid: set[int] = set()
        for load in self.role.new_loads:
            if load.is_async:
                self.loading.append(load)
            else:
                invalid |= self._bring(load)
        self.role.new_loads.clear()
        return WorkerOutput(invalid_block_ids=frozenset(invalid))

    def _rot(self, output: WorkerOutput) -> WorkerOutput:
        lent = {block for slots in self.role.saving.values() for block, _ in slots}
        in_use = {
            request.block_ids[position // self.block_size]
            for request in self.requests.values()
            if request.request_id in self.running
            for position in range(request.num_computed_tokens)
        }
        rotten = self.choices.rotten(sorted(in_use - lent))
        for block in rotten:
            self.kv[block] = [GARBAGE] * self.block_size
        return WorkerOutput(invalid_block_ids=output.invalid_block_ids | set(rotten))

    def _bring(self, load: Load) -> set[int]:
        failed = self.choices.failed_from(load)
        good = len(load.block_ids) if failed is None else failed
        for index, block in enumerate(load.block_ids):
            content = load.content[index] if index < good else [GARBAGE] * self.block_size
            self.kv[block] = list(content)
        return set(load.block_ids[good : good + 1])

    def _collect(self, output: WorkerOutput) -> WorkerOutput:
        recving, failed, invalid = set(), set(), set(output.invalid_block_ids)
        for load in list(self.loading):
            if not self.choices.ends_now(load):
                continue
            self.loading.remove(load)
            recving.add(load.request_id)
            bad = self._bring(load)
            if bad and self.choices.fails_whole(load):
                failed.add(load.request_id)
            else:
                invalid |= bad
        sent = {name for name in self.role.saving if self.choices.sent_now(name)}
        for name in sent:
            content = [self.kv[block][at] for block, at in self.role.saving.pop(name)]
            assert content == self.lent.pop(name), f"blocks lent by {name} were overwritten"
        awaited = {load.request_id for load in self.loading} | set(self.role.saving)
        strangers = self.choices.strangers() - awaited
        return WorkerOutput(
            finished_recving=frozenset(recving) | strangers,
            finished_sending=frozenset(sent) | strangers,
            failed_recving=frozenset(failed),
            invalid_block_ids=frozenset(invalid),
        )

    def _remember_lent(self, request: Request) -> None:
        slots = self.role.saving.get(request.request_id)
        if slots is not None and request.request_id not in self.lent:
            self.lent[request.request_id] = [self.kv[block][at] for block, at in slots]


__all__ = ["ASK_AGAIN", "Choices", "Load", "LookupResult", "Simulation", "reference"]
