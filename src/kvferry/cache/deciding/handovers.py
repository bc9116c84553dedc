"""Prefill here, decode there: what a request may wait for, and what its answer says.

A producer stores all chunks of a request that another engine goes on with, and its answer carries a
stamp: its namespace, the number of chunks and the last one's key. A consumer computes the keys of
the prompt itself. What is stamped otherwise is not waited for; the rest is expected from the store
that both share, or from the producer's memory, until the request's deadline. From memory comes the
tail, too: the whole blocks behind the last whole chunk.
"""

from __future__ import annotations

import secrets
from contextlib import suppress

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.requests import HandoverPlan, Requests, RequestState, Tail
from kvferry.cache.deciding.save_plan import SavePlan
from kvferry.contract.handover import NAMESPACE_DIGITS, STAMP_VERSION, write_handover
from kvferry.contract.messages import FREE_NOW, FinishResult, LookupMiss
from kvferry.errors import ContractError
from kvferry.store.base import Address
from kvferry.types import ChunkKey, KVSource, ProducerStamp, RequestView


class Handovers:
    """Runs in: scheduler thread; memory only.

    Args:
        saves: knows which chunks are stored or on their way.

    Attributes:
        early: requests that wait for another engine, and that the host did not look up yet.
        address: where peers are served; None if they are not.
    """

    def __init__(self, context: RoleContext, requests: Requests, saves: SavePlan) -> None:
        self._context = context
        self._requests = requests
        self._saves = saves
        self.early: dict[str, RequestView] = {}
        self.address: tuple[str, int] | None = None
        self._engine_id = secrets.token_hex(16)  # of this run: `engine_id` of a host may be fixed

    def begin(self, request: RequestView, state: RequestState, limit: int) -> None:
        """Expect the chunks of a request that another engine computes, once.

        Args:
            limit: tokens of the longest hit that the prompt could have.
        """
        handover = request.handover
        if handover is None or state.handover is not None:
            return
        source = handover.source
        plan = state.handover = HandoverPlan()
        plan.is_turn = self._context.config.save_generated and source is not None
        plan.gives = handover.gives or plan.is_turn
        plan.lends = plan.gives and self._context.config.serve is not None
        if source is None:
            return
        self._expect(plan, source, request, state, limit)
        keys = state.chain[: plan.num_chunks]
        if keys:
            self._context.store.expect(keys, plan.until, _holder(source))

    def _expect(
        self,
        plan: HandoverPlan,
        source: KVSource,
        request: RequestView,
        state: RequestState,
        limit: int,
    ) -> None:
        chunk, stamp = state.keys.chunk_tokens, source.stamp
        plan.miss, plan.why = self._refusal(source, state)
        if plan.miss is not LookupMiss.ABSENT or not source.waits:
            return
        plan.num_chunks = -(-limit // chunk)
        if source.num_tokens is not None:
            plan.num_chunks = min(plan.num_chunks, source.num_tokens // chunk)
        if stamp is not None:
            plan.num_chunks = min(plan.num_chunks, stamp.num_chunks)
            plan.tail = self._tail(source, stamp, request, state)
            if plan.tail is not None:
                plan.num_chunks = stamp.num_chunks + 1
        plan.until = self._context.clock() + self._context.config.load_timeout_seconds
        plan.miss, plan.why = LookupMiss.NOT_PRODUCED, "the rest did not come"

    def _tail(
        self, source: KVSource, stamp: ProducerStamp, request: RequestView, state: RequestState
    ) -> Tail | None:
        """The stamped tail, if it follows all whole chunks of this prompt, has a block that is of
        use, and is read from the peer that made it: no store has it."""
        keys, block = state.keys, self._context.tables.block_size
        number, holder = len(keys.keys), _holder(source)
        first, num_tokens = number * keys.chunk_tokens, len(request.all_token_ids)
        stop = first + stamp.tail_tokens
        is_next = number == stamp.num_chunks and first < stop <= (source.num_tokens or num_tokens)
        is_useful = min(stop, num_tokens - 1) // block * block > first
        if not (is_next and is_useful and holder and self._context.store.reads_from(holder)):
            return None
        with suppress(ContractError):  # it is longer than the prompt, or has no token ids
            if keys.tail(request.all_token_ids, stop) == stamp.tail_key:
                return Tail((*keys.keys, ChunkKey(stamp.tail_key)), stop)
        return None

    def _refusal(self, source: KVSource, state: RequestState) -> tuple[LookupMiss, str]:
        """Why the chunks that a source made are not those of this prompt; ABSENT if they may be."""
        stamp, keys = source.stamp, state.keys.keys
        if stamp is None:
            other = "it is of another kind of engine" if source.has_blocks else ""
        elif stamp.version != STAMP_VERSION:
            other = f"its stamp has version {stamp.version}, not {STAMP_VERSION}"
        else:
            namespace = self._requests.namespace.hex()[:NAMESPACE_DIGITS]
            is_same = stamp.namespace == namespace
            other = "" if is_same else f"its namespace is {stamp.namespace}, not {namespace}"
        if other:
            return LookupMiss.OTHER_PRODUCER, other
        last = -1 if stamp is None else stamp.num_chunks - 1
        if stamp is not None and last >= 0 and keys[last : last + 1] != [stamp.last_key]:
            return LookupMiss.OTHER_TOKENS, "it computed other tokens"
        return LookupMiss.ABSENT, ""

    def answer(self, request: RequestView, state: RequestState) -> FinishResult:
        """What the client gets with the end of a request, for the engine that goes on with it."""
        handover, plan, spec = request.handover, state.handover, self._context.spec
        if handover is None or plan is None or spec.disabled:
            return FREE_NOW
        if not (handover.answers or plan.is_turn):
            return FREE_NOW
        # The KV of the last token was not computed, unless it is of the prompt.
        num_tokens = max(request.num_prompt_tokens, len(request.all_token_ids) - 1)
        if plan.is_turn:
            state.keys.extend(request.all_token_ids)
        num_chunks = 0
        for key in state.keys.keys[: num_tokens // state.keys.chunk_tokens]:
            if not self._saves.has(key, state):
                break
            num_chunks += 1
        tail = plan.tail if plan.lends and handover.answers else None
        if tail and not (tail.number == num_chunks and self._saves.has(tail.key, state)):
            tail = None
        stamp = ProducerStamp(
            version=STAMP_VERSION,
            namespace=self._requests.namespace.hex()[:NAMESPACE_DIGITS],
            num_chunks=num_chunks,
            last_key=state.keys.keys[num_chunks - 1] if num_chunks else b"",
            tail_tokens=tail.stop - num_chunks * state.keys.chunk_tokens if tail else 0,
            tail_key=tail.key if tail else b"",
        )
        params = write_handover(
            stamp,
            is_prefill=handover.answers,
            engine_id=self._engine_id,
            request_id=request.request_id,
            num_tokens=num_tokens,
            num_groups=len({part.table for part in spec.table_parts}),
            tp_size=spec.shard.world_size,
            address=self.address,
        )
        return FinishResult(False, params)


def _holder(source: KVSource) -> Address | None:
    """The peer that has all that is stamped in memory, if it serves any."""
    if source.stamp is None or source.host is None or source.port is None:
        return None
    return source.host, source.port
