"""vLLM's tier manager with kvferry's tier behind it. Tests drive it as vLLM's scheduler does,
without an engine."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from kvferry.testing.stores.hooks import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, as it is imported
    pytest.importorskip("vllm.v1.kv_offload.config")  # as of 0.29
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec
    from vllm.v1.kv_offload.base import Locality, LookupResult, ReqContext
    from vllm.v1.kv_offload.config import OffloadingCacheConfig, OffloadingModelConfig
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from benchmarks import tier_host
    from benchmarks.tier_host import PLACES, ManagerHost, attention, key_of, kv_caches

__all__ = [
    "EngineArgs", "FullAttentionSpec", "KVCacheConfig", "Locality", "MambaSpec",
    "OffloadingCacheConfig", "OffloadingModelConfig", "TieringOffloadingSpec", "attention",
]  # fmt: skip

TIER = {"type": "KVFerryTier", "module_path": "kvferry.adapters.vllm.tier"}
SECONDS = 60.0
"""How long a busy machine may take for anything."""

ROW = 8192
NUM_ROWS = 4

HAS_BACKPRESSURE = importlib.util.find_spec("vllm.v1.kv_offload.tiering.backpressure") is not None


def offloading_config(extra: dict[str, Any], **changes: Any) -> Any:
    """Return the offloading configuration of an engine of one rank, with rows of two pages."""
    row_bytes = changes.pop("worker_kv_bytes_per_block", ROW)
    changes = {"enable_kv_cache_events": True, **changes}
    return tier_host.offloading_config(extra, row_bytes, NUM_ROWS, 16, **changes)


class Scripted(ManagerHost):
    """The manager, whose chunks have the content of their numbers.

    Attributes:
        row_bytes: bytes of a row of the manager's memory; a row holds a chunk.
    """

    def __init__(self, spec: TieringOffloadingSpec) -> None:
        super().__init__(spec)
        self.row_bytes = self.view.strides[0]

    def row(self, place: int) -> memoryview:
        return self.view.cast("B")[place * self.row_bytes : (place + 1) * self.row_bytes]

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
            found = self.manager.prepare_store([key_of(each) for each in numbers], context)
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
            found = self.manager.lookup(key_of(number), context)
            if found is not LookupResult.HIT:
                return found, None
            spec = self.manager.prepare_load([key_of(number)], context)
            held = bytes(self.row(int(getattr(spec, PLACES)[0])))
            self.manager.complete_load([key_of(number)], context)
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
        unknown = [key_of(1_000_000 + place) for place in range(len(self.view))]
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
    config = offloading_config({"secondary_tiers": tiers}, **changes)
    caches = kv_cache_config or kv_caches()
    with tier_host.opened(Scripted, vllm_config, config, caches) as one:
        yield one
