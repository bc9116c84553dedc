"""Stand-in for an engine in benchmarks and in the tests' simulated host: paged KV of any shape, and
a host that calls both roles of a connector. It has no model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from kvferry.cache.build import PrefixCache
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import WorkerOutput
from kvferry.contract.spec import EngineSpec, Roles
from kvferry.keys import ModelIdentity
from kvferry.layout.device import TorchCopies
from kvferry.layout.ops import PagedKV
from kvferry.layout.plan import BlockRun
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.layout.spec import ALIASES, parse
from kvferry.observe import Counters, Observer
from kvferry.types import (
    DEFAULT_OPTIONS,
    NO_EXTRA_KEYS,
    ExtraKeys,
    Handover,
    KVGroup,
    RequestOptions,
)

CHUNK_TOKENS = 128

Rows = np.ndarray[tuple[int, ...], np.dtype[np.int16]]
Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How an engine keeps KV, in one tensor per layer."""

    tp: int
    block_size: int
    layout: str

    def __str__(self) -> str:
        return f"TP {self.tp}, {self.block_size}, {self.layout}"


def group_of(block_size: int, *, is_mla: bool = False) -> KVGroup:
    """Return the KV group of an 8B model, or of a small MLA model."""
    layers, heads, content = (27, 1, 576) if is_mla else (32, 8, 256)
    return KVGroup(
        num_layers=layers,
        num_kv_heads=heads,
        content_size=content,
        dtype="bfloat16",
        block_size=block_size,
    )


class Blocks:
    """The paged KV of one rank, whose blocks are in random order; block 0 stays free. With a
    `device`, "cpu" included, rows are torch tensors instead of arrays."""

    def __init__(
        self,
        group: KVGroup,
        shape: Shape,
        rank: int,
        num_tokens: int,
        rng: random.Random,
        device: str | None = None,
    ) -> None:
        shard = tensor_parallel_shard((group,), rank, shape.tp).groups[0]
        self.heads = shard.heads
        num_heads = shard.heads[1] - shard.heads[0]
        num_blocks = num_tokens // shape.block_size
        self.tensors = kv_tensors(shape.layout, group, num_heads, num_blocks + 1, device)
        copies = TorchCopies if device == "cpu" else None
        self.paged = PagedKV(self.tensors, group, shard, shape.layout, copies=copies)
        self._row_shape = (group.num_layers, num_heads, CHUNK_TOKENS, group.content_size)
        self.row_bytes = prod(self._row_shape) * 2
        self.ids = list(range(1, num_blocks + 1))
        rng.shuffle(self.ids)
        per_chunk = CHUNK_TOKENS // shape.block_size
        self.runs: list[list[BlockRun]] = [
            self.paged.runs(self.ids[start : start + per_chunk], 0, CHUNK_TOKENS)
            for start in range(0, num_blocks - per_chunk + 1, per_chunk)
        ]
        """Block runs of each whole chunk."""

    def rows(self, staging: Bytes) -> Rows:
        """Return a view of a buffer as the rows of a chunk."""
        found: Rows = self.paged.as_rows(staging.data, self._row_shape)
        return found


def kv_tensors(
    layout: str, group: KVGroup, num_heads: int, num_blocks: int, device: str | None = None
) -> list[torch.Tensor]:
    """Make one bfloat16 tensor per layer; layers and axes lie in memory as the layout is named."""
    axes = parse(layout).axes
    name = ALIASES.get(layout, layout)
    order = name if "L" in name else "L" + axes
    sizes = {
        "L": group.num_layers,
        "B": num_blocks,
        "2": 2,
        "H": num_heads,
        "N": group.block_size,
        "C": group.content_size,
        "D": group.content_size // (2 if "2" in order else 1),
    }
    memory = torch.zeros([sizes[axis] for axis in order], dtype=torch.bfloat16, device=device)
    return list(memory.permute(*(order.index(axis) for axis in "L" + axes)))


def fill_with_noise(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Fill tensors with noise that differs from layer to layer, so that swapped layers show. All of
    it is finite: with a larger number, the exponent of a float16 has ones alone."""
    noise = np.random.default_rng(seed).integers(0, 0x7C00, 2**16 + 1, dtype=np.int16)
    for layer, tensor in enumerate(tensors):
        values = np.resize(np.roll(noise, 1009 * layer), tensor.numel()).reshape(tensor.shape)
        tensor.view(torch.int16).copy_(torch.from_numpy(values))


def engine_spec(group: KVGroup) -> EngineSpec:
    """Return the spec of an engine of one rank."""
    return EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={"model_type": "bench"}),
        groups=(group,),
        shard=tensor_parallel_shard((group,), 0, 1),
    )


@contextmanager
def opened_roles(
    group: KVGroup, options: Mapping[str, object], layers: Mapping[str, torch.Tensor]
) -> Iterator[Roles]:
    """Open both roles of the shared-storage connector for one rank, and register its layers."""
    cache = PrefixCache(engine_spec(group), options, Counters())
    roles = Roles(cache.scheduler(), cache.worker(), cache.close, cache.wait_ready)
    try:
        roles.worker.register_kv_caches(layers)
        yield roles
    finally:
        roles.scheduler.close()
        roles.worker.close()
        roles.close_last()


@dataclass
class HostRequest:
    """A request as `RequestView` and `ScheduledRequest` want it."""

    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    handover: Handover | None = None
    block_ids: tuple[list[int], ...] = ()
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_external_tokens: int = 0
    options: RequestOptions = DEFAULT_OPTIONS

    @property
    def request(self) -> HostRequest:
        return self


@dataclass
class HostStep:
    """A step; implements `StepView`."""

    scheduled: list[HostRequest] = field(default_factory=list)
    preempted_request_ids: set[str] = field(default_factory=set)
    finished_request_ids: set[str] = field(default_factory=set)


class RolesHost:
    """Calls both roles, guarded, in the order of the embedded engine."""

    def __init__(self, roles: Roles, block_size: int) -> None:
        observer = Observer()
        self.scheduler = GuardedScheduler(roles.scheduler, observer, block_size=block_size)
        self._driver = StepDriver(roles.worker, observer)
        self._none: set[str] = set()

    def step(self, scheduled: list[HostRequest], finished: set[str] | None = None) -> WorkerOutput:
        """Run one step, with a forward if something is scheduled. It does little besides the calls,
        since `bench step` times it."""
        finished = finished or self._none
        plan = self.scheduler.build_plan(HostStep(scheduled, self._none, finished))
        if scheduled:
            with self._driver.step(plan, finished) as step:
                pass  # the model is left out
            output = step.output
        else:
            output = self._driver.no_forward(plan, finished)
        self.scheduler.update_output(output)
        self.scheduler.take_events()
        return output

    def forward(self, request: HostRequest, blocks: Sequence[int], hit: int) -> WorkerOutput:
        """Give a request its blocks, and compute all tokens after the hit in one step."""
        request.block_ids = (list(blocks),)
        request.num_computed_tokens = request.num_external_tokens = hit
        self.scheduler.update_after_alloc(request, request.block_ids, hit)
        request.num_scheduled_tokens = len(request.all_token_ids) - hit
        output = self.step([request])
        request.num_computed_tokens = len(request.all_token_ids)
        return output
