"""A host engine without a model: schedules, allocates and "computes" KV that can be checked.

The KV of a token is a pure function of all tokens up to it, so a wrong, stale or misplaced byte
anywhere is seen. Ranks of a tensor-parallel host are simulated in one process: each has its own
worker role and tensors, and their outputs are folded as an executor would.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from kvferry.aggregation import WorkerOutputFold
from kvferry.connectors.registry import EngineSpec
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.worker import WorkerRole
from kvferry.observe import Counters, Observer
from kvferry.runner.lifecycle import StepLifecycle
from kvferry.store.base import Store
from kvferry.topology import tensor_parallel_shard
from kvferry.types import NO_EXTRA_KEYS, ExtraKeys, KVGroup


@dataclass
class HostRequest:
    """A request as `RequestView` and `ScheduledRequest` want it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    block_ids: tuple[list[int], ...] = ()
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_external_tokens: int = 0

    @property
    def request(self) -> HostRequest:
        return self


@dataclass
class HostStep:
    """A step as `StepView` wants it."""

    scheduled: list[HostRequest] = field(default_factory=list)
    preempted_request_ids: set[str] = field(default_factory=set)
    finished_request_ids: set[str] = field(default_factory=set)


def make_groups(
    *, num_layers: int = 2, num_kv_heads: int = 2, head_dim: int = 4, block_size: int = 4
) -> tuple[KVGroup, ...]:
    """One full-attention group, small."""
    return (
        KVGroup(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            content_size=2 * head_dim,
            dtype="float32",
            block_size=block_size,
        ),
    )


def layer_names(groups: Sequence[KVGroup]) -> tuple[tuple[str, ...], ...]:
    """`group.layer` names."""
    return tuple(
        tuple(f"{index}.{layer}" for layer in range(group.num_layers))
        for index, group in enumerate(groups)
    )


class HostRank:
    """One rank's tensors, `[B, H, N, C]` per layer, and what it writes into them."""

    def __init__(self, spec: EngineSpec, worker: WorkerRole, num_blocks: int) -> None:
        self._spec = spec
        self.worker = worker
        self.lifecycle = StepLifecycle(worker, strict=True)
        self.caches: dict[str, torch.Tensor] = {}
        self._layer_names = layer_names(spec.groups)
        for group, shard, names in zip(
            spec.groups, spec.shard.groups, self._layer_names, strict=True
        ):
            heads = shard.heads[1] - shard.heads[0]
            shape = (len(names), num_blocks, heads, group.block_size, group.content_size)
            pool = torch.full(shape, float("nan"), dtype=torch.float32)
            self.caches.update(zip(names, pool, strict=True))
        worker.register_kv_caches(self.caches)

    def expected(self, group: int, layer: int, prefix_seed: int) -> torch.Tensor:
        """`[heads of this rank, content]` KV of the token that ends a prefix."""
        shard = self._spec.shard.groups[group]
        heads = torch.arange(*shard.heads).unsqueeze(1)
        content = torch.arange(self._spec.groups[group].content_size)
        value = prefix_seed * 31 + group * 7919 + layer * 1009 + heads * 97 + content * 7
        return (value % 65_521).to(torch.float32)

    def _slots(
        self, request: HostRequest, seeds: Sequence[int], start: int, stop: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for group, names in enumerate(self._layer_names):
            size = self._spec.groups[group].block_size
            for layer, name in enumerate(names):
                for token in range(start, stop):
                    block = request.block_ids[group][token // size]
                    slot = self.caches[name][block, :, token % size]
                    found.append((slot, self.expected(group, layer, seeds[token])))
        return found

    def compute(self, request: HostRequest, seeds: Sequence[int], start: int, stop: int) -> None:
        """Write the KV of tokens `[start, stop)`."""
        for slot, value in self._slots(request, seeds, start, stop):
            slot.copy_(value)

    def wrong_tokens(self, request: HostRequest, seeds: Sequence[int], stop: int) -> int:
        """How many token slots of `[0, stop)`, over layers, hold anything but the right KV."""
        pairs = self._slots(request, seeds, 0, stop)
        return sum(not torch.equal(slot, value) for slot, value in pairs)


class SimulatedHost:
    """Runs requests through a connector, one at a time or interleaved by the caller.

    Args:
        scheduler: the connector's scheduler role.
        ranks: one worker each, in rank order.
        spec: of rank 0.
        num_blocks: blocks per group; block 0 is never used.
    """

    def __init__(
        self,
        scheduler: SchedulerRole,
        ranks: Sequence[tuple[EngineSpec, WorkerRole]],
        *,
        num_blocks: int = 64,
    ) -> None:
        self.scheduler = scheduler
        self.ranks = [HostRank(spec, worker, num_blocks) for spec, worker in ranks]
        self._fold = WorkerOutputFold(len(ranks))
        self._groups = ranks[0][0].groups
        self._free = [list(range(num_blocks - 1, 0, -1)) for _ in self._groups]
        self._finished: set[str] = set()
        self.invalid_block_ids: set[int] = set()
        self.num_steps = 0

    # -- whole requests -------------------------------------------------------------------------

    def run(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        budget: int = 10**9,
        num_local_tokens: int = 0,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        generate: Sequence[int] = (),
    ) -> HostRequest:
        """Prefill a prompt, check every byte of its KV, generate given tokens, finish.

        Args:
            budget: tokens computed per step (chunked prefill).
            num_local_tokens: pretend that so many tokens are in the local prefix cache.
            generate: tokens "sampled" after the prompt, one per step.
        """
        request = self.add(request_id, token_ids, extra_keys=extra_keys)
        self.admit(request, num_local_tokens=num_local_tokens)
        self.prefill(request, budget=budget)
        for token in generate:
            request.all_token_ids.append(token)
            self.prefill(request, budget=1)
        self.finish(request)
        return request

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> HostRequest:
        request = HostRequest(request_id, list(token_ids), len(token_ids), extra_keys)
        self.scheduler.on_new_request(request)
        return request

    def admit(
        self, request: HostRequest, *, num_local_tokens: int = 0, timeout: float = 20.0
    ) -> int:
        """Look up until there is an answer, allocate, tell the connector. Returns the hit."""
        deadline = time.monotonic() + timeout
        while (answer := self.scheduler.lookup(request, num_local_tokens)).num_tokens is None:
            self.step([])
            if time.monotonic() > deadline:
                raise TimeoutError(f"{request.request_id} was told to ask again for {timeout} s")
            time.sleep(0.0005)
        hit = answer.num_tokens
        tokens = len(request.all_token_ids)
        self._check_answer(hit, num_local_tokens, tokens)
        request.num_computed_tokens = num_local_tokens + hit
        request.num_external_tokens = hit
        self._allocate(request, tokens)
        for rank in self.ranks:
            rank.compute(request, prefix_seeds(request), 0, num_local_tokens)
        self.scheduler.update_after_alloc(request, request.block_ids, hit)
        return hit

    def _check_answer(self, hit: int, num_local_tokens: int, num_tokens: int) -> None:
        """Contract A4, as a host that dies of it would."""
        size = max(group.block_size for group in self._groups)
        too_long = num_local_tokens + hit >= num_tokens
        if hit and (hit < 0 or too_long or hit % size):
            raise AssertionError(
                f"illegal hit {hit} beyond {num_local_tokens} of {num_tokens} tokens"
            )

    def prefill(self, request: HostRequest, *, budget: int = 10**9) -> None:
        """Compute until every known token has KV, then check all of it."""
        while request.num_computed_tokens < len(request.all_token_ids):
            remaining = len(request.all_token_ids) - request.num_computed_tokens
            self.step([request], tokens=min(budget, remaining))
        seeds = prefix_seeds(request)
        for rank in self.ranks:
            wrong = rank.wrong_tokens(request, seeds, len(request.all_token_ids))
            if wrong:
                raise AssertionError(f"{request.request_id}: {wrong} token slots hold wrong KV")

    def preempt(self, request: HostRequest) -> None:
        """Take the blocks away at once, as a host does; the next step tells the connector."""
        self._release(request)
        request.num_computed_tokens = 0
        self.step([], preempted={request.request_id})

    def finish(self, request: HostRequest) -> None:
        result = self.scheduler.request_finished(request, request.block_ids)
        if result.delay_free:
            raise AssertionError("this host does not delay frees")
        self._finished.add(request.request_id)
        self._release(request)

    def settle(self, timeout: float = 10.0) -> None:
        """Step without tokens until nothing new is reported for a while (saves have ended)."""
        deadline = time.monotonic() + timeout
        quiet = 0
        while quiet < 4 and time.monotonic() < deadline:
            quiet = quiet + 1 if self.step([]) else 0
            time.sleep(0.002)

    def close(self) -> None:
        """Close every role; what they share stays open."""
        self.scheduler.close()
        for rank in self.ranks:
            rank.worker.close()

    # -- one step -------------------------------------------------------------------------------

    def step(
        self,
        scheduled: Sequence[HostRequest],
        *,
        tokens: int = 0,
        preempted: set[str] | None = None,
    ) -> bool:
        """One engine step over all ranks. True if no rank had news."""
        self.num_steps += 1
        for request in scheduled:
            request.num_scheduled_tokens = tokens
        finished, self._finished = self._finished, set()
        view = HostStep(list(scheduled), preempted or set(), finished)
        plan = self.scheduler.build_plan(view)
        outputs = []
        for rank in self.ranks:
            with rank.lifecycle.step(plan, finished) as step:
                for request in scheduled:
                    start = request.num_computed_tokens
                    rank.compute(request, prefix_seeds(request), start, start + tokens)
            outputs.append(step.output)
        output = self._fold.fold(outputs)
        for request in scheduled:
            request.num_computed_tokens += tokens
            self._recompute_invalid(request, output.invalid_block_ids)
        self.invalid_block_ids |= output.invalid_block_ids
        self.scheduler.update_output(output)
        return output.is_empty()

    def _recompute_invalid(self, request: HostRequest, invalid: frozenset[int]) -> None:
        for group, table in zip(self._groups, request.block_ids, strict=True):
            for index, block in enumerate(table):
                if block in invalid:
                    first_bad = index * group.block_size
                    request.num_computed_tokens = min(request.num_computed_tokens, first_bad)

    def _allocate(self, request: HostRequest, num_tokens: int) -> None:
        room = num_tokens + 64
        request.block_ids = tuple(
            [free.pop() for _ in range(-(-room // group.block_size))]
            for group, free in zip(self._groups, self._free, strict=True)
        )

    def _release(self, request: HostRequest) -> None:
        """Blocks go back filled with garbage: whoever still reads or writes them is seen."""
        if not request.block_ids:
            return
        names = layer_names(self._groups)
        for group, (table, free) in enumerate(zip(request.block_ids, self._free, strict=True)):
            for rank in self.ranks:
                for name in names[group]:
                    rank.caches[name][table] = float("nan")
            free.extend(table)
        request.block_ids = ()


def prefix_seeds(request: HostRequest) -> list[int]:
    """One number per token that depends on every token up to it and on the extra keys."""
    extra = request.extra_keys
    seed = sum(repr((extra.cache_salt, extra.lora, extra.items, extra.embeds_digest)).encode())
    seeds = []
    for token in request.all_token_ids:
        seed = (seed * 1_000_003 + token + 1) % 2_147_483_629
        seeds.append(seed)
    return seeds


def make_shared_storage_host(
    options: Mapping[str, Any],
    *,
    groups: tuple[KVGroup, ...] | None = None,
    world_size: int = 1,
    num_blocks: int = 64,
    weights: bytes = b"w" * 32,
    observer: Observer | None = None,
    carries_worker_meta: bool = True,
    stores: Sequence[Store] = (),
) -> tuple[SimulatedHost, Any]:
    """A host with the shared-storage connector, and what its roles share (close it last)."""
    from kvferry.connectors.shared_storage.build import Parts
    from kvferry.keys import ModelIdentity

    groups = groups or make_groups()
    specs = [
        EngineSpec(
            identity=ModelIdentity(weights=weights, config={"model_type": "simulated"}),
            groups=groups,
            shard=tensor_parallel_shard(groups, rank, world_size),
            layer_names=layer_names(groups),
            carries_worker_meta=carries_worker_meta,
        )
        for rank in range(world_size)
    ]
    observer = observer or Counters()
    parts = [
        Parts(spec, options, observer, store=store) for spec, store in zip_longest(specs, stores)
    ]
    host = SimulatedHost(
        parts[0].scheduler(),
        [(spec, part.worker()) for spec, part in zip(specs, parts, strict=True)],
        num_blocks=num_blocks,
    )
    return host, parts
