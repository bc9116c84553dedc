"""Counters and durations: `Observer`, whose methods do nothing, and `Counters`, which adds up.

The core calls the observer from scheduler, worker and I/O threads, and never reads it; exporters
and adapters read `Counters`. Methods must be cheap and must not raise.

A name may carry the values of its labels after slashes, as in `hit_tokens/file`; `FAMILIES` and
`GAUGES` name the labels.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

TIME_BOUNDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1.0, 2.5, 5.0))
"""Upper bounds of a histogram's buckets, in seconds; one more bucket has the longer durations."""


class Family(NamedTuple):
    """Help text and label names of one counter or gauge."""

    text: str
    labels: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "hits": Family("Requests admitted with KV from the cache."),
    "requests_missed": Family("Requests admitted without KV from the cache."),
    "lookup_tokens": Family("Tokens of all admitted prompts."),
    "local_hit_tokens": Family("Tokens of admitted prompts that the engine had itself."),
    "hit_tokens": Family("Tokens brought instead of computed; memory: the host pool.", ("tier",)),
    "miss_tokens": Family("Tokens to compute.", ("reason",)),
    "loaded_tokens": Family("Tokens copied from the cache into KV blocks, per rank."),
    "saved_bytes": Family("Bytes stored, per rank."),
    "saved_state_bytes": Family("Bytes of recurrent states stored, of all ranks."),
    "loaded_state_bytes": Family("Bytes of recurrent states promised with hits, of all ranks."),
    "save_failed": Family("Chunks that could not be stored."),
    "save_not_finite": Family("Chunks not stored, as their KV has NaN or Inf."),
    "save_no_slot": Family("Saves put off because the host pool had no slot."),
    "load_failed_chunks": Family("Chunks that could not be brought after they were promised."),
    "audits": Family("Hits compared and found right; in Transformers, all compared."),
    "audit_mismatch": Family(
        "Hits unlike what the engine computes: wrong records, or another model."
    ),
    "remote_prefills": Family("Requests admitted whose prompt another engine was said to compute."),
    "remote_prefills_computed": Family(
        "Remote prefills of which this engine computed more than the end."
    ),
    "records_corrupt": Family("Records found wrong; never served."),
    "store_quarantined": Family("Records taken out of the store because they were wrong."),
    "store_evicted_bytes": Family("Bytes evicted to keep the quota."),
    "pins_refused": Family("Pins that requests asked for and that the store did not keep."),
    "hook_failed": Family("Faults of kvferry that were kept from the engine."),
    "tier_reads": Family("Reads of a tier: hit, miss, failed, away.", ("tier", "result")),
    "tier_read_bytes": Family("Bytes read from a tier.", ("tier",)),
    "tier_writes": Family("Writes to a tier by their result.", ("tier", "result")),
    "tier_copies": Family("Copies to a tier from another by their result.", ("tier", "result")),
}
"""Counters that exporters show under their own names."""

FROM_ZERO = ("hit_tokens/memory", *(name for name, of in FAMILIES.items() if not of.labels))
"""Counters that exporters show as 0 before any event, so that the first event makes a rate."""

TIMES: Mapping[str, str] = {
    "lookup": "One look-up, on the scheduler's thread.",
    "promise": "From the first look-up of a request until its hit was promised.",
    "fetch": "Reading and verifying one chunk.",
    "load_copy": "Copying the chunks of a step from the host pool into KV blocks.",
    "save": "Writing one chunk to the store; its hashing came before.",
}
"""Durations that exporters show under their own names."""

GAUGES: Mapping[str, Family] = {
    "pool_slots": Family("Slots of the host pool: total, held, in_use, lent.", ("state",)),
    "ranks_apart": Family("1: ranks are on several machines, so each stores the rows it holds."),
    "store_records": Family("Records of a tier.", ("tier",)),
    "store_used_bytes": Family("Bytes counted against the quota of a tier.", ("tier",)),
    "store_max_bytes": Family("Quota of a tier.", ("tier",)),
    "tier_since_seconds": Family(
        "When a tier came into its state, in seconds since the epoch, and why; 0: no longer.",
        ("tier", "role", "state", "kind", "because"),
    ),
}
"""Current values."""

Gauges = dict[str, float]
"""Current value by name."""


def labelled(name: str) -> tuple[str, list[str]]:
    """Split a name from its label values. A value that `name` lacks is empty, as with a host that
    has no tiers. The last label's value may hold slashes."""
    family, _, values = name.partition("/")
    known = FAMILIES.get(family) or GAUGES.get(family)
    num_labels = len(known.labels) if known else 0
    found = values.split("/", num_labels - 1)
    return family, (found + num_labels * [""])[:num_labels]


class Observer:
    """A receiver of counts and durations. Its methods do nothing; subclasses override some."""

    def count(self, name: str, amount: int = 1) -> None:
        """Add `amount` to the counter `name` (snake_case; bytes end in `_bytes`)."""

    def observe(self, name: str, seconds: float) -> None:
        """Record one duration in seconds under `name`."""

    def watch(self, read: Callable[[], Gauges]) -> None:
        """Register `read`, which returns current values. It is called on any thread, whenever they
        are asked for, and must use memory only."""


class Times:
    """A histogram of the durations of one name.

    Attributes:
        counts: number of durations in each bucket, not cumulative; the last bucket has those above
            all `TIME_BOUNDS`.
        seconds: sum of all durations.
    """

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(TIME_BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(TIME_BOUNDS, seconds)] += 1
        self.seconds += seconds


class Counters(Observer):
    """An observer that adds up in memory. Thread-safe. Its memory grows with the names only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: defaultdict[str, float] = defaultdict(int)
        self._times: defaultdict[str, Times] = defaultdict(Times)
        self._watched: list[Callable[[], Gauges]] = []

    def count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._sums[name] += amount

    def observe(self, name: str, seconds: float) -> None:
        with self._lock:
            self._times[name].add(seconds)

    def watch(self, read: Callable[[], Gauges]) -> None:
        self._watched.append(read)

    def __getitem__(self, name: str) -> int:
        """Return the sum of a counter: for the label values in `name`, over those it leaves out."""
        with self._lock:
            if name in self._sums:
                return int(self._sums[name])
            return int(sum(n for each, n in self._sums.items() if each.startswith(f"{name}/")))

    def snapshot(self) -> dict[str, float]:
        """Return all sums: counters by name, durations as `<name>_count` and `<name>_seconds`."""
        with self._lock:
            found = dict(self._sums)
            for name, times in self._times.items():
                found[f"{name}_count"] = sum(times.counts)
                found[f"{name}_seconds"] = times.seconds
        return found

    def sums(self) -> dict[str, float]:
        """Return the counters so far."""
        with self._lock:
            return dict(self._sums)

    def times(self) -> dict[str, tuple[Sequence[int], float]]:
        """Return the durations so far: counts and seconds, as in `Times`."""
        with self._lock:
            return {name: (tuple(of.counts), of.seconds) for name, of in self._times.items()}

    def gauges(self) -> Gauges:
        """Ask all registered readers for their current values."""
        found: Gauges = {}
        for read in self._watched:
            found.update(read())
        return found

    def pop_all(self) -> dict[str, float]:
        """Return the sums since the last call: counters by name, durations as `<name>_seconds` and,
        for each bucket that is not empty, `<name>_bucket/<number>`. Sums of several calls or ranks
        can be added."""
        if not (self._sums or self._times):
            return {}
        with self._lock:
            found, self._sums = dict(self._sums), defaultdict(int)
            times, self._times = self._times, defaultdict(Times)
        for name, of in times.items():
            found[f"{name}_seconds"] = of.seconds
            found |= {f"{name}_bucket/{number}": n for number, n in enumerate(of.counts) if n}
        return found
