"""A host of a model with recurrent states, which handles them as vLLM does.

KV of tokens is in table 0, states are in tables 1 and 2, all in blocks of `BLOCK` tokens out of one
pool. A request reads and writes one block of each state table, in which its last token is. Before a
forward, and before the loads of the same step, the host copies the state on if that is a new block.
Freed blocks are filled with garbage. A forward on anything but the right state raises.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.host import HostRequest, HostStep
from kvferry.cache.build import PrefixCache
from kvferry.cache.deciding.scheduler import CacheScheduler
from kvferry.cache.moving.worker import CacheWorker
from kvferry.contract.driver import StepDriver
from kvferry.contract.fold import WorkerOutputFold
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import LookupResult, WorkerOutput
from kvferry.contract.spec import EngineSpec, StateSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import heads_of_rank, tensor_parallel_shard
from kvferry.layout.states import components_of
from kvferry.observe import Counters
from kvferry.store.base import Store
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import NULL_BLOCK, Handover, KVGroup, OfferedState, StateKind, TablePart
from tests.cache.pools import check_pool
from tests.host_tables import kv_values
from tests.simulated_host import prefix_seeds
from tests.state_models import MODELS, Place

BLOCK, LAYERS = 32, 5
GROUP = KVGroup(num_layers=2, num_kv_heads=2, content_size=32, dtype="float32", block_size=BLOCK)
STATE_TABLES = (1, 2)


@dataclass(eq=False)
class StatefulHostRequest(HostRequest):
    """A request as `StatefulRequest` wants it.

    Attributes:
        states: what the step leaves behind.
        junction: after so many tokens the host is to keep a state.
        is_loading: whether it waits for the end of an async load.
    """

    states: list[OfferedState] = field(default_factory=list)
    junction: int = 0
    is_loading: bool = False

    def keep_state_after(self, num_tokens: int) -> None:
        assert num_tokens % BLOCK == 0
        self.junction = max(self.junction, num_tokens)


def spec_of(kind: str, rank: int, tp: int, engine_id: str) -> EngineSpec:
    model = MODELS[kind]
    components = components_of(model.kind, model.arrays(tp, dim_first=False))
    tables = tuple(
        TablePart(
            table=table,
            group=0,
            layers=tuple(range(first, LAYERS, 2)),
            layer_names=tuple(f"state.{layer}" for layer in range(first, LAYERS, 2)),
            block_size=BLOCK,
        )
        for first, table in enumerate(STATE_TABLES)
    )
    kinds = (StateKind(num_layers=LAYERS, components=components),)
    return EngineSpec(
        identity=ModelIdentity(weights=b"w" * 32, config={"model_type": "hybrid"}),
        groups=(GROUP,),
        shard=tensor_parallel_shard((GROUP,), rank, tp),
        multi_process=True,
        engine_id=engine_id,
        tables=(
            TablePart(
                table=0, group=0, layers=(0, 1), layer_names=("kv.0", "kv.1"), block_size=BLOCK
            ),
        ),
        states=StateSpec(kinds=kinds, tables=tables),
    )


class _Rank:
    """The memory of one rank, and what the model writes there."""

    def __init__(self, worker: CacheWorker, kind: str, rank: int, tp: int, num_blocks: int) -> None:
        self.model, self.rank, self.tp = MODELS[kind], rank, tp
        self.driver = StepDriver(worker, strict=True)
        size = self.model.page_bytes(tp)
        self.pages = [
            torch.full((num_blocks, 1, 1, size), 0x5A, dtype=torch.int8) for _ in range(LAYERS)
        ]
        self.heads = heads_of_rank(GROUP.num_kv_heads, rank, tp)
        heads = self.heads[1] - self.heads[0]
        shape = (2, num_blocks, heads, BLOCK, GROUP.content_size)
        self.kv = torch.full(shape, float("nan"))
        caches = {f"kv.{layer}": self.kv[layer] for layer in range(2)}
        caches |= {f"state.{layer}": page for layer, page in enumerate(self.pages)}
        worker.register_kv_caches(caches)

    def values(self, layer: int, seed: int) -> torch.Tensor:
        return kv_values([seed], layer, range(*self.heads), GROUP.content_size)[0].float()

    def state_pages(self, blocks: Mapping[int, int], seed: int) -> list[tuple[torch.Tensor, Place]]:
        return [
            (page[blocks[STATE_TABLES[layer % 2]]], Place(layer, seed % 4096, self.tp, self.rank))
            for layer, page in enumerate(self.pages)
        ]

    def move_state(self, before: Mapping[int, int], after: Mapping[int, int]) -> None:
        for layer, page in enumerate(self.pages):
            table = STATE_TABLES[layer % 2]
            page[after[table]] = page[before[table]]

    def num_wrong(self, blocks: Mapping[int, int], seed: int) -> int:
        return sum(self.model.num_wrong(*each) for each in self.state_pages(blocks, seed))

    def compute(self, request: HostRequest, seeds: Sequence[int], stop: int) -> None:
        for token in range(request.num_computed_tokens, stop):
            block = request.block_ids[0][token // BLOCK]
            for layer in range(2):
                self.kv[layer, block, :, token % BLOCK] = self.values(layer, seeds[token])
        blocks = {t: request.block_ids[t][(stop - 1) // BLOCK] for t in STATE_TABLES}
        for page, place in self.state_pages(blocks, seeds[stop - 1]):
            self.model.write(page, place)

    def num_wrong_tokens(self, request: HostRequest, seeds: Sequence[int]) -> int:
        found = 0
        for token in range(request.num_computed_tokens):
            block = request.block_ids[0][token // BLOCK]
            for layer in range(2):
                wanted = self.values(layer, seeds[token])
                found += not torch.equal(self.kv[layer, block, :, token % BLOCK], wanted)
        return found

    def poison(self, blocks: Sequence[int]) -> None:
        for page in self.pages:
            page[list(blocks)] = 0x5A
        self.kv[:, list(blocks)] = float("nan")


class StatefulHost:
    """Runs requests of a model with states through the cache's roles, guarded and strict.

    Args:
        store: its store, or the URL of that.
        kind: one of `tests.state_models.MODELS`.
        tp: number of ranks.
        in_flight: so many steps are planned before the scheduler gets the output of the first.
    """

    def __init__(
        self,
        store: str | Store,
        kind: str,
        tp: int = 1,
        *,
        num_blocks: int = 200,
        in_flight: int = 1,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        **options: Any,
    ) -> None:
        self.observer = Counters()
        engine_id = secrets.token_hex(16)
        opened, url = (None, store) if isinstance(store, str) else (store, store.url)
        given = {"store": url, "memory_bytes": 1 << 24, "audit": "off", **options}
        self.caches = [
            PrefixCache(
                spec_of(kind, rank, tp, engine_id),
                given,
                self.observer,
                store=opened,
                has_scheduler=rank == 0,
            )
            for rank in range(tp)
        ]
        assert self.caches[0].wait_ready(30)
        for cache in self.caches:
            cache.context = replace(cache.context, clock=clock)
        self.role: CacheScheduler = self.caches[0].scheduler(draw=draw)
        self.scheduler = GuardedScheduler(
            self.role, self.observer, block_size=BLOCK, strict=True, checks_host=False
        )
        self.ranks = [
            _Rank(cache.worker(), kind, rank, tp, num_blocks)
            for rank, cache in enumerate(self.caches)
        ]
        self._fold = WorkerOutputFold(tp)
        self._num_in_flight = in_flight
        self._in_flight: deque[WorkerOutput] = deque()
        self._free = list(range(num_blocks - 1, 0, -1))
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._drop: list[int] = []  # blocks of states that were left in the last step
        self.loading: dict[str, StatefulHostRequest] = {}
        self.failed: set[str] = set()

    # -- requests -------------------------------------------------------------------------------

    def add(
        self, name: str, tokens: Sequence[int], handover: Handover | None = None
    ) -> StatefulHostRequest:
        request = StatefulHostRequest(name, list(tokens), len(tokens), handover=handover)
        self.scheduler.on_new_request(request)
        return request

    def admit(self, request: StatefulHostRequest) -> int:
        """Look up until there is an answer, and load. Return the hit."""
        answers: list[LookupResult] = []

        def is_answered() -> bool:
            answer = self.scheduler.lookup(request, 0)
            if answer.num_tokens is None:
                self.step([])
            else:
                answers.append(answer)
            return bool(answers)

        wait_until(is_answered, "the look-up is answered", interval=0.0005)
        hit = answers[0].num_tokens or 0
        assert hit % BLOCK == 0
        assert hit < len(request.all_token_ids)
        assert answers[0].is_async == (hit > 0), "a host moves states before sync loads"
        request.num_computed_tokens = request.num_external_tokens = hit
        kv = [self._free.pop() for _ in range(hit // BLOCK)]
        # One block of each state table: that in which the last token of the hit is.
        states = [[NULL_BLOCK] * (hit // BLOCK - 1) + [self._free.pop()] for _ in STATE_TABLES]
        request.block_ids = (kv, *(states if hit else [[] for _ in STATE_TABLES]))
        if not hit:
            self._free.extend(block for table in states for block in table if block)
        self.scheduler.update_after_alloc(request, request.block_ids, hit)
        if hit:
            request.is_loading, self.loading[request.request_id] = True, request
            wait_until(lambda: self.step([]) or not request.is_loading, "the load ends")
            self.scheduler.update_after_alloc(request, request.block_ids, 0)
        return hit

    def prefill(self, request: StatefulHostRequest, budget: int = BLOCK) -> None:
        """Compute every known token. Steps end where vLLM's do: within a block only at the end."""
        while request.num_computed_tokens < len(request.all_token_ids):
            computed, end = request.num_computed_tokens, len(request.all_token_ids)
            stop = min(end, computed + budget)
            last = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
            stops = [
                last,
                request.junction,
                (computed // BLOCK + 1) * BLOCK if computed % BLOCK else 0,
            ]
            if stop < end:
                stop = stop // BLOCK * BLOCK or stop
            stop = min([each for each in stops if computed < each < stop], default=stop)
            self.step([request], stop - computed)
        self.check(request)

    def check(self, request: HostRequest) -> None:
        seeds = prefix_seeds(request)
        for rank in self.ranks:
            assert rank.num_wrong_tokens(request, seeds) == 0

    def run(self, name: str, tokens: Sequence[int], budget: int = BLOCK) -> int:
        """Serve a prompt. Return its hit."""
        request = self.add(name, tokens)
        hit = self.admit(request)
        self.prefill(request, budget)
        self.finish(request)
        return hit

    def finish(self, request: StatefulHostRequest) -> Any:
        """End a request; return the parameters of its answer."""
        result = self.scheduler.request_finished(request, request.block_ids)
        assert not result.delay_free
        self._finished.add(request.request_id)
        self.release(request)
        return result.params

    def release(self, request: StatefulHostRequest) -> None:
        freed = [block for table in request.block_ids for block in table if block != NULL_BLOCK]
        request.block_ids = ()
        self._give_back(freed)

    def preempt(self, request: StatefulHostRequest) -> None:
        """Take its blocks away, and notify the connector."""
        self.lose(request)
        self.step([])

    def lose(self, request: StatefulHostRequest) -> None:
        """Take its blocks away; the next step notifies the connector. Till then it may be admitted
        again, as after vLLM's `reset_prefix_cache` of running requests."""
        self.release(request)
        request.num_computed_tokens = 0
        self._preempted.add(request.request_id)

    def settle(self, seconds: float = 30.0) -> None:
        """Step until saves and fetches have ended."""

        def is_settled() -> bool:
            self.step([])
            are_idle = all(rank.driver.role.is_idle for rank in self.ranks)
            return are_idle and self.role.pool.is_idle

        wait_until(is_settled, "saves and fetches end", seconds, interval=0.001)

    def close(self) -> None:
        self.scheduler.close()
        for rank in self.ranks:
            rank.driver.close()
        for cache in self.caches:
            cache.close()

    def _give_back(self, blocks: list[int]) -> None:
        for rank in self.ranks:
            rank.poison(blocks)
        self._free.extend(blocks)

    # -- one step -------------------------------------------------------------------------------

    def step(
        self,
        scheduled: Sequence[StatefulHostRequest],
        tokens: int = 0,
    ) -> bool:
        """Run one engine step. Always False, for waits."""
        dropped, self._drop = self._drop, []
        self._give_back(dropped)
        moves = [self._grow(request, tokens) for request in scheduled]
        for request in scheduled:
            request.num_scheduled_tokens = tokens
        finished, self._finished = self._finished, set()
        preempted, self._preempted = self._preempted, set()
        plan = self.scheduler.build_plan(HostStep(list(scheduled), preempted, finished))
        outputs = []
        for rank in self.ranks:
            for move in filter(None, moves):
                rank.move_state(*move)
            if not scheduled:
                outputs.append(rank.driver.no_forward(plan, finished))
                continue
            with rank.driver.step(plan, finished) as step:
                for request in scheduled:
                    self._forward(rank, request, tokens)
            outputs.append(step.output)
        for request in scheduled:
            request.num_computed_tokens += tokens
        self._in_flight.append(self._fold.fold(outputs))
        while len(self._in_flight) >= self._num_in_flight:
            self._learn(self._in_flight.popleft())
        return False

    def _learn(self, output: WorkerOutput) -> None:
        assert not output.invalid_block_ids, "vLLM ends at these with several tables"
        for name in output.finished_recving:
            request = self.loading.pop(name)
            request.is_loading = False
            if name in output.failed_recving:
                self.failed.add(name)
                self.release(request)
                request.num_computed_tokens, request.block_ids = 0, ([], [], [])
        self.scheduler.update_output(output)
        check_pool(self.role.pool, self.role.holds())

    def _forward(self, rank: _Rank, request: StatefulHostRequest, tokens: int) -> None:
        seeds, computed = prefix_seeds(request), request.num_computed_tokens
        stop = computed + tokens
        blocks = {t: request.block_ids[t][(stop - 1) // BLOCK] for t in STATE_TABLES}
        if computed:
            wrong = rank.num_wrong(blocks, seeds[computed - 1])
            assert not wrong, f"{request.request_id} goes on from a wrong state at {computed}"
        rank.compute(request, seeds, stop)

    def _grow(
        self, request: StatefulHostRequest, tokens: int
    ) -> tuple[dict[int, int], dict[int, int]] | None:
        """Give a request blocks for its next tokens; say what it offers, and which state is copied
        from where to where."""
        computed, stop = request.num_computed_tokens, request.num_computed_tokens + tokens
        kv = request.block_ids[0] if request.block_ids else []
        if not request.block_ids:
            request.block_ids = ([], [], [])
            kv = request.block_ids[0]
        while len(kv) * BLOCK < stop:
            kv.append(self._free.pop())
        before, after = (computed - 1) // BLOCK, (stop - 1) // BLOCK
        move = None
        if after != before or not computed:
            old = {t: request.block_ids[t][before] for t in STATE_TABLES} if computed else {}
            for table in STATE_TABLES:
                ids = request.block_ids[table]
                ids.extend([NULL_BLOCK] * (after - len(ids)))
                ids.append(self._free.pop())
                if computed:
                    ids[before] = NULL_BLOCK
            new = {t: request.block_ids[t][after] for t in STATE_TABLES}
            self._drop.extend(old.values())  # after this step
            move = (old, new) if computed else None
        request.states = []
        if stop % BLOCK == 0:
            blocks = {table: request.block_ids[table][after] for table in STATE_TABLES}
            last = (request.num_prompt_tokens - 1) // BLOCK * BLOCK
            is_kept = stop in (last, request.junction)
            request.states = [OfferedState(stop, blocks, is_kept=is_kept)]
        return move
