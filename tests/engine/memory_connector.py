"""A small connector that keeps KV in a dict, for tests of the embedded engine. A test chooses sync
or async loads, answers that ask to look up again, and failures."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvferry.contract.messages import (
    ASK_AGAIN,
    MISS,
    FinishResult,
    LookupResult,
    Plan,
    WorkerOutput,
)
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import Roles
from kvferry.contract.worker import WorkerRole

Blocks = tuple[tuple[bytes, int], ...]
"""Content keys of blocks, each with the id of the block to load into or to save from."""


class MemoryPlan(Plan, frozen=True, kw_only=True):
    sync_loads: Blocks = ()
    async_loads: tuple[tuple[str, Blocks], ...] = ()
    saves: Blocks = ()
    holds: tuple[str, ...] = ()


@dataclass
class Behaviour:
    """What the connector does. Both roles share it, and tests change it while they run."""

    is_async: bool = False
    ask_again: int = 0
    steps_per_load: int = 3
    steps_per_free: int = 0
    lose: set[bytes] = field(default_factory=set)
    fail_whole: bool = False
    store: dict[bytes, torch.Tensor] = field(default_factory=dict)
    raise_in: str = ""
    closed: list[str] = field(default_factory=list)


class MemoryScheduler(SchedulerRole):
    def __init__(self, behaviour: Behaviour, block_size: int) -> None:
        self.behaviour, self.block_size = behaviour, block_size
        self.asked: dict[str, int] = {}
        self.failed: set[str] = set()
        self.sync_loads: list[tuple[bytes, int]] = []
        self.async_loads: list[tuple[str, Blocks]] = []
        self.holds: list[str] = []
        self.is_async: dict[str, bool] = {}

    def keys(self, token_ids) -> list[bytes]:
        size = self.block_size
        return [
            repr(list(token_ids[: (index + 1) * size])).encode()
            for index in range(len(token_ids) // size)
        ]

    def lookup(self, request, num_local_tokens):
        behaviour, size = self.behaviour, self.block_size
        keys = self.keys(request.all_token_ids)
        if not behaviour.is_async:
            keys = keys[: (len(request.all_token_ids) - 1) // size]
        hit = num_local_tokens // size
        while hit < len(keys) and keys[hit] in behaviour.store:
            hit += 1
        count = hit * size - num_local_tokens
        if count <= 0 or request.request_id in self.failed:
            return MISS
        asked = self.asked.setdefault(request.request_id, 0)
        if asked < behaviour.ask_again:
            self.asked[request.request_id] = asked + 1
            return ASK_AGAIN
        self.is_async[request.request_id] = behaviour.is_async
        return LookupResult(count, behaviour.is_async)

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        if num_external_tokens == 0:
            return
        size = self.block_size
        stop = request.num_computed_tokens // size
        start = stop - num_external_tokens // size
        keys = self.keys(request.all_token_ids)
        blocks = tuple(zip(keys[start:stop], block_ids[0][start:stop], strict=True))
        if self.is_async[request.request_id]:
            self.async_loads.append((request.request_id, blocks))
        else:
            self.sync_loads += blocks

    def build_plan(self, step):
        if self.behaviour.raise_in == "build_plan":
            raise RuntimeError("told to")
        saves = []
        for entry in step.scheduled:
            stop = entry.num_computed_tokens + entry.num_scheduled_tokens
            keys = self.keys(entry.request.all_token_ids[:stop])
            first = entry.num_computed_tokens // self.block_size
            saves += zip(keys[first:], entry.block_ids[0][first : len(keys)], strict=True)
        plan = MemoryPlan(
            sync_loads=tuple(self.sync_loads),
            async_loads=tuple(self.async_loads),
            saves=tuple(saves),
            holds=tuple(self.holds),
        )
        self.sync_loads, self.async_loads, self.holds = [], [], []
        return plan

    def update_output(self, output):
        self.failed |= output.failed_recving

    def request_finished(self, request, block_ids):
        if self.behaviour.steps_per_free == 0:
            return FinishResult()
        self.holds.append(request.request_id)
        return FinishResult(delay_free=True, params={"blocks": len(block_ids[0])})

    def close(self):
        self.behaviour.closed.append("scheduler")


class MemoryWorker(WorkerRole):
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.plan = MemoryPlan()
        self.caches: list[torch.Tensor] = []
        self.names: list[str] = []
        self.loading: list[list] = []
        self.holding: list[list] = []
        self.invalid: set[int] = set()

    def register_kv_caches(self, kv_caches):
        self.names, self.caches = list(kv_caches), list(kv_caches.values())

    def planned_blocks(self, plan):
        blocks = list(plan.sync_loads) if isinstance(plan, MemoryPlan) else []
        if isinstance(plan, MemoryPlan):
            blocks += [block for _, load in plan.async_loads for block in load]
        return frozenset(block_id for _, block_id in blocks)

    def planned_recving(self, plan):
        if not isinstance(plan, MemoryPlan):
            return frozenset()
        return frozenset(request_id for request_id, _ in plan.async_loads)

    def begin_step(self, plan):
        self.plan = plan if isinstance(plan, MemoryPlan) else MemoryPlan()
        self.loading += [
            [self.behaviour.steps_per_load, request_id, blocks]
            for request_id, blocks in self.plan.async_loads
        ]
        self.holding += [[self.behaviour.steps_per_free, name] for name in self.plan.holds]

    def start_load(self):
        if self.behaviour.raise_in == "start_load":
            raise RuntimeError("told to")
        self.invalid |= self.bring(self.plan.sync_loads)

    def bring(self, blocks: Blocks) -> set[int]:
        invalid = set()
        for key, block_id in blocks:
            if key in self.behaviour.lose or key not in self.behaviour.store:
                invalid.add(block_id)
                for cache in self.caches:
                    cache[block_id] = 1e3
                continue
            for cache, kv in zip(self.caches, self.behaviour.store[key], strict=True):
                cache[block_id] = kv
        return invalid

    def save(self):
        if self.invalid:
            return
        for key, block_id in self.plan.saves:
            kv = torch.stack([cache[block_id] for cache in self.caches])
            assert kv.isfinite().all()
            self.behaviour.store.setdefault(key, kv)

    def collect(self, finished_request_ids):
        recving, failed, invalid = set(), set(), self.invalid
        self.invalid = set()
        for load in self.loading:
            load[0] -= 1
            if load[0] <= 0:
                recving.add(load[1])
                bad = self.bring(load[2])
                if bad and self.behaviour.fail_whole:
                    failed.add(load[1])
                else:
                    invalid |= bad
        self.loading = [load for load in self.loading if load[0] > 0]
        for hold in self.holding:
            hold[0] -= 1
        sent = {name for left, name in self.holding if left <= 0}
        self.holding = [hold for hold in self.holding if hold[0] > 0]
        return WorkerOutput(
            finished_sending=frozenset(sent),
            finished_recving=frozenset(recving),
            failed_recving=frozenset(failed),
            invalid_block_ids=frozenset(invalid),
        )

    def end_step(self):
        self.plan = MemoryPlan()

    def close(self):
        self.behaviour.closed.append("worker")


class LayerwiseWorker(MemoryWorker):
    """A worker that loads around each layer instead, and checks the calls for saves."""

    def start_load(self):
        self.seen: list[str] = []

    def wait_for_layer_load(self, layer_name):
        self.seen.append(layer_name)
        layer = self.names.index(layer_name)
        for key, block_id in self.plan.sync_loads:
            self.caches[layer][block_id] = self.behaviour.store[key][layer]

    def save_layer(self, layer_name, kv_layer, attn_metadata):
        assert kv_layer is self.caches[self.names.index(layer_name)]
        self.seen.append(layer_name)

    def save(self):
        assert self.seen in ([], [name for name in self.names for _ in range(2)])
        super().save()


def memory_roles(
    behaviour: Behaviour, *, block_size: int = 16, worker: type[MemoryWorker] = MemoryWorker
) -> Roles:
    return Roles(MemoryScheduler(behaviour, block_size), worker(behaviour))
