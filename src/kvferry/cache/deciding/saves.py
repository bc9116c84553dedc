"""Chooses the chunks to save in a step: whole, computed, confirmed, and not yet held or stored.

The scheduler role asks for the saves of every step, and passes on what the ranks report of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.accounts import Announcer
from kvferry.cache.deciding.failed_keys import MAX_FAILED, REFUSED_SECONDS, UNREADABLE_SECONDS
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.cache.deciding.pins import RequestPins
from kvferry.cache.deciding.request import Request
from kvferry.cache.deciding.requests import Requests
from kvferry.cache.deciding.shared_writes import SharedWrites
from kvferry.cache.messages import (
    Filled,
    RankReport,
    Save,
    Sealed,
    SlotChunk,
)
from kvferry.contract.messages import LookupMiss
from kvferry.errors import ContractError, Fault
from kvferry.keys import state_key, state_keys
from kvferry.record.check import ReadFault
from kvferry.store.base import (
    COMPUTED_WRONG,
    HERE,
    Put,
    PutResult,
)
from kvferry.store.recordio import NOT_FINITE
from kvferry.types import (
    ChunkKey,
    OfferedState,
    RequestView,
    ScheduledRequest,
    StatefulRequest,
)

logger = logging.getLogger(__name__)


class Saves:
    """The saves of an engine, each until it is stored. Runs in: scheduler thread; no I/O.

    Args:
        pool: assigns the slots.
        announcer: makes events of what is saved; None: the host publishes none.
        take_out: gives up chunks and takes their records out of the store; also gets why, and their
            namespace.

    Attributes:
        shared_writes: writes the records that several ranks hold together.
        announcer: as given.
        failures_known: see `CachePlan.failures_known`.
        pins: the chunks that requests ask to keep.
    """

    def __init__(
        self,
        context: RoleContext,
        pool: HostPool,
        requests: Requests,
        shared_writes: SharedWrites,
        announcer: Announcer | None,
        take_out: Callable[[Sequence[ChunkKey], str, bytes], None],
    ) -> None:
        self._context = context
        self._pool = pool
        self._requests = requests
        self.shared_writes = shared_writes
        self.announcer = announcer
        self._take_out = take_out
        self._has_told = False  # of KV that is not finite
        self._is_alone = context.spec.shard.world_size == 1
        # Chunks that were computed with a part of an item alone, and the first token of the item.
        self._of_parts: dict[ChunkKey, int] = {}
        self._has_forgotten_parts = False
        self._await_until = 0.0
        self.failures_known: tuple[int, ...] = ()
        self._ranks = shared_writes.ranks
        self.pins = RequestPins(context.store, self._ranks, context.observer)

    def begin_epoch(self) -> None:
        """Announce that this engine no longer reads what it stored before."""
        if self.announcer is not None:
            self.announcer.forget_all()

    def close(self) -> None:
        """Give up the records that several ranks write. Bounded in time."""
        self.shared_writes.close()
        self.pins.close()

    def plan(self, running: Sequence[tuple[ScheduledRequest, Request]]) -> tuple[Save, ...]:
        """The saves of a step. Costs little once every live prompt is saved."""
        saves: list[Save] = []
        if self._context.spec.whole_items:
            self._find_parts(running)
        for item, request in running:
            if not request.is_saving or request.saves_blocked or request.is_erased:
                continue
            try:
                self._plan_request(item, request, saves)
            except ContractError as error:
                # Not raised: the saves of other requests have slots and must be planned.
                logger.error("nothing more of %s is saved: %s", item.request.request_id, error)
                self._context.observer.count("save_refused")
                request.is_saving = False
        if saves and self.announcer is not None:
            chunks = [save for save in saves if save.chunk.part < 0]
            self.announcer.planned(chunks, running)
        return tuple(saves)

    @property
    def has_work(self) -> bool:
        """Whether a host without requests should step for the reports of saves."""
        return not self._pool.is_idle and self._context.clock() < self._await_until

    def await_reports(self) -> None:
        """Keep an idle host awake for some time from now, for saves under way. Called when a plan
        carries saves or audits, when one of them made progress, and when a request ended."""
        if not self._pool.is_idle:
            self._await_until = self._context.clock() + self._context.bounds.saves_seconds

    def _plan_request(self, item: ScheduledRequest, request: Request, saves: list[Save]) -> None:
        """Add to `saves` each missing chunk that is wanted and computed by the end of this step."""
        view, chunk_tokens = item.request, request.keys.chunk_tokens
        computed = item.num_computed_tokens + item.num_scheduled_tokens
        # Tokens past `all_token_ids` are drafts: the model has not confirmed them.
        limit = len(view.all_token_ids)
        if self._context.config.save_generated:
            request.keys.extend(view.all_token_ids)
        else:
            limit = min(limit, view.num_prompt_tokens)
            if request.next_save >= limit // chunk_tokens:
                request.is_saving = False
                return
        whole = min(computed, limit) // chunk_tokens
        keys = request.keys.keys
        if self._context.states is not None:
            self._plan_states(cast("StatefulRequest", item), request, whole, saves)
        while request.next_save < whole:
            key = keys[request.next_save]
            if self._part_of(view, request.next_save, key) is not None:
                request.is_saving = False
                return
            if not self.has(key, request) and not self._plan_chunk(item, request, saves):
                self._context.observer.count("save_no_slot")
                request.lacks_slot = True
                return  # offered again in the next step of this request
            request.next_save += 1
        request.lacks_slot = False

    def _plan_states(
        self, item: StatefulRequest, request: Request, whole: int, saves: list[Save]
    ) -> None:
        """Add to `saves` the states that this step leaves after some of the `whole` first chunks
        and that are wanted. What is not copied now is gone.

        A host keeps few states: at the end of a prompt, and where prompts part. Of the others, one
        is saved where the KV since the last one has as many bytes, so that states take no more
        room than KV.
        """
        states, size = self._context.states, self._context.chunk_tokens
        assert states is not None
        for state in sorted(item.states, key=lambda state: state.num_tokens):
            number = state.num_tokens // size - 1
            if state.num_tokens % size or not states.is_behind(number) or not 0 <= number < whole:
                continue
            is_far = state.num_tokens - request.last_state >= states.num_parts * size
            chunk = request.keys.keys[number]
            is_wanted = state.is_kept or is_far
            if not is_wanted or self._part_of(item.request, number, chunk) is not None:
                continue
            keys = state_keys(chunk, states.num_parts)
            lacking = [part for part, key in enumerate(keys) if not self.has(key, request)]
            if lacking and not self._plan_state(item, request, state, lacking, saves):
                self._context.observer.count("save_no_slot")
            else:
                request.last_state = state.num_tokens

    def _plan_state(
        self,
        item: ScheduledRequest,
        request: Request,
        state: OfferedState,
        lacking: Sequence[int],
        saves: list[Save],
    ) -> bool:
        """Have the lacking parts of a state saved, all or none; False if there are no slots."""
        pool, keys = self._pool, request.keys
        if len(lacking) > min(pool.num_savable, pool.num_slots - pool.num_taken):
            return False
        blocks = self._context.tables.state_slices(state.blocks, len(item.block_ids))
        chunk = keys.keys[state.num_tokens // keys.chunk_tokens - 1]
        for part in lacking:
            slot = pool.save(state_key(chunk, part), state.num_tokens, keys.mark, part)
            if slot is None:  # one of the others is lent
                return False
            self._expect_write(slot)
            saved = SlotChunk(slot.index, slot.key, state.num_tokens, slot.mark, part)
            saves.append(Save(saved, blocks))
        return True

    def with_states(self, keys: Sequence[ChunkKey]) -> Sequence[ChunkKey]:
        """Return the keys of a prompt's chunks, and of the states behind them that are known."""
        states = self._context.states
        if states is None:
            return keys
        behind = [key for number, key in enumerate(keys) if states.is_behind(number)]
        found = [
            part
            for key in behind
            if self._pool.find(first := state_key(key, 0)) or self._is_stored(first)
            for part in state_keys(key, states.num_parts)
        ]
        return [*keys, *found]

    def _find_parts(self, running: Iterable[tuple[ScheduledRequest, Request]]) -> None:
        """Learn which chunks are wrong because a step ends in an item. A host has it end there
        after a hit of its own that did, and gives the blocks to later requests."""
        size = self._context.chunk_tokens
        for scheduled, request in running:
            view = scheduled.request
            stop = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            for item in view.extra_keys.items:
                if item.offset < stop < item.offset + item.length:
                    wrong = request.keys.keys[item.offset // size :]
                    self._of_parts.update(dict.fromkeys(wrong, item.offset))
        if len(self._of_parts) > MAX_FAILED:
            self._of_parts.clear()
            self._has_forgotten_parts = True  # any chunk behind an item may be one of them

    def _part_of(self, view: RequestView, number: int, key: ChunkKey) -> int | None:
        """Return the first token of an item of which a part was computed alone, if that may have
        gone into this chunk of a request; None if it has not."""
        items = view.extra_keys.items
        if self._has_forgotten_parts and items:
            first = min(item.offset for item in items)
            if number >= first // self._context.chunk_tokens:
                return first
        return self._of_parts.get(key)

    def _plan_chunk(self, item: ScheduledRequest, request: Request, saves: list[Save]) -> bool:
        """Have the next chunk of a request saved; False if there is no slot for it now. If it is
        stored and peers want it from memory, it is fetched instead, if there is room: windows may
        have dropped a part of it from the host's blocks."""
        key, chunk_tokens = request.keys.keys[request.next_save], request.keys.chunk_tokens
        first = request.next_save * chunk_tokens
        if request.handover.lends and self._is_stored(key):
            self._pool.fetch_whole(key, first, request.keys.mark)
            return True
        blocks = self._context.tables.chunk_slices(item.block_ids, first, first + chunk_tokens)
        if blocks is None:
            self._context.observer.count("save_out_of_window")
            return True
        slot = self._pool.save(key, first, request.keys.mark)
        if slot is None:
            return False
        self._expect_write(slot)
        saves.append(Save(SlotChunk(slot.index, key, first, slot.mark), blocks))
        return True

    def _expect_write(self, slot: Slot) -> None:
        if not self._is_alone:
            self.shared_writes.begin(slot, self._requests.namespace)
        self._ranks.lacks(slot.key)

    def has(self, key: ChunkKey, request: Request) -> bool:
        """Whether a chunk is held, on its way, or stored. If another engine continues the request,
        the chunk must be where that engine looks: in memory that is lent, if peers are served, or
        else in the store. That engine does not see what else this one holds."""
        slot = self._pool.find(key)
        # A slot that one rank failed to fill is given up when the other ranks have ended.
        is_sound = slot is not None and not slot.failed
        if request.handover.lends:
            return is_sound and self._pool.loans.knows(key)
        if slot is not None and is_sound:
            is_held = self._context.tables.all_groups <= slot.held
            # A pinned slot can take no copy now.
            if not slot.is_idle or (is_held and (slot.pins > 0 or not request.handover.gives)):
                return True
        return self._is_stored(key)

    def _is_stored(self, key: ChunkKey) -> bool:
        is_here = self._context.store.where(key) is HERE
        return is_here and key not in self._requests.unreadable

    def not_stored(
        self, view: RequestView, request: Request, *, may_save: bool
    ) -> tuple[dict[str, int], str, str]:
        """Count the tokens of a prompt that was computed whose chunks are neither stored nor on
        their way, by reason; say details of the first reason in words, and its `FaultKind`."""
        size, end = request.keys.chunk_tokens, view.num_prompt_tokens
        found: Counter[str] = Counter()
        why = kind = ""
        for number, key in enumerate(request.keys.keys[: end // size]):
            if key in self._requests.refused:
                reason, *said = self._requests.refused.why(key)
                if not why:
                    why, kind = said
            elif self.has(key, request):
                continue
            elif (first := self._part_of(view, number, key)) is not None:
                reason = LookupMiss.NOT_CACHEABLE
                why = why or f"a part of the item at token {first} was computed alone"
            elif not may_save:
                reason = LookupMiss.NOT_STORING
            elif request.lacks_slot and number >= request.next_save:
                reason = LookupMiss.NO_MEMORY
            else:
                continue  # not computed, or removed since
            found[reason] += size
        found[LookupMiss.PARTIAL] = end % size
        return dict(+found), why, kind

    # -- reports --------------------------------------------------------------------------------

    def learn(self, report: RankReport) -> None:
        """Learn what a rank hashed and wrote, and which loads failed on it."""
        for sealed in report.sealed:
            slot = self._pool.report_sealed(sealed.slot)
            if slot is not None:
                self._learn_sealed(report.rank, slot, sealed)
        for saved in report.saved:
            if not self._ranks.are_apart:
                self._learn_saved(saved.slot, saved.result, saved.fault)
                continue
            said = Put(PutResult(saved.result), saved.fault)
            answer = self.shared_writes.report_shard(report.rank, saved.slot, said)
            if answer is not None:  # the last rank's
                self._learn_saved(saved.slot, *answer)
        if report.filled or report.sealed:
            self.await_reports()

    def learn_missed(self, slot: Slot, copied: Filled) -> None:
        """Learn that a rank did not copy a chunk into its slot."""
        self.shared_writes.abort(slot)
        if copied.missed == ReadFault.CANCELLED:
            self._offer_again((slot.key,))

    def _learn_sealed(self, rank: int, slot: Slot, sealed: Sealed) -> None:
        if sealed.leaf_digests is None:
            if slot.is_writing:
                name = "save_failed" if sealed.is_finite else "save_not_finite"
                self._context.observer.count(name)
            self._pool.end_write(slot)
            self.shared_writes.abort(slot)
            self._announce_failed(slot.key)
            if not (sealed.is_finite or slot.failed):  # else it is computed again
                self._refuse(slot)
        elif self._is_alone:
            self._pool.seal(slot)
        else:
            self.shared_writes.report(rank, slot, sealed.leaf_digests)

    def _refuse(self, slot: Slot) -> None:
        """Neither offer nor store a chunk with NaN or Inf, nor what requests computed on it."""
        if not self._has_told:
            self._has_told = True
            logger.warning("%s, first at token %d", NOT_FINITE, slot.first_token)
        behind = self._requests.behind(slot.key) or [slot.key]
        why = f"computed at token {slot.first_token}"
        self._requests.refused.add(behind, REFUSED_SECONDS, LookupMiss.NOT_FINITE, why)
        for request in self._requests.by_id.values():
            if slot.key in request.keys.keys:
                request.block_saves()
        found = map(self._pool.find, behind)
        saved = [each for each in found if each is not None and each.is_save]
        for each in saved:
            each.failed = True  # if its write is under way, see `_learn_saved`
            if self.shared_writes.abort(each):
                self._pool.end_write(each)
            self._announce_failed(each.key)
        self._take_out([each.key for each in saved], COMPUTED_WRONG, slot.namespace)

    def _learn_saved(self, index: int, result: str, fault: Fault | None) -> None:
        self.await_reports()
        slot = self._pool.report_written(index)
        if slot is None:
            return
        if slot.failed:
            self._take_out((slot.key,), COMPUTED_WRONG, slot.namespace)
            return
        if result not in (PutResult.STORED, PutResult.EXISTS):
            refused = self._requests.refused
            kind, why = fault or ("", result)
            refused.add((slot.key,), REFUSED_SECONDS, LookupMiss.REFUSED, why, kind)
            self._announce_failed(slot.key)
            return
        self._requests.refused.discard(slot.key)
        if self._is_alone:
            self._context.store.learn([slot.key])
        elif self._ranks.are_apart:
            self._ranks.stored(slot.key)
            self._context.store.learn([self._ranks.shard_of(slot.key, slot.part)])
        self.pins.stored(slot.key)
        if result == PutResult.STORED:
            self._requests.unreadable.discard(slot.key)
            if slot.part >= 0 and (states := self._context.states) is not None:
                self._context.observer.count("saved_state_bytes", states.record_bytes)

    def be_apart(self) -> None:
        """Have ranks write shards from now on: what they hashed for this process is offered
        again."""
        given_up = self.shared_writes.abort_all()
        for slot in given_up:
            self._pool.end_write(slot)
            self._pool.give_up(slot)
        self._offer_again([slot.key for slot in given_up])

    def poll_writes(self) -> None:
        """Learn which records of several ranks this process has written."""
        if not self._is_alone:
            for slot, answer in self.shared_writes.poll():
                self._learn_saved(slot.index, *answer)

    def _announce_failed(self, key: ChunkKey) -> None:
        """Drop the event of a chunk whose save failed."""
        if self.announcer is not None:
            self.announcer.failed(key)

    def learn_failures(self, report: RankReport) -> None:
        """The host computes the failed requests again. Other requests may have computed on the same
        blocks, through the host's own prefix cache. vLLM lets these run on, so nothing more of them
        is saved. Failures of an earlier report, which was lost, may be of any request."""
        rank = report.rank
        known = self.failures_known or (0,) * self._context.spec.shard.world_size
        if report.failures != known[rank]:
            for name, request in self._requests.by_id.items():
                if not report.failed_keys or name not in report.failed_requests:
                    request.block_saves()
                request.drop_audit()
        if report.failed_keys:
            self._requests.unreadable.add(
                report.failed_keys, UNREADABLE_SECONDS, LookupMiss.DAMAGED, "a load failed"
            )
            for key in report.failed_keys:
                self._pool.drop(ChunkKey(key))
            self._offer_again(report.failed_keys)
        self.failures_known = (*known[:rank], report.failures, *known[rank + 1 :])

    def _offer_again(self, keys: Collection[bytes]) -> None:
        """Have requests look once more at chunks that they passed: these are not stored after all.
        Rare; walks all live requests."""
        for request in self._requests.by_id.values():
            passed = request.keys.keys[: request.next_save]
            first = next((i for i, key in enumerate(passed) if key in keys), None)
            if first is not None and not (request.saves_blocked or request.is_past):
                request.save(first)
