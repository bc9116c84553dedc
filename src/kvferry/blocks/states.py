"""The engine's pages of recurrent states, bound to the parts of their records: gather and scatter.

A state after n tokens is one page in each block table of recurrent layers. Which page, the host
says: tables of such layers have no positions that stay (`StateBlocks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.blocks.paged import layer_spans
from kvferry.blocks.rows import RankRows
from kvferry.errors import LayoutError
from kvferry.layout.ops import MakeCopies, PagedKV, strided
from kvferry.layout.plan import BlockRun
from kvferry.layout.states import ITEM_BYTES, page_parts
from kvferry.record.state_parts import StatePart
from kvferry.types import NULL_BLOCK, StateKind, TablePart

if TYPE_CHECKING:
    import torch

StateBlocks = Mapping[int, int]
"""By block table, the block whose page holds a state."""


class _Bound(NamedTuple):
    """The layers of one kind that stand in one block table, and their components' pages."""

    table: int
    layers: tuple[int, ...]
    paged: tuple[PagedKV, ...]


class PagedStates:
    """The pages of one rank. Runs in: worker. Thread-safe after `register`.

    Args:
        kinds: the kinds of recurrent layers of the model.
        tables: where their layers stand; `TablePart.group` is the index of a kind.
        parts: the records of a state, and what this rank holds of each.
    """

    def __init__(
        self,
        kinds: Sequence[StateKind],
        tables: Sequence[TablePart],
        parts: Sequence[tuple[StatePart, RankRows]],
    ) -> None:
        self._kinds = kinds
        self._tables = tables
        self._parts = parts
        self._of_kind: tuple[tuple[_Bound, ...], ...] = ()

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], copies: MakeCopies | None = None
    ) -> None:
        """Bind the engine's pages, given by layer name.

        Raises:
            LayoutError: a layer is missing or in no table, or its pages are not as described.
        """
        of_kind: list[list[_Bound]] = [[] for _ in self._kinds]
        for each in self._tables:
            names = each.layer_names or ()
            missing = [name for name in names if name not in kv_caches]
            if missing or len(names) != len(each.layers):
                raise LayoutError(f"no pages for recurrent layers {missing or each.layers}")
            tensors = [kv_caches[name] for name in names]
            paged = tuple(
                PagedKV.of_parts(
                    tensors,
                    [page_parts(component, strided(tensor)) for tensor in tensors],
                    ITEM_BYTES[component.dtype],
                    component.content_size,
                    copies=copies,
                )
                for component in self._kinds[each.group].components
            )
            of_kind[each.group].append(_Bound(each.table, each.layers, paged))
        for kind, found in zip(self._kinds, of_kind, strict=True):
            held = sorted(layer for bound in found for layer in bound.layers)
            if held != list(range(kind.num_layers)):
                raise LayoutError(f"the tables hold {held} of {kind.num_layers} recurrent layers")
        self._of_kind = tuple(map(tuple, of_kind))

    def unregister(self) -> None:
        """Drop the pages, until the next `register`."""
        self._of_kind = ()

    def check(self, blocks: StateBlocks) -> None:
        """Raise LayoutError unless there is a block of this engine, and not the null block, for
        each table of recurrent layers."""
        if not self._of_kind:
            raise LayoutError("the engine has released its KV memory, as it does to sleep")
        for bound in (each for found in self._of_kind for each in found):
            block = blocks.get(bound.table, NULL_BLOCK)
            if block == NULL_BLOCK:
                raise LayoutError(f"table {bound.table} has no block for a state")
            bound.paged[0].check_blocks((block,))

    def scatter(self, part: int, slot: memoryview, blocks: StateBlocks) -> None:
        """Copy one part of a state from its slot into the pages.

        Raises:
            LayoutError: as `check`; nothing was written.
        """
        self.check(blocks)
        for paged, rows, layer, run in self._targets(part, slot, blocks):
            paged.scatter(rows, layer, run, 0)

    def gather(self, part: int, slot: memoryview, blocks: StateBlocks) -> None:
        """Copy one part of a state out of the pages into its slot, with the zeros behind it.

        Raises:
            LayoutError: as `check`; nothing was written.
        """
        self.check(blocks)
        for paged, rows, layer, run in self._targets(part, slot, blocks):
            paged.gather(rows, layer, run, 0)
        described, of_rank = self._parts[part]
        for group in range(described.num_states, len(described.groups)):
            # The slot may hold the KV of somebody else.
            zeros = of_rank.group_rows(slot, group)
            zeros[:] = bytes(len(zeros))

    def _targets(
        self, part: int, slot: memoryview, blocks: StateBlocks
    ) -> list[tuple[PagedKV, Any, int, list[BlockRun]]]:
        (kind, (start, stop), *_), rows = self._parts[part]
        found = []
        for bound in self._of_kind[kind]:
            run = [BlockRun((blocks[bound.table],), 0, 1, 0, 1)]
            held = [at for at, layer in enumerate(bound.layers) if start <= layer < stop]
            wanted = [bound.layers[at] - start for at in held]
            for group, paged in enumerate(bound.paged):
                memory = paged.as_rows(rows.group_rows(slot, group), rows.group_shape(group))
                found += [
                    (paged, memory[span], held[first], run) for span, first in layer_spans(wanted)
                ]
        return found
