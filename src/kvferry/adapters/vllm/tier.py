"""kvferry as a tier of vLLM's own offloading (vLLM 0.29 and later).

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 10737418240, "blocks_per_chunk": 8,
            "secondary_tiers": [{"type": "KVFerryTier", "module_path": "kvferry.adapters.vllm.tier",
                "store": "file:///var/cache/kvferry?max_bytes=200GiB"}]}}'

vLLM copies between the GPU and chunks of host memory. A row is one such chunk, byte for byte. The
tier stores rows under vLLM's keys, and verifies them when they come back. Importing this module
imports vLLM.
"""

# ruff: noqa: ANN401 - configurations and contexts are the host's

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.version import __version__

from kvferry.adapters.rows import CLOSE_SECONDS, RowsOptions, guarded, open_rows
from kvferry.adapters.vllm.host import (
    has_whole_items,
    load_host,
    needs_all_tokens,
    offloads_a_part,
    prunes_items,
)
from kvferry.adapters.vllm.host_frames import added_request, constructing
from kvferry.adapters.vllm.metrics import PREFIX
from kvferry.adapters.vllm.tier_identity import rows_namespace, values_of_rows
from kvferry.adapters.vllm.tier_rows import Finished, TierRows
from kvferry.config import build_config, format_size
from kvferry.contract.faults import HookFaults
from kvferry.errors import ConfigError
from kvferry.keys import Namespace
from kvferry.observe import Counters
from kvferry.v1.late_weights import LateWeights

logger = logging.getLogger("vllm.kvferry")

EVENTS = f"{PREFIX}_tier_events"

# vLLM 0.29 has another name for the rows of a job, and its results hold no number of bytes.
_PLACES = "chunk_ids" if "chunk_ids" in TransferJob.__dataclass_fields__ else "block_ids"
_TAKES_BYTES = "transfer_bytes" in JobResult.__dataclass_fields__

_IS_KEPT = "kvferry_is_kept"
"""An attribute that the tier sets on vLLM's context of a request, which outlives the request."""


class KVFerryTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not installed for mypy
    """A `SecondaryTierManager` on a store of kvferry. Constructed by vLLM in its scheduler's
    process. Every method runs on the scheduler's thread; I/O threads of `TierRows` copy to and from
    the rows.

    Attributes:
        counters: counts since the last `get_stats`.
        faults: counts and logs what methods raise.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """Raises ConfigError for an option, a store or a model that cannot be used."""
        # vLLM 0.29 has no such argument, and gives none.
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        self.locality = None if locality is None else Locality(locality)
        config = build_config(RowsOptions, options, where=f"secondary tier {tier_type}")
        self.counters = Counters()
        self.faults = HookFaults(type(self).__name__, self.counters)
        rows = np.frombuffer(primary_kv_view.cast("B"), np.uint8).reshape(len(primary_kv_view), -1)
        self._weights = LateWeights()
        self._namespace = self._identify(config, rows.shape[1])
        self._is_reset = False
        store, schema = open_rows(
            config,
            self._namespace,
            self.counters,
            sized_by="block_size",
            values=self._values,
            late=self._weights.late,
        )
        self._rows = TierRows(
            store,
            schema,
            rows,
            self.counters,
            io_threads=config.io_threads,
            load_seconds=config.load_timeout_seconds,
        )
        self._refused: list[int] = []  # jobs that could not be submitted
        self._reports_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        logger.info(
            "kvferry: tier in store %s; namespace %s of %s; %s per row",
            store.url,
            self._weights.why or self._namespace.digest.hex()[:16],
            self._namespace.title,
            format_size(rows.shape[1]),
        )

    def _identify(self, options: RowsOptions, row_bytes: int) -> Namespace:
        found = constructing()
        if found is None:
            raise ConfigError(
                "this vLLM gives its tiers no engine configuration, so kvferry cannot identify the "
                "model; use KVFerryConnector, or report the release"
            )
        self._values = values_of_rows(found[1])
        has_adapters = getattr(found[0], "lora_config", None) is not None
        self._keeps_adapters = not has_adapters or options.weights_version is not None
        self._keeps_items = not (prunes_items(found[0]) or has_whole_items(found[0]))
        self._is_off = needs_all_tokens(found[0]) or offloads_a_part(found[1])
        if self._is_off:
            logger.warning("kvferry: the tier neither stores nor reads: %s", self._is_off)
        return rows_namespace(
            *found,
            self._offloading_spec.config,
            load_host(),
            str(__version__),
            options,
            row_bytes=row_bytes,
            hashed=self._weights.hashed,
        )

    # ---- look-ups

    @guarded(lambda *_: LookupResult.MISS)
    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if not self._is_kept(req_context):
            return LookupResult.MISS
        found = self._rows.lookup(key, req_context.req_id)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    @guarded(lambda *_: RequestOffloadingContext())
    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        digest = self._weights.take()
        if digest is not None and not self._is_reset:
            self._rows.begin_epoch(self._namespace.of_weights(digest).digest)
        if not self._keeps_all:
            request = added_request()
            setattr(req_context, _IS_KEPT, request is not None and self._keeps(request))
        return RequestOffloadingContext()

    @property
    def _keeps_all(self) -> bool:
        return self._keeps_adapters and self._keeps_items and not self._is_off

    def _keeps(self, request: Any) -> bool:
        if self._is_off or (request.lora_request is not None and not self._keeps_adapters):
            return False
        return self._keeps_items or not request.mm_features

    def _is_kept(self, req_context: Any) -> bool:
        """Whether the rows of a request are stored and read: none before the weights are hashed, or
        if the engine needs every token computed. Those under a LoRA adapter are not, unless the
        operator names the weights: the host's hashes cover no adapter's content, and another may be
        loaded in place under the same name and path. Nor are those with items, if these are pruned,
        or a hit may not end in them: a tier does not say where one ends.
        """
        is_kept = self._keeps_all or getattr(req_context, _IS_KEPT, False)
        return is_kept and not self._weights.why

    @guarded()
    def on_request_finished(self, req_context: Any) -> None:
        self._rows.forget(req_context.req_id)

    @guarded()
    def on_schedule_end(self, context: Any) -> None:
        self._rows.flush()

    @guarded()
    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._rows.touch(keys)

    # ---- jobs

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(
            job_metadata, lambda keys, places: self._rows.store(job_metadata.job_id, keys, places)
        )

    def submit_load(self, job_metadata: Any) -> None:
        request = job_metadata.req_context.req_id
        self._submit(
            job_metadata,
            lambda keys, places: self._rows.load(job_metadata.job_id, keys, places, request),
        )

    def _submit(self, job: Any, submit: Callable[[list[bytes], Sequence[int]], None]) -> None:
        """Submit a job. If that fails, report it as failed: vLLM keeps the rows of a job pinned
        until it is reported."""
        try:
            if not self._is_kept(job.req_context):
                self.counters.count("stores_dropped", len(job.keys))
                self._refused.append(job.job_id)
                return
            submit(list(job.keys), [int(place) for place in getattr(job, _PLACES)])
        except Exception:  # the host boundary
            self.faults.fault("submit", "a job of the tier fails")
            self._refused.append(job.job_id)

    @guarded(lambda: [])
    def get_finished_jobs(self) -> Iterable[JobResult]:
        ended = [_result(each) for each in self._rows.finished()]
        refused, self._refused = self._refused, []
        return ended + [JobResult(job_id=job_id, success=False) for job_id in refused]

    @guarded()
    def drain_jobs(self) -> None:
        """Wait for jobs under way, then begin an epoch: vLLM drains only to reset its cache (sleep,
        new weights, resume), without saying which. Nothing stored before is read from then on. New
        rows go to a random namespace, which no other engine and no restart finds."""
        try:
            self._rows.drain()
        finally:
            self._is_reset = True  # the weights may not be those that are being hashed
            self._rows.begin_epoch(secrets.token_bytes(32))

    @guarded(lambda *_: False)
    def has_pending_work(self) -> bool:
        return bool(self._refused) or self._rows.num_jobs > 0

    @guarded()
    def shutdown(self) -> None:
        self._rows.close(CLOSE_SECONDS)
        if self._weights.late is not None:
            # Afterwards, as a closed store does not say that it cannot be opened.
            self._weights.late.cancel()

    # ---- events and metrics

    @guarded(lambda: [])
    def take_events(self) -> Iterable[OffloadingEvent]:
        stored = self._rows.take_stored()
        if not self._reports_events:
            return []
        changes = ((stored, False), (self._rows.take_removed(), True))
        return [self._event(keys, removed=removed) for keys, removed in changes if keys]

    def _event(self, keys: list[bytes], *, removed: bool) -> OffloadingEvent:
        return OffloadingEvent(
            keys=keys, medium=self.medium, removed=removed, locality=self.locality
        )

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        text = "Events in a kvferry tier, by name."
        return {EVENTS: OffloadingCounterMetadata(documentation=text, labelnames=("event",))}

    @guarded()
    def get_stats(self) -> OffloadingConnectorStats | None:
        counted = self.counters.pop_all()
        if not counted:
            return None
        stats = OffloadingConnectorStats()
        for name, amount in counted.items():
            if amount >= 0:
                stats.increase_counter(EVENTS, amount, (name,))
        return stats


def _result(ended: Finished) -> JobResult:
    return JobResult(
        job_id=ended.job_id,
        success=ended.success,
        successful_keys=tuple(ended.moved) or None,
        transfer_time=ended.seconds,
        **({"transfer_bytes": ended.num_bytes} if _TAKES_BYTES else {}),
    )
