"""Counters of the connector's two halves on their way to vLLM's log line and to Prometheus.

The scheduler half and each worker half add up their counts until vLLM asks for them. vLLM adds up
ranks and halves, hands each sum to Prometheus in the API server, and logs the sum of an interval.
Gauges travel beside the counts, once a second at most.
"""

from __future__ import annotations

from collections import Counter as Sums
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from kvferry.contract.messages import WorkerMeta
from kvferry.observe import FAMILIES, FROM_ZERO, GAUGES, TIME_BOUNDS, TIMES, Family, labelled

PREFIX = "vllm:kvferry"
"""`LLM.get_metrics` shows only names that begin with vllm:"""

NOW = "now"
"""Key of the gauges in the data of stats."""

_BUCKET = "_bucket/"

MULTIPROCESS = "mostrecent"
"""How Prometheus combines gauges of several API servers."""

MAX_REASONS = 32
"""Number of different reasons for states of tiers that labels show at most: Prometheus keeps each
that it has seen. Further ones are shown as "other"."""


class Stats:
    """Our counters, as a host's `KVConnectorStats`, which a subclass adds to its bases.

    `carried_meta` is for hosts without messages from workers to the scheduler: it is merged like
    such messages, and is no part of `data`, which goes on to log and metrics.
    """

    data: dict[str, Any]
    carried_meta: WorkerMeta | None = None

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the host's
        """Serve `MultiConnector`: it reads `stats["data"]` as if stats had crossed processes,
        also where engine and API server share one."""
        if name != "data":
            raise KeyError(name)
        return self.data

    def reset(self) -> None:
        self.data = {}
        self.carried_meta = None

    def aggregate(self, other: Any) -> Any:  # noqa: ANN401 - the host's
        mine, theirs = dict(self.data), dict(other.data)
        gauges = {**mine.pop(NOW, {}), **theirs.pop(NOW, {})}
        sums = Sums(mine)
        sums.update(theirs)
        self.data = {**sums, NOW: gauges} if gauges else dict(sums)
        said = getattr(other, "carried_meta", None)
        if said is not None:
            own = self.carried_meta
            self.carried_meta = said if own is None else own.aggregate(said)
        return self

    def reduce(self) -> dict[str, float]:
        return {
            name: round(amount, 6)
            for name, amount in sorted(self.data.items())
            if name != NOW and _BUCKET not in name
        }

    def is_empty(self) -> bool:
        return not self.data and self.carried_meta is None

    def clone(self) -> Any:  # noqa: ANN401 - hosts before 0.32 ask for it
        copy = type(self)(data=dict(self.data))  # type: ignore[call-arg]  # of the host
        copy.carried_meta = self.carried_meta
        return copy


class PromMetrics:
    """Our counters, as a host's `KVConnectorPromMetrics`, which a subclass adds to its bases."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - the host's, as all here
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Make the metrics, and show those of each engine before anything happens in it.

        Args:
            metric_types: the host's class for each of prometheus_client's.
            labelnames: the host's labels of every metric.
            per_engine_labelvalues: their values, by index of the engine.
        """
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)  # type: ignore[call-arg]

        def made(kind: Any, name: str, of: Family, **more: Any) -> Any:  # noqa: ANN401 - the host's
            labels = [*labelnames, *of.labels]
            return metric_types[kind](
                name=f"{PREFIX}_{name}", documentation=of.text, labelnames=labels, **more
            )

        self._labelvalues = per_engine_labelvalues
        self._counters = {name: made(Counter, name, of) for name, of in FAMILIES.items()}
        self._gauges = {
            name: made(Gauge, name, of, multiprocess_mode=MULTIPROCESS)
            for name, of in GAUGES.items()
        }
        self._times = {
            name: made(Histogram, f"{name}_seconds", Family(text), buckets=list(TIME_BOUNDS))
            for name, text in TIMES.items()
        }
        everything = Family("Everything else that kvferry counts, by name.", ("event",))
        self._events = made(Counter, "events", everything)
        self._tiers: dict[tuple[object, ...], tuple[object, ...]] = {}  # labels shown last
        self._reasons: set[str] = set()
        for engine, labels in per_engine_labelvalues.items():
            self.observe(dict.fromkeys(FROM_ZERO, 0), engine)
            for metric in self._times.values():
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts and durations, and set gauges."""
        data, labels = dict(transfer_stats_data), self._labelvalues[engine_idx]
        for name, value in data.pop(NOW, {}).items():
            self._set(name, value, labels)
        for name, metric in self._times.items():
            for seconds in _durations(name, data):
                metric.labels(*labels).observe(seconds)
        for name, amount in data.items():
            family, values = labelled(name)
            if amount < 0 or _BUCKET in name:
                continue
            if family in self._counters:
                self._counters[family].labels(*labels, *values).inc(amount)
            else:
                self._events.labels(*labels, name).inc(amount)

    def _set(self, name: str, value: float, labels: list[object]) -> None:
        family, values = labelled(name)
        metric = self._gauges[family]
        if family == "tier_since_seconds":
            *place, state, kind, because = values
            self._reasons |= {because} if len(self._reasons) < MAX_REASONS else set()
            values = [*place, state, kind, because if because in self._reasons else "other"]
            key = (*labels, *place)
            before = self._tiers.get(key)
            self._tiers[key] = (*labels, *values)
            if before not in (None, self._tiers[key]):
                metric.labels(*before).set(0)
        metric.labels(*labels, *values).set(value)


def _durations(name: str, data: dict[str, Any]) -> list[float]:
    """Take the durations of one name out of `data`. Return as many for each bucket as were
    measured, with the same sum: where they lay within buckets is not known, so all lie at the same
    fraction of their bucket."""
    total = data.pop(f"{name}_seconds", 0.0)
    edges = (0.0, *TIME_BOUNDS, max(2 * TIME_BOUNDS[-1], total))
    spans: list[tuple[float, float, int]] = []
    for number in range(len(TIME_BOUNDS) + 1):
        count = data.pop(f"{name}{_BUCKET}{number}", 0)
        spans += [(edges[number], edges[number + 1], count)] if count else []
    least = sum(low * count for low, _, count in spans)
    most = sum(high * count for _, high, count in spans)
    part = min(1.0, max(1e-9, (total - least) / (most - least))) if spans else 0.0
    return [low + part * (high - low) for low, high, count in spans for _ in range(count)]
