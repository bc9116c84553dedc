"""Shows kvferry's counts among SGLang's own metrics, whenever SGLang calls `get_stats`."""

from __future__ import annotations

from collections import deque

from prometheus_client import CollectorRegistry, Counter

from kvferry.observe import Counters

MAX_CALLS = 4096
"""Number of calls whose sizes are kept until SGLang asks for them."""


class StorageCounts:
    """Counts for SGLang's `/metrics`, as `kvferry_events_total`, and calls for its histograms.

    SGLang collects metrics from the files of several processes, so any registry will do; one of our
    own lets a process attach a back end twice.

    Args:
        labels: labels of every sample.

    Attributes:
        loads, stores: pages and seconds of each call since SGLang last asked.
    """

    def __init__(self, counters: Counters, labels: dict[str, str]) -> None:
        self._counters = counters
        self._labels = labels
        self._events = Counter(
            "kvferry_events",
            "What kvferry counts behind HiCache, by name.",
            ("event", *labels),
            registry=CollectorRegistry(),
        )
        self.loads: deque[tuple[int, float]] = deque(maxlen=MAX_CALLS)
        self.stores: deque[tuple[int, float]] = deque(maxlen=MAX_CALLS)

    def publish(self) -> None:
        """Hand Prometheus what was counted since the last call."""
        for name, amount in self._counters.pop_all().items():
            if amount >= 0:
                self._events.labels(event=name, **self._labels).inc(amount)


def taken(calls: deque[tuple[int, float]], page_bytes: int) -> tuple[list[int], list[float]]:
    """Empty `calls`, and return the pages and the GB per second of each."""
    found = [calls.popleft() for _ in range(len(calls))]
    pages = [number for number, _ in found]
    return pages, [number * page_bytes / 1e9 / max(seconds, 1e-9) for number, seconds in found]
