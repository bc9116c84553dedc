"""The parts of one open store, and the operations that several of its faces share."""

from __future__ import annotations

import logging
import random
import stat
import threading
from collections.abc import Callable, Sequence

from kvferry.observe import Observer
from kvferry.store.base import PutResult
from kvferry.store.file.eviction import Evictor
from kvferry.store.file.faults import Faults
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.index import KeyIndex, NoIndex
from kvferry.store.file.layout import Layout, key_of_record_name
from kvferry.store.file.membership import Member, Membership
from kvferry.store.file.quarantine import Quarantine
from kvferry.store.file.quota import Quota
from kvferry.store.file.recovery import Recovery
from kvferry.store.file.removal import Removed
from kvferry.store.file.slots import Slot
from kvferry.store.file.upkeep import Upkeep
from kvferry.store.file.writing import DirectIO, PendingWrite, RecordWriting
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)


class Volume:
    """Everything a store needs, wired once. Thread-safe.

    Its methods answer with results; only those that say so raise.
    """

    def __init__(
        self,
        io: FileIO,
        layout: Layout,
        *,
        max_bytes: int | None,
        create: bool,
        direct_io: DirectIO,
        index: bool,
        observer: Observer,
        clock: Callable[[], float],
        wall: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.io = io
        self.layout = layout
        self.observer = observer
        self.index = KeyIndex() if index else NoIndex()
        self.membership = Membership(io, layout, wall, create=create)
        self.faults = Faults(layout.root, observer, clock)
        self.writing = RecordWriting(io, layout, direct_io, clock)
        self._making_slots = threading.Lock()
        recovery = Recovery(io, layout, clock, wall)
        self.quota = Quota(
            io,
            layout,
            max_bytes,
            evictor=Evictor(io, layout, rng),
            recovery=recovery,
            on_removed=self.forget,
            observer=observer,
        )
        self.quarantine = Quarantine(io, layout, max_bytes)
        self.upkeep = Upkeep(
            io,
            layout,
            self.index,
            membership=self.membership,
            recovery=recovery,
            quota=self.quota,
            faults=self.faults,
            rest=self.rest,
            lists=index,
            clock=clock,
            wall=wall,
            observer=observer,
        )

    def reserve(self, key: ChunkKey, num_bytes: int) -> PendingWrite | PutResult:
        """Find room for a record and a hidden file for it, or say why not."""
        member = self.membership.current
        max_bytes = self.quota.max_bytes
        if member is None:
            return PutResult.FAILED
        resting = self.faults.resting()
        if resting is not None:
            return resting
        try:
            if self._is_stored(key):
                return PutResult.EXISTS
            if max_bytes is not None and num_bytes > max_bytes:
                return self._no_room()
            slot = member.slots.take(num_bytes) or self._make_slot(member, num_bytes)
        except OSError as error:
            return self.write_failed(error)
        return PutResult.NO_SPACE if slot is None else PendingWrite(key, slot)

    def commit(self, pending: PendingWrite, views: Sequence[memoryview]) -> PutResult:
        """Write `views` to the front of a reserved record and make it visible."""
        try:
            self.writing.write(pending, views)
            won = self.writing.commit(pending)
        except OSError as error:
            self.writing.abort(pending)
            return self.write_failed(error)
        self.index.add(pending.key, stored=True)
        self.faults.write_succeeded()
        if not won:
            return PutResult.EXISTS
        self.observer.count("store_put_records")
        self.observer.count("store_put_bytes", pending.slot.num_bytes)
        return PutResult.STORED

    def used_bytes(self) -> int:
        """What all processes hold; see `Quota.used_bytes`. Of what was reserved ahead, only what
        others did."""
        member = self.membership.current
        ahead = 0 if member is None else member.slots.num_bytes
        return self.quota.used_bytes(member) - ahead

    def rest(self, *, always: bool = False) -> None:
        """Leave the ledger as others expect it between writes: what was reserved ahead and is not
        used, or `always` all of it, is given back."""
        member = self.membership.current
        if member is not None:
            take = member.slots.take_all if always else member.slots.take_idle
            self.writing.give_back(take())
            member.writer.catch_up()

    def write_failed(self, error: OSError) -> PutResult:
        """The outcome of a write that the medium refused. If our writer directory is gone, be it
        taken over or removed with the store, register again so that later writes work."""
        try:
            if self.membership.rejoin_if_fenced():
                self.observer.count("store_writer_fenced")
        except OSError as second:
            return self.faults.write_failed(second)
        return self.faults.write_failed(error)

    def set_aside(self, key: ChunkKey, reason: str) -> None:
        """Take a broken record out of service: to quarantine, or at least out of the index."""
        self.index.discard(key)
        member = self.membership.current
        if member is None:
            self.index.ban(key)
            return
        try:
            if self.quarantine.take(key, reason):
                self.observer.count("store_quarantined")
                logger.warning("store %s: quarantined %s: %s", self.layout.root, key.hex(), reason)
                self.quarantine.remove_foreign()
                member.remover.remove(self.quarantine.surplus())
        except OSError as error:
            self.index.ban(key)
            self.faults.failed("quarantine", error)

    def remove(self, keys: Sequence[ChunkKey]) -> Removed:
        """Remove what is there of these records.

        Raises:
            OSError: the medium failed.
        """
        for key in keys:
            self.index.discard(key)
        member = self.membership.current
        if member is None:
            return Removed()
        removed = member.remover.remove([self.layout.record(key) for key in keys])
        self.forget(removed)
        return removed

    def forget(self, removed: Removed) -> None:
        """Take removed records out of the index."""
        for name in removed.names:
            key = key_of_record_name(name)
            if key is not None:
                self.index.discard(key)

    def _is_stored(self, key: ChunkKey) -> bool:
        try:
            status = self.io.lstat(self.layout.record(key))
        except FileNotFoundError:
            return False
        if stat.S_ISREG(status.st_mode):
            self.index.add(key, stored=True)
            return True
        self.set_aside(key, "not_a_file")
        return False

    def _make_slot(self, member: Member, num_bytes: int) -> Slot | None:
        """A slot for one record, and some for those to come; None if there is no room for one.

        Raises:
            OSError: the medium refused, or our writer was fenced off.
        """
        # Of threads that find none at once, one makes several.
        is_first = self._making_slots.acquire(blocking=False)
        try:
            room = self.quota.room_ahead(member) if is_first else 0
            num_slots = member.slots.num_to_make(num_bytes, room, member.writer.num_free)
            slots = self._make_slots(member, num_bytes, num_slots)
            member.slots.keep(slots[1:])
            if self.membership.current is not member:  # closed meanwhile, or taken over
                self.writing.give_back(member.slots.take_all())
        finally:
            if is_first:
                self._making_slots.release()
        return slots[0] if slots else None

    def _make_slots(self, member: Member, num_bytes: int, num_slots: int) -> list[Slot]:
        slots = self.writing.make_slots(member.writer, num_bytes, num_slots)
        if not slots:  # the entries that are left may all be held by slots
            self.writing.give_back(member.slots.take_all())
            slots = self.writing.make_slots(member.writer, num_bytes, 1)
        if not slots:
            self.observer.count("store_put_busy")
            return []
        try:
            if self.quota.fits():
                return slots
            # Nothing is evicted for what may never be written.
            self.writing.give_back([*slots[1:], *member.slots.take_all()])
            slots = slots[:1]
            if self.quota.make_room(member):
                return slots
        except OSError:
            self.writing.give_back(slots)
            raise
        self.writing.give_back(slots)
        self._no_room()
        return []

    def _no_room(self) -> PutResult:
        self.observer.count("store_put_no_space")
        return PutResult.NO_SPACE
