"""Which blocks, groups and chunks a hit or a save needs, in each block table of the host.

After a hit `[.., stop)`, the next token to compute attends, in a group with window w, to
`[stop - w + 1, stop)` and to itself. In a table with that window, every block that ends before
these tokens is the null block. With attention chunks of c tokens these are `[stop // c * c, stop)`,
none where a chunk ends:

    tokens   0 .............. start ............................... stop
    table    [ null ........................ ][ block ][ block ]...|
                                              ^ fill_start: rounded down to a whole block

Where all layers of a table have a tail (`KVGroup.tail`), a chunk is stored from the tail on: hits
end where chunks end, and of the chunks before the last one they need nothing in such a table.

A load fills in full every block that is not the null block, also with tokens before the window,
because the host may offer the block to another request. So all KV that a table holds is right and
can be saved. Pure arithmetic over an `EngineSpec`: the scheduler role makes slices for its plans,
and the worker role (`blocks.paged`) places tokens by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvferry.contract.spec import EngineSpec
from kvferry.errors import ContractError
from kvferry.types import NULL_BLOCK, BlockTable


class BlockSlice(msgspec.Struct, frozen=True, array_like=True):
    """The part of one block table that a load or save needs. It must have no null block; the worker
    checks that before it copies."""

    skipped: int
    """Number of the request's blocks before `ids[0]`."""
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One block table of the host that a `TablePart` names."""

    index: int
    block_size: int
    window: int | None
    chunk: int | None = None
    tail: int | None = None

    def fill_start(self, start: int, stop: int) -> int:
        """Return the first token that this table needs of a hit of `[start, stop)`; `stop` if none.
        `stop` is a whole number of blocks."""
        if self.window is not None:
            first = stop - self.window + 1
        elif self.chunk is not None:
            first = stop // self.chunk * self.chunk
        else:
            return start
        return max(start, first // self.block_size * self.block_size)

    def stored_from(self, start: int, stop: int) -> int:
        """Return the first token of a chunk `[start, stop)` that its record has of this table."""
        return start if self.tail is None else max(start, stop - self.tail)

    def keeps_whole(self, num_tokens: int) -> bool:
        """Whether all of a chunk of so many tokens, which begins at a multiple of them, is still
        in this table in the step that completes it, however steps divide it. Of a tail, all is."""
        fits_window = self.window is None or self.tail is not None or self.window >= num_tokens
        return fits_window and (self.chunk is None or self.chunk % num_tokens == 0)


class Tables:
    """The block tables of one engine. `chunk_tokens` counts where records have tails alone."""

    def __init__(self, spec: EngineSpec, chunk_tokens: int | None = None) -> None:
        parts = spec.table_parts
        tails = {part.table: spec.groups[part.group].tail for part in parts}
        by_index = {
            part.table: Table(
                part.table, part.block_size, part.window, part.chunk, tails[part.table]
            )
            for part in parts
        }
        self.tables = tuple(by_index[index] for index in sorted(by_index))
        # A host that does not describe its tables has one per group; another number is refused.
        self._num_tables = None if spec.tables is not None else len(spec.groups)
        self._of_group = tuple(
            tuple(by_index[index] for index in {p.table for p in parts if p.group == group})
            for group in range(len(spec.groups))
        )
        self.all_groups = frozenset(range(len(spec.groups)))
        self._state_tables = spec.states.tables if spec.states is not None else ()
        sizes = [part.block_size for part in self._state_tables]
        if any(tail is not None for tail in tails.values()):
            assert chunk_tokens is not None, "hits end where chunks do"
            sizes.append(chunk_tokens)
        self.block_size = math.lcm(*(table.block_size for table in self.tables), *sizes)
        """The length of every hit is a multiple of this."""
        self.drops_blocks = any(t.window is not None or t.chunk is not None for t in self.tables)

    def first_needed(self, start: int, stop: int) -> int:
        """Return the first token that a hit of `[start, stop)` needs in any table."""
        if not self.drops_blocks:
            return start
        return min(table.fill_start(start, stop) for table in self.tables)

    def groups_of(self, chunk_stop: int, start: int, stop: int) -> frozenset[int]:
        """Return the groups that a hit of `[start, stop)` needs of the chunk that ends at
        `chunk_stop`."""
        if not self.drops_blocks:
            return self.all_groups
        return frozenset(
            group
            for group, tables in enumerate(self._of_group)
            if any(table.fill_start(start, stop) < chunk_stop for table in tables)
        )

    def load_slices(self, block_ids: BlockTable, start: int, stop: int) -> tuple[BlockSlice, ...]:
        """Return the blocks that a load of `[start, stop)` fills, one slice per table of the host,
        with that of the state at its end.

        Raises:
            ContractError: the host announced another number of block tables.
        """
        slices = self._unused(block_ids)
        for table in self.tables:
            first = table.fill_start(start, stop)
            slices[table.index] = _slice(table, block_ids, first, max(first, stop))
        for part in self._state_tables:
            # A host has the state of a hit in the block that its last token is in.
            before = stop // part.block_size - 1
            slices[part.table] = BlockSlice(before, tuple(block_ids[part.table][before:][:1]))
        return tuple(slices)

    def state_slices(self, blocks: Mapping[int, int], num_tables: int) -> tuple[BlockSlice, ...]:
        """Return the blocks of one state, given by table: one slice for each of the host's tables.

        Raises:
            ContractError: there is not one for each table of recurrent layers.
        """
        slices = [BlockSlice(0, ())] * num_tables
        for part in self._state_tables:
            if part.table not in blocks or part.table >= num_tables:
                raise ContractError(
                    f"the host named blocks of tables {sorted(blocks)} for a state, and none of "
                    f"table {part.table}"
                )
            slices[part.table] = BlockSlice(0, (blocks[part.table],))
        return tuple(slices)

    def chunk_slices(
        self, block_ids: BlockTable, start: int, stop: int
    ) -> tuple[BlockSlice, ...] | None:
        """Return the blocks that hold what the record of a chunk `[start, stop)` has; None if some
        table has dropped one.

        Raises:
            ContractError: as `load_slices`.
        """
        slices = self._unused(block_ids)
        for table in self.tables:
            part = _slice(table, block_ids, table.stored_from(start, stop), stop)
            if NULL_BLOCK in part.ids:
                return None
            slices[table.index] = part
        return tuple(slices)

    def _unused(self, block_ids: BlockTable) -> list[BlockSlice]:
        num_tables = len(block_ids)
        if num_tables <= self.tables[-1].index or num_tables != (self._num_tables or num_tables):
            raise ContractError(
                f"the request has {num_tables} block tables, the host announced "
                f"{self._num_tables or self.tables[-1].index + 1}"
            )
        return [BlockSlice(0, ())] * len(block_ids)


def _slice(table: Table, block_ids: BlockTable, start: int, stop: int) -> BlockSlice:
    size = table.block_size
    first = start // size
    return BlockSlice(first, tuple(block_ids[table.index][first : -(-stop // size)]))
