"""Which bytes of a record one rank holds, and where they lie in a slot of host memory.

If a rank holds all layers and heads, its slot is a byte-for-byte image of the record file:

    | head | rows of group 0 | rows of group 1 | ...

If it holds only some, its slot has the whole record head and its own rows, packed in the order of
the record. A row is one kv head of one layer. The worker role uses this for its own rank, the
scheduler role to join the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from kvferry.record.leaves import Leaves, joined
from kvferry.record.schema import ALIGN, RecordSchema, RowRange, leaves_of
from kvferry.types import KVGroup, RankShard

GroupLeaves = Mapping[int, Callable[[], Leaves]]
"""By group, a function that returns the leaves of all its rows. A leaf is a piece of a row that has
its own checksum."""


class RankRows:
    """Geometry of one rank's slots, computed once. Thread-safe.

    Args:
        groups: KV groups of the whole model.
        shard: what this rank holds of them.
        schema: sizes and offsets of the records.

    Attributes:
        schema: schema of the records that are read and written now.
        own: schema of records with this rank's rows alone: `schema` if it holds all, None if none.
        slot_bytes: bytes of a slot that are used.
    """

    def __init__(self, groups: Sequence[KVGroup], shard: RankShard, schema: RecordSchema) -> None:
        self._groups = groups
        self._shard = shard
        self.schema = schema
        self.own = schema.of_shard(shard.groups)
        # By group: the rows in the record, and in one of this rank's rows alone; where in a slot.
        self._held: list[tuple[RowRange, RowRange, int, int]] = []
        offset, number = schema.head_bytes, 0
        for index, (group, held) in enumerate(zip(groups, shard.groups, strict=True)):
            rows = _rows_of(index, held.layers, held.heads, group.num_kv_heads)
            start, offset = offset, offset + schema.num_bytes_of(rows)
            alone = RowRange(number, 0, (rows.stop - rows.start) * rows.num_runs)
            number += start < offset  # a group of which it holds nothing is no component
            self._held.append((rows, alone, start, offset))
        self.slot_bytes = offset
        self._written = [
            (run, at + start, at + stop)
            for rows, _, at, end in self._held
            if at < end and shard.groups[rows.component].writes
            for run, start, stop in schema.runs_of(rows)
        ]

    @property
    def rank(self) -> int:
        return self._shard.rank

    def switch_namespace(self, namespace: bytes) -> None:
        """Use the schema of another namespace from now on; sizes stay as they are."""
        self.schema = self.schema.with_namespace(namespace)
        self.own = self.schema.of_shard(self._shard.groups)

    @property
    def all_groups(self) -> frozenset[int]:
        return frozenset(range(len(self._shard.groups)))

    def head_of(self, slot: memoryview) -> memoryview:
        """The head part of a slot."""
        return slot[: self.schema.head_bytes]

    def rows_of(
        self, slot: memoryview, groups: Container[int], *, of_shard: bool = False
    ) -> list[tuple[RowRange, memoryview]]:
        """Return this rank's rows in each of some groups, with their part of a slot; as they are
        numbered in the record, or in that of the rank's rows alone, its shard."""
        return [
            (alone if of_shard else rows, slot[start:stop])
            for rows, alone, start, stop in self._held
            if rows.component in groups and start < stop
        ]

    def image_of(self, slot: memoryview) -> memoryview:
        """Return the head and rows of a slot, without the padding at its end."""
        return slot[: self.slot_bytes]

    def group_rows(self, slot: memoryview, group: int) -> memoryview:
        """Return all rows of a group in a slot; their shape is `group_shape`."""
        *_, start, stop = self._held[group]
        return slot[start:stop]

    def dtype_of(self, group: int) -> str:
        """Return the dtype of a group, as `KVGroup` names it."""
        return self._groups[group].dtype

    def origin_of(self, group: int) -> tuple[int, int]:
        """Return the first layer of the group and the first head that this rank holds."""
        held = self._shard.groups[group]
        return held.layers[0], held.heads[0]

    def depths_of(self, group: int) -> list[int]:
        """Return for each layer of the group that this rank holds how many layers of the model are
        before it, as if the layers of each group were spread evenly over the model."""
        num_layers = sum(each.num_layers for each in self._groups)
        held = range(*self._shard.groups[group].layers)
        return [layer * num_layers // self._groups[group].num_layers for layer in held]

    def group_shape(self, group: int) -> tuple[int, int, int, int]:
        """The `[num_layers, num_kv_heads, chunk_tokens, content_size]` that this rank holds."""
        held = self._shard.groups[group]
        layers, heads = (stop - start for start, stop in (held.layers, held.heads))
        _, _, num_tokens, content_size = self.schema.components[group].shape
        return layers, heads, num_tokens, content_size

    def writes_group(self, group: int) -> bool:
        """False where another rank replicates these heads and writes them."""
        return self._shard.groups[group].writes

    def spans(self) -> list[tuple[RowRange, int, int]]:
        """Return each run of rows that this rank writes, and where it starts and stops in a slot.
        These are all but those that another rank replicates and writes."""
        return self._written

    def leaves(self, slot: memoryview, known: GroupLeaves, *, of_shard: bool = False) -> Leaves:
        """Return the leaves of a slot's chunk, for the ranges of `spans` in their order; of a
        shard, for all rows of the rank, also those that another one writes. The device has hashed
        the groups in `known`; the others are hashed here."""
        parts = []
        for group, component in enumerate(self.schema.components):
            rows = self.group_rows(slot, group)
            if rows.nbytes and (of_shard or self.writes_group(group)):
                found = known.get(group)
                parts.append(leaves_of(component, rows) if found is None else found())
        return joined(parts)


_NO_KEY = bytes(32)


class DraftRows:
    """Where the KV of draft layers lies in a slot, behind that of the chunk, and the records that
    one rank makes of it.

        | key of the chunk | ... | rows of group 0 | rows of group 1 | ...

    The key is there only while the rows are the chunk's, whole and verified. So ranks that share a
    slot know it without a message.

    Attributes:
        rows: geometry, from `start` of a slot on.
        own: schema of the rank's records.
    """

    def __init__(self, rows: RankRows, own: RecordSchema, start: int) -> None:
        self.rows = rows
        self.own = own
        self._start = start

    def memory(self, slot: memoryview) -> memoryview:
        """Return the part of a slot that `rows` describes."""
        return slot[self._start : self._start + self.rows.slot_bytes]

    def are_of(self, slot: memoryview, key: bytes) -> bool:
        """Whether a slot has the drafts of this chunk."""
        return bytes(self.memory(slot)[: len(key)]) == key

    def set_key(self, slot: memoryview, key: bytes = b"") -> None:
        """Say whose drafts a slot has now; without a key, none, as they are about to change."""
        self.memory(slot)[: len(_NO_KEY)] = key or _NO_KEY


class RankRecords:
    """Geometry of one rank's slots, by what a slot holds.

    Attributes:
        rows: of chunks.
        parts: of the parts of states.
        drafts: of what a drafter computed of a chunk; None: nothing of that is stored.
        slot_bytes: bytes of a slot that any of them uses.
    """

    def __init__(
        self,
        rows: RankRows,
        parts: Sequence[RankRows] = (),
        drafts: tuple[RankRows, RecordSchema] | None = None,
    ) -> None:
        self.rows = rows
        self.parts = tuple(parts)
        self.slot_bytes = max(each.slot_bytes for each in (rows, *parts))
        self.drafts: DraftRows | None = None
        if drafts is not None:
            start = -(-self.slot_bytes // ALIGN) * ALIGN
            self.drafts = DraftRows(*drafts, start)
            self.slot_bytes = start + self.drafts.rows.slot_bytes

    def of(self, part: int) -> RankRows:
        """Return the geometry of a part of a state, or, if that is negative, of a chunk."""
        return self.rows if part < 0 else self.parts[part]

    def switch_namespace(self, namespace: bytes) -> None:
        """Use the schemas of another namespace from now on."""
        for each in (self.rows, *self.parts):
            each.switch_namespace(namespace)
        if self.drafts is not None:
            self.drafts.own = self.drafts.own.with_namespace(namespace)


def _rows_of(
    component: int, layers: tuple[int, int], heads: tuple[int, int], num_heads: int
) -> RowRange:
    first = layers[0] * num_heads
    if heads == (0, num_heads):
        return RowRange(component, first, layers[1] * num_heads)
    runs = layers[1] - layers[0], num_heads
    return RowRange(component, first + heads[0], first + heads[1], *runs)
