"""The host pool: the table of slots in host memory and their chunks, the same for all ranks.

Host memory for KV is divided into slots of one chunk each, the same number on every rank; a rank's
slot holds its part of the chunk. So do parts of recurrent states, which are records as large as
chunks: what is said of chunks is said of them, too. The parts of the scheduler role get all slots
from this table:

    free ──fetch, save──▶ filling ──all ranks have it──▶ held ──▶ idle (may be evicted)
     ▲                       │ a rank missed it            ▲ │
     └───────────────────────┘                       unpin │ │ pin
                                                           └─▼
                                                         pinned

Invariants:
- A slot is assigned again only when no rank reads into it or writes from it any more: a late read
  cannot overwrite another chunk. Workers report the end of every operation.
- A pinned slot keeps its chunk. A request pins the chunks that it waits for or was promised. Each
  pin is in the `hold.Hold` of its owner.
- Operations on one slot are ordered by the plans that name it: a slot that a plan loads from is
  unpinned when that plan is built, so only a later plan can assign it again.
- A fetched chunk is verified before it is held; a saved one was computed here. Both are immutable
  under their key.
- A chunk that came whole is sealed once its head and the digests of its rows are there, too. Then
  other threads may borrow it (`loans`); a slot that is lent is not assigned again.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.cache.deciding.loans import Loans
from kvferry.cache.messages import Fetch, SlotChunk
from kvferry.types import ChunkKey

NO_GROUPS: frozenset[int] = frozenset()
NO_KEY = ChunkKey(b"")


@dataclass(slots=True, eq=False)
class Slot:
    """A slot assigned to a chunk; a new object for each assignment.

    Attributes:
        index: number of the slot, the same on every rank.
        key: key of the chunk. `HostPool.find` does not find a slot that was given up.
        first_token: position of the chunk in the prompt.
        mark: `kvferry.keys.salt_mark` of its salt; empty if it has none.
        namespace: of the epoch in which it was assigned, and so of its record.
        part: number of the part of a state that it holds; negative: it holds a chunk.
        held: groups that every rank holds.
        filling: groups that the ranks read or copy into it now.
        is_save: whether a save fills it, not a fetch.
        pins: number of requests that wait for it, were promised it or load it, plus its audits.
        num_filling: number of ranks that have not reported the end of the read or copy.
        num_sealing: number of ranks that have not reported that they hashed what a save brought.
        is_writing: whether a write to the store is to come, or under way.
        failed: whether a rank could not read or copy the chunk.
        seconds: time that the slowest rank's fetch took.
    """

    index: int
    key: ChunkKey
    first_token: int
    mark: bytes = b""
    namespace: bytes = b""
    part: int = -1
    held: frozenset[int] = NO_GROUPS
    filling: frozenset[int] = NO_GROUPS
    is_save: bool = False
    pins: int = 0
    num_filling: int = 0
    num_sealing: int = 0
    is_writing: bool = False
    failed: bool = False
    seconds: float = 0.0

    @property
    def is_spare(self) -> bool:
        """Whether it is for the copy that an audit compares with a record."""
        return self.key == NO_KEY

    @property
    def is_idle(self) -> bool:
        """Whether no rank reads into it or writes from it any more."""
        return not (self.num_filling or self.num_sealing or self.is_writing)


class HostPool:
    """All slots of an engine. Runs in: scheduler thread, but for `loans`; memory only; not
    thread-safe.

    Args:
        num_slots: number of slots on every rank.
        num_ranks: number of ranks that each report the end of an operation.
        all_groups: indices of the model's KV groups; a save fills all of them.
        loans: lends what is sealed here; None: nothing is lent.

    Attributes:
        pool_id: names this pool in plans and reports; reports of other pools are ignored.
        namespace: of the chunks that get slots from now on.
    """

    def __init__(
        self,
        num_slots: int,
        num_ranks: int,
        all_groups: frozenset[int],
        loans: Loans | None = None,
    ) -> None:
        self.pool_id = secrets.randbits(63)
        self.namespace = b""
        self.num_slots = num_slots
        self.loans = Loans() if loans is None else loans
        self._num_ranks = num_ranks
        self._all_groups = all_groups
        self._free: list[int] = []  # slots that had a chunk before
        self._slots: dict[int, Slot] = {}
        self._by_key: dict[ChunkKey, Slot] = {}
        # Least recently used first. `touch` puts the root of a prefix last, so a prompt loses its
        # end first.
        self._idle: OrderedDict[ChunkKey, None] = OrderedDict()
        self._num_filling = 0
        self._num_writing = 0
        # For the next plan: fetches by slot, slots whose earlier fetch is cancelled, and slots that
        # ranks are to copy into.
        self._fetches: dict[int, Fetch] = {}
        self._cancels: list[int] = []
        self._copies: list[Slot] = []

    # -- look-up --------------------------------------------------------------------------------

    def find(self, key: ChunkKey) -> Slot | None:
        """The slot that is assigned to a chunk, filled or not."""
        return self._by_key.get(key)

    def holds(self, key: ChunkKey, groups: frozenset[int]) -> bool:
        """Whether every rank holds these groups of a chunk."""
        slot = self._by_key.get(key)
        return slot is not None and groups <= slot.held

    @property
    def num_taken(self) -> int:
        """Number of slots that are pinned or busy, and so cannot be assigned to other chunks now.
        Idle or free slots that are lent cannot be assigned either, but are not counted."""
        return len(self._slots) - len(self._idle)

    @property
    def num_pins(self) -> int:
        """Number of pins of all slots. Walks the slots."""
        return sum(slot.pins for slot in self._slots.values())

    def pinned(self) -> list[Slot]:
        """The slots that have pins. Walks the slots."""
        return [slot for slot in self._slots.values() if slot.pins]

    @property
    def num_assigned(self) -> int:
        """Number of slots that have a chunk, or get one."""
        return len(self._slots)

    @property
    def is_filling(self) -> bool:
        """Whether the end of some fetch or copy is still to be reported."""
        return self._num_filling > 0

    @property
    def is_writing(self) -> bool:
        """Whether some slot is still being written to the store."""
        return self._num_writing > 0

    @property
    def is_idle(self) -> bool:
        """Whether no slot is being filled or written, and none is to be."""
        return not (self._num_filling or self._num_writing or self.has_work)

    @property
    def has_work(self) -> bool:
        """Whether the next plan must go out even if nothing is scheduled."""
        return bool(self._fetches or self._cancels)

    # -- assignment -----------------------------------------------------------------------------

    def fetch(
        self,
        key: ChunkKey,
        first_token: int,
        groups: frozenset[int],
        mark: bytes = b"",
        *,
        looks_at_values: bool = False,
        part: int = -1,
    ) -> Slot | None:
        """Have every rank read some groups of a chunk. One fetch serves all requests for the chunk.

        Args:
            part: of a part of a state: its number. It has all groups.
            looks_at_values: whether the fetch fails if there are values that are not finite.

        Returns:
            The slot, not pinned for the caller; None if every slot is pinned, busy or lent.
        """
        slot = self._by_key.get(key) or self._assign(key, first_token, mark, part)
        if slot is None:
            return None
        if slot.filling or groups <= slot.held:
            return slot  # groups that the fetch under way does not bring can be fetched later
        self._fill(slot, groups - slot.held)
        chunk = SlotChunk(slot.index, key, first_token, part=slot.part)
        self._fetches[slot.index] = Fetch(chunk, tuple(sorted(slot.filling)), looks_at_values)
        return slot

    def save(
        self, key: ChunkKey, first_token: int, mark: bytes = b"", part: int = -1
    ) -> Slot | None:
        """Assign a slot for a chunk that every rank copies, hashes and writes to the store.

        Returns:
            The slot; None if none can be assigned now, or half of them are being written.
        """
        slot = None
        if self.num_savable > 0:
            slot = self._assign_again(key, first_token, mark, part)
        if slot is None:
            return None
        slot.is_save = True
        slot.num_sealing = self._num_ranks
        slot.is_writing = True
        self._num_writing += 1
        self.loans.expect(key)
        self._fill(slot, self._all_groups)
        self._copies.append(slot)
        return slot

    @property
    def num_savable(self) -> int:
        """How many more slots may be written at once: a store that writes slowly must not keep
        prompts from being read."""
        return max(1, self.num_slots // 2) - self._num_writing

    def fetch_whole(self, key: ChunkKey, first_token: int, mark: bytes = b"") -> None:
        """Have every rank read all of a stored chunk, so that it may be lent. Does nothing if its
        slot is in use otherwise, or half of the slots are pinned or busy."""
        slot = self._by_key.get(key)
        if slot is None or slot.filling != self._all_groups:
            if 2 * self.num_taken >= self.num_slots:
                return
            if not self._assign_again(key, first_token, mark):
                return
            self.fetch(key, first_token, self._all_groups)
        self.loans.expect(key)

    def spare(self, first_token: int) -> Slot | None:
        """Assign a pinned slot for the copy that an audit makes; None if every slot is pinned, busy
        or lent. `find` does not find it."""
        slot = self._assign(NO_KEY, first_token)
        if slot is not None:
            slot.pins = 1
        return slot

    def fill_spare(self, slot: Slot) -> None:
        """Have every rank copy a chunk into a spare slot, which the audit keeps pinned."""
        self._fill(slot, self._all_groups)
        self._copies.append(slot)

    def _assign_again(
        self, key: ChunkKey, first_token: int, mark: bytes, part: int = -1
    ) -> Slot | None:
        """Assign a new slot to a chunk and give up its old one. None if the old one is in use, or
        no slot can be had."""
        old = self._by_key.get(key)
        if old is not None:
            if old.pins or not old.is_idle:
                return None
            self.give_up(old)
        return self._assign(key, first_token, mark, part)

    def _assign(
        self, key: ChunkKey, first_token: int, mark: bytes = b"", part: int = -1
    ) -> Slot | None:
        """Assign a free slot, or that of the chunk to evict; None if there is none."""
        index = self._free_place()
        if index is None:
            return None
        slot = self._slots[index] = Slot(index, key, first_token, mark, self.namespace, part)
        if not slot.is_spare:
            self._by_key[key] = slot
        return slot

    def _free_place(self) -> int | None:
        """Take a slot that is not lent: a free one, or that of the chunk to evict. None if there is
        none."""
        for at in reversed(range(len(self._free))):
            if not self.loans.is_lent(self._free[at]):
                return self._free.pop(at)
        num_used = len(self._slots) + len(self._free)
        if num_used < self.num_slots:
            return num_used
        for key in self._idle:
            slot = self._by_key[key]
            if not self.loans.is_lent(slot.index):
                self._forget(slot)
                return slot.index
        return None

    def _fill(self, slot: Slot, groups: frozenset[int]) -> None:
        self._idle.pop(slot.key, None)
        slot.filling = groups
        slot.num_filling = self._num_ranks
        slot.failed = False
        self._num_filling += 1

    def pin(self, slot: Slot) -> None:
        """Keep a chunk in its slot until `unpin`."""
        slot.pins += 1
        self._idle.pop(slot.key, None)

    def touch(self, keys: Sequence[ChunkKey]) -> None:
        """Note that a prefix was used: its root is evicted last."""
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def unpin(self, slot: Slot) -> None:
        """End one pin. The last one cancels a fetch into a slot that holds nothing, unless peers
        wait for it."""
        slot.pins -= 1
        is_wanted = slot.held or slot.is_save or self.loans.knows(slot.key)
        if slot.pins == 0 and slot.filling and not is_wanted:
            self._cancel(slot)
        self._settle(slot)

    def unpin_all(self, slots: Sequence[Slot]) -> None:
        """End one pin of each slot; the root of a prefix comes last, so that it is evicted last."""
        for slot in reversed(slots):
            self.unpin(slot)

    def _cancel(self, slot: Slot) -> None:
        self._forget(slot)
        if self._fetches.pop(slot.index, None) is None:
            self._cancels.append(slot.index)
        else:  # no plan has carried the fetch, so the ranks will report nothing
            slot.filling, slot.num_filling = NO_GROUPS, 0
            self._num_filling -= 1

    def pop_orders(self) -> tuple[tuple[Fetch, ...], tuple[int, ...]]:
        """Take the orders for the next plan: fetches, and slots whose fetch is cancelled."""
        orders = tuple(self._fetches.values()), tuple(self._cancels)
        self._fetches, self._cancels = {}, []
        self._copies.clear()
        return orders

    def pop_copies(self) -> tuple[Slot, ...]:
        """Take the slots that no plan will have ranks copy into. Each still expects the reports of
        all ranks."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    # -- reports --------------------------------------------------------------------------------

    def report_filled(
        self, index: int, seconds: float = 0.0, *, missed: bool = False
    ) -> Slot | None:
        """Learn that a rank ended a fetch, or the copy of a save or an audit. Return the slot,
        which fills until all ranks have reported; None if no such end was expected."""
        slot = self._slots.get(index)
        if slot is None or slot.num_filling == 0:
            return None
        slot.num_filling -= 1
        slot.failed |= missed
        slot.seconds = max(slot.seconds, seconds)
        if missed and slot.is_save:
            slot.num_sealing -= 1  # it has nothing to hash
        if slot.num_filling:
            return slot
        self._num_filling -= 1
        is_whole = slot.filling == self._all_groups
        if not slot.failed:
            slot.held |= slot.filling
        elif not slot.held:
            self._forget(slot)
        slot.filling = NO_GROUPS
        if slot.failed:
            self.end_write(slot)
        else:
            if is_whole and not slot.is_save:
                self.seal(slot)
            self._settle(slot)
        return slot

    def report_sealed(self, index: int) -> Slot | None:
        """Learn that a rank hashed what a save brought, or could not. Return the slot; None if that
        was not expected."""
        slot = self._slots.get(index)
        if slot is None or slot.num_sealing == 0:
            return None
        slot.num_sealing -= 1
        self._settle(slot)
        return slot

    def seal(self, slot: Slot) -> None:
        """Let a chunk be lent: all of it came from one source, and its head is there."""
        if self._by_key.get(slot.key) is slot:
            self.loans.offer(slot.key, slot.index, slot.part)

    def report_written(self, index: int) -> Slot | None:
        """Learn that the write of a slot ended. Return the slot; None if none was expected."""
        slot = self._slots.get(index)
        if slot is None or not slot.is_writing:
            return None
        self.end_write(slot)
        return slot

    def end_write(self, slot: Slot) -> None:
        """Note that the write of a slot ended, or will not come."""
        if slot.is_writing:
            slot.is_writing = False
            self._num_writing -= 1
            if self._by_key.get(slot.key) is slot and not self.loans.offers(slot.key):
                self.loans.withdraw(slot.key)
        self._settle(slot)

    # -- ends -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Give up all chunks. Operations that a plan has carried continue, and a pinned slot is
        free only after its last pin."""
        for slot in list(self._by_key.values()):
            self.give_up(slot)

    def erase(self, is_erased: Callable[[Slot], bool]) -> None:
        """Give up some chunks, as `clear` gives up all."""
        for slot in list(self._by_key.values()):
            if is_erased(slot):
                self.give_up(slot)

    def drop(self, key: ChunkKey) -> None:
        """Give up a chunk that cannot be loaded, or has to be read again, unless its slot is pinned
        or busy."""
        slot = self._by_key.get(key)
        if slot is not None and not slot.pins and slot.is_idle:
            self.give_up(slot)

    def give_up(self, slot: Slot) -> None:
        """Give up a chunk whatever its slot is used for, as `clear` does."""
        self._forget(slot)
        if slot.index in self._fetches:  # else a plan has carried it: its result is dropped
            self._cancel(slot)
        self._settle(slot)

    def _forget(self, slot: Slot) -> None:
        """Remove a slot from the index: `find` no longer finds it, and it is lent no more."""
        if self._by_key.get(slot.key) is slot:
            self.loans.withdraw(slot.key)
            del self._by_key[slot.key]
            self._idle.pop(slot.key, None)

    def _settle(self, slot: Slot) -> None:
        """Make a slot idle or free if no request and no rank uses it any more."""
        if slot.pins or not slot.is_idle or self._slots.get(slot.index) is not slot:
            return
        if self._by_key.get(slot.key) is slot:
            self._idle[slot.key] = None
            self._idle.move_to_end(slot.key)
        else:
            del self._slots[slot.index]
            self._free.append(slot.index)

    def __repr__(self) -> str:
        num_pinned = sum(slot.pins > 0 for slot in self._slots.values())
        return (
            f"<HostPool {self.num_slots} slots: {self.num_slots - len(self._slots)} free, "
            f"{len(self._idle)} idle, {num_pinned} pinned, "
            f"{self._num_filling} filling, {self._num_writing} writing>"
        )
