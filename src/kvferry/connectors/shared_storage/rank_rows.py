"""Which bytes of a record one rank moves, and where they lie in staging, scratch and blocks.

A staging slot of a rank that holds everything is the image of the record file:

    | head | rows of group 0 | rows of group 1 | ...

For a rank that holds some layers and heads, the slot has the same head and only its rows, packed in
the order of the record.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.errors import LayoutError
from kvferry.layout.ops import BlockRun, PagedKV, as_rows
from kvferry.record.schema import RecordSchema, RowRange, leaf_digests
from kvferry.store.recordio import pieces

if TYPE_CHECKING:
    import torch

    from kvferry.connectors.registry import EngineSpec
    from kvferry.connectors.shared_storage.messages import BlockSlice, Load, Save


class _Box(NamedTuple):
    """Where a piece lies: in the slot, and in this rank's layers and heads."""

    offset: int
    num_bytes: int
    layer: int
    head: int
    shape: tuple[int, int, int, int]


class RankRows:
    """Geometry of one rank, computed once, and the copies that follow from it.

    Thread-safe after `register`: nothing changes but per-thread scratch.
    """

    def __init__(self, spec: EngineSpec, schema: RecordSchema) -> None:
        self._spec = spec
        self.schema = schema
        self._paged: tuple[PagedKV, ...] = ()
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
        self._boxes = dict(zip(self.pieces, self._layout_pieces(self.pieces), strict=True))
        self._scratch_bytes = max(box.num_bytes for box in self._boxes.values())
        self.large_pieces = tuple(pieces(schema, self.ranges, schema.record_bytes))
        large = zip(self.large_pieces, self._layout_pieces(self.large_pieces), strict=True)
        self._boxes.update(large)
        self._local = threading.local()

    def _layout_pieces(self, parts: Sequence[RowRange]) -> Iterator[_Box]:
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
            yield _Box(offset, num_bytes, layer - shard.layers[0], head - shard.heads[0], shape)
            offset += num_bytes

    def switch_namespace(self, namespace: bytes) -> None:
        """Read and write records of another namespace from now on; sizes stay as they are."""
        self.schema = self.schema.with_namespace(namespace)

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Bind the engine's tensors.

        Raises:
            LayoutError: a layer is missing or a tensor is not what the spec says.
        """
        paged = []
        layer_names = self._spec.layer_names or (tuple(kv_caches),)
        for group, shard, names in zip(
            self._spec.groups, self._spec.shard.groups, layer_names, strict=True
        ):
            missing = [name for name in names if name not in kv_caches]
            if missing:
                raise LayoutError(f"no KV tensor for layer {missing[0]!r}")
            tensors = [kv_caches[name] for name in names]
            paged.append(PagedKV(tensors, group, shard, self._spec.kv_layout))
        self._paged = tuple(paged)

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
        box = self._boxes[piece]
        return slot[box.offset : box.offset + box.num_bytes]

    def scratch_piece(self, scratch: memoryview, piece: RowRange) -> memoryview:
        """Where any piece lies in scratch: right behind the head."""
        start = self.schema.head_bytes
        return scratch[start : start + self._boxes[piece].num_bytes]

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

    def digests(self, slot: memoryview) -> bytes:
        """Leaf digests of the `written` ranges, in their order."""
        return b"".join(
            leaf_digests(component, slot[start:stop])
            for component, (start, stop), shard in zip(
                self.schema.components, self._group_spans, self._spec.shard.groups, strict=True
            )
            if shard.writes
        )

    # -- copies ---------------------------------------------------------------------------------

    def runs_of(self, load: Load, first_token: int) -> tuple[list[BlockRun], ...]:
        """Per group, where the tokens of one chunk go that a load wants.

        Raises:
            LayoutError: a block id outside the cache, or a table too short.
        """
        start = max(load.start, first_token)
        stop = min(load.stop, first_token + self.schema.chunk_tokens)
        return self._runs(load.blocks, start, stop)

    def blocks_of(self, load: Load, first_token: int) -> set[int]:
        """Ids of the blocks, of all groups, that hold tokens of one chunk of a load."""
        start = max(load.start, first_token)
        stop = min(load.stop, first_token + self.schema.chunk_tokens)
        found: set[int] = set()
        for group, table in zip(self._spec.groups, load.blocks, strict=True):
            size = group.block_size
            low, high = start // size - table.skipped, -(-stop // size) - table.skipped
            found.update(table.ids[low:high])
        return found

    def scatter_chunk(self, slot: memoryview, load: Load, first_token: int) -> None:
        """Copy what a load wants of a staged chunk into the blocks.

        Raises:
            LayoutError: before anything is written.
        """
        runs = self.runs_of(load, first_token)
        for paged, rows, group_runs in zip(self._paged, self._group_rows(slot), runs, strict=True):
            paged.scatter(rows, 0, 0, group_runs, first_token)

    def scatter_piece(
        self,
        part: memoryview,
        piece: RowRange,
        runs: tuple[list[BlockRun], ...],
        first_token: int,
    ) -> None:
        """Copy the bytes of one piece into the blocks."""
        box = self._boxes[piece]
        paged = self._paged[piece.component]
        dtype = self._spec.groups[piece.component].dtype
        rows = as_rows(part, paged, dtype, box.shape)
        paged.scatter(rows, box.layer, box.head, runs[piece.component], first_token)

    def gather_chunk(self, slot: memoryview, save: Save) -> None:
        """Copy a whole chunk out of the blocks into a slot.

        Raises:
            LayoutError: a block id outside the cache, a table too short, or a token of the chunk
                that has no block.
        """
        first = save.chunk.first_token
        tokens = self.schema.chunk_tokens
        runs = self._runs(save.blocks, first, first + tokens)
        for group_runs in runs:
            if sum(run.stop - run.start for run in group_runs) != tokens:
                raise LayoutError(f"chunk at token {first} has tokens without a block")
        for paged, rows, group_runs in zip(self._paged, self._group_rows(slot), runs, strict=True):
            paged.gather(rows, 0, 0, group_runs, first)

    def _runs(
        self, tables: tuple[BlockSlice, ...], start: int, stop: int
    ) -> tuple[list[BlockRun], ...]:
        result = []
        for paged, table in zip(self._paged, tables, strict=True):
            size = paged.block_size
            low, high = start // size - table.skipped, -(-stop // size) - table.skipped
            if low < 0 or high > len(table.ids):
                raise LayoutError(
                    f"tokens {start} to {stop} lie in blocks {low + table.skipped} to "
                    f"{high + table.skipped}; the table has {table.skipped} to "
                    f"{table.skipped + len(table.ids)}"
                )
            used = table.ids[low:high]
            paged.check_blocks(used)
            result.append(list(paged.runs(used, start, stop)))
        return tuple(result)

    def _group_rows(self, slot: memoryview) -> Iterator[Any]:
        tokens = self.schema.chunk_tokens
        for index, (start, stop) in enumerate(self._group_spans):
            shard, group = self._spec.shard.groups[index], self._spec.groups[index]
            shape = (
                shard.layers[1] - shard.layers[0],
                shard.heads[1] - shard.heads[0],
                tokens,
                group.content_size,
            )
            yield as_rows(slot[start:stop], self._paged[index], group.dtype, shape)


def _rows_of(
    component: int, layers: tuple[int, int], heads: tuple[int, int], num_heads: int
) -> Iterator[RowRange]:
    if heads == (0, num_heads):
        yield RowRange(component, layers[0] * num_heads, layers[1] * num_heads)
        return
    for layer in range(*layers):
        yield RowRange(component, layer * num_heads + heads[0], layer * num_heads + heads[1])
