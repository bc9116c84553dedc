"""The slots of all ranks as the scheduler role's process sees them: whole records.

Each rank makes the memory of its slots and reports where it is; here it is opened, so that one
process can write, lend and read what all ranks hold together.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvferry.blocks.rows import RankRows
from kvferry.cache.memory import open_slots, slot_size
from kvferry.cache.messages import SlotRegion
from kvferry.errors import TransferError
from kvferry.record.schema import DIGEST_BYTES, RecordSchema
from kvferry.types import KVGroup

logger = logging.getLogger(__name__)


class _Slots(NamedTuple):
    """One rank's."""

    rows: RankRows
    name: str
    memory: memoryview
    slot_bytes: int

    def part(self, slot: int, start: int, stop: int) -> memoryview:
        base = slot * self.slot_bytes
        return self.memory[base + start : base + stop]


class _Part(NamedTuple):
    """Contiguous bytes of a record that are contiguous in the slots of one rank, too."""

    rank: int
    start: int
    stop: int


class RankSlots:
    """Opens the memory of all ranks' slots, for writes to the store and for peers that read.
    Thread-safe, but for `learn`.

    Args:
        groups: KV groups of the whole model.
        schema: of the records; their namespace does not matter.
        num_slots: of every rank.
        world_size: number of ranks.
    """

    def __init__(
        self, groups: Sequence[KVGroup], schema: RecordSchema, num_slots: int, world_size: int
    ) -> None:
        self._groups = groups
        self._schema = schema
        self._num_slots = num_slots
        self._world_size = world_size
        self._slots: dict[int, _Slots] = {}
        self._unreachable: dict[int, str] = {}  # by rank, the name of its memory
        self._parts: tuple[_Part, ...] | None = None

    def learn(self, region: SlotRegion) -> None:
        """A rank reports where its slots are. Opens memory that is new; never waits."""
        rank = region.shard.rank
        known = self._slots.get(rank)
        if (known is not None and known.name == region.name) or (
            self._unreachable.get(rank) == region.name
        ):
            return
        rows = RankRows(self._groups, region.shard, self._schema)
        slot_bytes = slot_size(rows.slot_bytes)
        try:
            memory = open_slots(
                region.name, region.process, region.fd, self._num_slots * slot_bytes
            )
        except TransferError as error:
            self._unreachable[rank] = region.name
            if self._world_size > 1:
                logger.warning(
                    "nothing is stored, as the slots of rank %d cannot be read: %s; all ranks must "
                    "run on the machine of the scheduler, in its container and as its user",
                    rank,
                    error,
                )
            return
        self._slots[rank] = _Slots(rows, region.name, memory, slot_bytes)
        if len(self._slots) == self._world_size:
            self._parts = self._in_file_order()

    def _in_file_order(self) -> tuple[_Part, ...]:
        """The parts of a record: its head, as rank 0 has it, and the rows of all ranks."""
        head = _Part(0, 0, self._schema.head_bytes)
        found = [
            (self._schema.offset_of(ranges), _Part(rank, start, stop))
            for rank, slots in self._slots.items()
            for ranges, start, stop in slots.rows.spans()
        ]
        parts, end = [head], self._schema.head_bytes
        for offset, part in sorted(found):
            assert offset == end, "ranks divide every record without gap or overlap"
            end += part.stop - part.start
            last = parts[-1]
            if (last.rank, last.stop) == (part.rank, part.start):
                parts[-1] = _Part(part.rank, last.start, part.stop)
            else:
                parts.append(part)
        return tuple(parts)

    def record(self, slot: int) -> list[memoryview] | None:
        """The buffers of the record in a slot, in file order and writable; the first begins with
        the head as rank 0 has it. None if not all ranks can be reached."""
        if self._parts is None:
            return None
        return [self._slots[part.rank].part(slot, part.start, part.stop) for part in self._parts]

    def whole_record(self, slot: int) -> list[memoryview] | None:
        """As `record`, but also None if the ranks' heads differ: the chunk was replaced in the
        store while they read it, and their rows are of different records."""
        parts = self.record(slot)
        heads = self._heads(slot)
        return parts if all(head == heads[0] for head in heads[1:]) else None

    def seal(self, slot: int, head: bytes) -> None:
        """Write the head of a saved record into the slots of all ranks."""
        for part in self._heads(slot):
            part[:] = head

    def _heads(self, slot: int) -> list[memoryview]:
        return [each.part(slot, 0, self._schema.head_bytes) for each in self._slots.values()]

    def leaf_table(self, digests: Mapping[int, bytes]) -> bytes | None:
        """The leaf table of a record, made of what each rank hashed; None if a rank's part is
        missing or has another length."""
        table = bytearray(DIGEST_BYTES * self._schema.num_leaves)
        num_filled = 0
        for rank, slots in self._slots.items():
            at, found = 0, digests.get(rank, b"")
            for ranges, _, _ in slots.rows.spans():
                where = self._schema.leaf_slice(ranges)
                size = where.stop - where.start
                table[where] = found[at : at + size].ljust(size, b"\0")
                at += size
            if at != len(found):
                return None
            num_filled += at
        return bytes(table) if num_filled == len(table) else None
