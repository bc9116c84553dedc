"""An engine without a model for tests of connectors: it schedules requests, allocates blocks, and
"computes" KV that can be checked.

The KV of a token is a pure function of all tokens up to it, so checks detect a wrong, stale or
misplaced byte in any block table (`host_tables`). The ranks of a tensor-parallel host run in one
process, each with a worker role and tensors of its own. The host folds their outputs into one.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.host import HostRequest, HostStep
from kvferry.contract.fold import WorkerOutputFold
from kvferry.contract.messages import LookupResult, WorkerOutput
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import EngineSpec
from kvferry.contract.worker import WorkerRole
from kvferry.testing.prefixes import extend_seeds
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import (
    DEFAULT_OPTIONS,
    NO_EXTRA_KEYS,
    ExtraKeys,
    Handover,
    MultimodalItem,
    OfferedState,
    RequestOptions,
)
from tests.host_tables import (
    HostBlockPool,
    HostRank,
    HostTable,
    Move,
    table_per_group,
)
from tests.state_models import StateModel


@dataclass(eq=False)
class SimulatedRequest(HostRequest):
    """A request as `StatefulRequest` wants it, too.

    Attributes:
        states: what the step leaves behind.
        junction: after so many tokens the host is to keep a state.
        is_loading: whether it waits for the end of an async load.
    """

    states: Sequence[OfferedState] = ()
    junction: int = 0
    is_loading: bool = False

    def keep_state_after(self, num_tokens: int) -> None:
        self.junction = max(self.junction, num_tokens)


class SimulatedHost:
    """Runs requests through a connector, one at a time or interleaved by the caller.

    Args:
        scheduler: the connector's scheduler role.
        ranks: spec and worker role of each rank, in rank order.
        num_blocks: number of blocks of all tables together; block 0 is never used.
        tables: block tables; None for one per group of the spec.
        check: check of the connector's own accounts, called after every step; raises if they do not
            add up.
        num_ranks: number of ranks, if the caller sets `ranks` itself.
        states: the model of recurrent states, if tables have some. Steps then end where vLLM's do.
        in_flight: so many steps are planned before the scheduler gets the output of the first.
    """

    def __init__(
        self,
        scheduler: SchedulerRole,
        ranks: Sequence[tuple[EngineSpec, WorkerRole]],
        *,
        num_blocks: int = 64,
        tables: Sequence[HostTable] | None = None,
        check: Callable[[], None] = lambda: None,
        num_ranks: int | None = None,
        states: StateModel | None = None,
        in_flight: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._check = check
        self._tables = tuple(tables or table_per_group(ranks[0][0].groups))
        self.ranks = [
            HostRank(spec, worker, self._tables, num_blocks, states) for spec, worker in ranks
        ]
        self._fold = WorkerOutputFold(num_ranks or len(ranks))
        self._pool = HostBlockPool(self._tables, num_blocks)
        self._running: dict[str, SimulatedRequest] = {}
        self._has_states = states is not None
        self._num_in_flight = in_flight
        self._in_flight: deque[tuple[Sequence[SimulatedRequest], WorkerOutput]] = deque()
        self.block_size = math.lcm(*(table.block_size for table in self._tables if table.layers))
        """Tokens that the length of every hit must be a multiple of."""
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self.invalid_block_ids: set[int] = set()
        self.failed: set[str] = set()
        """Requests whose async load failed."""
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
        handover: Handover | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
        generate: Sequence[int] = (),
    ) -> HostRequest:
        """Prefill a prompt, check every byte of its KV, generate given tokens, finish.

        Args:
            budget: most tokens computed per step (chunked prefill).
            num_local_tokens: tokens of a simulated local prefix hit.
            generate: tokens "sampled" after the prompt, one per step.
        """
        request = self.add(
            request_id, token_ids, extra_keys=extra_keys, handover=handover, options=options
        )
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
        handover: Handover | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> HostRequest:
        request = SimulatedRequest(
            request_id, list(token_ids), len(token_ids), extra_keys, handover
        )
        request.options = options
        self.scheduler.on_new_request(request)
        return request

    def admit(
        self, request: HostRequest, *, num_local_tokens: int = 0, timeout: float = 20.0
    ) -> int:
        """Look up until there is an answer, allocate, notify the connector. Return the hit."""
        answer = LookupResult(None)

        def is_answered() -> bool:
            nonlocal answer
            answer = self.scheduler.lookup(request, num_local_tokens)
            if answer.num_tokens is None:
                self.step([])
            return answer.num_tokens is not None

        what = f"the answer to the look-up of {request.request_id}"
        wait_until(is_answered, what, timeout, interval=0.0005)
        hit = answer.num_tokens
        assert hit is not None
        tokens = len(request.all_token_ids)
        # Contract A4: a real host crashes on an illegal hit.
        if hit and (hit < 0 or num_local_tokens + hit >= tokens or hit % self.block_size):
            raise AssertionError(f"illegal hit {hit} beyond {num_local_tokens} of {tokens} tokens")
        if answer.is_async != (self._has_states and hit > 0):
            raise AssertionError("a host moves states on before the sync loads of a step")
        self.grow(request, num_local_tokens + hit if answer.is_async else tokens + 64)
        list(self._pool.carry(request, hit))
        request.num_computed_tokens = num_local_tokens + hit
        request.num_external_tokens = hit
        request.is_loading = answer.is_async
        self._running[request.request_id] = request
        for rank in self.ranks if num_local_tokens else ():
            rank.compute(request, prefix_seeds(request), 0, num_local_tokens)
        self.scheduler.update_after_alloc(request, request.block_ids, hit)
        if answer.is_async:
            self._wait_loaded(request)
        return hit

    def _wait_loaded(self, request: SimulatedRequest) -> None:
        def is_loaded() -> bool:
            self.step([])
            return not request.is_loading

        wait_until(is_loaded, f"the load of {request.request_id}")
        self.scheduler.update_after_alloc(request, request.block_ids, 0)

    def go_on(
        self,
        request: HostRequest,
        piece: Sequence[int],
        items: Sequence[MultimodalItem] = (),
        *,
        cacheable: bool = True,
        preempted: bool = False,
    ) -> int:
        """Continue a session as vLLM does: take back tokens that were not computed, add a piece and
        its items, which stand at offsets in the piece, and admit it in the blocks that it has, or
        after a preemption anew. Return the hit."""
        del request.all_token_ids[request.num_computed_tokens :]
        offset = len(request.all_token_ids)
        request.all_token_ids.extend(piece)
        request.num_prompt_tokens = len(request.all_token_ids)
        placed = tuple(replace(item, offset=item.offset + offset) for item in items)
        before = request.extra_keys
        request.extra_keys = replace(before, items=before.items + placed, cacheable=cacheable)
        if preempted:
            self.preempt(request)
            return self.admit(request)
        self.grow(request, len(request.all_token_ids) + 64)
        self.scheduler.update_after_alloc(request, request.block_ids, 0)
        return 0

    def prefill(self, request: HostRequest, *, budget: int = 10**9) -> None:
        """Compute the KV of every known token, then check all KV that is still in blocks."""
        while request.num_computed_tokens < len(request.all_token_ids):
            stop = min(request.num_computed_tokens + budget, len(request.all_token_ids))
            if self._has_states:
                stop = self._stop_with_states(request, stop)
            self.step([request], tokens=stop - request.num_computed_tokens)
        self.check(request)

    def _stop_with_states(self, request: SimulatedRequest, stop: int) -> int:
        """Where vLLM has a step end that could reach `stop`: within a block only at the end."""
        size, computed = self.block_size, request.num_computed_tokens
        if stop < len(request.all_token_ids):
            stop = stop // size * size or stop
        within = (computed // size + 1) * size if computed % size else 0
        stops = (*self._kept(request), within)
        return min((each for each in stops if computed < each < stop), default=stop)

    def _kept(self, request: SimulatedRequest) -> tuple[int, int]:
        """After so many tokens the host keeps a state."""
        last = (request.num_prompt_tokens - 1) // self.block_size * self.block_size
        return last, request.junction

    def offer(self, request: SimulatedRequest, stop: int) -> Sequence[OfferedState]:
        """The states that a step leaves which computes tokens up to `stop`."""
        if not self._has_states or stop % self.block_size:
            return ()
        blocks = {
            index: request.block_ids[index][(stop - 1) // table.block_size]
            for index, table in enumerate(self._tables)
            if table.states
        }
        return (OfferedState(stop, blocks, is_kept=stop in self._kept(request)),)

    def check(self, request: HostRequest) -> None:
        """Check that each token that the next one attends to has a block, and that no block holds
        wrong KV, since a host may share any block with other requests. Raises AssertionError."""
        missing = self._pool.num_missing(request)
        if missing:
            raise AssertionError(f"{request.request_id}: {missing} attended tokens have no block")
        seeds = prefix_seeds(request)
        for rank in self.ranks:
            wrong = rank.wrong_tokens(request, seeds, request.num_computed_tokens)
            if wrong:
                raise AssertionError(f"{request.request_id}: {wrong} token slots hold wrong KV")
            rank.check_null_block()

    def preempt(self, request: HostRequest) -> None:
        """Take the blocks away, and notify the connector."""
        self.lose(request)
        self.step([])

    def lose(self, request: HostRequest) -> None:
        """Take the blocks away at once, as a host does; the next step notifies the connector. Till
        then it may be admitted again, as after vLLM's `reset_prefix_cache` of running requests."""
        self.release(request)
        request.num_computed_tokens = 0
        self._preempted.add(request.request_id)

    def admitted(self, request_id: str, prompt: Sequence[int], **options: Any) -> HostRequest:
        """A new request that runs, with its hit."""
        request = self.add(request_id, prompt, **options)
        self.admit(request)
        return request

    def complete(self, request: HostRequest) -> Mapping[str, Any] | None:
        """Run a request to its end."""
        self.prefill(request)
        return self.finish(request)

    def finish(self, request: HostRequest) -> Mapping[str, Any] | None:
        """End a request; return the connector's parameters for the client."""
        result = self.scheduler.request_finished(request, request.block_ids)
        if result.delay_free:
            raise AssertionError("this host does not delay frees")
        self._finished.add(request.request_id)
        self.release(request)
        return result.params

    def settle(self) -> None:
        """Step without tokens until fetches and saves have ended and nothing new is reported for a
        while."""
        assert self.run_for(60.0), "fetches or saves do not end"

    def run_for(self, seconds: float) -> bool:
        """As `settle`, for at most so long. Whether all has ended."""
        deadline = time.monotonic() + seconds
        quiet = 0
        while quiet < 4 and time.monotonic() < deadline:
            is_quiet = self.step([]) and all(rank.worker.is_idle for rank in self.ranks)
            quiet = quiet + 1 if is_quiet and not self.scheduler.has_work() else 0
            time.sleep(0.002)
        return quiet == 4

    def close(self) -> None:
        """Close every role; what they share stays open."""
        self.scheduler.close()
        for rank in self.ranks:
            rank.worker.close()

    # -- one step -------------------------------------------------------------------------------

    def step(
        self,
        scheduled: Sequence[SimulatedRequest],
        *,
        tokens: int = 0,
    ) -> bool:
        """Run one engine step over all ranks. Return whether no rank reports anything."""
        self.num_steps += 1
        left, moves = self._pool.free_left(), list[Move]()
        for rank in self.ranks if left else ():
            rank.poison(left)
        for request in scheduled:
            stop = request.num_computed_tokens + tokens
            request.num_scheduled_tokens = tokens
            self.grow(request, stop)
            moves += self._pool.carry(request, stop)
            request.states = self.offer(request, stop)
            if self._pool.num_missing(request):
                raise AssertionError(f"{request.request_id} attends to tokens without a block")
        finished, self._finished = self._finished, set()
        preempted, self._preempted = self._preempted, set()
        plan = self.scheduler.build_plan(HostStep(list(scheduled), preempted, finished))
        outputs = []
        for rank in self.ranks:
            if moves:
                rank.move_states(moves)
            with rank.driver.step(plan, finished) as step:
                for request in scheduled:
                    start = request.num_computed_tokens
                    rank.compute(request, prefix_seeds(request), start, start + tokens)
            outputs.append(step.output)
        output = self._fold.fold(outputs)
        for request in scheduled:
            request.num_computed_tokens += tokens
        self._in_flight.append((scheduled, output))
        while len(self._in_flight) >= self._num_in_flight:
            self._learn(*self._in_flight.popleft())
        return output.is_empty()

    def _learn(self, scheduled: Sequence[SimulatedRequest], output: WorkerOutput) -> None:
        for request in scheduled:
            self._recompute_invalid(request, output.invalid_block_ids)
        self.invalid_block_ids |= output.invalid_block_ids
        for name in output.finished_recving:
            request = self._running[name]
            request.is_loading = False
            if name in output.failed_recving:
                self.failed.add(name)
                self.release(request)
                request.num_computed_tokens = 0
                request.block_ids = tuple([] for _ in self._tables)
        self.scheduler.update_output(output)
        self._check()

    def _recompute_invalid(self, request: HostRequest, invalid: frozenset[int]) -> None:
        if invalid and len(self._tables) > 1:
            raise AssertionError("a host with several tables cannot handle invalid block ids")
        # A request that was preempted meanwhile has no tables.
        for table, blocks in zip(self._tables, request.block_ids, strict=False):
            for index, block in enumerate(blocks):
                if block in invalid:
                    first_bad = index * table.block_size
                    request.num_computed_tokens = min(request.num_computed_tokens, first_bad)

    def grow(self, request: HostRequest, num_tokens: int) -> None:
        """Give a request blocks for its first tokens; free the blocks that have left a window."""
        freed = self._pool.grow(request, num_tokens)
        for rank in self.ranks:
            rank.poison(freed)

    def release(self, request: HostRequest) -> None:
        """Take all blocks from a request without notifying the connector."""
        self._running.pop(request.request_id, None)
        freed = self._pool.release(request)
        for rank in self.ranks:
            rank.poison(freed)
        self._pool.check_integrity(self._running.values())


def prefix_seeds(request: HostRequest) -> list[int]:
    """Return the seed of each token of a request."""
    seeds: list[int] = []
    extend_seeds(seeds, request.all_token_ids, 0, request.extra_keys)
    return seeds
