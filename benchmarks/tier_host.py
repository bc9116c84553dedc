"""vLLM's own manager of tiers with one tier behind it, driven as vLLM's scheduler drives it.

The benchmark `tier` uses it. No engine runs: in place of a worker, it copies noise into the rows of
the manager's memory. Imports vLLM.
"""

# ruff: noqa: ANN401 - configurations and contexts are vLLM's

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvferry.errors import StoreError

Json = dict[str, Any]

TIMEOUT_SECONDS = 120.0

IDLE_STEP_SECONDS = 0.001
"""How long vLLM's engine sleeps after a step that ran nothing, so that other threads go on."""


def offloading_spec(tier: Json, row_bytes: int, num_rows: int) -> Any:
    """Return the spec of an engine of one rank whose chunk is one block."""
    ranks = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size")
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=128, layer_names=("a",), group_id=0),),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": row_bytes * num_rows, "secondary_tiers": [tier]},
        engine_id=f"bench-{uuid.uuid4().hex[:12]}",
        model=OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=128, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
            **dict.fromkeys(ranks, 1),
        ),
    )
    return TieringOffloadingSpec(config)


def key_of(number: int) -> bytes:
    key: bytes = make_offload_key(number.to_bytes(32, "big"), 0)
    return key


class TierHost:
    """A manager with as many rows as one batch, so that each batch evicts the previous one.

    Attributes:
        tier: the tier behind the manager.
    """

    def __init__(self, spec: Any, noise: np.ndarray) -> None:
        self._manager = spec.get_manager()
        self._lock: AbstractContextManager[Any] = getattr(self._manager, "lock", nullcontext())
        self._view = self._manager.primary_tier.get_kv_memoryview()
        self._rows = np.frombuffer(self._view.cast("B"), np.uint8).reshape(len(noise), -1)
        self._noise = noise
        self._requests = 0
        self.tier = self._manager.secondary_tiers[0]

    def close(self) -> None:
        del self._rows
        self._view.release()
        self._manager.shutdown()

    def store(self, numbers: Sequence[int]) -> float:
        """Store a batch of new rows. Return the seconds until the tier reported all as stored."""
        context = self._begin()
        keys = [key_of(number) for number in numbers]
        with self._lock:
            prepared = self._manager.prepare_store(keys, context)
        if prepared is None or len(prepared.keys_to_store) != len(keys):
            raise StoreError("memory of the manager is not free")
        for place, number in zip(prepared.store_spec.chunk_ids, numbers, strict=True):
            self._rows[int(place)] = self._content(number)
        started = time.perf_counter()
        with self._lock:
            self._manager.complete_store(keys, context)
        self._until(lambda: not self._manager._transfer_jobs)
        seconds = time.perf_counter() - started
        self._end(context)
        return seconds

    def load(self, batches: Sequence[Sequence[int]]) -> float:
        """Load each batch by a request of its own, and check every byte. Return the seconds from
        the first look-up until all rows are in memory."""
        contexts = [self._begin() for _ in batches]
        waiting = [
            (key_of(number), context)
            for numbers, context in zip(batches, contexts, strict=True)
            for number in numbers
        ]
        started = time.perf_counter()

        def is_over() -> bool:
            nonlocal waiting
            found = [(self._manager.lookup(key, context), key, context) for key, context in waiting]
            if any(result is LookupResult.MISS for result, _, _ in found):
                raise StoreError("a stored row is not found")
            waiting = [(key, on) for result, key, on in found if result is not LookupResult.HIT]
            return not waiting

        self._until(is_over)
        seconds = time.perf_counter() - started
        for numbers, context in zip(batches, contexts, strict=True):
            self._check(numbers, context)
            self._end(context)
        return seconds

    def look_up(self, numbers: Sequence[int], expected: bool) -> tuple[float, float]:
        """Ask the tier itself about rows. Return the seconds that this thread spent in the tier's
        hooks, and the seconds until all answers were there."""
        context = self._begin()
        waiting = [key_of(number) for number in numbers]
        wanted = LookupResult.HIT if expected else LookupResult.MISS
        lookup, inside = self.tier.lookup, 0.0
        started = time.perf_counter()
        while waiting:
            began = time.perf_counter()
            found = [(lookup(key, context), key) for key in waiting]
            self.tier.on_schedule_end(_STEP)
            inside += time.perf_counter() - began
            if any(result not in (wanted, LookupResult.RETRY) for result, _ in found):
                raise StoreError(f"a look-up did not answer {wanted}")
            waiting = [key for result, key in found if result is LookupResult.RETRY]
            if waiting:
                _pause(started)
        seconds = time.perf_counter() - started
        self._end(context)
        return inside, seconds

    def _content(self, number: int) -> np.ndarray:
        row: np.ndarray = self._noise[number % len(self._noise)]
        return row

    def _check(self, numbers: Sequence[int], context: Any) -> None:
        keys = [key_of(number) for number in numbers]
        spec = self._manager.prepare_load(keys, context)
        for place, number in zip(spec.chunk_ids, numbers, strict=True):
            if not np.array_equal(self._rows[int(place)], self._content(number)):
                raise StoreError("a row came back with other bytes")
        self._manager.complete_load(keys, context)

    def _begin(self) -> Any:
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        with self._lock:
            self._manager.on_new_request(context)
        return context

    def _end(self, context: Any) -> None:
        with self._lock:
            self._manager.on_request_finished(context)

    def _until(self, is_over: Callable[[], bool]) -> None:
        """Step as a scheduler without other work does, until `is_over`."""
        started = time.perf_counter()
        while True:
            with self._lock:
                if is_over():
                    return
                self._manager.on_schedule_end(_STEP)
            _pause(started)


_STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())


def _pause(started: float) -> None:
    if time.perf_counter() > started + TIMEOUT_SECONDS:
        raise StoreError(f"a tier did not end in {TIMEOUT_SECONDS} s")
    time.sleep(IDLE_STEP_SECONDS)


_ATTENTION = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=32, dtype=torch.float32)


class _Connector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed here
    """As far as a tier that it constructs sees it."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, spec: Any, noise: np.ndarray
    ) -> None:
        self.host = TierHost(spec, noise)


@contextmanager
def opened_host(
    tier: Json,
    vllm_config: Any,
    noise: np.ndarray,
) -> Iterator[TierHost]:
    """Open a manager with one row of memory for each row of `noise`, `[num_rows, row_bytes]`."""
    spec = offloading_spec(tier, noise.shape[1], len(noise))
    caches = KVCacheConfig(
        num_blocks=0,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["a"], kv_cache_spec=_ATTENTION)],
    )
    with set_current_vllm_config(vllm_config):
        host = _Connector(vllm_config, caches, spec, noise).host
    try:
        yield host
    finally:
        host.close()
