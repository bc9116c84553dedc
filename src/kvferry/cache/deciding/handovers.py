"""Prefill here, decode there: what a request may wait for, and what its answer says.

The producer of a request's KV stores the chunks, and its answer to the client carries a stamp: the
namespace, the number of leading chunks that are stored or lent, or soon will be, and the key of the
last one. The client passes the stamp to the consumer, which computes the keys of the prompt on its
own. If the stamp does not match them, the consumer does not wait. Else it expects the chunks from
the store that both share or from the producer's memory for `load_timeout_seconds`. Unless the
producer says that it has them in memory, each chunk that comes restarts this time, until
`MOST_WAITS` times as much is over. How requests wait: `kvferry.cache.deciding.lookup`.
"""

from __future__ import annotations

import secrets

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.miss import ABSENT, Miss
from kvferry.cache.deciding.policy import ProducerWaits
from kvferry.cache.deciding.request import Request
from kvferry.cache.deciding.requests import Requests
from kvferry.cache.deciding.saves import Saves
from kvferry.cache.deciding.search import HandoverPlan
from kvferry.contract.handover import NAMESPACE_DIGITS, STAMP_VERSION, write_handover
from kvferry.contract.messages import FREE_NOW, FinishResult, LookupMiss
from kvferry.contract.spec import Mode
from kvferry.types import Handover, KVSource, ProducerStamp, RequestView

MOST_WAITS = 10
"""A request waits for a producer that makes progress for so many `load_timeout_seconds` at most."""


class Handovers:
    """The handovers of an engine. Runs in: scheduler thread, for the scheduler role; no I/O.

    Args:
        saves: knows which chunks are stored, or being stored.
        patience: says how long requests wait for a first chunk.

    Attributes:
        address: host and port where this engine serves peers; None if it does not.
    """

    def __init__(
        self, context: RoleContext, requests: Requests, saves: Saves, patience: ProducerWaits
    ) -> None:
        self._context = context
        self._requests = requests
        self._saves = saves
        self._patience = patience
        self.address: tuple[str, int] | None = None
        self._engine_id = secrets.token_hex(16)  # of this run; that of a host may be fixed

    def begin(self, handover: Handover, request: Request, limit: int) -> None:
        """Plan the handover of a request, once.

        Args:
            limit: number of tokens of the longest hit that the prompt could have.
        """
        config, source = self._context.config, handover.source
        is_turn = config.save_generated and source is not None
        gives = handover.gives or is_turn
        plan = HandoverPlan(gives=gives, lends=gives and config.serve is not None, is_turn=is_turn)
        request.handover = plan if source is None else self._awaiting(plan, source, request, limit)

    def _awaiting(
        self, plan: HandoverPlan, source: KVSource, request: Request, limit: int
    ) -> HandoverPlan:
        """Add to a plan what may be waited for, and how long; or why nothing is."""
        chunk, stamp = request.keys.chunk_tokens, source.stamp
        miss = self._refusal(source, request)
        if miss.reason is not LookupMiss.ABSENT or not source.waits:
            return plan._replace(miss=miss)
        num_chunks = -(-limit // chunk)  # a hit may end inside a chunk
        if source.num_tokens is not None:
            num_chunks = min(num_chunks, source.num_tokens // chunk)
        if stamp is not None:
            num_chunks = min(num_chunks, stamp.num_chunks)
        now, seconds = self._context.clock(), self._context.config.load_timeout_seconds
        is_held = False
        if stamp is not None and source.host is not None and source.port is not None:
            # The first look-up fetches what this peer says it holds, without a question.
            holder = source.host, source.port
            is_held = self._context.store.learn(request.keys.keys[:num_chunks], holder)
        until = now + (seconds if is_held else self._patience.seconds(now))
        return plan._replace(
            num_chunks=num_chunks,
            is_held=is_held,
            until=until,
            latest=until if is_held else now + MOST_WAITS * seconds,
            miss=Miss(LookupMiss.NOT_PRODUCED, "the rest did not come"),
        )

    def _refusal(self, source: KVSource, request: Request) -> Miss:
        """Return why the chunks of a source cannot be those of this prompt; ABSENT if they can."""
        stamp, keys = source.stamp, request.keys.keys
        if stamp is None:
            other = "it is of another kind of engine" if source.has_blocks else ""
        elif stamp.version != STAMP_VERSION:
            other = f"its stamp has version {stamp.version}, not {STAMP_VERSION}"
        else:
            namespace = self._requests.namespace.hex()[:NAMESPACE_DIGITS]
            is_same = stamp.namespace == namespace
            other = "" if is_same else f"its namespace is {stamp.namespace}, not {namespace}"
        if other:
            return Miss(LookupMiss.OTHER_PRODUCER, other)
        last = -1 if stamp is None else stamp.num_chunks - 1
        if stamp is not None and last >= 0 and keys[last : last + 1] != [stamp.last_key]:
            return Miss(LookupMiss.OTHER_TOKENS, "it computed other tokens")
        return ABSENT

    def answer(self, view: RequestView, request: Request) -> FinishResult:
        """Return the result of a request that ended, with the parameters that the client passes to
        the next engine, if one is to continue it."""
        handover, plan, spec = view.handover, request.handover, self._context.spec
        if handover is None or spec.mode is Mode.OFF or not (handover.answers or plan.is_turn):
            return FREE_NOW
        # The last token has no KV yet, unless it is a token of the prompt.
        num_tokens = max(view.num_prompt_tokens, len(view.all_token_ids) - 1)
        if plan.is_turn:
            request.keys.extend(view.all_token_ids)
        num_chunks = 0
        for key in request.keys.keys[: num_tokens // request.keys.chunk_tokens]:
            if not self._saves.has(key, request):
                break
            num_chunks += 1
        stamp = ProducerStamp(
            version=STAMP_VERSION,
            namespace=self._requests.namespace.hex()[:NAMESPACE_DIGITS],
            num_chunks=num_chunks,
            last_key=request.keys.keys[num_chunks - 1] if num_chunks else b"",
        )
        params = write_handover(
            stamp,
            is_prefill=handover.answers,
            engine_id=self._engine_id,
            request_id=view.request_id,
            num_tokens=num_tokens,
            num_groups=len({part.table for part in spec.table_parts}),
            tp_size=spec.shard.world_size,
            address=self.address,
        )
        return FinishResult(False, params)
