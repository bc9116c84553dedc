"""Opens the slots of all ranks in the scheduler role's process, and joins them into whole records.

A slot is memory for one rank's part of a record. Each rank makes its slots and reports where they
are. `Loans` lends the joined records to peers, and `SharedWrites` writes them to the store. If the
slots of one rank cannot be opened, ranks are apart, for good: each writes shards of its own. That
is decided once all ranks have reported, as chunks are found by the first shard of any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvferry.blocks.rows import RankRecords
from kvferry.cache.epoch import CacheIdentity
from kvferry.cache.memory import open_slots, slot_size
from kvferry.cache.messages import SlotRegion
from kvferry.cache.shards import shard_keys
from kvferry.errors import TransferError
from kvferry.keys import ShardKeys
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import RecordSchema
from kvferry.types import ChunkKey, RankShard

logger = logging.getLogger(__name__)

MAX_LACKING = 1 << 16
"""Most chunks that are known to lack a shard."""


class _Slots(NamedTuple):
    """The opened slots of one rank. `slot_bytes` is the distance from one slot to the next."""

    records: RankRecords
    memory: memoryview
    slot_bytes: int

    def part(self, slot: int, start: int, stop: int) -> memoryview:
        base = slot * self.slot_bytes
        return self.memory[base + start : base + stop]


class _Part(NamedTuple):
    """Bytes contiguous in a record and in a rank's slot; `[start, stop)` is where in the slot."""

    rank: int
    start: int
    stop: int


class RankSlots:
    """The opened slots of all ranks. Only the scheduler thread calls `learn`, `lacks`, `stored` and
    `counts`; the other methods may be called from any thread.

    Args:
        records_of: returns what a rank holds of records, given its shard.
        schemas: layouts of the records under any namespace, where `RankRecords.of` has them: of the
            parts of states, and last of chunks.
        num_slots: number of slots that each rank has.
        shard: of the scheduler role.
        identity: has the namespace that all ranks must begin with.

    Attributes:
        are_apart: whether ranks are on several machines, and their records shards. Never unset.
    """

    def __init__(
        self,
        records_of: Callable[[RankShard], RankRecords],
        schemas: Sequence[RecordSchema],
        num_slots: int,
        shard: RankShard,
        identity: CacheIdentity,
    ) -> None:
        self._records_of = records_of
        self._schemas = tuple(schemas)
        self._num_slots = num_slots
        self._world_size = shard.world_size
        self._identity = identity
        self._slots: dict[int, _Slots] = {}
        self._regions: dict[int, SlotRegion] = {}
        self._shards: dict[int, dict[int, ShardKeys]] = {}  # by rank, see `shard_keys`
        self._note_shard(shard)
        self._unopened: dict[int, TransferError] = {}
        self.are_apart = False
        # Chunks that not all ranks have stored, as far as this process knows.
        self._lacking: dict[ChunkKey, None] = {}
        # By record: -1 is a chunk's, as everywhere.
        self._parts: tuple[tuple[_Part, ...], ...] | None = None

    def _note_shard(self, shard: RankShard) -> None:
        names = shard_keys(self._records_of(shard))
        if names:  # else it has no rows
            self._shards = dict(sorted((self._shards | {shard.rank: names}).items()))

    def shard_of(self, key: ChunkKey, part: int) -> ChunkKey:
        """Return the key of the first shard of a record: that of the first rank with rows, once
        ranks are apart. `part` as in slots."""
        return next(iter(self._shards.values()))[part].of(key)

    def first_names(self, key: ChunkKey) -> tuple[ChunkKey, ...]:
        """Return `shard_of` for each part: a key does not say which it is of, and no other record
        has such a name."""
        names = next(iter(self._shards.values())).values()
        return tuple(each.of(key) for each in dict.fromkeys(names))

    def names_of(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Return the keys, and those that shards of these records may have. Any thread."""
        ranks = self._shards.values() if self.are_apart else ()  # replaced, never changed
        shards = dict.fromkeys(each for names in ranks for each in names.values())
        return [name for key in keys for name in (key, *(shard.of(key) for shard in shards))]

    def lacks(self, key: ChunkKey) -> None:
        """Note that ranks begin to write shards of a chunk, or one lacks its own: none counts until
        all are `stored`. Does nothing before ranks are apart."""
        if self.are_apart:
            if len(self._lacking) >= MAX_LACKING:
                del self._lacking[next(iter(self._lacking))]
            self._lacking[key] = None

    def stored(self, key: ChunkKey) -> None:
        """Note that all ranks have stored their shards of a chunk."""
        self._lacking.pop(key, None)

    def counts(self, key: ChunkKey) -> bool:
        """Whether the shard of the first rank stands for all."""
        return self.are_apart and key not in self._lacking

    def learn(self, region: SlotRegion) -> str:
        """Open the slots that a rank reports, unless that was tried before. Never waits. If it
        fails, records of several ranks are not stored, and nothing is lent.

        Returns:
            Why nothing may be loaded or saved: this rank describes the model in another way, has
            another number of slots, or loads from slots that are not those of the first rank that
            holds the same. Empty if all is well.
        """
        if self._regions.get(region.shard.rank) == region:
            return ""  # a rank says it again in each report
        namespace = self._identity.first
        if not namespace:
            return ""
        if region.namespace != namespace:
            return (
                f"rank {region.shard.rank} stores KV under another namespace than the scheduler "
                "looks it up: the host describes the model differently to both. Nothing is loaded "
                "or saved; make kvferry the host's only connector, or a tier of the host's own "
                "offloading"
            )
        if region.num_slots not in (0, self._num_slots):
            return (
                f"rank {region.shard.rank} has memory for {region.num_slots} chunks, and the "
                f"scheduler counts on {self._num_slots}: without memory_bytes, that depends on the "
                "memory of each machine. Nothing is loaded or saved; set memory_bytes to the same "
                "for all ranks"
            )
        self._open(region)
        self._regions[region.shard.rank] = region
        if self._unopened and not self.are_apart and len(self._regions) == self._world_size:
            self._be_apart(*next(iter(self._unopened.items())))
        for rank, each in self._regions.items():
            first = rank - rank % each.shard.num_replicas
            before = [self._regions.get(other) for other in range(first, rank)]
            made = {other.name for other in before if other is not None and not other.loads_only}
            if each.loads_only and None not in before and each.name not in made:
                return (
                    f"rank {rank} shares host memory with another engine. Nothing is loaded or "
                    "saved; give each engine an engine_id of its own"
                )
        return ""

    def _open(self, region: SlotRegion) -> None:
        rank = region.shard.rank
        tried = self._regions.get(rank)
        if tried is not None and tried.name == region.name:
            return
        self._note_shard(region.shard)
        records = self._records_of(region.shard)
        slot_bytes = region.slot_bytes or slot_size(records.slot_bytes)
        try:
            memory = open_slots(
                region.name, region.process, region.fd, self._num_slots * slot_bytes
            )
        except TransferError as error:
            # What was opened before is this rank's no more. In this order, see `record`.
            self._parts = None
            self._slots = {other: each for other, each in self._slots.items() if other != rank}
            if self._world_size > 1:  # a single rank stores its records itself
                self._unopened[rank] = error
            return
        self._unopened.pop(rank, None)
        self._slots[rank] = _Slots(records, memory, slot_bytes)
        if len(self._slots) == self._world_size:
            numbers = (*range(len(self._schemas) - 1), -1)
            self._parts = tuple(map(self._in_file_order, numbers))

    def _be_apart(self, rank: int, error: TransferError) -> None:
        """Take ranks as apart, and say so."""
        self.are_apart = True
        logger.warning(
            "ranks are on several machines, as the slots of rank %d cannot be opened (%s): each "
            "rank stores the layers and heads that it holds. Engines with the same split read "
            "them, others after `kvferry copy --join`; ranks of one machine must run in one "
            "container and as one user",
            rank,
            error,
        )

    def _in_file_order(self, number: int) -> tuple[_Part, ...]:
        """Return the parts of a record: its head, from rank 0, and the rows of all ranks."""
        schema = self._schemas[number]
        head = _Part(0, 0, schema.head_bytes)
        found = [
            (schema.offset_of(ranges), _Part(rank, start, stop))
            for rank, slots in self._slots.items()
            for ranges, start, stop in slots.records.of(number).spans()
        ]
        parts, end = [head], schema.head_bytes
        for offset, part in sorted(found):
            assert offset == end, "ranks divide every record without gap or overlap"
            end += part.stop - part.start
            last = parts[-1]
            if (last.rank, last.stop) == (part.rank, part.start):
                parts[-1] = _Part(part.rank, last.start, part.stop)
            else:
                parts.append(part)
        return tuple(parts)

    def record(self, slot: int, number: int = -1) -> list[memoryview] | None:
        """Return the buffers of the record in a slot, in file order and writable; the first begins
        with the head, from rank 0. None while the slots of some rank are not open. `number`: of a
        part of a state, if the slot holds one; so for the other methods."""
        slots, parts = self._slots, self._parts  # in this order: `learn` clears the parts first
        if parts is None:
            return None
        return [slots[part.rank].part(slot, part.start, part.stop) for part in parts[number]]

    def whole_record(self, slot: int, number: int = -1) -> list[memoryview] | None:
        """As `record`, but also None if the ranks' heads differ. They do if the store replaced the
        chunk while the ranks read it; then their rows belong to different records."""
        parts = self.record(slot, number)
        heads = self._heads(slot, number)
        return parts if all(head == heads[0] for head in heads[1:]) else None

    def seal(self, slot: int, head: bytes, number: int = -1) -> None:
        """Write the head of a saved record into the slots of all ranks."""
        for part in self._heads(slot, number):
            part[:] = head

    def _heads(self, slot: int, number: int) -> list[memoryview]:
        slots = tuple(self._slots.values())  # at once: another thread may learn
        return [each.part(slot, 0, self._schemas[number].head_bytes) for each in slots]

    def leaf_table(self, digests: Mapping[int, bytes], number: int = -1) -> bytes | None:
        """Make the leaf table of a record from the digests that each rank reported; None if those
        of a rank are missing or have the wrong length."""
        schema = self._schemas[number]
        table = bytearray(CHECKSUM.num_bytes * schema.num_leaves)
        num_filled = 0
        for rank, slots in self._slots.items():
            at, found = 0, digests.get(rank, b"")
            for ranges, _, _ in slots.records.of(number).spans():
                where = schema.leaf_slice(ranges)
                size = where.stop - where.start
                table[where] = found[at : at + size].ljust(size, b"\0")
                at += size
            if at != len(found):
                return None
            num_filled += at
        return bytes(table) if num_filled == len(table) else None
