"""`KVFerryStorage`, the storage back end that SGLang constructs; see the package."""

# ruff: noqa: ANN401 - pools, indices and configurations are the host's

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvferry.adapters.rows import CLOSE_SECONDS, RowsOptions, guarded, open_rows
from kvferry.adapters.sglang.identity import ServedModel, watch_weights
from kvferry.adapters.sglang.metrics import StorageCounts, taken
from kvferry.adapters.sglang.pages import (
    FlatPages,
    PageRecords,
    Pages,
    copy_from,
    copy_to,
    pages_of,
)
from kvferry.config import build_config, format_size
from kvferry.contract.faults import HookFaults
from kvferry.keys import Namespace
from kvferry.observe import Counters
from kvferry.v1.late_weights import LateWeights

logger = logging.getLogger("sglang.kvferry")

KV = "kv"

OF_SGLANG = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "file_storage_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
    }
)
"""Keys of the extra configuration that SGLang reads or adds, and does not always remove."""

_RANKS = ("tp_rank", "pp_rank", "dp_rank")


class KVFerryStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not installed for mypy
    """A `HiCacheStorage` on a store of kvferry. SGLang constructs one in each rank's scheduler,
    registers its host pools, and calls it from several threads at a time. After that, no call
    raises, and each takes a bounded time.

    Attributes:
        counters: counts of what happened; `get_stats` empties them if SGLang's metrics are on.
        faults: counts and logs what methods raise.
    """

    def __init__(self, storage_config: Any, _options: dict[str, Any] | None = None) -> None:
        """Raises ConfigError for an option or a model that cannot be used."""
        given = dict(storage_config.extra_config or {})
        self._options = build_config(
            RowsOptions,
            {name: value for name, value in given.items() if name not in OF_SGLANG},
            where="--hicache-storage-backend-extra-config",
        )
        self.counters = Counters()
        self._storage_config = storage_config
        self.faults = HookFaults("KVFerryStorage", self.counters)
        weights = LateWeights()
        self._model = ServedModel(self._options, weights.hashed)
        self._late = weights.late
        self._pools: dict[str, tuple[Pages, PageRecords]] = {}
        self._counts: StorageCounts | None = None
        if storage_config.enable_storage_metrics:
            ranks = {each: str(getattr(storage_config, each)) for each in _RANKS}
            self._counts = StorageCounts(self.counters, ranks)
        self._weights = watch_weights(self.begin_epoch)

    # ---- attaching

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for KV. Raises ConfigError if the store or the pool cannot be used."""
        super().register_mem_pool_host(mem_pool_host)
        self._open(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """As `register_mem_pool_host`, for any pool; KV that is open already stays as it is."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _text(host_pool_name)
        if name != KV or KV not in self._pools:
            self._open(host_pool, name)

    def _open(self, pool: Any, name: str) -> None:
        pages = pages_of(pool)
        namespace = self._model.namespace(self._storage_config, pool, name, pages)
        store, schema = open_rows(
            self._options,
            namespace,
            self.counters,
            sized_by="--page-size",
            values=pages.values,
            late=self._late,
        )
        records = PageRecords(
            store,
            schema,
            self.counters,
            io_threads=self._options.io_threads,
            load_seconds=self._options.load_timeout_seconds,
        )
        if self._weights.have_changed:
            records.begin_epoch()
        before = self._pools.pop(name, None)
        if before is not None:  # attached again
            before[1].close(CLOSE_SECONDS)
        self._pools[name] = pages, records
        if self._late is not None:
            self._late.add_done_callback(partial(self._take_up, namespace, records))
        logger.info(
            "kvferry: pages of pool %s in store %s; namespace %s of %s; %s per page",
            name,
            store.url,
            namespace.digest.hex()[:16] if self._late is None else "unknown yet",
            namespace.title,
            format_size(pages.num_bytes),
        )

    def _take_up(self, namespace: Namespace, records: PageRecords, late: Future[bytes]) -> None:
        """The weights are hashed, unless this was cancelled. Runs in: the thread that hashes."""
        if not late.cancelled():
            records.begin_epoch(namespace.of_weights(late.result()).digest)
            if self._weights.have_changed:  # looked at last, as they may change at any time
                records.begin_epoch()

    def begin_epoch(self) -> None:
        """Stop reading what was stored until now. See `Weights`."""
        for _, records in list(self._pools.values()):
            records.begin_epoch()

    # ---- what is there

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @guarded(lambda *_, **__: 0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return how many leading pages are stored."""
        return len(list(takewhile(bool, self._exist(KV, keys))))

    def _exist(self, name: str, keys: Sequence[str]) -> list[bool]:
        if name not in self._pools:
            return [False] * len(keys)
        return self._pools[name][1].exists(keys)

    @guarded(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return how many leading pages can be restored with what other pools store for them."""
        num_pages = len(list(takewhile(bool, self._exist(KV, keys))))
        hits: dict[Any, int] = {KV: num_pages} if num_pages else {}
        restorable = set(range(1, num_pages + 1))
        for transfer in pool_transfers or ():
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never decides; a pool that is not reported has no verdict
            found = self._exist(_text(transfer.name), keys[:num_pages])
            window = num_pages  # also for a policy that is not known
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = len(transfer.keys or ()) or 1
            ends = {end for end in restorable if all(found[max(0, end - window) : end])}
            if ends:
                hits[transfer.name] = max(ends)
            restorable &= ends
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # ---- pages between the store and host pools

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Fill pages of the KV pool with verified bytes. Return for each whether it was filled."""
        return self._load(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Store pages of the KV pool. Return for each whether it is stored now."""
        return self._save(KV, keys, host_indices)

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_get_v1`, for several pools."""
        return {each.name: self._load(*_moved(each)) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """As `batch_set_v1`, for several pools."""
        return {each.name: self._save(*_moved(each)) for each in transfers}

    @guarded(lambda _name, keys, _indices: [False] * len(keys))
    def _load(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pages, records = self._pools[name]
        starts = _starts(keys, host_indices, pages)

        def land(place: int, payload: memoryview) -> None:
            pages.write(starts[place], payload)

        return self._timed("loads", records.load, keys, land)

    @guarded(lambda _name, keys, _indices: [False] * len(keys))
    def _save(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        pages, records = self._pools[name]
        starts = _starts(keys, host_indices, pages)
        if self._is_dropped(keys):
            return [False] * len(keys)

        def fill(place: int, payload: memoryview) -> None:
            pages.read(starts[place], payload)

        return self._timed("stores", records.store, keys, fill)

    def _is_dropped(self, keys: Sequence[str]) -> bool:
        """Whether nothing is stored now; counts pages that are not."""
        if is_dropped := self._weights.left_old_kv:
            self.counters.count("stores_dropped", len(keys))
        return is_dropped

    def _timed(
        self,
        name: str,
        move: Callable[[Sequence[str], Any], list[bool]],
        keys: Sequence[str],
        copy: Any,
    ) -> list[bool]:
        start = time.monotonic()
        found = move(keys, copy)
        if self._counts is not None:
            calls: deque[tuple[int, float]] = getattr(self._counts, name)
            calls.append((found.count(True), time.monotonic() - start))
        return found

    # ---- pages as tensors: the calls of SGLang without `interface_v1`

    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    @guarded(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fill the given tensors, one per page, or new ones of bytes. Return each, or None for a
        page that is not right."""
        pages, records = self._pools[KV]
        values = [
            torch.empty(pages.num_bytes, dtype=torch.uint8) if each is None else each
            for each in target_locations or [None] * len(keys)
        ]
        if not self._are_pages(values):
            return [None] * len(keys)

        def land(place: int, payload: memoryview) -> None:
            copy_from(payload, values[place])

        right = self._timed("loads", records.load, keys, land)
        return [value if is_right else None for value, is_right in zip(values, right, strict=True)]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [target_location if value is None else value])

    @guarded(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store tensors, one per page; True if all are stored."""
        given = target_locations if values is None else values
        if not self._are_pages(given) or self._is_dropped(keys):
            return False

        def fill(place: int, payload: memoryview) -> None:
            copy_to(payload, given[place])

        return all(self._timed("stores", self._pools[KV][1].store, keys, fill))

    def _are_pages(self, values: Sequence[torch.Tensor]) -> bool:
        """Whether the KV pool's pages are flat, and each tensor has the size of one."""
        pages = self._pools[KV][0]
        is_flat = isinstance(pages, FlatPages) and pages.num_bytes > 0
        return is_flat and all(value.nbytes == pages.num_bytes for value in values)

    # ---- administration

    def clear(self) -> None:
        """Delete all records in the namespaces of this rank's pools; others stay."""
        for _, records in list(self._pools.values()):
            self.faults.call(records.clear, otherwise=None, then="its pages are not deleted")

    @guarded()
    def get_stats(self) -> StorageMetrics | None:
        """Publish counts, and return the sizes and rates of the calls since the last time, for
        SGLang's histograms; None where its metrics are off, or without a KV pool."""
        if self._counts is None or KV not in self._pools:
            return None
        self._counts.publish()
        page_bytes = self._pools[KV][0].num_bytes
        stats = StorageMetrics()
        stats.prefetch_pgs, stats.prefetch_bandwidth = taken(self._counts.loads, page_bytes)
        stats.backup_pgs, stats.backup_bandwidth = taken(self._counts.stores, page_bytes)
        return stats

    def close(self) -> None:
        """Wait a few seconds for threads, and close the stores."""
        pools, self._pools = self._pools, {}
        for _, records in pools.values():
            self.faults.call(
                records.close, CLOSE_SECONDS, otherwise=None, then="its store may stay open"
            )
        if self._late is not None:
            self._late.cancel()


def _text(name: Any) -> str:
    """Return a pool's name as text; it may be given as an enumeration."""
    return str(getattr(name, "value", name))


def _moved(transfer: Any) -> tuple[str, Sequence[str], Any]:
    """Return the arguments of `_load` and `_save` for a transfer of SGLang."""
    return _text(transfer.name), transfer.keys or [], transfer.host_indices


def _starts(keys: Sequence[str], host_indices: Any, pages: Pages) -> list[int]:
    """Return the index at which each page begins in its pool."""
    if host_indices is None or len(host_indices) != len(keys) * pages.tokens:
        raise ValueError(
            f"{len(keys)} pages of {pages.tokens} tokens have "
            f"{0 if host_indices is None else len(host_indices)} indices"
        )
    return [int(each) for each in host_indices[:: pages.tokens]]
