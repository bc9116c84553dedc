"""A host without a model that saves and loads whole prompts, one at a time, and times them.

It calls both roles of the connector, guarded, in the order of the embedded engine, with a hook
before and after each layer where they ask for it. Every prompt has the same KV in the same blocks.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from kvferry.bench.limits import Measured
from kvferry.connectors.registry import create_roles
from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.messages import WorkerOutput
from kvferry.contract.spec import EngineSpec, Roles
from kvferry.errors import StoreError
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters
from kvferry.runner.lifecycle import StepLifecycle
from kvferry.testing.host import HostStep
from kvferry.testing.host_tables import HostRequest
from kvferry.topology import tensor_parallel_shard
from kvferry.types import KVGroup

CHUNK_TOKENS = 128
BLOCK_SIZE = 16
GROUP = KVGroup(
    num_layers=32, num_kv_heads=8, content_size=256, dtype="bfloat16", block_size=BLOCK_SIZE
)
TOKEN_BYTES = 32 * 8 * 256 * 2
TIMEOUT_SECONDS = 600.0
IDLE_SECONDS = 0.001
"""A host pauses so long after a step without tokens, as vLLM's does."""


class PagedTensors:
    """Random KV of `num_tokens` tokens in blocks of random order, one block more for the token that
    no hit covers, and the null block."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        self.num_tokens = num_tokens
        num_blocks = num_tokens // BLOCK_SIZE + 1
        # Allocated by torch, as an engine does: numpy's alignment would slow every copy down.
        self.tensor = torch.empty((32, num_blocks + 1, 8, BLOCK_SIZE, 256), dtype=torch.bfloat16)
        bits = self._bits()
        noise = np.random.default_rng(seed).integers(0, 2**15, 2**22, dtype=np.int16)
        bits[:] = np.resize(noise, bits.size)
        blocks = list(range(1, num_blocks + 1))
        random.Random(seed).shuffle(blocks)
        self.blocks = tuple(blocks)
        self._saved = self.tensor[:, list(blocks[:-1])]

    @property
    def num_bytes(self) -> int:
        """Of the tokens."""
        return self.num_tokens * TOKEN_BYTES

    def _bits(self) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
        return self.tensor.view(torch.int16).numpy().reshape(-1)

    def clear(self) -> None:
        """Forget all KV."""
        self._bits()[:] = 0

    def is_restored(self) -> bool:
        """Whether the blocks of all tokens hold what they held at first."""
        now = self.tensor[:, list(self.blocks[:-1])]
        return torch.equal(now.view(torch.int16), self._saved.view(torch.int16))


class Loaded(NamedTuple):
    """What a load took."""

    in_hand: Measured
    """Until the hit was promised."""
    all: Measured
    """Until its KV was in the blocks."""


def open_roles(kv: PagedTensors, store: Path, *, io_threads: int, memory_prompts: int) -> Roles:
    """Both roles over a store in a directory, with memory for so many prompts: all that the
    benchmark knows of the connector."""
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={"model_type": "bench-8b"}),
        groups=(GROUP,),
        shard=tensor_parallel_shard((GROUP,), 0, 1),
        layer_names=None,
    )
    slot_bytes = CHUNK_TOKENS * TOKEN_BYTES + (1 << 16)
    options = {
        "store": f"file://{store}",
        "chunk_tokens": CHUNK_TOKENS,
        "io_threads": io_threads,
        "load_timeout_seconds": TIMEOUT_SECONDS,
        "memory_bytes": memory_prompts * (kv.num_tokens // CHUNK_TOKENS) * slot_bytes,
    }
    roles: Roles = create_roles("shared_storage", spec, options, Counters())
    roles.worker.register_kv_caches({str(index): layer for index, layer in enumerate(kv.tensor)})
    return roles


class PromptHost:
    """An engine's scheduler and runner for prompts by number. A context manager.

    Args:
        kv: of every prompt.
        store: directory of the store.
        io_threads: of the connector.
        memory_prompts: how many prompts the connector's memory holds.
    """

    def __init__(
        self, kv: PagedTensors, store: Path, *, io_threads: int, memory_prompts: int
    ) -> None:
        self._kv = kv
        self._roles = open_roles(kv, store, io_threads=io_threads, memory_prompts=memory_prompts)
        observer = Counters()
        self._scheduler = GuardedScheduler(self._roles.scheduler, observer, block_size=BLOCK_SIZE)
        self._lifecycle = StepLifecycle(GuardedWorker(self._roles.worker, observer))
        self._layers = [(str(index), layer) for index, layer in enumerate(kv.tensor)]
        self._finished: set[str] = set()
        self._ids = itertools.count()
        self._roles.wait_ready(TIMEOUT_SECONDS)

    def __enter__(self) -> PromptHost:
        return self

    def __exit__(self, *exc: object) -> None:
        self._scheduler.close()
        self._roles.worker.close()
        self._roles.close_last()

    def save(self, number: int) -> None:
        """Run a prompt that nobody stored, until all its chunks are."""
        request = self._request(number)
        if hit := self._look_up(request):
            raise StoreError(f"{hit} tokens of a new prompt were found stored")
        self._allocate(request, 0)
        self._forward(request)
        while self._scheduler.has_pending_work():
            self._idle()
            time.sleep(IDLE_SECONDS)
        self._finish(request)

    def load(self, number: int) -> Loaded:
        """Run a prompt whose chunks are all stored.

        Raises:
            StoreError: its KV is not in the blocks.
        """
        self._kv.clear()
        request = self._request(number)
        started = _now()
        hit = self._look_up(request)
        in_hand = _since(started)
        self._allocate(request, hit)
        output = self._forward(request)
        loaded = Loaded(in_hand, _since(started))
        self._finish(request)
        if hit != self._kv.num_tokens or output.invalid_block_ids or not self._kv.is_restored():
            raise StoreError(
                f"{hit} of {self._kv.num_tokens} tokens hit, "
                f"{len(output.invalid_block_ids)} blocks were not loaded"
            )
        return loaded

    def _request(self, number: int) -> HostRequest:
        # One token more than is stored: the last one is always computed.
        tokens = [number, *range(self._kv.num_tokens)]
        request = HostRequest(f"{number}.{next(self._ids)}", tokens, len(tokens))
        self._scheduler.on_new_request(request)
        return request

    def _look_up(self, request: HostRequest) -> int:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (hit := self._scheduler.lookup(request, 0).num_tokens) is None:
            if time.monotonic() > deadline:
                raise StoreError(f"no answer to a look-up in {TIMEOUT_SECONDS} s")
            self._idle()
            time.sleep(IDLE_SECONDS)
        return hit

    def _allocate(self, request: HostRequest, hit: int) -> None:
        request.block_ids = (list(self._kv.blocks),)
        request.num_computed_tokens = request.num_external_tokens = hit
        self._scheduler.update_after_alloc(request, request.block_ids, hit)

    def _forward(self, request: HostRequest) -> WorkerOutput:
        request.num_scheduled_tokens = len(request.all_token_ids) - request.num_computed_tokens
        plan = self._scheduler.build_plan(self._step([request]))
        with self._lifecycle.step(plan, self._finished) as step:
            if (hooks := self._lifecycle.layerwise) is not None:
                for name, tensor in self._layers:
                    hooks.wait_for_layer_load(name)
                    hooks.save_layer(name, tensor, None)
        request.num_computed_tokens = len(request.all_token_ids)
        self._end(step.output)
        return step.output

    def _idle(self) -> None:
        plan = self._scheduler.build_plan(self._step([]))
        self._end(self._lifecycle.no_forward(plan, self._finished))

    def _step(self, scheduled: Sequence[HostRequest]) -> HostStep:
        return HostStep(list(scheduled), set(), self._finished)

    def _end(self, output: WorkerOutput) -> None:
        self._finished = set()
        self._scheduler.update_output(output)
        self._scheduler.take_events()

    def _finish(self, request: HostRequest) -> None:
        self._scheduler.request_finished(request, request.block_ids)
        self._finished.add(request.request_id)
        self._idle()


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(started: tuple[float, float]) -> Measured:
    wall, cpu = _now()
    return Measured(wall - started[0], cpu - started[1])
