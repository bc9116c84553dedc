"""Drives one worker of the cache over KV tensors of a device, one plan after another. The model has
two groups of layers, each with a block table of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from kvferry.blocks.copies import DeviceSetup
from kvferry.blocks.tables import BlockSlice
from kvferry.cache.build import PrefixCache
from kvferry.cache.config import CacheBounds
from kvferry.cache.messages import (
    CachePlan,
    Fetch,
    Load,
    Save,
    SlotChunk,
)
from kvferry.contract.spec import EngineSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Counters
from kvferry.store.base import Store
from kvferry.testing.stores.hooks import wait_until
from tests.cache.conftest import record_bytes
from tests.cache.moving.simulated_device import SimulatedStream
from tests.layout.paging import Cache, expected_rows

BLOCK, CHUNK = 16, 32
NUM_CHUNKS = 3
SAVE_SLOTS = (2, 0, 5)
FETCH_SLOTS = (1, 4, 3)
SAVED = ([2, 5, 1, 8, 9, 4], [7, 1, 3, 2, 6, 5])
"""Block ids of the saved chunks, by table."""
LOADED = ([6, 3, 4, 1, 2, 7], [3, 4, 8, 9, 1, 2])


def slices(
    tables: Sequence[Sequence[int]], first: int = 0, stop: int = 6
) -> tuple[BlockSlice, ...]:
    return tuple(BlockSlice(first, tuple(table[first:stop])) for table in tables)


def chunks(slots: Sequence[int]) -> tuple[SlotChunk, ...]:
    return tuple(
        SlotChunk(slot, bytes([index + 1]) * 32, index * CHUNK) for index, slot in enumerate(slots)
    )


def saves(
    tables: Sequence[Sequence[int]] = SAVED, slots: Sequence[int] = SAVE_SLOTS
) -> tuple[Save, ...]:
    per_chunk = CHUNK // BLOCK
    return tuple(
        Save(chunk, slices(tables, index * per_chunk, (index + 1) * per_chunk))
        for index, chunk in enumerate(chunks(slots))
    )


class DeviceHost:
    """A worker, its tensors, and what it has reported so far."""

    def __init__(
        self,
        layout: str,
        store: Store,
        *,
        device: str = "cpu",
        setup: DeviceSetup | None = None,
        bounds: CacheBounds = CacheBounds(),  # noqa: B008  # frozen
    ) -> None:
        sizes = {"block_size": BLOCK, "num_blocks": 10, "device": device}
        self.caches = [
            Cache(layout, num_layers=2, num_heads=3, head_dim=8, **sizes),
            Cache(layout, num_layers=1, num_heads=1, head_dim=16, dtype="bfloat16", **sizes),
        ]
        groups = tuple(cache.group for cache in self.caches)
        names = tuple(
            tuple(f"{index}.{layer}" for layer in range(len(cache.tensors)))
            for index, cache in enumerate(self.caches)
        )
        spec = EngineSpec(
            identity=ModelIdentity(weights=b"w" * 32, config={"model_type": "device"}),
            groups=groups,
            shard=tensor_parallel_shard(groups, 0, 1),
            kv_layout=layout,
        )
        parts = [replace(part, layer_names=names[part.group]) for part in spec.table_parts]
        spec = replace(spec, tables=tuple(parts))
        self.observer = Counters()
        memory_bytes = 8 * record_bytes(groups, CHUNK)
        options = {"store": store.url, "chunk_tokens": CHUNK, "memory_bytes": memory_bytes}
        options["load_timeout_seconds"] = 60.0  # a machine that stalls costs no read
        self.cache = PrefixCache(spec, options, self.observer, store=store)
        self.cache.context = replace(self.cache.context, bounds=bounds)
        self.worker = self.cache.worker(setup)
        self.tensors = {
            name: tensor
            for cache, several in zip(self.caches, names, strict=True)
            for name, tensor in zip(several, cache.tensors, strict=True)
        }
        self.worker.register_kv_caches(self.tensors)
        for stream in self.worker._copies._streams or ():
            if isinstance(stream, SimulatedStream):
                stream.device.is_eager = False
        self.held, self.missed, self.saved, self.invalid = [], [], [], set()
        self.sealed = []
        self.off = ""

    def begin(self, **plan: object) -> None:
        """Run the part of a step before the forward."""
        first = self.cache.schema.namespace
        self.worker.begin_step(CachePlan(first_namespace=first, **plan))
        self.worker.start_load()

    def end(self) -> None:
        """Run the part of a step after the forward."""
        self.worker.save()
        self._collect()
        self.worker.end_step()

    def step(self, **plan: object) -> None:
        """Run a step whose forward does nothing."""
        self.begin(**plan)
        self.end()

    def _collect(self) -> None:
        output = self.worker.collect(())
        self.invalid |= output.invalid_block_ids
        if output.meta is not None:
            (report,) = output.meta.reports
            self.region = report.region
            self.off = self.off or report.off
            self.held += [one for one in report.filled if one.missed is None]
            self.missed += [one for one in report.filled if one.missed is not None]
            self.sealed += report.sealed
            self.saved += report.saved

    def settle(self, *, saved: int = 0, held: int = 0) -> None:
        """Run empty steps until so many saves and fetches have ended."""

        def have_ended() -> bool:
            if len(self.saved) >= saved and len(self.held) >= held:
                return True
            self.step()
            return False

        wait_until(have_ended, "saves and fetches end")

    def fetch(self, slots: Sequence[int] = FETCH_SLOTS) -> None:
        """Fetch all chunks from the store into slots."""
        num_held = len(self.held)
        self.step(fetches=tuple(Fetch(chunk, (0, 1)) for chunk in chunks(slots)))
        self.settle(held=num_held + NUM_CHUNKS)

    def load(
        self, tables: Sequence[Sequence[int]] = LOADED, slots: Sequence[int] = FETCH_SLOTS
    ) -> Load:
        return Load("r", chunks(slots), 0, NUM_CHUNKS * CHUNK, slices(tables))

    def snapshot(self) -> list[torch.Tensor]:
        return [cache.whole.clone() for cache in self.caches]

    def restore(self, snapshot: Sequence[torch.Tensor]) -> None:
        for cache, whole in zip(self.caches, snapshot, strict=True):
            cache.whole.copy_(whole)

    def rows(self, tables: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return the KV of the tokens of all chunks, by group."""
        return [
            expected_rows(cache, table, 0, NUM_CHUNKS * CHUNK)
            for cache, table in zip(self.caches, tables, strict=True)
        ]

    def fill(self, start: int = 1) -> None:
        for cache in self.caches:
            cache.fill(start)

    def close(self) -> None:
        self.worker.close()


def assert_rows(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tobytes() == theirs.tobytes()
