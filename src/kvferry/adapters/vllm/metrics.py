"""Counters of both halves on their way to vLLM's log line and to Prometheus.

Each half adds up its counts between two questions of vLLM. vLLM adds up ranks and halves, logs the
sum of an interval and hands it to Prometheus in the API server.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvferry.v1.types import CarriedMeta

PREFIX = "vllm:kvferry"
"""`LLM.get_metrics` shows only names that begin with vllm:"""

METRICS = {
    "hits": "Requests admitted with KV from the store.",
    "hit_tokens": "Tokens of those requests that were not computed.",
    "requests_missed": "Requests admitted without KV from the store.",
    "loaded_tokens": "Tokens copied from the store into KV blocks, per rank.",
    "saved_bytes": "Bytes stored, per rank.",
    "save_failed": "Chunks that could not be stored.",
    "save_no_slot": "Saves put off because the host pool had no slot.",
    "load_failed_chunks": "Chunks that could not be brought after they were promised.",
    "audits": "Hits compared with what the engine computes, and found right.",
    "audit_bad_records": "Records that audits found wrong, and that were taken out of the store.",
    "audit_mismatch": "Hits that differ from it, by wrong records or by another model.",
    "lookup_tokens": "Tokens of all admitted prompts.",
    "miss_tokens_slower": "Tokens computed because loading them would have taken longer.",
    "miss_tokens_no_memory": "Tokens computed because the host pool had no slot.",
    "miss_tokens_deadline": "Tokens computed because the store was too slow.",
    "remote_prefills": "Requests admitted whose prompt another engine was said to compute.",
    "remote_prefills_computed": "Those of which this engine computed more than the end itself.",
    "records_corrupt": "Records found wrong; never served.",
    "store_quarantined": "Records taken out of the store because they were wrong.",
    "store_evicted_bytes": "Bytes evicted to keep the quota.",
    "hook_failed": "Faults of kvferry that were kept from the engine.",
}
"""Counters that are metrics of their own; all others are labels of `vllm:kvferry_events`."""


def make_stats_class(base: type[Any]) -> type[Any]:
    """A host's `KVConnectorStats` over our counters.

    `carried_meta` is for hosts without messages from workers to the scheduler: it is merged like
    such messages, and is no part of `data`, which goes on to log and metrics.
    """

    class FerryStats(base):  # type: ignore[misc]
        carried_meta: CarriedMeta | None = None

        def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the host's
            """`MultiConnector` reads `stats["data"]`, as of stats that crossed processes, also of
            those that did not because engine and API share one."""
            if name != "data":
                raise KeyError(name)
            return self.data

        def reset(self) -> None:
            self.data: dict[str, Any] = {}
            self.carried_meta = None

        def aggregate(self, other: Any) -> Any:  # noqa: ANN401 - the host's
            sums = Counter(self.data)
            sums.update(other.data)
            self.data = dict(sums)
            theirs = getattr(other, "carried_meta", None)
            if theirs is not None:
                mine = self.carried_meta
                self.carried_meta = theirs if mine is None else mine.aggregate(theirs)
            return self

        def reduce(self) -> dict[str, float]:
            return {name: round(amount, 6) for name, amount in sorted(self.data.items())}

        def is_empty(self) -> bool:
            return not self.data and self.carried_meta is None

        def clone(self) -> Any:  # noqa: ANN401 - hosts before 0.32 ask for it
            copy = type(self)(data=dict(self.data))
            copy.carried_meta = self.carried_meta
            return copy

    return FerryStats


def make_prom_class(base: type[Any]) -> type[Any]:
    """A host's `KVConnectorPromMetrics` for our counters."""

    class FerryPromMetrics(base):  # type: ignore[misc]
        def __init__(
            self,
            vllm_config: Any,  # noqa: ANN401 - the host's, as all here
            metric_types: dict[Any, Any],
            labelnames: list[str],
            per_engine_labelvalues: dict[int, list[object]],
        ) -> None:
            super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            self._labelvalues = per_engine_labelvalues
            self._own = {
                name: self._counter_cls(
                    name=f"{PREFIX}_{name}", documentation=text, labelnames=labelnames
                )
                for name, text in METRICS.items()
            }
            self._events = self._counter_cls(
                name=f"{PREFIX}_events",
                documentation="Everything else that kvferry counts, by name.",
                labelnames=[*labelnames, "event"],
            )
            for labels in per_engine_labelvalues.values():
                for metric in self._own.values():
                    metric.labels(*labels)  # so that a metric is there before anything happens

        def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
            labels = self._labelvalues[engine_idx]
            for name, amount in transfer_stats_data.items():
                if amount < 0:
                    continue
                if name in self._own:
                    self._own[name].labels(*labels).inc(amount)
                else:
                    self._events.labels(*labels, name).inc(amount)

    return FerryPromMetrics
