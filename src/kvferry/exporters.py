"""Counters as Prometheus reads them.

    from prometheus_client import start_http_server
    from prometheus_client.core import REGISTRY

    REGISTRY.register(KVFerryCollector(counters))
    start_http_server(9400)

A count `name` becomes `kvferry_<name>_total`, a duration becomes `kvferry_<name>_seconds_sum` and
`kvferry_<name>_seconds_count`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from kvferry.observe import Counters

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")


class KVFerryCollector(Collector):
    """Reads `counters` at each scrape. Thread-safe; keeps nothing between scrapes.

    Args:
        counters: the observer that was handed to stores, connectors and engine.
        labels: constant labels of every sample, for example `{"rank": "0"}`.
    """

    def __init__(self, counters: Counters, labels: Mapping[str, str] | None = None) -> None:
        self._counters = counters
        labels = labels or {}
        self._label_names = tuple(labels)
        self._label_values = tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        snapshot = self._counters.snapshot()
        durations = {
            name.removesuffix("_seconds")
            for name in snapshot
            if name.endswith("_seconds") and f"{name.removesuffix('_seconds')}_count" in snapshot
        }
        in_durations = {f"{name}{part}" for name in durations for part in ("_count", "_seconds")}
        for name in sorted(snapshot.keys() - in_durations):
            family = CounterMetricFamily(
                _metric_name(name), f"Sum of {name} since the start.", labels=self._label_names
            )
            family.add_metric(self._label_values, snapshot[name])
            yield family
        for name in sorted(durations):
            summary = SummaryMetricFamily(
                f"{_metric_name(name)}_seconds", f"Time spent in {name}.", labels=self._label_names
            )
            summary.add_metric(
                self._label_values,
                count_value=int(snapshot[f"{name}_count"]),
                sum_value=snapshot[f"{name}_seconds"],
            )
            yield summary


def _metric_name(name: str) -> str:
    # A reason that names a counter may hold what Prometheus does not take.
    return "kvferry_" + _NOT_IN_NAMES.sub("_", name)
