"""Which bytes of a record one rank moves, and where they lie in staging, scratch and blocks.

A staging slot of a rank that holds everything is the image of the record file:

    | head | rows of group 0 | rows of group 1 | ...

For a rank that holds some layers and heads, the slot has the same head and only its rows, packed in
the order of the record.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvferry.connectors.shared_storage.rank_tables import Box, LayerPlace, RankTables, Runs
from kvferry.connectors.shared_storage.tables import Table, Tables
from kvferry.errors import LayoutError
from kvferry.layout.ops import MakeCopies
from kvferry.record.schema import LEAF_BYTES, RecordSchema, RowRange, leaf_digests
from kvferry.store.recordio import pieces

if TYPE_CHECKING:
    from kvferry.connectors.registry import EngineSpec
    from kvferry.connectors.shared_storage.messages import Load, Prefetch, Save


class _Piece(NamedTuple):
    """Where a piece lies in the slot, and in this rank's layers and heads."""

    offset: int
    num_bytes: int
    box: Box


GroupDigests = Mapping[int, Callable[[], bytes]]
"""By group, what gives the leaf digests of all its rows."""


class RankRows:
    """Geometry of one rank, computed once, and the copies that follow from it.

    Thread-safe after `register`: nothing changes but per-thread scratch.
    """

    def __init__(self, spec: EngineSpec, schema: RecordSchema) -> None:
        self._spec = spec
        self.rank = spec.shard.rank
        self.schema = schema
        self._needs = Tables(spec)
        self._tables = RankTables(spec, self._needs.tables)
        self._group_spans: list[tuple[int, int]] = []
        self.ranges: tuple[RowRange, ...] = ()
        offset = schema.head_bytes
        ranges: list[RowRange] = []
        for index, shard in enumerate(spec.shard.groups):
            start = offset
            for rows in _rows_of(index, shard.layers, shard.heads, spec.groups[index].num_kv_heads):
                ranges.append(rows)
                offset += schema.num_bytes_of(rows)
            self._group_spans.append((start, offset))
        self.ranges = tuple(ranges)
        self.slot_bytes = offset
        self.pieces = tuple(pieces(schema, self.ranges))
        self._places = dict(zip(self.pieces, self._layout_pieces(self.pieces), strict=True))
        self._scratch_bytes = max((piece.num_bytes for piece in self._places.values()), default=0)
        self.large_pieces = tuple(pieces(schema, self.ranges, schema.record_bytes))
        large = zip(self.large_pieces, self._layout_pieces(self.large_pieces), strict=True)
        self._places.update(large)
        self._pieces_of = {self._needs.all_groups: self.pieces}
        self._local = threading.local()

    def _layout_pieces(self, parts: Sequence[RowRange]) -> Iterator[_Piece]:
        offset = self.schema.head_bytes
        for rows in parts:
            component = self.schema.components[rows.component]
            shard = self._spec.shard.groups[rows.component]
            heads = component.shape[1]
            layer, head = divmod(rows.start, heads)
            count = rows.stop - rows.start
            num_layers, num_heads = (count // heads, heads) if count >= heads else (1, count)
            num_bytes = self.schema.num_bytes_of(rows)
            shape = (num_layers, num_heads, component.shape[2], component.shape[3])
            box = Box(layer - shard.layers[0], head - shard.heads[0], shape)
            yield _Piece(offset, num_bytes, box)
            offset += num_bytes

    def switch_namespace(self, namespace: bytes) -> None:
        """Read and write records of another namespace from now on; sizes stay as they are."""
        self.schema = self.schema.with_namespace(namespace)

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], copies: MakeCopies | None = None
    ) -> None:
        """Bind the engine's tensors; see `RankTables.register`.

        Raises:
            LayoutError: likewise.
        """
        self._tables.register(kv_caches, copies)

    @property
    def device(self) -> torch.device:
        """Where the engine's tensors are."""
        return self._tables.device

    @property
    def can_fail_by_block(self) -> bool:
        """See `Tables.can_fail_by_block`."""
        return self._needs.can_fail_by_block

    @property
    def layers(self) -> Mapping[str, Sequence[LayerPlace]]:
        """See `RankTables.layers`."""
        return self._tables.layers

    def groups_of(self, fetch: Prefetch, first_token: int) -> frozenset[int]:
        """The groups that a prefetch brings of one of its chunks."""
        chunk_stop = first_token + self.schema.chunk_tokens
        return self._needs.groups_of(chunk_stop, fetch.start, fetch.stop)

    def pieces_of(self, groups: frozenset[int]) -> tuple[RowRange, ...]:
        """The pieces of some groups only."""
        found = self._pieces_of.get(groups)
        if found is None:
            found = tuple(piece for piece in self.pieces if piece.component in groups)
            self._pieces_of[groups] = found
        return found

    # -- memory ---------------------------------------------------------------------------------

    def scratch(self) -> memoryview:
        """Head and one piece of memory of this thread's own, aligned; reused by the next call."""
        view: memoryview | None = getattr(self._local, "view", None)
        if view is None:
            view = memoryview(mmap.mmap(-1, self.schema.head_bytes + self._scratch_bytes))
            self._local.view = view
        return view

    def head_of(self, view: memoryview) -> memoryview:
        """The head part of a slot or scratch."""
        return view[: self.schema.head_bytes]

    def piece_of(self, slot: memoryview, piece: RowRange) -> memoryview:
        """Where a piece lies in a slot."""
        where = self._places[piece]
        return slot[where.offset : where.offset + where.num_bytes]

    def scratch_piece(self, scratch: memoryview, piece: RowRange) -> memoryview:
        """Where any piece lies in scratch: right behind the head."""
        start = self.schema.head_bytes
        return scratch[start : start + self._places[piece].num_bytes]

    def image_of(self, slot: memoryview) -> memoryview:
        """The head and rows of a slot, without the padding at its end."""
        return slot[: self.slot_bytes]

    @property
    def written(self) -> tuple[RowRange, ...]:
        """The ranges that this rank writes: all but what another rank replicates and writes."""
        groups = self._spec.shard.groups
        return tuple(rows for rows in self.ranges if groups[rows.component].writes)

    def file_ranges(self, slot: memoryview) -> Iterator[tuple[int, memoryview]]:
        """Offset in the record file and bytes of each of the `written` ranges."""
        start = self.schema.head_bytes
        for rows in self.ranges:
            stop = start + self.schema.num_bytes_of(rows)
            if self._spec.shard.groups[rows.component].writes:
                yield self.schema.offset_of(rows), slot[start:stop]
            start = stop

    def digests(self, slot: memoryview, known: GroupDigests) -> bytes:
        """Leaf digests of the `written` ranges, in their order.

        Args:
            slot: the chunk; hashed here where nobody has.
            known: what a device has hashed.
        """
        parts = []
        spans = zip(self.schema.components, self._group_spans, strict=True)
        for group, (component, (start, stop)) in enumerate(spans):
            if not self._spec.shard.groups[group].writes:
                continue
            found = known.get(group)
            parts.append(leaf_digests(component, slot[start:stop]) if found is None else found())
        return b"".join(parts)

    # -- copies ---------------------------------------------------------------------------------

    def runs_of(self, load: Load, first_token: int) -> Runs:
        """Where the tokens of one chunk go that a load wants.

        Raises:
            LayoutError: a block id outside the cache, a null block, or a table too short.
        """
        stop = min(load.stop, first_token + self.schema.chunk_tokens)

        def first_of(table: Table) -> int:
            return max(first_token, table.fill_start(load.start, load.stop))

        return self._tables.runs(load.blocks, first_of, stop)

    def blocks_of(self, load: Load, first_token: int) -> set[int]:
        """Ids of the blocks, of all tables, that hold tokens of one chunk of a load."""
        start = max(load.start, first_token)
        stop = min(load.stop, first_token + self.schema.chunk_tokens)
        return self._tables.blocks(load.blocks, start, stop)

    def staged_runs(self, load: Load, first_token: int, groups: frozenset[int]) -> Runs:
        """`runs_of` for a chunk in a slot.

        Args:
            load: what goes where.
            first_token: of the chunk.
            groups: those that the slot holds.

        Raises:
            LayoutError: as `runs_of`; also if a table needs what the slot lacks.
        """
        runs = self.runs_of(load, first_token)
        wanted = self._tables.groups_with(runs)
        if not wanted <= groups:
            raise LayoutError(
                f"the window of a hit that ends at {load.stop} needs KV groups "
                f"{sorted(wanted - groups)} of the chunk at {first_token}, which were not fetched"
            )
        return runs

    def saved_runs(self, save: Save) -> Runs:
        """Where the tokens of a chunk lie that is to be taken out.

        Raises:
            LayoutError: a block id outside the cache, a table too short, or a token of the chunk
                that has no block.
        """
        first = save.chunk.first_token
        stop = first + self.schema.chunk_tokens
        return self._tables.runs(save.blocks, lambda _table: first, stop)

    def scatter_chunk(self, slot: memoryview, runs: Runs, first_token: int) -> None:
        """Copy tokens of a staged chunk into the blocks."""
        for group in self._tables.groups_with(runs):
            box, rows = self._whole(slot, group)
            self._tables.scatter(group, box, rows, runs, first_token)

    def scatter_layer(
        self, slot: memoryview, place: LayerPlace, runs: Runs, first_token: int
    ) -> None:
        """`scatter_chunk` for one layer."""
        box, rows = self._whole(slot, place.group)
        num_bytes = len(rows) // box.shape[0]
        part = rows[place.layer * num_bytes : (place.layer + 1) * num_bytes]
        one = Box(place.layer, 0, (1, *box.shape[1:]))
        self._tables.scatter(place.group, one, part, runs, first_token)

    def scatter_piece(
        self, part: memoryview, piece: RowRange, runs: Runs, first_token: int
    ) -> None:
        """Copy the bytes of one piece into the blocks."""
        self._tables.scatter(piece.component, self._places[piece].box, part, runs, first_token)

    def gather_chunk(self, slot: memoryview, runs: Runs, first_token: int) -> None:
        """Copy a whole chunk out of the blocks into a slot."""
        for group in self._tables.groups_with(runs):
            box, rows = self._whole(slot, group)
            self._tables.gather(group, box, rows, runs, first_token)

    # -- copies by way of device memory: they only submit to the current stream -------------------

    def scatter_chunk_on_device(self, slot: memoryview, runs: Runs, first_token: int) -> None:
        """`scatter_chunk`; `slot` is read until the stream has passed."""
        for group in self._tables.groups_with(runs):
            box, rows = self._whole(slot, group)
            self._tables.scatter(group, box, self._moved(group, box, rows), runs, first_token)

    def scatter_piece_on_device(
        self, part: memoryview, piece: RowRange, runs: Runs, first_token: int
    ) -> None:
        """`scatter_piece`; `part` is read until the stream has passed."""
        box, group = self._places[piece].box, piece.component
        self._tables.scatter(group, box, self._moved(group, box, part), runs, first_token)

    def gather_on_device(self, runs: Runs, first_token: int) -> dict[int, torch.Tensor]:
        """The rows of a whole chunk in new memory of the device, by group."""
        gathered = {}
        for group in self._tables.groups_with(runs):
            box, _ = self._whole(memoryview(b""), group)
            gathered[group] = self._tables.new_rows(group, box.shape)
            self._tables.gather(group, box, gathered[group], runs, first_token)
        return gathered

    def hash_on_device(self, gathered: Mapping[int, torch.Tensor]) -> GroupDigests:
        """What will give the digests of gathered rows, of the groups that the device can hash."""
        found = {}
        for group, rows in gathered.items():
            later = self._tables.digests_later(group, rows, LEAF_BYTES)
            if later is not None and self._spec.shard.groups[group].writes:
                found[group] = later
        return found

    def move_to_slot(self, gathered: Mapping[int, torch.Tensor], slot: memoryview) -> None:
        """Copy gathered rows to a slot, complete once the stream has passed."""
        for group, rows in gathered.items():
            _, target = self._whole(slot, group)
            _bytes_in(target).copy_(rows.view(-1).view(torch.uint8), non_blocking=True)

    def _moved(self, group: int, box: Box, part: memoryview) -> torch.Tensor:
        """Rows of the host in new memory of the device."""
        rows = self._tables.new_rows(group, box.shape)
        rows.view(-1).view(torch.uint8).copy_(_bytes_in(part), non_blocking=True)
        return rows

    def _whole(self, slot: memoryview, group: int) -> tuple[Box, memoryview]:
        """All rows of a group in a slot."""
        shard = self._spec.shard.groups[group]
        layers, heads = (stop - start for start, stop in (shard.layers, shard.heads))
        shape = (layers, heads, self.schema.chunk_tokens, self._spec.groups[group].content_size)
        start, stop = self._group_spans[group]
        return Box(0, 0, shape), slot[start:stop]


def _bytes_in(memory: memoryview) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _rows_of(
    component: int, layers: tuple[int, int], heads: tuple[int, int], num_heads: int
) -> Iterator[RowRange]:
    if heads == (0, num_heads):
        yield RowRange(component, layers[0] * num_heads, layers[1] * num_heads)
        return
    for layer in range(*layers):
        yield RowRange(component, layer * num_heads + heads[0], layer * num_heads + heads[1])
