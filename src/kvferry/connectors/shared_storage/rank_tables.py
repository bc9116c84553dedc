"""The block tables of one rank bound to its tensors: where tokens lie, and the copies.

A group's layers may stand in several tables, and a table may hold layers of several groups, so rows
of a record go to their blocks part by part (`TablePart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvferry.connectors.shared_storage.tables import Table
from kvferry.errors import LayoutError
from kvferry.layout.ops import BlockRun, MakeCopies, PagedKV, as_rows
from kvferry.types import NULL_BLOCK, GroupShard

if TYPE_CHECKING:
    from kvferry.connectors.registry import EngineSpec
    from kvferry.connectors.shared_storage.messages import BlockSlice

Runs = Mapping[int, Sequence[BlockRun]]
"""Where tokens lie, by table; tables that hold none of them are absent."""

Rows = memoryview | torch.Tensor
"""Rows of a group: bytes of the host, or a tensor of `RankTables.new_rows`."""


_INT_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Box(NamedTuple):
    """Rows of a group: `shape` is `[layers, heads, tokens, content]`, from the given layer and head
    of this rank on."""

    layer: int
    head: int
    shape: tuple[int, int, int, int]


class LayerPlace(NamedTuple):
    """A layer of a group, counted within this rank."""

    group: int
    layer: int


@dataclass(slots=True)
class _Bound:
    """A part with its tensors."""

    table: int
    layers: tuple[int, ...]
    paged: PagedKV
    spans: dict[tuple[int, int], list[tuple[slice, int]]] = field(default_factory=dict)
    """Results of `layer_spans`, by the layers asked for."""

    def spans_in(self, low: int, high: int) -> list[tuple[slice, int]]:
        found = self.spans.get((low, high))
        if found is None:
            found = self.spans[low, high] = list(layer_spans(self.layers, low, high))
        return found


def layer_spans(layers: Sequence[int], low: int, high: int) -> Iterator[tuple[slice, int]]:
    """Split those of `layers` that lie in `[low, high)` into runs of consecutive ones, whose rows
    are contiguous.

    Yields:
        The run as a slice of `[low, high)`, and the index in `layers` of its first one.
    """
    first = 0
    while first < len(layers):
        stop = first + 1
        if low <= layers[first] < high:
            while stop < len(layers) and layers[stop] == layers[stop - 1] + 1 < high:
                stop += 1
            yield slice(layers[first] - low, layers[stop - 1] + 1 - low), first
        first = stop


class RankTables:
    """Runs in: worker. Thread-safe after `register`.

    Args:
        spec: the engine and what this rank holds of it.
        tables: its block tables.

    Attributes:
        layers: what each registered tensor holds, by name; empty if some holds more than a layer.
        device: of the tensors.
    """

    def __init__(self, spec: EngineSpec, tables: Sequence[Table]) -> None:
        self._spec = spec
        self._tables = tables
        self._of_group: tuple[tuple[_Bound, ...], ...] = ()
        self._of_table: dict[int, tuple[PagedKV, ...]] = {}
        self.layers: Mapping[str, Sequence[LayerPlace]] = {}
        self.device = torch.device("cpu")

    def register(
        self, kv_caches: Mapping[str, torch.Tensor], copies: MakeCopies | None = None
    ) -> None:
        """Bind the engine's tensors.

        Args:
            kv_caches: layer name to tensor.
            copies: see `PagedKV`.

        Raises:
            LayoutError: a layer is missing, a tensor is not what the spec says, or they are not on
                one device.
        """
        of_group: list[list[_Bound]] = [[] for _ in self._spec.groups]
        of_table: dict[int, list[PagedKV]] = {}
        layers: dict[str, list[LayerPlace]] = {}
        is_by_layer = True
        for part in self._spec.table_parts:
            if not part.layers:
                continue
            names = part.layer_names if part.layer_names is not None else tuple(kv_caches)
            missing = [name for name in names if name not in kv_caches]
            if missing:
                raise LayoutError(f"no KV tensor for layer {missing[0]!r}")
            paged = PagedKV(
                [kv_caches[name] for name in names],
                replace(self._spec.groups[part.group], block_size=part.block_size),
                GroupShard(
                    layers=(0, len(part.layers)), heads=self._spec.shard.groups[part.group].heads
                ),
                self._spec.kv_layout,
                null_block=NULL_BLOCK,
                copies=copies,
            )
            if len(names) == len(part.layers):
                for name, layer in zip(names, part.layers, strict=True):
                    layers.setdefault(name, []).append(LayerPlace(part.group, layer))
            else:
                is_by_layer = False
            of_group[part.group].append(_Bound(part.table, part.layers, paged))
            of_table.setdefault(part.table, []).append(paged)
        devices = {paged.device for several in of_table.values() for paged in several}
        if len(devices) > 1:
            raise LayoutError(f"KV groups on {len(devices)} devices: {sorted(map(str, devices))}")
        self.device = next(iter(devices), self.device)
        self.layers = layers if is_by_layer else {}
        self._of_group = tuple(tuple(bound) for bound in of_group)
        self._of_table = {table: tuple(paged) for table, paged in of_table.items()}

    def runs(
        self, slices: Sequence[BlockSlice], first_of: Callable[[Table], int], stop: int
    ) -> Runs:
        """Where tokens lie: in each table from `first_of(table)` to `stop`.

        Raises:
            LayoutError: a block id outside the cache, a null block, or a table too short.
        """
        result = {}
        for table in self._tables:
            first = first_of(table)
            bound = self._of_table.get(table.index, ())
            if first >= stop or not bound:
                continue
            used = _blocks_between(table, slices, first, stop)
            for paged in bound:
                paged.check_blocks(used)
            result[table.index] = list(bound[0].runs(used, first, stop))
        return result

    def blocks(self, slices: Sequence[BlockSlice], start: int, stop: int) -> set[int]:
        """Ids of the blocks of all tables that hold some of `[start, stop)`, as far as known."""
        found: set[int] = set()
        for table in self._tables:
            if table.index < len(slices):
                part, size = slices[table.index], table.block_size
                low = max(0, start // size - part.skipped)
                high = max(0, -(-stop // size) - part.skipped)
                found.update(part.ids[low:high])
        return found - {NULL_BLOCK}

    def groups_with(self, runs: Runs) -> frozenset[int]:
        """The groups of which some layer stands in these tables."""
        return frozenset(
            group
            for group, parts in enumerate(self._of_group)
            if any(bound.table in runs for bound in parts)
        )

    def new_rows(self, group: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
        """Memory on the device of the KV for rows of a group, in the current stream."""
        kind = _INT_OF[getattr(torch, self._spec.groups[group].dtype).itemsize]
        return torch.empty(shape, dtype=kind, device=self.device)

    def digests_later(
        self, group: int, rows: torch.Tensor, leaf_bytes: int
    ) -> Callable[[], bytes] | None:
        """See `PagedKV.digests_later`; `rows` are of `new_rows`."""
        paged = self._of_group[group][0].paged
        return paged.digests_later(rows, leaf_bytes)

    def scatter(self, group: int, box: Box, memory: Rows, runs: Runs, first_token: int) -> None:
        """Copy rows of a group into the blocks; `first_token` is that of the rows."""
        for bound, rows, span, layer in self._targets(group, box, memory, runs):
            bound.paged.scatter(rows[span], layer, box.head, runs[bound.table], first_token)

    def gather(self, group: int, box: Box, memory: Rows, runs: Runs, first_token: int) -> None:
        """Copy blocks into rows of a group; arguments as `scatter`."""
        for bound, rows, span, layer in self._targets(group, box, memory, runs):
            bound.paged.gather(rows[span], layer, box.head, runs[bound.table], first_token)

    def _targets(
        self, group: int, box: Box, memory: Rows, runs: Runs
    ) -> Iterator[tuple[_Bound, Any, slice, int]]:
        rows: Any = None
        for bound in self._of_group[group]:
            if bound.table not in runs:
                continue
            if rows is None:
                rows = as_rows(memory, bound.paged, self._spec.groups[group].dtype, box.shape)
            for span, layer in bound.spans_in(box.layer, box.layer + box.shape[0]):
                yield bound, rows, span, layer


def _blocks_between(
    table: Table, slices: Sequence[BlockSlice], start: int, stop: int
) -> tuple[int, ...]:
    if table.index >= len(slices):
        raise LayoutError(f"{len(slices)} block tables, table {table.index} takes part")
    part, size = slices[table.index], table.block_size
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
