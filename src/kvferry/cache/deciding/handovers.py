"""Prefill here, decode there: what a request may wait for, and what its answer says.

The producer of a request's KV stores the chunks, and its answer to the client carries a stamp: the
namespace, the number of leading chunks that are stored or lent, or soon will be, and the key of the
last one. The client passes the stamp to the consumer, which computes the keys of the prompt on its
own. If the stamp does not match them, the consumer does not wait. Else it expects the chunks from
the store that both share or from the producer's memory for `load_timeout_seconds`. Unless the
producer says that it has them in memory, each chunk that comes restarts this time, until
`MOST_WAITS` times as much is over.

A producer whose chunks never come may store them elsewhere. So after a wait in vain, requests only
look for `ASK_SECONDS`. Now and then one of them waits as long as the first, until chunks come.
"""

from __future__ import annotations

import logging
import secrets

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.requests import HandoverPlan, Requests, RequestState
from kvferry.cache.deciding.save_plan import SavePlan
from kvferry.config import printable
from kvferry.contract.handover import NAMESPACE_DIGITS, STAMP_VERSION, write_handover
from kvferry.contract.messages import FREE_NOW, FinishResult, LookupMiss
from kvferry.network import join_host
from kvferry.store.base import ASK_SECONDS, Address
from kvferry.types import ChunkKey, KVSource, ProducerStamp, RequestView

logger = logging.getLogger(__name__)

MOST_WAITS = 10
"""A request waits for a producer that makes progress for so many `load_timeout_seconds` at most."""

FEW = 3
"""After so many waits in vain, one after the other, a warning says what to do."""

LONGEST_LOOKS_SECONDS = 300.0
"""The longest time without a whole wait: `load_timeout_seconds`, doubled by each wait in vain."""


class Handovers:
    """The handovers of an engine. Runs in: scheduler thread, for the scheduler role; no I/O.

    Args:
        saves: knows which chunks are stored, or being stored.

    Attributes:
        early: requests by id that wait for another engine's chunks and that the host has not looked
            up yet. The scheduler role fills and reads it.
        address: host and port where this engine serves peers; None if it does not.
    """

    def __init__(self, context: RoleContext, requests: Requests, saves: SavePlan) -> None:
        self._context = context
        self._requests = requests
        self._saves = saves
        self.early: dict[str, RequestView] = {}
        self.address: tuple[str, int] | None = None
        self._engine_id = secrets.token_hex(16)  # of this run; that of a host may be fixed
        self._num_in_vain = 0
        self._only_looks_until = 0.0
        self._has_told = False

    def begin(self, request: RequestView, state: RequestState, limit: int) -> None:
        """Plan the handover of a request, and expect the chunks that another engine computes for
        it. Only the first call for a request has an effect.

        Args:
            limit: number of tokens of the longest hit that the prompt could have.
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
        self._expect(plan, source, state, limit)
        keys = state.keys.keys[: plan.num_chunks]
        if keys:
            self._context.store.expect(keys, plan.until, _holder(source))

    def _expect(
        self, plan: HandoverPlan, source: KVSource, state: RequestState, limit: int
    ) -> None:
        chunk, stamp = state.keys.chunk_tokens, source.stamp
        plan.miss, plan.why = self._refusal(source, state)
        if plan.miss is not LookupMiss.ABSENT or not source.waits:
            return
        plan.num_chunks = -(-limit // chunk)  # a hit may end inside a chunk
        if source.num_tokens is not None:
            plan.num_chunks = min(plan.num_chunks, source.num_tokens // chunk)
        if stamp is not None:
            plan.num_chunks = min(plan.num_chunks, stamp.num_chunks)
        now, seconds = self._context.clock(), self._context.config.load_timeout_seconds
        holder = _holder(source)
        is_held = holder is not None and self._context.store.reads_from(holder)
        if holder is not None and not is_held:
            self._tell_unlisted(holder)
        plan.until = now + (seconds if is_held else self._patience(now))
        plan.latest = plan.until if is_held else now + MOST_WAITS * seconds
        plan.miss, plan.why = LookupMiss.NOT_PRODUCED, "the rest did not come"

    def _patience(self, now: float) -> float:
        """How long a request waits until the first chunk comes, in seconds."""
        seconds = self._context.config.load_timeout_seconds
        if now < self._only_looks_until:
            return min(ASK_SECONDS, seconds)
        if self._num_in_vain:
            self._only_looks_until = now + seconds  # one request at a time tries
        return seconds

    def end_wait(self, plan: HandoverPlan) -> None:
        """Note that a request is admitted: it waits for nothing more. Learn from how it waited, but
        not of a peer (`until` is `latest` there), which says itself what it lacks."""
        now = self._context.clock()
        if plan.wait in ("waits", "came"):  # it waits no more, so what it waited for came
            self._num_in_vain, self._only_looks_until = 0, 0.0
        elif plan.wait == "in vain" and plan.until < plan.latest and now >= self._only_looks_until:
            self._num_in_vain += 1
            seconds = self._context.config.load_timeout_seconds
            looks_seconds = min(LONGEST_LOOKS_SECONDS, seconds * 2**self._num_in_vain)
            self._only_looks_until = now + looks_seconds
            if self._num_in_vain == FEW:
                logger.warning(
                    "nothing came of %d handovers, each waited for %g s: the engines that prefill "
                    "seem to store elsewhere than in %s. Give them and this engine one store, or "
                    "list the address that they serve (option `serve`) as peer://HOST:PORT in "
                    "`store` here. Until chunks come, most requests wait for %g s only",
                    FEW,
                    seconds,
                    self._context.store.url,
                    ASK_SECONDS,
                )
        plan.end_wait()

    def reads_again(self, key: ChunkKey) -> bool:
        """Whether a chunk whose read failed is to be read again: a request waits for it that may
        still have such reads. This uses one of them up."""
        now = self._context.clock()
        for state in self._requests.by_id.values():
            plan, search = state.handover, state.search
            if plan is None or search is None or key not in search.fetched:
                continue
            if now < plan.until and plan.num_reads_left:
                plan.num_reads_left -= 1
                return True
        return False

    def _tell_unlisted(self, holder: Address) -> None:
        """Say once that the peer which has the chunks is not one that this engine reads from."""
        is_peer = any(tier.name.startswith("peer") for tier in self._context.store.tiers())
        if is_peer and not self._has_told:
            self._has_told = True
            logger.warning(
                "a prefill is served at %s, as a request says, which is not listed in %s. If it is "
                "listed under another name, give `advertise` of its `serve` the same name: else "
                "what only its memory has is computed here",
                printable(join_host(*holder)),
                self._context.store.url,
            )

    def _refusal(self, source: KVSource, state: RequestState) -> tuple[LookupMiss, str]:
        """Return why the chunks of a source cannot be those of this prompt, as a reason and a text;
        ABSENT and "" if they can."""
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
        """Return the result of a request that ended, with the parameters that the client passes to
        the next engine, if one is to continue it."""
        handover, plan, spec = request.handover, state.handover, self._context.spec
        if handover is None or plan is None or spec.disabled:
            return FREE_NOW
        if not (handover.answers or plan.is_turn):
            return FREE_NOW
        # The last token has no KV yet, unless it is a token of the prompt.
        num_tokens = max(request.num_prompt_tokens, len(request.all_token_ids) - 1)
        if plan.is_turn:
            state.keys.extend(request.all_token_ids)
        num_chunks = 0
        for key in state.keys.keys[: num_tokens // state.keys.chunk_tokens]:
            if not self._saves.has(key, state):
                break
            num_chunks += 1
        stamp = ProducerStamp(
            version=STAMP_VERSION,
            namespace=self._requests.namespace.hex()[:NAMESPACE_DIGITS],
            num_chunks=num_chunks,
            last_key=state.keys.keys[num_chunks - 1] if num_chunks else b"",
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
    """Address of the peer that has the stamped chunks in memory; None if the source names none."""
    if source.stamp is None or source.host is None or source.port is None:
        return None
    return source.host, source.port
