"""Block tables and tensors of the simulated host.

As in vLLM, all tables take blocks from one pool, and the layers of different tables share memory.
So a block id used in the wrong table destroys another table's KV. A table with a window frees a
block once no later token attends to it, and puts the null block in its place.

A table of recurrent states has one block of a request, in which its last token is. Before a
forward, and before the loads of the same step, the host copies the states on if that is a new
block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.host import HostRequest
from kvferry.contract.driver import StepDriver
from kvferry.contract.spec import EngineSpec
from kvferry.contract.worker import WorkerRole
from kvferry.types import NULL_BLOCK, KVGroup, RankShard, TablePart
from tests.state_models import Place, StateModel


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTable:
    """One block table of a host.

    Attributes:
        block_size: tokens per block.
        window: tokens that are kept, the next one to compute included; None for all.
        chunk: tokens of the attention chunks, of which the last is kept; None for all.
        layers: pairs of a group and its layers in the table; empty if the connector has no part in
            the table.
        states: layers whose recurrent states are in the table, which has no other layers.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None
    layers: tuple[tuple[int, tuple[int, ...]], ...] = ()
    states: tuple[int, ...] = ()

    def num_dropped(self, num_computed: int) -> int:
        """Return how many leading blocks no token from `num_computed` on attends to."""
        return self.attended_from(num_computed) // self.block_size

    def attended_from(self, num_computed: int) -> int:
        """Return the first token that token `num_computed` attends to."""
        if self.chunk is not None:
            return num_computed // self.chunk * self.chunk
        return 0 if self.window is None else max(0, num_computed - self.window + 1)


def table_per_group(groups: Sequence[KVGroup]) -> tuple[HostTable, ...]:
    """Return the tables that an `EngineSpec` without tables implies."""
    return tuple(
        HostTable(
            block_size=group.block_size,
            window=group.window,
            chunk=group.chunk,
            layers=((index, tuple(range(group.num_layers))),),
        )
        for index, group in enumerate(groups)
    )


def parts_of_tables(
    tables: Sequence[HostTable], shard: RankShard | None = None
) -> tuple[TablePart, ...]:
    """Return the tables as the `EngineSpec` of a rank lists them; without a shard, of one with all
    layers. Layers are named `group.layer`, with their index in the whole model."""
    parts = []
    for index, table in enumerate(tables):
        for group, layers in table.layers:
            start, stop = (0, max(layers) + 1) if shard is None else shard.groups[group].layers
            held = [layer for layer in layers if start <= layer < stop]
            parts.append(
                TablePart(
                    table=index,
                    group=group,
                    layers=tuple(layer - start for layer in held),
                    layer_names=tuple(f"{group}.{layer}" for layer in held),
                    block_size=table.block_size,
                    window=table.window,
                    chunk=table.chunk,
                )
            )
    return tuple(parts)


class Move(NamedTuple):
    """A copy of the states of a table from one block to another."""

    table: int
    source: int
    target: int


class HostBlockPool:
    """The blocks of all tables. Block 0 is the null block."""

    def __init__(self, tables: Sequence[HostTable], num_blocks: int) -> None:
        self.tables = tables
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._left: list[int] = []  # blocks that states were copied from since `free_left`

    def grow(self, request: HostRequest, num_tokens: int) -> list[int]:
        """Free the blocks of a request that left the windows, then give it blocks for its tokens.
        Return the freed blocks."""
        if not request.block_ids:
            request.block_ids = tuple([] for _ in self.tables)
        freed = []
        computed = request.num_computed_tokens
        for table, blocks in zip(self.tables, request.block_ids, strict=True):
            dropped = table.num_dropped(computed)
            for index in range(min(dropped, len(blocks))):
                if blocks[index] != NULL_BLOCK:
                    freed.append(blocks[index])
                    blocks[index] = NULL_BLOCK
            blocks.extend([NULL_BLOCK] * (dropped - len(blocks)))
        self._free.extend(reversed(freed))
        for table, blocks in zip(self.tables, request.block_ids, strict=True):
            while not table.states and len(blocks) * table.block_size < num_tokens:
                blocks.append(self._free.pop())
        return freed

    def carry(self, request: HostRequest, num_tokens: int) -> Iterator[Move]:
        """Give a request, in each table of states, the block in which token `num_tokens - 1` is;
        yield the copies that this takes. The blocks that they leave are freed by `free_left`."""
        for index, (table, blocks) in enumerate(zip(self.tables, request.block_ids, strict=True)):
            if not table.states:
                continue
            before = (request.num_computed_tokens - 1) // table.block_size
            after = (num_tokens - 1) // table.block_size
            if after == before:
                continue
            blocks.extend([NULL_BLOCK] * (after - len(blocks)))
            blocks.append(self._free.pop())
            if request.num_computed_tokens:
                yield Move(index, blocks[before], blocks[after])
                self._left.append(blocks[before])
                blocks[before] = NULL_BLOCK

    def free_left(self) -> list[int]:
        """Free the blocks that states were copied from; return them."""
        left, self._left = self._left, []
        self._free.extend(left)
        return left

    def num_missing(self, request: HostRequest) -> int:
        """Count, over all tables, the tokens without a block that the next token attends to."""
        computed = request.num_computed_tokens
        return sum(
            1
            for table, blocks in zip(self.tables, request.block_ids, strict=True)
            if table.layers
            for token in range(table.attended_from(computed), computed)
            if blocks[token // table.block_size] == NULL_BLOCK
        )

    def release(self, request: HostRequest) -> list[int]:
        """Take all blocks of a request back; return them."""
        freed = [block for table in request.block_ids for block in table if block != NULL_BLOCK]
        self._free.extend(freed)
        request.block_ids = ()
        return freed

    def check_integrity(self, requests: Collection[HostRequest]) -> None:
        """Raises AssertionError unless each block is free or held by one of these requests."""
        held = [b for r in requests for table in r.block_ids for b in table if b != NULL_BLOCK]
        if sorted(held + self._left + self._free) != list(range(1, self._num_blocks)):
            raise AssertionError("blocks are lost, or held twice")


def kv_values(
    seeds: Sequence[int] | torch.Tensor, layer: int, heads: range, content_size: int
) -> torch.Tensor:
    """Return the KV of the tokens that end prefixes with these seeds (`prefix_seeds` of
    `simulated_host`), `[tokens, heads, content]`: integers that float32 holds."""
    of_tokens = torch.as_tensor(seeds, dtype=torch.int64).view(-1, 1, 1)
    of_heads = torch.tensor(heads).view(1, -1, 1)
    content = torch.arange(content_size)
    return (of_tokens * 31 + layer * 1009 + of_heads * 97 + content * 7) % 65_521


class _ModelLayer(NamedTuple):
    """A layer, and its index in its group, counted over the whole model."""

    name: str
    group: int
    layer: int


class HostRank:
    """One rank's tensors, `[B, H, N, C]` per layer, and what it writes into them. `states`: the
    model of its recurrent states, of which each block is a page of bytes."""

    def __init__(
        self,
        spec: EngineSpec,
        worker: WorkerRole,
        tables: Sequence[HostTable],
        num_blocks: int,
        states: StateModel | None = None,
    ) -> None:
        self._spec = spec
        self._tables = tables
        self.worker = worker
        self.driver = StepDriver(worker, strict=True)
        self._layers: list[list[_ModelLayer]] = [[] for _ in tables]
        for part in spec.table_parts:
            base = spec.shard.groups[part.group].layers[0]
            self._layers[part.table] += [
                _ModelLayer(name, part.group, base + layer)
                for name, layer in zip(part.layer_names or (), part.layers, strict=True)
            ]
        drafts = spec.drafts
        self._groups = (*spec.groups, *(drafts.groups if drafts else ()))
        self._shards = (*spec.shard.groups, *(drafts.shard.groups if drafts else ()))
        self._drafts: list[list[_ModelLayer]] = [[] for _ in tables]
        for part in drafts.tables if drafts else ():
            self._drafts[part.table] += [
                _ModelLayer(name, len(spec.groups) + part.group, layer)
                for name, layer in zip(part.layer_names or (), part.layers, strict=True)
            ]
        self.caches: dict[str, torch.Tensor] = {}
        self._memory = self._allocate(num_blocks)
        self._states = states
        self._pages: dict[int, torch.Tensor] = {}
        for layer in sorted(layer for table in tables for layer in table.states):
            size = states.page_bytes(spec.shard.world_size)
            self._pages[layer] = torch.full((num_blocks, 1, 1, size), 0x5A, dtype=torch.int8)
            self.caches[f"state.{layer}"] = self._pages[layer]
        worker.register_kv_caches(self.caches)

    def _shape(self, table: int, layer: _ModelLayer) -> tuple[int, int, int]:
        """`[heads of this rank, block size, content]`."""
        heads = self._shards[layer.group].heads
        content = self._groups[layer.group].content_size
        return heads[1] - heads[0], self._tables[table].block_size, content

    def _allocate(self, num_blocks: int) -> list[torch.Tensor]:
        """Make one `[num_blocks, page]` region for the n-th layers of all tables together."""
        pages: dict[int, int] = {}
        every = [
            [*layers, *drafts] for layers, drafts in zip(self._layers, self._drafts, strict=True)
        ]
        for table, layers in enumerate(every):
            for index, layer in enumerate(layers):
                heads, size, content = self._shape(table, layer)
                pages[index] = max(pages.get(index, 0), heads * size * content)
        memory = [torch.full((num_blocks, page), float("nan")) for page in pages.values()]
        for table, layers in enumerate(every):
            for region, layer in zip(memory, layers, strict=False):
                heads, size, content = self._shape(table, layer)
                page = region[:, : heads * size * content]
                self.caches[layer.name] = page.view(num_blocks, heads, size, content)
        return memory

    def values(self, layer: _ModelLayer, prefix_seeds: torch.Tensor) -> torch.Tensor:
        """Return the KV of the tokens that end these prefixes, `[tokens, heads of this rank,
        content]`."""
        heads = range(*self._shards[layer.group].heads)
        size = self._groups[layer.group].content_size
        return kv_values(prefix_seeds, 64 * layer.group + layer.layer, heads, size).float()

    def compute(self, request: HostRequest, seeds: Sequence[int], start: int, stop: int) -> None:
        """Write the KV of tokens `[start, stop)`, as far as they have blocks, and the states after
        them. Raises AssertionError if the states before them are wrong."""
        for page, place in self._state(request, seeds, stop, at=start):
            if start and self._states.num_wrong(page, place):
                raise AssertionError(f"{request.request_id} goes on from a wrong state at {start}")
        for layers in (self._layers, self._drafts):
            for name, blocks, places, values in self._kv(layers, request, seeds, start, stop):
                self.caches[name][blocks, :, places] = values
        for page, place in self._state(request, seeds, stop, at=stop):
            self._states.write(page, place)

    def move_states(self, moves: Sequence[Move]) -> None:
        for table, source, target in moves:
            for layer in self._tables[table].states:
                self._pages[layer][target] = self._pages[layer][source]

    def _state(
        self, request: HostRequest, seeds: Sequence[int], stop: int, *, at: int
    ) -> Iterator[tuple[torch.Tensor, Place]]:
        """Yield the page of each layer with states in the block that has token `stop - 1`, and what
        the page holds after `at` tokens."""
        for table, ids in zip(self._tables, request.block_ids, strict=True):
            for layer in table.states if stop else ():
                page = self._pages[layer][ids[(stop - 1) // table.block_size]]
                shard = self._spec.shard
                yield page, Place(layer, seeds[at - 1] % 4096, shard.world_size, shard.rank)

    def wrong_tokens(self, request: HostRequest, seeds: Sequence[int], stop: int) -> int:
        """Count the tokens of `[0, stop)`, per layer, whose block holds anything but their KV."""
        return self._wrong(self._layers, request, seeds, stop)

    def wrong_drafts(self, request: HostRequest, seeds: Sequence[int], stop: int) -> int:
        """Count likewise in draft layers, where that is allowed."""
        return self._wrong(self._drafts, request, seeds, stop)

    def _wrong(
        self,
        layers: Sequence[Sequence[_ModelLayer]],
        request: HostRequest,
        seeds: Sequence[int],
        stop: int,
    ) -> int:
        return sum(
            int((self.caches[name][blocks, :, places] != values).flatten(1).any(1).sum())
            for name, blocks, places, values in self._kv(layers, request, seeds, 0, stop)
        )

    def _kv(
        self,
        of_tables: Sequence[Sequence[_ModelLayer]],
        request: HostRequest,
        seeds: Sequence[int],
        start: int,
        stop: int,
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield for each layer its name and, for the tokens of `[start, stop)` that have a block,
        the block, the place in the block, and the right KV."""
        for table, ids, layers in zip(self._tables, request.block_ids, of_tables, strict=True):
            if not layers:
                continue
            size = table.block_size
            held = [
                token
                for token in range(start, min(stop, len(ids) * size))
                if ids[token // size] != NULL_BLOCK
            ]
            blocks = torch.tensor([ids[token // size] for token in held], dtype=torch.int64)
            places = torch.tensor(held, dtype=torch.int64) % size
            wanted = torch.tensor([seeds[token] for token in held], dtype=torch.int64)
            for layer in layers:
                yield layer.name, blocks, places, self.values(layer, wanted)

    def poison(self, blocks: Collection[int]) -> None:
        """Fill blocks with garbage, to detect a connector that still reads or writes them."""
        for region in self._memory:
            region[list(blocks)] = float("nan")
        for page in self._pages.values():
            page[list(blocks)] = 0x5A

    def check_null_block(self) -> None:
        """Raises AssertionError if the null block was written."""
        if not all(region[NULL_BLOCK].isnan().all() for region in self._memory):
            raise AssertionError("the null block was written")
