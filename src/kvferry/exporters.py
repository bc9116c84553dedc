"""Exports `Counters` to Prometheus, for programs that embed kvferry.

    from prometheus_client import start_http_server
    from prometheus_client.core import REGISTRY

    REGISTRY.register(KVFerryCollector(counters))
    start_http_server(9400)

A counter `name` becomes `kvferry_<name>_total`, a duration the histogram `kvferry_<name>_seconds`,
and a current value the gauge `kvferry_<name>`. All names in `kvferry.observe` are declared from the
start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvferry.observe import (
    FAMILIES,
    FROM_ZERO,
    GAUGES,
    TIME_BOUNDS,
    TIMES,
    Counters,
    Family,
    labelled,
)

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_]")

_BOUNDS = [*map(str, TIME_BOUNDS), "+Inf"]


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
        sums = dict.fromkeys(FROM_ZERO, 0.0) | self._counters.sums()
        yield from self._families(CounterMetricFamily, FAMILIES, sums)
        yield from self._families(GaugeMetricFamily, GAUGES, self._counters.gauges())
        times = self._counters.times()
        for name in sorted(TIMES.keys() | times.keys()):
            counts, seconds = times.get(name, ([0] * len(_BOUNDS), 0.0))
            histogram = HistogramMetricFamily(
                f"{_metric_name(name)}_seconds",
                TIMES.get(name, f"Time spent in {name}."),
                labels=self._label_names,
            )
            buckets = list(zip(_BOUNDS, accumulate(counts), strict=True))
            histogram.add_metric(self._label_values, buckets, seconds)
            yield histogram

    def _families(
        self,
        kind: type[CounterMetricFamily | GaugeMetricFamily],
        known: Mapping[str, Family],
        found: Mapping[str, float],
    ) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for name in sorted(known.keys() | {labelled(each)[0] for each in found}):
            text, labels = known.get(name, Family(f"Sum of {name} since the start."))
            names = (*self._label_names, *labels)
            families[name] = kind(_metric_name(name), text, labels=names)
        for each, value in sorted(found.items()):
            name, values = labelled(each)
            families[name].add_metric((*self._label_values, *values), value)
        yield from families.values()


def _metric_name(name: str) -> str:
    # A counter's name may hold characters that Prometheus does not allow.
    return "kvferry_" + _NOT_IN_NAMES.sub("_", name)
