"""Runs the embedded engine's scheduler over a pretend connector; wrong KV always shows.

KV that was overwritten, shared too early, not reloaded or taken from a failed load changes what the
pretend model generates, and is seen after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
from kvferry.engine.request import Request
from tests.contract.tiny_host import NUM_LAYERS, ModelHost, true_kv, true_output
from tests.engine.integrity import check_scheduler


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the pretend model generates."""
    return true_output(prompt, count)[len(prompt) :]


@dataclass
class Load:
    """A load that the scheduler role promised: its blocks, and the tokens whose KV belongs there,
    with those before them."""

    request_id: str
    block_ids: list[int]
    token_ids: list[int]
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

    def strangers(self) -> frozenset[str]:
        """Return ids to report although no request waits for them."""
        return frozenset()


class PretendRole(SchedulerRole):
    """A scheduler role that keeps to the contract and records the calls to it."""

    def __init__(self, choices: Choices, block_size: int) -> None:
        self.choices = choices
        self.block_size = block_size
        self.promised: dict[str, LookupResult] = {}
        self.new_loads: list[Load] = []
        self.started_async: set[str] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.saving: dict[str, list[int]] = {}  # blocks that they lend
        self.plans = 0
        self.pending = False

    def on_new_request(self, request):
        self.calls.append(("new", request.request_id))

    def lookup(self, request, num_local_tokens):
        size = self.block_size
        assert num_local_tokens % size == 0
        assert num_local_tokens < len(request.all_token_ids), "the last token is always computed"
        num_tokens = len(request.all_token_ids)
        limit = (num_tokens - num_local_tokens) // size  # everything is stored
        result = self.choices.lookup(request, num_local_tokens, limit)
        # A look-up after a load means that the load failed from its first block on. The scheduler
        # then makes no second call of `update_after_alloc` for it.
        self.started_async.discard(request.request_id)
        self.promised.pop(request.request_id, None)
        if result.num_tokens is not None:
            self.promised[request.request_id] = result
            total = num_local_tokens + result.num_tokens
            assert total < num_tokens or (result.is_async and total <= num_tokens)
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
        stop = request.num_computed_tokens
        blocks = block_ids[0][start // size : stop // size]
        tokens = request.all_token_ids[:stop]
        self.new_loads.append(Load(request_id, list(blocks), tokens, promise.is_async))
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
        self.saving[request_id] = self.computed(request, block_ids[0])
        return FinishResult(delay_free=True)

    def computed(self, request: Request, table: Sequence[int]) -> list[int]:
        """Return the blocks that hold computed tokens."""
        return list(table[: -(-request.num_computed_tokens // self.block_size)])

    def has_work(self):
        return self.pending

    def count(self, *call: Any) -> int:
        return sum(1 for made in self.calls if made[: len(call)] == call)


class Simulation(ModelHost):
    """Drives a scheduler, and checks everything after every step."""

    def __init__(
        self,
        choices: Choices | None = None,
        *,
        num_blocks: int = 40,
        block_size: int = 4,
        **config: Any,
    ) -> None:
        self.choices = choices or Choices()
        self.role = PretendRole(self.choices, block_size)
        config = {"max_batched_tokens": 16, "max_num_seqs": 4, **config}
        super().__init__(self.role, num_blocks, block_size=block_size, **config)
        self.loading: list[Load] = []
        self.lent: dict[str, Any] = {}
        self.sampled: list[str] = []

    def send(self, prompt: Sequence[int], max_tokens: int = 3, **options: Any) -> Request:
        request = self.add(f"r{len(self.requests)}", prompt, max_tokens, **options)
        self.check()
        return request

    def abort(self, request: Request) -> bool:
        aborted = self.engine.abort(request.request_id)
        self._remember_lent()
        self.check()
        return aborted

    def step(self):
        plans = self.role.plans
        step = super().step()
        assert self.role.plans == plans + 1, "one plan per step"
        self._remember_lent()
        self.check()
        return step

    def check(self) -> None:
        check_scheduler(self.engine)
        for request in self.requests.values():
            if request.block_ids and not any(load.is_into(request) for load in self.loading):
                count, tokens = request.num_computed_tokens, request.all_token_ids
                for layer, kv in enumerate(self.kv.values()):
                    found = kv[request.block_ids].flatten()[:count].tolist()
                    assert found == true_kv(tokens[:count], layer), f"{request!r} has wrong KV"

    def sample(self, request: Request) -> int:
        self.sampled.append(request.request_id)
        return super().sample(request)

    # ---- the pretend worker

    def work(self, step) -> WorkerOutput:
        invalid: set[int] = set()
        for load in self.role.new_loads:
            if load.is_async:
                self.loading.append(load)
            else:
                invalid |= self._bring(load)
        self.role.new_loads.clear()
        self.forward(step)
        return self._collect(invalid)

    def forward(self, step) -> None:
        for layer in range(NUM_LAYERS):
            self.compute(step, layer)

    def spoil(self, blocks: Sequence[int]) -> None:
        for kv in self.kv.values():
            kv[list(blocks)] = -1

    def _bring(self, load: Load) -> set[int]:
        failed = self.choices.failed_from(load)
        good = len(load.block_ids) if failed is None else failed
        size, blocks = self.role.block_size, len(load.block_ids)
        for layer, kv in enumerate(self.kv.values()):
            content = torch.tensor(true_kv(load.token_ids, layer)[-blocks * size :])
            kv[load.block_ids] = content.view(blocks, size)
        self.spoil(load.block_ids[good:])
        return set(load.block_ids[good : good + 1])

    def _collect(self, invalid: set[int]) -> WorkerOutput:
        recving, failed = set(), set()
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
            content = self._content(self.role.saving.pop(name))
            assert content == self.lent.pop(name), f"blocks lent by {name} were overwritten"
        awaited = {load.request_id for load in self.loading} | set(self.role.saving)
        strangers = self.choices.strangers() - awaited
        return WorkerOutput(
            finished_recving=frozenset(recving) | strangers,
            finished_sending=frozenset(sent) | strangers,
            failed_recving=frozenset(failed),
            invalid_block_ids=frozenset(invalid),
        )

    def _content(self, blocks: list[int]) -> list:
        return [kv[blocks].tolist() for kv in self.kv.values()]

    def _remember_lent(self) -> None:
        for name, blocks in self.role.saving.items():
            if name not in self.lent:
                self.lent[name] = self._content(blocks)


__all__ = ["ASK_AGAIN", "Choices", "Load", "LookupResult", "Simulation", "reference"]
