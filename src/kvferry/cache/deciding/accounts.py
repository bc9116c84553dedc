"""What others learn of the decisions: counts and journal of requests, events of chunks.

`Accounts` counts the tokens of a request at each admission, also after a preemption: held by the
engine, hit by tier, or missed by reason. `Announcer` makes the events for the host's subscribers:
chunks that this engine saved, and chunks that are gone. The scheduler role calls both.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.miss import ABSENT, Miss
from kvferry.cache.deciding.request import Request
from kvferry.cache.deciding.search import Search
from kvferry.cache.messages import Save
from kvferry.config import printable
from kvferry.contract.handover import STAMP, write_explanation
from kvferry.contract.messages import ChunksRemoved, ChunkStored, FinishResult, LookupMiss
from kvferry.journal import Journal, JournalAnswer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import (
    ASKED,
    HERE,
    Store,
)
from kvferry.types import ChunkKey, Handover, RequestView, ScheduledRequest

logger = logging.getLogger(__name__)

MEMORY = "memory"
"""The tier of chunks that the host pool held when a request asked for them."""

CHECKS_PER_STEP = 32

MAX_PENDING = 4096
"""Saves under way that are remembered for an announcement. With more, the oldest is forgotten."""

MAX_ANNOUNCED = 1 << 18
"""Announced chunks that are watched for removal (some 20 MiB). With more, the one checked longest
ago is announced as gone, though it may be there: subscribers then ask another engine for it. If it
were no longer watched and were lost, they would go on asking this one in vain."""


class Accounts:
    """Tells the observer and the journal what requests got. Runs in: scheduler thread.

    `lookup_tokens = local_hit_tokens + hit_tokens/<tier> + miss_tokens/<reason>`, summed over all
    tiers and reasons.

    Args:
        schema: layout of the records.
        journal: receives each request once, at its end. None: no journal. `close` closes it.
    """

    def __init__(self, context: RoleContext, schema: RecordSchema, journal: Journal | None) -> None:
        self._observer = context.observer
        self._log = context.log
        self._record_bytes = schema.record_bytes
        self._chunk = context.chunk_tokens
        self._journal = journal

    def admitted(
        self, view: RequestView, request: Request, search: Search, stop: int, limit: int
    ) -> None:
        """Count and note a request that was admitted.

        Args:
            search: the search for its hit, as the last look-up left it.
            stop: where its hit ends, local hit included.
            limit: where the longest hit would end that its whole chunks and blocks allow.
        """
        num_tokens = len(view.all_token_ids)
        local = min(search.num_local, num_tokens)
        hits = self._by_tier(request, search, local, stop) if stop > local else Counter()
        if hits and search.hit is not None and search.hit.num_parts:
            num_bytes = search.hit.num_parts * self._record_bytes
            self._observer.count("loaded_state_bytes", num_bytes)
        limit = min(max(stop, limit), num_tokens)
        misses: Counter[str] = Counter()
        missed, why, kind = search.miss or ABSENT
        hit = search.hit
        if hit is not None and hit.audit is not None and hit.is_shortened:
            missed = missed if search.miss else LookupMiss.AUDIT  # what follows the audited chunk
            audited = min(limit, hit.audit.record.first_token + self._chunk)
            misses[LookupMiss.AUDIT] += audited - stop
            stop = audited
        misses[missed] += limit - stop
        misses[LookupMiss.PARTIAL] += num_tokens - limit
        misses = +misses  # those above zero, as for hits
        self._count(num_tokens, local, hits, misses)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: of %d tokens the engine has %d; hits %s, misses %s%s",
                printable(view.request_id),
                num_tokens,
                local,
                dict(hits),
                {str(reason): tokens for reason, tokens in misses.items()},
                f"; {why}" if why else "",
            )
        answer = JournalAnswer(local, hits, misses, why, kind=kind)
        if request.answer is None:  # not after a preemption
            request.answer = answer
            if view.handover is not None:
                self._count_handover(view, view.handover, answer, search.loads)

    def _count_handover(
        self,
        view: RequestView,
        handover: Handover,
        answer: JournalAnswer,
        loads: Mapping[str, tuple[int, float]],
    ) -> None:
        """Count and log what became of a request that another engine prefills or decodes."""
        source = handover.source
        if source is not None:
            self._observer.count("remote_prefills")
            if set(answer.misses) - {LookupMiss.PARTIAL, LookupMiss.AUDIT}:
                self._observer.count("remote_prefills_computed")
        parts = [f"{answer.local} of the engine's own"] if answer.local else []
        for tier, tokens in answer.hits.items():
            fetched, seconds = loads.get(tier, (0, 0.0))
            speed = fetched / self._chunk * self._record_bytes / seconds if seconds else 0.0
            rate = f" at {speed / 1e9:.3f} GB/s" if speed else ""
            parts.append(f"{tokens} from {tier}{rate}")
        parts += [f"{tokens} computed ({reason})" for reason, tokens in answer.misses.items()]
        if source is None:
            what = "prefill for another engine"
        else:
            what = "prefilled by another engine"
            if source.host is not None:
                # A client may have written this address. The tiers tell what was really read.
                what += f" at {source.host}:{source.port or '?'}, as the parameters say"
        self._log.info(
            "request %s, %s: of %d tokens %s%s",
            printable(view.request_id),
            what,
            len(view.all_token_ids),
            ", ".join(parts),
            f"; {answer.why}" if answer.why else "",
        )

    def _count(self, num_tokens: int, local: int, hits: Counter[str], misses: Counter[str]) -> None:
        self._observer.count("lookup_tokens", num_tokens)
        self._observer.count("local_hit_tokens", local)
        if hits:
            self._observer.count("hits")
        else:
            self._observer.count("requests_missed")
        for source, tokens in hits.items():
            tier = source.partition(" ")[0]  # without a peer's address: few labels are kept apart
            self._observer.count(f"hit_tokens/{tier}", tokens)
        for reason, tokens in misses.items():
            self._observer.count(f"miss_tokens/{reason}", tokens)

    def not_cacheable(self, view: RequestView, miss: Miss) -> None:
        """Count a request that was admitted and must not be cached."""
        num_tokens, reason = len(view.all_token_ids), miss.reason
        self._observer.count("lookup_tokens", num_tokens)
        if num_tokens:
            self._observer.count(f"miss_tokens/{reason}", num_tokens)
        if view.handover is not None:
            answer = JournalAnswer(0, {}, {reason: num_tokens}, miss.why)
            self._count_handover(view, view.handover, answer, {})

    def wants_end(self, view: RequestView) -> bool:
        """Whether the journal or the client wants to know what of a request was not stored."""
        return self._journal is not None or view.options.explain

    def ended(
        self,
        view: RequestView,
        request: Request | None,
        answer: JournalAnswer | None,
        compute_rate: float,
    ) -> None:
        """Note a request that ended, with what its tokens got, and the tokens a second that the
        engine computes. If it must not be cached, `request` is None, and no keys are written."""
        if self._journal is None:
            return
        # After a preemption, the answer may count generated tokens, too.
        num_tokens = view.num_prompt_tokens if answer is None else answer.num_tokens
        keys = () if request is None else request.keys.keys[: num_tokens // self._chunk]
        arrived_at = time.time() if request is None else request.arrived_at
        self._journal.add(
            arrived_at, view.request_id, num_tokens, keys, answer, round(compute_rate, 1)
        )

    def close(self) -> None:
        """Write out the journal and close it. Idempotent."""
        if self._journal is not None:
            self._journal.close()

    def _by_tier(self, request: Request, search: Search, start: int, stop: int) -> Counter[str]:
        tiers: Counter[str] = Counter()
        for index in range(start // self._chunk, -(-stop // self._chunk)):
            tier = search.fetched.get(request.keys.keys[index], MEMORY)
            first = index * self._chunk
            tiers[tier] += min(stop, first + self._chunk) - max(start, first)
        return tiers


def not_cached(view: RequestView, miss: Miss) -> JournalAnswer:
    """Return the answer to a request that must not be cached: every token is a miss, and none is
    stored."""
    num_tokens = view.num_prompt_tokens
    missed: dict[str, int] = {miss.reason: num_tokens} if num_tokens else {}
    return JournalAnswer(0, {}, missed, miss.why, missed)


def explained(
    result: FinishResult, view: RequestView, answer: JournalAnswer | None
) -> FinishResult:
    """Add to the result of a request what its tokens got, if it asked for that. `answer` is None if
    it was never admitted."""
    if answer is None or not view.options.explain:
        return result
    explanation = write_explanation(**answer._asdict())
    params = dict(result.params or {})
    params[STAMP] = {**params.get(STAMP, {}), **explanation}
    return result._replace(params=params)


class Announcer:
    """The events of chunks. They follow the index of `store`, so it does not matter which process
    stored or evicted a chunk. Each call of `pop_events` checks a few announced chunks in turn: a
    removal is announced late, but steps stay short. Runs in: scheduler thread; no I/O."""

    def __init__(self, store: Store, chunk_tokens: int) -> None:
        self._store = store
        self._chunk = chunk_tokens
        self._pending: dict[bytes, ChunkStored] = {}
        self._announced: OrderedDict[bytes, None] = OrderedDict()  # the next to be checked first
        self._gone: list[bytes] = []

    def planned(
        self, saves: Iterable[Save], running: Iterable[tuple[ScheduledRequest, Request]]
    ) -> None:
        """Remember the events of a step's saves until the index knows the chunks."""
        by_key = {save.chunk.key: save.chunk.first_token // self._chunk for save in saves}
        for item, request in running:
            keys = request.keys.keys
            for key, index in by_key.items():
                if index < len(keys) and keys[index] == key and key not in self._announced:
                    first = index * self._chunk
                    tokens = item.request.all_token_ids[first : first + self._chunk]
                    self._pending[key] = ChunkStored(
                        key=key,
                        parent=keys[index - 1] if index else None,
                        token_ids=tuple(tokens),
                        extra_keys=item.request.extra_keys,
                    )
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def failed(self, key: bytes) -> None:
        """Forget the event of a save that failed."""
        self._pending.pop(key, None)

    def pop_events(self) -> list[ChunkStored | ChunksRemoved]:
        """Return the events since the last call."""
        where = self._store.where
        gone, self._gone = self._gone, []
        stored = [key for key in self._pending if where(ChunkKey(key)) is HERE]
        events: list[ChunkStored | ChunksRemoved] = [self._pending.pop(key) for key in stored]
        self._announced.update(dict.fromkeys(stored))
        for _ in range(min(CHECKS_PER_STEP, len(self._announced))):
            key, _nothing = self._announced.popitem(last=False)
            may_be_here = where(ChunkKey(key)) in (HERE, ASKED)
            if may_be_here and len(self._announced) < MAX_ANNOUNCED:
                self._announced[key] = None
            else:
                gone.append(key)
        if gone:
            events.append(ChunksRemoved(keys=tuple(gone)))
        return events

    def forget_all(self) -> None:
        """Announce all chunks as gone: in the new epoch this engine no longer reads them."""
        self._gone += self._announced
        self._pending.clear()
        self._announced.clear()
