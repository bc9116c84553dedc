"""The engine's KV tensors, bound to its block tables: where tokens lie, and gather and scatter.

`BlockCopies` (`blocks.copies`) uses this in the worker. A group's layers may be spread over several
block tables, and a table may hold layers of several groups. So the rows of a group are copied part
by part (`TablePart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kvferry.blocks.rows import RankRows
from kvferry.blocks.tables import BlockSlice, Table, Tables
from kvferry.contract.spec import EngineSpec
from kvferry.errors import LayoutError
from kvferry.layout.device import INT_OF
from kvferry.layout.ops import MakeCopies, PagedKV
from kvferry.layout.plan import BlockRun, block_runs
from kvferry.record.checksum import CHECKSUM
from kvferry.record.leaves import Leaves
from kvferry.types import NULL_BLOCK, GroupShard, KVGroup

Runs = Mapping[int, Sequence[BlockRun]]
"""The runs of blocks that hold some tokens, by table; tables that hold none of them are absent."""

Rows = memoryview | torch.Tensor
"""All rows of a group that this rank holds: host memory, or a device tensor from `new_rows`."""


class _BoundPart(NamedTuple):
    """A `TablePart` with its tensors."""

    table: int
    spans: tuple[tuple[slice, int], ...]
    """See `layer_spans`."""
    paged: PagedKV


def layer_spans(layers: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Split layers into runs of consecutive ones, whose rows are contiguous.

    Yields:
        The layers of a run as a slice, and the index in `layers` of the run's first layer.
    """
    first = 0
    while first < len(layers):
        stop = first + 1
        while stop < len(layers) and layers[stop] == layers[stop - 1] + 1:
            stop += 1
        yield slice(layers[first], layers[stop - 1] + 1), first
        first = stop


class PagedTables:
    """The paged KV of one rank. Runs in: worker. Thread-safe after `register`.

    Args:
        spec: the engine, and what this rank holds of it.
        rows: the shapes of this rank's rows.

    Attributes:
        device: device of the engine's tensors.
    """

    def __init__(self, spec: EngineSpec, rows: RankRows) -> None:
        self._spec = spec
        self._rows = rows
        self._tables = Tables(spec, rows.schema.chunk_tokens)
        self._of_group: tuple[tuple[_BoundPart, ...], ...] = ()
        self._of_table: dict[int, tuple[PagedKV, ...]] = {}
        self.device = torch.device("cpu")

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], copies: MakeCopies | None = None
    ) -> None:
        """Bind the engine's tensors, given by layer name. `copies` is passed to `PagedKV`.

        Raises:
            LayoutError: a layer is missing, a tensor does not match the spec, or the tensors are on
                several devices.
        """
        of_group: list[list[_BoundPart]] = [[] for _ in self._spec.groups]
        of_table: dict[int, list[PagedKV]] = {}
        for part in self._spec.table_parts:
            if not part.layers:
                continue
            names = part.layer_names if part.layer_names is not None else tuple(kv_caches)
            missing = [name for name in names if name not in kv_caches]
            if missing:
                raise LayoutError(f"no KV tensor for layer {missing[0]!r}")
            paged = PagedKV(
                [kv_caches[name] for name in names],
                _of_rows(self._spec.groups[part.group], part.block_size),
                GroupShard(
                    layers=(0, len(part.layers)), heads=self._spec.shard.groups[part.group].heads
                ),
                self._spec.kv_layout,
                copies=copies,
            )
            spans = tuple(layer_spans(part.layers))
            of_group[part.group].append(_BoundPart(part.table, spans, paged))
            of_table.setdefault(part.table, []).append(paged)
        devices = {paged.device for several in of_table.values() for paged in several}
        if len(devices) > 1:
            raise LayoutError(f"KV groups on {len(devices)} devices: {sorted(map(str, devices))}")
        self.device = next(iter(devices), self.device)
        self._of_group = tuple(tuple(parts) for parts in of_group)
        # First the one with fewest blocks: an id that it has is one of all.
        self._of_table = {
            table: tuple(sorted(paged, key=lambda each: each.num_blocks))
            for table, paged in of_table.items()
        }

    def unregister(self) -> None:
        """Drop the tensors, until the next `register`."""
        self._of_group, self._of_table = (), {}

    def load_runs(
        self,
        blocks: Sequence[BlockSlice],
        hit: tuple[int, int],
        first_token: int,
        held: frozenset[int],
    ) -> Runs:
        """Return the runs of blocks into which a load copies tokens of one chunk.

        Args:
            blocks: blocks of the load, one slice per table.
            hit: tokens `[start, stop)` that the load fills.
            first_token: first token of the chunk.
            held: groups that the chunk's slot holds.

        Raises:
            LayoutError: a block id is outside the cache, a block is the null block, a table is too
                short or needs a group that the slot lacks, or no tensors are registered.
        """
        stop = min(hit[1], first_token + self._rows.schema.chunk_tokens)
        runs = self._runs(blocks, lambda table: max(first_token, table.fill_start(*hit)), stop)
        wanted = self.groups_in(runs)
        if not wanted <= held:
            raise LayoutError(
                f"a hit that ends at {hit[1]} needs KV groups {sorted(wanted - held)} of the chunk "
                f"at {first_token}, which were not fetched"
            )
        return runs

    def chunk_runs(self, blocks: Sequence[BlockSlice], first_token: int) -> Runs:
        """Return the runs of blocks that hold all tokens of one chunk.

        Raises:
            LayoutError: as `load_runs`, except for the groups.
        """
        stop = first_token + self._rows.schema.chunk_tokens
        return self._runs(blocks, lambda table: table.stored_from(first_token, stop), stop)

    def _runs(
        self, blocks: Sequence[BlockSlice], first_of: Callable[[Table], int], stop: int
    ) -> Runs:
        """Return the runs of tokens `[first_of(table), stop)` in each table."""
        if not self._of_group:
            raise LayoutError("the engine has released its KV memory, as it does to sleep")
        result = {}
        for table in self._tables.tables:
            first = first_of(table)
            bound = self._of_table.get(table.index, ())
            if first >= stop or not bound:
                continue
            used = _blocks_between(table, blocks, first, stop)
            result[table.index] = _runs_of(bound[0], table, used, first, stop)
        return result

    def block_ids(
        self, blocks: Sequence[BlockSlice], hit: tuple[int, int], first_token: int
    ) -> set[int]:
        """Return the ids of all blocks that a load of `hit` fills with tokens of one chunk."""
        start = max(hit[0], first_token)
        stop = min(hit[1], first_token + self._rows.schema.chunk_tokens)
        found: set[int] = set()
        for table in self._tables.tables:
            if table.index < len(blocks):
                part, size = blocks[table.index], table.block_size
                low = max(0, start // size - part.skipped)
                high = max(0, -(-stop // size) - part.skipped)
                found.update(part.ids[low:high])
        return found - {NULL_BLOCK}

    def groups_in(self, runs: Runs) -> frozenset[int]:
        """Return the groups that have a layer in the tables of `runs`."""
        return frozenset(
            group
            for group, parts in enumerate(self._of_group)
            if any(part.table in runs for part in parts)
        )

    def null_blocks(self) -> Iterator[tuple[Runs, int]]:
        """Yield for each table the run of its null block, or of its first tokens if a chunk has
        fewer, and how many bytes the table's layers have in it."""
        chunk_tokens = self._rows.schema.chunk_tokens
        for table in self._tables.tables:
            bound = self._of_table.get(table.index)
            if bound is None:
                continue
            num_tokens = min(table.block_size, chunk_tokens)
            first = table.stored_from(0, chunk_tokens)
            num_bytes = sum(
                each.num_layers
                * each.num_heads
                * (num_tokens * each.block_size // table.block_size)
                * each.content_size
                * each.item_bytes
                for each in bound
            )
            runs = _runs_of(bound[0], table, [NULL_BLOCK], first, first + num_tokens)
            yield {table.index: runs}, num_bytes

    def new_rows(self) -> dict[int, torch.Tensor]:
        """Allocate device memory for all rows of each group."""
        return {
            group: torch.empty(
                self._rows.group_shape(group),
                dtype=INT_OF[parts[0].paged.item_bytes],
                device=self.device,
            )
            for group, parts in enumerate(self._of_group)
            if parts
        }

    def leaves_later(
        self, group: int, rows: torch.Tensor, leaf_bytes: int
    ) -> Callable[[], Leaves] | None:
        """See `PagedKV.digests_later`; `rows` come from `new_rows`."""
        words = self._rows.schema.components[group].float_bits.words
        paged = self._of_group[group][0].paged
        later = paged.digests_later(rows, leaf_bytes, CHECKSUM.kernel, *words)
        return None if later is None else lambda: Leaves(*later())

    def scatter(self, group: int, rows: Rows, runs: Runs, first_token: int) -> None:
        """Copy the tokens of `runs` from a group's rows into the blocks. The rows are those of the
        chunk at `first_token`."""
        first = self._first_row(group, first_token)
        for paged, part, layer, table_runs in self._targets(group, rows, runs):
            paged.scatter(part, layer, table_runs, first)

    def gather(self, group: int, rows: Rows, runs: Runs, first_token: int) -> None:
        """Copy blocks into a group's rows; arguments as for `scatter`."""
        first = self._first_row(group, first_token)
        for paged, part, layer, table_runs in self._targets(group, rows, runs):
            paged.gather(part, layer, table_runs, first)

    def _first_row(self, group: int, first_token: int) -> int:
        """Return the number of the first row that a chunk's record has of a group."""
        schema = self._rows.schema
        stop = first_token + schema.chunk_tokens
        return stop // self._spec.groups[group].row_tokens - schema.components[group].shape[2]

    def _targets(
        self, group: int, memory: Rows, runs: Runs
    ) -> Iterator[tuple[PagedKV, Any, int, Sequence[BlockRun]]]:
        rows: Any = None
        row_tokens = self._spec.groups[group].row_tokens
        for part in self._of_group[group]:
            if part.table not in runs:
                continue
            if rows is None:
                rows = part.paged.as_rows(memory, self._rows.group_shape(group))
            for span, layer in part.spans:
                yield part.paged, rows[span], layer, _by_row(runs[part.table], row_tokens)


def _of_rows(group: KVGroup, block_size: int) -> KVGroup:
    """Return a group as its tensors lie: with a row in the place of a token."""
    return replace(group, block_size=block_size // group.row_tokens)


def _runs_of(
    paged: PagedKV, table: Table, block_ids: Sequence[int], start: int, stop: int
) -> list[BlockRun]:
    paged.check_blocks(block_ids)
    return block_runs(block_ids, start, stop, table.block_size)


def _by_row(runs: Sequence[BlockRun], row_tokens: int) -> Sequence[BlockRun]:
    """Return runs of tokens as runs of rows. Blocks of such groups are only stored whole."""
    if row_tokens == 1:
        return runs
    if any(number % row_tokens for run in runs for number in run[1:]):
        raise LayoutError(f"blocks with a row for {row_tokens} tokens are not stored in parts")
    return [BlockRun(run.blocks, *(number // row_tokens for number in run[1:])) for run in runs]


def _blocks_between(
    table: Table, blocks: Sequence[BlockSlice], start: int, stop: int
) -> tuple[int, ...]:
    if table.index >= len(blocks):
        raise LayoutError(f"{len(blocks)} block tables, table {table.index} takes part")
    part, size = blocks[table.index], table.block_size
    low, high = start // size - part.skipped, -(-stop // size) - part.skipped
    if low < 0 or high > len(part.ids):
        raise LayoutError(
            f"tokens {start} to {stop} lie in blocks {low + part.skipped} to "
            f"{high + part.skipped}; table {table.index} has {part.skipped} to "
            f"{part.skipped + len(part.ids)}"
        )
    used = part.ids[low:high]
    if NULL_BLOCK in used:
        raise LayoutError(f"tokens {start} to {stop} have a null block in table {table.index}")
    return used
