"""vLLM's own manager of tiers with one tier behind it, driven as vLLM's scheduler drives it.

The benchmark `tier` and the tests of kvferry's tier use it. No engine runs: in place of a worker,
they write the rows of the manager's memory. Imports vLLM.
"""

# ruff: noqa: ANN401 - configurations and contexts are vLLM's

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

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
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvferry.errors import KVError

Json = dict[str, Any]
Host = TypeVar("Host", bound="ManagerHost")

TIMEOUT_SECONDS = 120.0

IDLE_STEP_SECONDS = 0.001
"""How long vLLM's engine sleeps after a step that ran nothing, so that other threads go on."""

# vLLM 0.29 has other names.
PLACES = "chunk_ids" if "chunk_ids" in TransferJob.__dataclass_fields__ else "block_ids"
_GROUP = {"group_id": 0} if "group_id" in OffloadingGroupConfig.__dataclass_fields__ else {}


def offloading_config(
    extra: Json, row_bytes: int, num_rows: int, tokens: int = 128, **changes: Any
) -> Any:
    """Return the configuration of an engine of one rank whose chunk is one block of `tokens`."""
    ranks = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size")
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=tokens, layer_names=("a",), **_GROUP),),
        worker_kv_bytes_per_block=row_bytes,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": row_bytes * num_rows, **extra},
        engine_id=f"host-{uuid.uuid4().hex[:12]}",
        model=OffloadingModelConfig(name="m", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=tokens, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
            **dict.fromkeys(ranks, 1),
        ),
    )
    return replace(config, **changes)


def attention(**changes: Any) -> Any:
    """Return the spec of a layer of full attention."""
    shape = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    return FullAttentionSpec(**shape | changes)


def kv_caches(*specs: Any) -> Any:
    """Return what vLLM's scheduler knows of KV caches with one layer for each spec."""
    groups = [
        KVCacheGroupSpec(layer_names=[chr(ord("a") + number)], kv_cache_spec=spec)
        for number, spec in enumerate(specs or [attention()])
    ]
    return KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=groups)


def key_of(number: int) -> bytes:
    key: bytes = make_offload_key(number.to_bytes(32, "big"), 0)
    return key


class ManagerHost:
    """A manager as after a start of the engine, over real shared memory.

    Attributes:
        manager: the `TieringOffloadingManager`.
        tier: the tier behind the manager.
        lock: the lock that the scheduler holds whenever it calls the manager, as of 0.33.
        view: the manager's memory, `[rows, bytes]`.
    """

    def __init__(self, spec: Any) -> None:
        self.manager = spec.get_manager()
        self.lock: AbstractContextManager[Any] = getattr(self.manager, "lock", nullcontext())
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.tier = self.manager.secondary_tiers[0]
        self._requests = 0

    @property
    def jobs(self) -> dict[int, Any]:
        """The manager's jobs that have not ended, by id."""
        found: dict[int, Any] = self.manager._transfer_jobs
        return found

    def request(self) -> Any:
        """Begin a request; return its context."""
        self._requests += 1
        context = ReqContext(req_id=f"r{self._requests}")
        with self.lock:
            self.manager.on_new_request(context)
        return context

    def finish(self, context: Any) -> None:
        with self.lock:
            self.manager.on_request_finished(context)

    def step(self) -> None:
        with self.lock:
            self.manager.on_schedule_end(_STEP)

    def close(self) -> None:
        self.view.release()
        self.manager.shutdown()


class _Connector(OffloadingConnector):  # type: ignore[misc]  # vLLM is not installed here
    """As far as a tier that it constructs sees it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, made: Callable[[], Any]) -> None:
        self.host = made()


@contextmanager
def opened(
    make: Callable[[Any], Host], vllm_config: Any, config: Any, caches: Any
) -> Iterator[Host]:
    """Make a host of the offloading configuration `config`, as vLLM's connector does."""
    spec = TieringOffloadingSpec(config)
    host: Host = _Connector(vllm_config, caches, lambda: make(spec)).host
    try:
        yield host
    finally:
        host.close()


class TierHost(ManagerHost):
    """A manager with as many rows as one batch, so that each batch evicts the previous one."""

    def __init__(self, spec: Any, noise: np.ndarray) -> None:
        super().__init__(spec)
        self._rows = np.frombuffer(self.view.cast("B"), np.uint8).reshape(len(noise), -1)
        self._noise = noise

    def close(self) -> None:
        del self._rows
        super().close()

    def store(self, numbers: Sequence[int]) -> float:
        """Store a batch of new rows. Return the seconds until the tier reported all as stored."""
        context = self.request()
        keys = [key_of(number) for number in numbers]
        with self.lock:
            prepared = self.manager.prepare_store(keys, context)
        if prepared is None or len(prepared.keys_to_store) != len(keys):
            raise KVError("memory of the manager is not free")
        for place, number in zip(prepared.store_spec.chunk_ids, numbers, strict=True):
            self._rows[int(place)] = self._content(number)
        started = time.perf_counter()
        with self.lock:
            self.manager.complete_store(keys, context)
        self._until(lambda: not self.jobs)
        seconds = time.perf_counter() - started
        self.finish(context)
        return seconds

    def load(self, batches: Sequence[Sequence[int]]) -> float:
        """Load each batch by a request of its own, and check every byte. Return the seconds from
        the first look-up until all rows are in memory."""
        contexts = [self.request() for _ in batches]
        waiting = [
            (key_of(number), context)
            for numbers, context in zip(batches, contexts, strict=True)
            for number in numbers
        ]
        started = time.perf_counter()

        def is_over() -> bool:
            nonlocal waiting
            found = [(self.manager.lookup(key, context), key, context) for key, context in waiting]
            if any(result is LookupResult.MISS for result, _, _ in found):
                raise KVError("a stored row is not found")
            waiting = [(key, on) for result, key, on in found if result is not LookupResult.HIT]
            return not waiting

        self._until(is_over)
        seconds = time.perf_counter() - started
        for numbers, context in zip(batches, contexts, strict=True):
            self._check(numbers, context)
            self.finish(context)
        return seconds

    def look_up(self, numbers: Sequence[int], expected: bool) -> tuple[float, float]:
        """Ask the tier itself about rows. Return the seconds that this thread spent in the tier's
        hooks, and the seconds until all answers were there."""
        context = self.request()
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
                raise KVError(f"a look-up did not answer {wanted}")
            waiting = [key for result, key in found if result is LookupResult.RETRY]
            if waiting:
                _pause(started)
        seconds = time.perf_counter() - started
        self.finish(context)
        return inside, seconds

    def _content(self, number: int) -> np.ndarray:
        row: np.ndarray = self._noise[number % len(self._noise)]
        return row

    def _check(self, numbers: Sequence[int], context: Any) -> None:
        keys = [key_of(number) for number in numbers]
        spec = self.manager.prepare_load(keys, context)
        for place, number in zip(spec.chunk_ids, numbers, strict=True):
            if not np.array_equal(self._rows[int(place)], self._content(number)):
                raise KVError("a row came back with other bytes")
        self.manager.complete_load(keys, context)

    def _until(self, is_over: Callable[[], bool]) -> None:
        """Step as a scheduler without other work does, until `is_over`."""
        started = time.perf_counter()
        while True:
            with self.lock:
                if is_over():
                    return
                self.manager.on_schedule_end(_STEP)
            _pause(started)


_STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())


def _pause(started: float) -> None:
    if time.perf_counter() > started + TIMEOUT_SECONDS:
        raise KVError(f"a tier did not end in {TIMEOUT_SECONDS} s")
    time.sleep(IDLE_STEP_SECONDS)


@contextmanager
def opened_host(
    tier: Json,
    vllm_config: Any,
    noise: np.ndarray,
) -> Iterator[TierHost]:
    """Open a manager with one row of memory for each row of `noise`, `[num_rows, row_bytes]`."""
    config = offloading_config({"secondary_tiers": [tier]}, noise.shape[1], len(noise))
    caches = kv_caches(attention(block_size=128))
    with (
        set_current_vllm_config(vllm_config),
        opened(lambda spec: TierHost(spec, noise), vllm_config, config, caches) as host,
    ):
        yield host
