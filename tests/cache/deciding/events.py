"""The scheduler role alone, to which things happen: what the store knows, how reads and comparisons
end, and what the host does with its requests.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.host import HostRequest, HostStep
from kvferry.cache.build import PrefixCache
from kvferry.cache.deciding.search import Asking, Awaiting, Fetching, Search
from kvferry.cache.messages import CacheMeta, Filled, RankReport, Saved, Sealed
from kvferry.contract.messages import LookupMiss, WorkerOutput
from kvferry.contract.spec import EngineSpec
from kvferry.keys import ChunkKeys, ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Counters
from kvferry.store.base import ASK_SECONDS, Address, Where
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.types import ChunkKey, Handover, KVSource, ProducerStamp, RequestOptions
from tests.cache.conftest import record_bytes
from tests.cache.hosts import make_groups
from tests.cache.pools import check_pool, slot_at
from tests.host_tables import parts_of_tables, table_per_group

BLOCK, CHUNK, SLOTS = 4, 8, 7
PATIENCE = 5.0
LONGEST = max(ASK_SECONDS, PATIENCE)
"""No deadline is farther away: progress moves it on, and by no more than this."""

PEER: Address = ("10.0.0.1", 7100)
PROMPTS = [[*range(33)], [*range(16), *range(50, 69)], [*range(80, 104)]]
"""The first two share two chunks. The last one ends with a chunk."""

ALL = frozenset([0])

OTHER = ChunkKey(bytes(32))
"""Of a producer that computed other tokens."""


class Fickle(MemoryStore):
    """Knows what a test says. Keys may come at any time."""

    def __init__(self) -> None:
        super().__init__("memory://fickle")
        self.says: dict[ChunkKey, bool | None] = {}
        self.has_peer = True

    def where(self, key: ChunkKey) -> Where:
        said = self.says.get(key, False)
        if said is None:
            return Where.ASKED
        if said:
            return Where.HERE
        return Where.COMING if self.has_peer and key[1] % 2 == 0 else Where.ABSENT

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        return Where.ASKED

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        return holder == PEER

    def tier_of(self, key: ChunkKey) -> str:
        return "near" if key[0] % 2 else "far"


class Events:
    """Runs events, and checks the invariants after each. `audit` is the option."""

    def __init__(self, window: int | None, audit: Any, seed: int) -> None:
        (full,) = make_groups(block_size=BLOCK)
        groups = (full,) if window is None else (full, replace(full, window=window))
        self.clock = FakeClock()
        self.store = Fickle()
        spec = EngineSpec(
            identity=ModelIdentity(weights=b"w" * 32, config={"model_type": "simulated"}),
            groups=groups,
            shard=tensor_parallel_shard(groups, 0, 1),
            tables=parts_of_tables(table_per_group(groups)),
            host_recomputes=True,
        )
        options = {
            "store": "memory://fickle",
            "chunk_tokens": CHUNK,
            "memory_bytes": SLOTS * record_bytes(groups, CHUNK),
            "load_timeout_seconds": PATIENCE,
            "audit": audit,
            "save_generated": True,
        }
        self.part = PrefixCache(spec, options, Counters(), store=self.store)
        self.part.context = replace(self.part.context, clock=self.clock)
        self.role = self.part.scheduler(draw=random.Random(seed).random)
        self.num_tables, self.num_requests = len(groups), 0
        self.requests: list[HostRequest] = []
        self.answers: dict[str, tuple[int, int]] = {}  # of waiting requests: local and promised
        self.locals: dict[str, int] = {}
        self.admitted: set[str] = set()  # in this epoch
        self.last: dict[int, tuple[Search, Any, Awaiting | None]] = {}  # by search that asked again
        self.ends: deque[tuple[str, int]] = deque()  # of fetches and saves under way

    def run(self, events: Sequence[tuple[int, int, int]]) -> None:
        acts = (
            self.arrive, self.arrive, self.look_up, self.look_up, self.look_up, self.admit,
            self.step, self.step, self.end, self.end, self.store_some, self.store_some,
            self.pass_time, self.preempt, self.finish, self.reset,
        )  # fmt: skip
        for act, which, how in events:
            acts[act](which, how)
            self.check()
        while self.requests:
            if not self.requests[0].block_ids:
                self.check_end(self.requests[0], self.locals.get(self.requests[0].request_id, 0))
                self.check()
            self.finish(0, 0)
        self.step(0, 0)
        while self.ends:
            self.end(0, 0)
            self.step(0, 0)
        self.check()
        assert self.role.pool.num_taken == 0
        check_pool(self.role.pool)
        self.role.close()
        self.part.close()

    # -- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        """Each pin has one owner."""
        check_pool(self.role.pool, self.role.holds())

    def check_promise(self, request: HostRequest, local: int, promised: int, why: object) -> None:
        """What is promised is held and pinned: each chunk that the next token needs."""
        state, tables = self.role.requests.by_id[request.request_id], self.role.context.tables
        stop = local + promised
        assert state.search.hit[:2] == (local, stop)
        assert stop % BLOCK == 0
        assert stop < len(request.all_token_ids)
        most = request.options.max_load_tokens
        assert promised <= (promised if most is None else most)
        audit = state.search.hit.audit
        assert (audit is None) == (state.search.hit.audited is None)
        assert (why is LookupMiss.AUDIT) == state.search.hit.is_shortened
        assert audit is None or stop <= audit.record.first_token
        assert audit is None or audit.record.held == tables.all_groups
        pinned = {slot.key for slot in state.search.pinned}
        for number in range(tables.first_needed(local, stop) // CHUNK, -(-stop // CHUNK)):
            key = state.keys.keys[number]
            needed = tables.groups_of((number + 1) * CHUNK, local, stop)
            assert key in pinned
            assert needed <= self.role.pool.find(key).held

    def check_time(self, search: Search) -> None:
        """Fetches keep their deadline, also if a promise came between. No wait gets shorter, unless
        what had come is lost while it is fetched."""
        state = search.state
        wait = state if isinstance(state, Awaiting) else getattr(state, "before", None)
        seen, last, last_wait = self.last.get(id(search), (None, None, None))
        if seen is search:
            if isinstance(state, Fetching) and isinstance(last, Fetching):
                assert state.until == last.until
            if wait is not None and last_wait is not None:
                assert wait.until >= last_wait.until
            wait = None if isinstance(state, Fetching) else wait or last_wait
        self.last[id(search)] = search, state, wait

    def check_wait(self, request: HostRequest, search: Search) -> None:
        """It waits for what may still come and is of use, and not beyond the latest time."""
        state, plan = search.state, search.wanted.plan
        if isinstance(state, Asking):
            is_last = state.before is not None and state.before.until <= self.clock()
            assert is_last or Where.ASKED in map(self.store.where, search.wanted.keys)
        if isinstance(state, Fetching):
            assert search.is_filling or self.role.pool.num_taken > len(search.pinned)
        if isinstance(state, Awaiting):
            source = request.handover.source
            assert source.waits
            assert request.request_id not in self.admitted
            assert source.stamp is None or source.stamp.last_key != OTHER
            assert state.until <= plan.latest
            end = min(plan.num_chunks * CHUNK, len(request.all_token_ids) - 1)
            if (most := request.options.max_load_tokens) is not None:
                end = min(end, search.num_local + most)
            assert end // BLOCK * BLOCK > search.num_local
            is_new = self.clock() < search.wanted.began_at + ASK_SECONDS
            assert not plan.is_held or is_new or self.may_come(search)

    def may_come(self, search: Search) -> bool:
        """Whether the store may still get the first chunk that nothing has."""
        for key in search.wanted.keys[search.num_local // CHUNK :]:
            if self.role.pool.find(key) is None and self.store.where(key) is not Where.HERE:
                return self.store.where(key) is not Where.ABSENT
        return False

    def check_end(self, request: HostRequest, local: int) -> None:
        """If nothing happens, a search asks, awaits, asks once more and fetches at most."""
        for _ in range(5):
            if self.role.lookup(request, local).num_tokens is not None:
                return
            state = self.role.requests.by_id[request.request_id].search.state
            self.clock.advance(max(0.0, state.until - self.clock()) + 0.001)
        pytest.fail(f"a request asks again for ever: {state}")

    # -- events -----------------------------------------------------------------------------------

    def arrive(self, which: int, how: int) -> None:
        prompt = PROMPTS[which % 3]
        stamp = self.stamp(prompt, is_right=how != 4)
        source = {
            1: KVSource(waits=True, num_tokens=(None, None, None, None, 17, 9)[which]),
            2: KVSource(waits=True, stamp=stamp),
            3: KVSource(waits=True, stamp=stamp, host=PEER[0], port=PEER[1]),
            4: KVSource(waits=True, stamp=stamp),
            5: KVSource(waits=False),
        }.get(how)
        handover = None if source is None and how < 6 else Handover(gives=how >= 6, source=source)
        options = RequestOptions(max_load_tokens=(None, None, None, 12, 16, 0)[which])
        self.num_requests += 1
        request = HostRequest(
            str(self.num_requests), [*prompt], len(prompt), handover=handover, options=options
        )
        self.requests.append(request)
        self.role.on_new_request(request)

    def stamp(self, prompt: Sequence[int], *, is_right: bool) -> ProducerStamp:
        namespace = self.role.requests.namespace
        chain = ChunkKeys(namespace, CHUNK)
        chain.extend(prompt)
        last = chain.keys[-1] if is_right else OTHER
        return ProducerStamp(
            version=1, namespace=namespace.hex()[:16], num_chunks=len(chain.keys), last_key=last
        )

    def waiting(self, which: int) -> HostRequest | None:
        found = [each for each in self.requests if not each.block_ids]
        return found[which % len(found)] if found else None

    def running(self, which: int) -> HostRequest | None:
        found = [each for each in self.requests if each.block_ids]
        return found[which % len(found)] if found else None

    def look_up(self, which: int, how: int) -> None:
        request = self.waiting(which)
        if request is None:
            return
        name, local = request.request_id, BLOCK * (0, 0, 0, 0, 1, 2, 3, 4)[how]
        self.locals[name] = local
        before = self.answers.get(name)
        promised, is_async, why = self.role.lookup(request, local)
        assert not is_async
        if before is not None and before[0] == local and self.role.identity.state.miss is None:
            assert promised == before[1], "a promise stands"
        self.answers.pop(name, None)
        if name not in self.role.requests.by_id or self.role.identity.state.miss is not None:
            return
        if promised is None:
            search = self.role.requests.by_id[name].search
            assert self.clock() < search.state.until, "it asks again after its deadline"
            assert search.state.until <= self.clock() + LONGEST
            self.check_time(search)
            self.check_wait(request, search)
            self.build(HostStep())
        elif not promised:
            search = self.role.requests.by_id[name].search
            assert search.hit is not None or not search.pinned  # a hit of an audit alone
        else:
            self.check_promise(request, local, promised, why)
            self.answers[name] = local, promised

    def admit(self, which: int, how: int) -> None:
        """Admit a request with its hit, with a part of it, or without; mostly one with a promise,
        and one that waits still only if the host has all places free."""
        ready = [each for each in self.requests if each.request_id in self.answers]
        request = ready[which % len(ready)] if ready else self.waiting(which)
        if request is None:
            return
        local = self.locals.get(request.request_id, 0)
        _local, promised = self.answers.pop(request.request_id, (0, 0))
        if self.role.identity.state.miss is not None:
            promised = 0
        # A part of a hit may need windows that the hit does not: workers then report a failed load.
        is_whole = how < 6 or self.num_tables > 1
        used = promised if is_whole else promised // 2 // BLOCK * BLOCK
        num_blocks = -(-len(request.all_token_ids) // BLOCK) + 8
        blocks = [*range(1, num_blocks + 1)]
        request.block_ids = tuple([*blocks] for _ in range(self.num_tables))
        self.role.update_after_alloc(request, request.block_ids, used)
        request.num_computed_tokens = local + used
        self.admitted.add(request.request_id)

    def step(self, which: int, how: int) -> None:
        """Compute all that runs, `how` tokens at a time, and take over what the plan begins."""
        scheduled = [each for each in self.requests if each.block_ids]
        for request in scheduled:
            left = len(request.all_token_ids) - request.num_computed_tokens
            request.num_scheduled_tokens = min(left, 1 + 5 * how)
        self.build(HostStep(scheduled))
        for request in scheduled:
            request.num_computed_tokens += request.num_scheduled_tokens
            if request.num_computed_tokens == len(request.all_token_ids) < 60:
                request.all_token_ids.append(200 + which)

    def build(self, step: HostStep) -> None:
        plan = self.role.build_plan(step)
        pool, tables = self.role.pool, self.role.context.tables
        for load in getattr(plan, "loads", ()):
            for chunk in load.chunks:
                slot = slot_at(pool, chunk.slot)
                needed = tables.groups_of(chunk.first_token + CHUNK, load.start, load.stop)
                assert slot.key == chunk.key
                assert needed <= slot.held
        ends = (each.num_computed_tokens + each.num_scheduled_tokens for each in step.scheduled)
        computed = max(ends, default=0)
        for save in getattr(plan, "saves", ()):
            assert save.chunk.first_token + CHUNK <= computed
            assert save.compare_with is None or save.compare_with.key == save.chunk.key
        self.ends += [("fetch", fetch.chunk.slot) for fetch in getattr(plan, "fetches", ())]
        for save in getattr(plan, "saves", ()):
            self.ends.append(("save" if save.compare_with is None else "audit", save.chunk.slot))

    def end(self, which: int, how: int) -> None:
        """All fetches, saves and comparisons end well, or one ends in some way."""
        while self.ends and how < 4:
            self.end_one(0)
        if self.ends:
            self.ends.rotate(-which)
            self.end_one(how)

    def end_one(self, how: int) -> None:
        kind, slot = self.ends.popleft()
        sealed, saved = (), ()
        if kind == "fetch":
            filled = Filled(slot, {6: "io_error", 7: "absent"}.get(how), 0.1 * how)
        elif kind == "audit":
            filled = Filled(slot, {6: "io_error"}.get(how), excess=2.0 * (how == 7))
        else:
            filled = Filled(slot, {6: "cancelled", 7: "io_error"}.get(how))
            if how < 6:
                result = "failed" if how == 5 else "stored"
                sealed, saved = (Sealed(slot),), (Saved(slot, result),)
        report = RankReport(
            rank=0, pool=self.role.pool.pool_id, filled=(filled,), sealed=sealed, saved=saved
        )
        self.role.update_output(WorkerOutput(meta=CacheMeta(reports=(report,))))

    def store_some(self, which: int, how: int) -> None:
        """The store learns of leading chunks of a prompt, loses some, or begins to ask for them."""
        chain = ChunkKeys(self.role.requests.namespace, CHUNK)
        chain.extend(PROMPTS[which % 3])
        says = (True, True, True, True, True, True, None, False)[how]
        for key in chain.keys[:how] if says else chain.keys[how - which :]:
            self.store.says[key] = says

    def pass_time(self, which: int, how: int) -> None:
        self.clock.advance((0.01, 0.1, 0.3, 1.0, 4.9, 5.1, 30.0, 61.0)[how])

    def preempt(self, which: int, how: int) -> None:
        request = self.running(which)
        if request is not None:
            request.block_ids, request.num_computed_tokens = (), 0
            self.locals.pop(request.request_id, None)
            self.build(HostStep([], {request.request_id}))

    def finish(self, which: int, how: int) -> None:
        if self.requests:
            request = self.requests.pop(which % len(self.requests))
            self.role.request_finished(request, request.block_ids)
            self.answers.pop(request.request_id, None)

    def reset(self, which: int, how: int) -> None:
        if how == 7:
            assert self.role.reset()
            self.admitted.clear()
            self.answers.clear()


def awaited(which: int = 0, how: int = 1) -> tuple[Events, HostRequest]:
    """A request that waits for its producer."""
    events = Events(None, "off", 0)
    events.arrive(which, how)
    (request,) = events.requests
    assert events.role.lookup(request, 0).num_tokens is None
    assert isinstance(search_of(events, request).state, Awaiting)
    return events, request


def search_of(events: Events, request: HostRequest | None = None) -> Search:
    """The search of a request, by default of the first one that came."""
    return events.role.requests.by_id["1" if request is None else request.request_id].search
