"""vLLM's tier manager with kvferry's tier behind it. Tests drive it as vLLM's scheduler does,
without an engine."""

from __future__ import annotations

import importlib.util
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

from kvferry.testing.stores.hooks import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, as it is imported
    pytest.importorskip("vllm.v1.kv_offload.config")  # as of 0.29
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
    )
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["EngineArgs", "JobResult", "Locality", "MambaSpec", "TransferJob"]

TIER = {"type": "KVFerryTier", "module_path": "kvferry.adapters.vllm.tier"}
SECONDS = 60.0
"""How long a busy machine may take for anything."""

ROW = 8192
NUM_ROWS = 4

# vLLM 0.29 has other names.
PLACES = "chunk_ids" if "chunk_ids" in TransferJob.__dataclass_fields__ else "block_ids"
HAS_BACKPRESSURE = importlib.util.find_spec("vllm.v1.kv_offload.tiering.backpressure") is not None
_GROUP = {"group_id": 0} if "group_id" in OffloadingGroupConfig.__dataclass_fields__ else {}


def offloading_config(extra: dict[str, Any], **changes: Any) -> OffloadingConfig:
    """Return the offloading configuration of an engine of one rank, with rows of two pages."""
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    row_bytes = changes.get("worker_kv_bytes_per_block", ROW)
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), **_GROUP),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": row_bytes * NUM_ROWS, **extra},
        engine_id=f"test-{uuid.uuid4().hex[:12]}",
        model=OffloadingModelConfig(name="m", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
    )
    return replace(config, **changes)


def kv_caches(*specs: Any) -> KVCacheConfig:
    """Return what vLLM's scheduler knows of KV caches with one layer for each spec."""
    groups = [
        KVCacheGroupSpec(layer_names=[chr(ord("a") + number)], kv_cache_spec=spec)
        for number, spec in enumerate(specs or [attention()])
    ]
    return KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=groups)


def attention(**changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        **{
            "block_size": 16,
            "num_kv_heads": 2,
            "head_size": 32,
            "dtype": torch.float32,
            **changes,
        }
    )


class Connector(OffloadingConnector):
    """As far as a tier that it constructs sees it."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, spec: Any) -> None:
        self.scripted = Scripted(spec)


def key(number: int) -> bytes:
    return make_offload_key(number.to_bytes(32, "big"), 0)


class Scripted:
    """vLLM's tier manager as after a start of the engine, over real shared memory.

    Attributes:
        manager: the `TieringOffloadingManager`.
        tier: the `KVFerryTier` behind the manager.
        lock: the lock that the scheduler holds whenever it calls the manager, as of 0.33.
        row_bytes: bytes of a row of the manager's memory; a row holds a chunk.
    """

    def __init__(self, spec: TieringOffloadingSpec) -> None:
        self.manager = spec.get_manager()
        self.lock: AbstractContextManager[Any] = getattr(self.manager, "lock", nullcontext())
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.row_bytes = self.view.strides[0]
        self.tier = self.manager.secondary_tiers[0]
        self.requests = 0

    @property
    def jobs(self) -> dict[int, Any]:
        """The manager's jobs that have not ended, by id."""
        found: dict[int, Any] = self.manager._transfer_jobs
        return found

    def request(self) -> ReqContext:
        self.requests += 1
        context = ReqContext(req_id=f"r{self.requests}")
        with self.lock:
            self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        with self.lock:
            self.manager.on_request_finished(context)

    def row(self, place: int) -> memoryview:
        return self.view.cast("B")[place * self.row_bytes : (place + 1) * self.row_bytes]

    def step(self) -> None:
        with self.lock:
            self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=()))

    def reset(self) -> None:
        with self.lock:
            self.manager.reset_cache()
            if hasattr(self.manager, "on_reset_flushed"):  # as of 0.33
                self.manager.on_reset_flushed()

    def until(self, done: Callable[[], bool]) -> None:
        """Step until `done`."""

        def stepped() -> bool:
            if done():
                return True
            self.step()
            return False

        wait_until(stepped, "what the test waits for", SECONDS, interval=0.001)

    def offer(self, numbers: Sequence[int], context: ReqContext, epoch: int = 0) -> bool:
        """Fill rows as a worker does, and have the manager pass them on to the tier. Return False
        if no memory is free for them."""
        with self.lock:
            found = self.manager.prepare_store([key(each) for each in numbers], context)
            if found is None:
                return False
            places = getattr(found.store_spec, PLACES)
            for place, stored in zip(places, found.keys_to_store, strict=True):
                number = int.from_bytes(stored[:32], "big")
                self.row(int(place))[:] = content(number, self.row_bytes, epoch)
            if found.keys_to_store:
                self.manager.complete_store(found.keys_to_store, context)
        return True

    def store(self, *numbers: int) -> None:
        """Offer chunks, and step until the tier has reported them."""
        context = self.request()
        assert self.offer(numbers, context)
        self.finish(context)
        self.until(lambda: not self.jobs)

    def look(self, number: int, context: ReqContext) -> tuple[LookupResult, bytes | None]:
        """Look up a chunk once; return the answer, and the bytes of a hit."""
        with self.lock:
            found = self.manager.lookup(key(number), context)
            if found is not LookupResult.HIT:
                return found, None
            spec = self.manager.prepare_load([key(number)], context)
            held = bytes(self.row(int(getattr(spec, PLACES)[0])))
            self.manager.complete_load([key(number)], context)
        return found, held

    def lookup(self, number: int) -> tuple[LookupResult, bytes | None]:
        """Look up a chunk until it hits or misses; return the answer, and the bytes of a hit."""
        context = self.request()
        found: list[tuple[LookupResult, bytes | None]] = []

        def ends() -> bool:
            found.append(self.look(number, context))
            return found[-1][0] in (LookupResult.HIT, LookupResult.MISS)

        self.until(ends)
        self.finish(context)
        return found[-1]

    def assert_nothing_is_held(self) -> None:
        """Assert, once all requests have ended, that there is no job, request or pinned row."""
        self.until(lambda: not self.manager.has_pending_work())
        assert not self.jobs
        assert not self.manager._pending_load_submissions
        assert not self.manager._req_state
        assert self.tier.counters["hook_failed"] == 0
        context = self.request()
        unknown = [key(1_000_000 + place) for place in range(len(self.view))]
        with self.lock:
            assert self.manager.prepare_store(unknown, context) is not None
            self.manager.complete_store(unknown, context, success=False)
        self.finish(context)


def content(number: int, size: int, epoch: int = 0) -> bytes:
    """Return the content of a chunk's row; an epoch stands for one version of the weights."""
    return (number.to_bytes(3, "big") + bytes([epoch])) * (size // 4)


@contextmanager
def scripted(
    vllm_config: Any,
    store: str | list[str],
    options: dict[str, Any] | None = None,
    kv_cache_config: Any = None,
    **changes: Any,
) -> Iterator[Scripted]:
    patient = {"load_timeout_seconds": SECONDS}  # a machine may stall
    tiers = [{**TIER, "store": store, **patient, **(options or {})}]
    spec = TieringOffloadingSpec(offloading_config({"secondary_tiers": tiers}, **changes))
    one = Connector(vllm_config, kv_cache_config or kv_caches(), spec).scripted
    try:
        yield one
    finally:
        one.view.release()
        one.manager.shutdown()
