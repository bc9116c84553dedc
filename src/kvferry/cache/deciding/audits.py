"""Audits: whether what is stored under this model's identity is what the engine computes.

An audit is a save that compares. A look-up promises a hit up to the chunk to compare, whose record
is held and pinned → the engine computes the chunk → the plan of the step that completes it saves
the chunk into a spare slot, and says which record to compare it with → every rank does this as for
any save, but reports the result instead of writing (`kvferry.cache.moving.comparisons`) → `learn`.
Every hit is audited until one audit passes at the last chunk of its hit that came from the store.
From then on a share of hits is audited (option `audit`).

kvferry stores only what it saw computed, so a mismatch shows another model or broken hardware: the
record is taken out of the store, and nothing is loaded or saved until the next epoch, when
weights change. NaN or Inf in a record shows no other model, only a bad step of its writer, an older
release: the record goes, with all behind it in the prompt. In what was computed they show nothing
of the record. Both ways the cache goes on.

A difference that is nearly a mismatch is used, and logged and counted (`DOUBTFUL`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.blocks.tolerance import (
    DOUBTFUL,
    OTHER_KV,
    ROUNDING,
    TOLERANCE,
    tolerances_for,
)
from kvferry.cache.config import RoleContext
from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool, Slot
from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.cache.messages import Filled, Load, Save, SlotChunk
from kvferry.errors import ContractError
from kvferry.record.check import ReadFault
from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey, ScheduledRequest

logger = logging.getLogger(__name__)

OTHER_MODEL = "the model computes other KV than is stored under its identity"

REMEDY = (
    "Another model stored it, or hardware is broken: the record is taken out, and nothing more is "
    "loaded or saved. The engine's own prefix cache may still hold what was loaded: reset it, or "
    "restart. If the weights or the code were changed in memory, give them a weights_version of "
    "their own. If it is the same model, and only rounds otherwise than where the records were "
    'stored (other kernels, device or number of ranks), set the option audit to "off"'
)


@dataclass(slots=True, eq=False)
class Audit:
    """The comparison of a promised hit with what the engine computes.

    Attributes:
        hold: has the two slots that follow.
        record: slot with the record of the compared chunk.
        copy: slot for what the engine computes.
        is_at_end: False if chunks that this engine did not save follow the compared one in the hit.
            Faults that grow with the position, such as other rotary frequencies, may not show then.
        behind: keys of the prompt, from that of the compared chunk on.
        load: load of the hit, once it is admitted; None if nothing is loaded, or the host cannot
            compute it again.
        is_expected: whether the copy is still to be made, by a later step of the request.
        unchecked: takes `load` if no rank will ever compare (`Audits.take_unchecked`).
        results: results of the ranks that have compared their part.
    """

    hold: Hold
    record: Slot
    copy: Slot
    is_at_end: bool
    behind: Sequence[ChunkKey]
    unchecked: list[Load] = field(repr=False)
    load: Load | None = None
    is_expected: bool = True
    results: list[Filled] = field(default_factory=list)

    def give_up(self) -> None:
        """Expect the copy no more: the request lost its blocks, or others may have filled them with
        something else. The host's own cache may still have their content, so the load counts as
        unchecked. Does nothing once the copy is planned."""
        if self.is_expected:
            self.is_expected = False
            self.hold.release()
            if self.load is not None:
                self.unchecked.append(self.load)


class Audits:
    """The audits of an engine: chooses, plans and judges them. Runs in: scheduler thread; does I/O
    only in a job that takes a wrong record out of the store.

    Args:
        pool: assigns the slots.
        withdraw: ends the searches that were promised one of these chunks.
        ranks: knows whether they are apart.

    Attributes:
        discards: what the next plan has ranks that are apart take out of their stores; it clears
            them.
    """

    def __init__(
        self,
        context: RoleContext,
        pool: HostPool,
        withdraw: Callable[[Collection[ChunkKey]], None],
        ranks: RankSlots,
    ) -> None:
        self._context = context
        self._ranks = ranks
        self._pool = pool
        self._withdraw = withdraw
        option = context.config.audit
        why_not = None if option == "off" else _why_not(context)
        if why_not:
            logger.warning("hits are not audited: %s", why_not)
        self._rate: float | None = option if isinstance(option, float | int) else 0.0
        if why_not or option == "off":
            self._rate = None  # not even the first
        self._has_passed = False
        self._has_told = False  # of a doubtful difference
        self._running: dict[int, Audit] = {}  # by the slot of the copy
        self._unchecked: list[Load] = []
        self.discards: list[tuple[bytes, str, bytes]] = []
        self._thread = IOPool(1, "kvferry-discard")

    # -- hits -----------------------------------------------------------------------------------

    def draw(self) -> float | None:
        """Draw, when a search begins, where its hit is compared: a number in [0, 1); below 1/n, a
        hit of n chunks is compared at its start, else at its end. None if it is not audited."""
        share = 1.0 if self._rate is not None and not self._has_passed else self._rate or 0.0
        sample = self._context.draw() if share else 1.0
        return sample / share if sample < share else None

    def is_sampled(self, place: float) -> bool:
        """Whether a hit is compared for the share of the option `audit`, and not until one audit
        passes: then chunks that this engine saved itself are compared, too."""
        return self._has_passed or place < (self._rate or 0.0)

    def reserve(self, keys: Sequence[ChunkKey], whole: range, number: int) -> Audit | None:
        """Pin for the audit the record of a chunk (its request has a pin of its own) and a spare
        slot for the copy that the engine computes. None if the record is gone or no slot is free.

        Args:
            whole: the chunks of the hit before it was shortened.
            number: index of the chunk to compare.
        """
        record = self._pool.find(keys[number])
        if record is None:
            return None
        # Before a spare slot is assigned, which may evict one of these.
        is_at_end = all(
            slot is not None and slot.is_save
            for slot in (self._pool.find(keys[later]) for later in range(number + 1, whole.stop))
        )
        hold = Hold(self._pool)
        copy = hold.add_spare(number * self._context.chunk_tokens)
        if copy is None:
            return None
        hold.add(record)
        return Audit(hold, record, copy, is_at_end, keys[number:], self._unchecked)

    # -- plan -----------------------------------------------------------------------------------

    def plan(self, item: ScheduledRequest, audit: Audit) -> Save | None:
        """Return the save that compares the audited chunk of a request; None if this step does not
        complete it, or it is in no blocks any more."""
        record, copy = audit.record, audit.copy
        first = record.first_token
        stop = first + self._context.chunk_tokens
        if item.num_computed_tokens + item.num_scheduled_tokens < stop:
            return None
        try:
            blocks = self._context.tables.chunk_slices(item.block_ids, first, stop)
        except ContractError as error:
            logger.error("the hit of %s is not audited: %s", item.request.request_id, error)
            blocks = None
        if blocks is None:
            self._context.observer.count("audit_failed")
            audit.give_up()
            return None
        self._pool.fill_spare(copy)
        self._running[copy.index] = audit
        audit.is_expected = False
        chunk, compare_with = (SlotChunk(each.index, record.key, first) for each in (copy, record))
        return Save(chunk, blocks, compare_with, audit.load)

    def lost_plan(self, copy: Slot) -> None:
        """Learn that no rank will get the comparison with this copy, so none fails the load."""
        load = self._running[copy.index].load
        if load is not None:
            self._unchecked.append(load)

    def take_unchecked(self) -> tuple[Load, ...]:
        """Take the loads whose audit will never run: workers report their blocks as failed."""
        unchecked = tuple(self._unchecked)
        self._unchecked.clear()
        return unchecked

    def holds(self) -> Iterator[Hold]:
        """The pins of comparisons that ranks make."""
        return (audit.hold for audit in self._running.values())

    @property
    def has_unchecked(self) -> bool:
        """Whether some loads wait to be reported as unchecked."""
        return bool(self._unchecked)

    # -- reports --------------------------------------------------------------------------------

    def learn(self, copy: Slot, compared: Filled) -> None:
        """Learn that a rank ended a comparison."""
        audit = self._running[copy.index]
        audit.results.append(compared)
        if copy.filling:
            return
        del self._running[copy.index]
        is_current = self._pool.find(audit.record.key) is audit.record  # no epoch has begun since
        audit.hold.release()
        if is_current:
            self._conclude(audit)

    def _conclude(self, audit: Audit) -> None:
        """Judge an audit of which all ranks have compared their parts."""
        observer = self._context.observer
        if any(each.missed == ReadFault.NOT_FINITE for each in audit.results):
            observer.count("records_corrupt")
            self.take_out(audit.behind, ReadFault.NOT_FINITE, audit.record.namespace)
            return
        if audit.copy.failed:
            # For example, a rank whose load failed spoils what the others compute in that step.
            observer.count("audit_failed")
            return
        worst = max(audit.results, key=lambda each: each.excess)
        key = audit.record.key
        where = f"record {key.hex()} of {self._context.store.url}"
        if worst.agrees:
            observer.count("audits")
            logger.info("audit passed; largest difference: %s", worst.detail)
            if worst.excess > DOUBTFUL:
                self._doubt(where, worst.detail)
            self._has_passed |= audit.is_at_end
            return
        observer.count("audit_mismatch")
        if self._context.identity.distrust(f"{where} differs"):
            self.take_out((key,), OTHER_KV, audit.record.namespace)
            logger.warning("%s, in %s: %s. %s", OTHER_MODEL, where, worst.detail, REMEDY)

    def take_out(self, keys: Sequence[ChunkKey], why: str, namespace: bytes) -> None:
        """Give up chunks of a namespace, also where they are promised already, and take their
        records out of the store."""
        self._withdraw(frozenset(keys))
        for key in keys:
            slot = self._pool.find(key)
            if slot is not None:
                self._pool.give_up(slot)
        if self._ranks.are_apart:
            self.discards += [(key, why, namespace) for key in keys]
        store = self._context.store.in_namespace(namespace)

        def discard(_job: Job[None]) -> None:
            for key in keys:
                store.discard(key, why)

        self._thread.submit(discard)

    def _doubt(self, where: str, difference: str) -> None:
        """Note a difference that is nearly a mismatch."""
        self._context.observer.count("audit_doubtful")
        if not self._has_told:
            self._has_told = True
            logger.warning("%s, in %s: %s", ROUNDING, where, difference)

    def close(self) -> None:
        """End the thread, in bounded time. Idempotent."""
        if not self._thread.close(self._context.bounds.reads_close_seconds):
            logger.warning(
                "a wrong record was not taken out of %s in time at close; it may still be there",
                self._context.store.url,
            )


def _why_not(context: RoleContext) -> str | None:
    """Why hits cannot be audited; None if they can."""
    chunk = context.chunk_tokens
    if not {group.dtype for group in context.spec.groups} <= TOLERANCE.keys():
        return "no tolerance is known for KV of this dtype"
    if not tolerances_for(context.spec.identity.config):
        return "this model rounds activations to 4 bits, which blurs what a comparison would show"
    if not all(table.keeps_whole(chunk) for table in context.tables.tables):
        return f"an attention window is shorter than chunk_tokens={chunk}, or chunks divide it not"
    return None
