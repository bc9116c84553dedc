"""Reads what a running cache does from its metrics or its journal, for `kvferry status`."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvferry.errors import ConfigError
from kvferry.journal import ENGINE, journal_lines, read_journal
from kvferry.network import http

K = TypeVar("K")

MAX_METRICS_BYTES = 32 << 20
MAX_LABEL = 120
"""Characters that are kept of a label's value."""

JOURNAL_REQUESTS = 1000
"""Number of a journal's last requests that are summed up."""

Buckets = dict[float, float]
"""Number of durations up to each bound, by bound in seconds: a cumulative histogram."""


class TierReading(NamedTuple):
    """State of a tier, as the scheduler or worker role sees it."""

    tier: str
    role: str
    state: str
    since: float
    """Seconds since the epoch."""
    because: str
    kind: str = ""
    """A `FaultKind`; empty if nothing is wrong, or an earlier release does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Sums since the start of the engine, since an earlier reading, or over a journal's requests.

    Attributes:
        at: when it was read, seconds since the epoch; of a journal, when its last request came.
        hits: hit tokens by tier.
        misses: computed tokens by reason.
        counts: other counters, summed over all labels; current values by `name/tier` or
            `name/state`.
        tiers: states of the tiers, for each role.
        times: durations by name.
        span: seconds that the sums cover; None: since the start, or less than two requests.
    """

    at: float
    hits: Mapping[str, float] = field(default_factory=dict)
    misses: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    tiers: Sequence[TierReading] = ()
    times: Mapping[str, Buckets] = field(default_factory=dict)
    span: float | None = None

    @property
    def num_tokens(self) -> float:
        """Tokens of all prompts."""
        return sum(self.hits.values()) + sum(self.misses.values())

    def since(self, before: Reading) -> Reading:
        """Return what happened after an earlier reading; current values stay as they are. After a
        restart of the engine, return this reading."""
        if self.num_tokens < before.num_tokens:
            return self
        times = self.times.items()
        sums = {name: value for name, value in self.counts.items() if "/" not in name}
        return replace(
            self,
            hits=_less(self.hits, before.hits),
            misses=_less(self.misses, before.misses),
            counts={**self.counts, **_less(sums, before.counts)},
            times={name: _less(buckets, before.times.get(name, {})) for name, buckets in times},
            span=max(1e-3, self.at - before.at),
        )


def _less(now: Mapping[K, float], before: Mapping[K, float]) -> dict[K, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def quantile(buckets: Buckets, part: float) -> float:
    """Return the lowest bound that covers at least `part` of the durations, at least one."""
    least = part * buckets[math.inf]
    return next(bound for bound, count in sorted(buckets.items()) if count >= least)


# -- from the metrics of an engine ----------------------------------------------------------------


def read_endpoint(url: str, timeout: float) -> Reading:
    """Read the metrics at a URL, of vLLM or of the embedded engine's exporter.

    Raises:
        ConfigError: no answer within `timeout` seconds, or an answer without kvferry's metrics.
    """
    text = _fetch(url, timeout)
    try:
        samples = [
            sample._replace(name=sample.name.removeprefix("vllm:").removeprefix("kvferry_"))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(("kvferry_", "vllm:kvferry_")) and math.isfinite(sample.value)
        ]
        reading = _read_samples(samples)
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{url} does not answer with metrics: {error}") from error
    if not samples:
        raise ConfigError(f"{url} has no metrics of kvferry; is the connector configured?")
    return reading


def _fetch(url: str, timeout: float) -> str:
    try:
        return http(url, timeout, MAX_METRICS_BYTES).decode(errors="replace")
    except TimeoutError as error:
        raise ConfigError(f"{url} did not answer within {timeout:g} s") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"cannot read {url}: {reason or type(error).__name__}") from error


def _read_samples(samples: Iterable[Sample]) -> Reading:
    hits, misses, counts = (defaultdict[str, float](float) for _ in range(3))
    times: defaultdict[str, Buckets] = defaultdict(lambda: defaultdict(float))
    tiers = []
    for name, given, value, *_ in samples:
        labels = defaultdict(str, {each: text[:MAX_LABEL] for each, text in given.items()})
        tier = labels["tier"]
        if name == "hit_tokens_total":
            hits[tier] += value
        elif name == "local_hit_tokens_total":
            hits[ENGINE] += value
        elif name == "miss_tokens_total":
            misses[labels["reason"]] += value
        elif name.endswith("_seconds_bucket"):
            times[name.removesuffix("_seconds_bucket")][float(labels["le"])] += value
        elif name == "tier_since_seconds":
            if value:  # 0: the tier is no longer in that state
                place = tier, labels["role"], labels["state"]
                tiers.append(TierReading(*place, value, labels["because"], labels["kind"]))
        elif name == "pool_slots":
            counts[f"{name}/{labels['state']}"] += value
        elif name == "ranks_apart":
            counts[name] += value
        elif name.startswith("store_") and tier:
            counts[f"{name}/{tier}"] += value
        elif name.endswith("_total"):
            counts[name.removesuffix("_total")] += value
    return Reading(
        at=time.time(),
        hits={name: value for name, value in hits.items() if value},
        misses={name: value for name, value in misses.items() if value},
        counts=counts,
        tiers=tiers,
        times=times,
    )


# -- from a journal -------------------------------------------------------------------------------


def read_requests(path: Path) -> Reading:
    """Sum up the last requests of a journal. Raises as `read_journal`."""
    lines = read_journal(path, None, JOURNAL_REQUESTS)
    hits: Counter[str] = Counter()
    misses: Counter[str] = Counter()
    for line in lines:
        hits.update(line.by_source())
        misses.update(line.misses)
    times = [line.time for line in lines]
    return Reading(
        at=max(times, default=time.time()),
        hits=hits,
        misses=misses,
        counts={"hits": sum(bool(line.hits) for line in lines), "requests": len(lines)},
        span=max(1e-3, max(times) - min(times)) if len(times) > 1 else None,
    )


class Day(NamedTuple):
    """What the requests of a journal that came on one day of this machine's time got."""

    day: str
    num_requests: int
    num_tokens: int
    """Of their prompts."""
    own: int
    """Tokens that the engine had itself."""
    loaded: int
    """Tokens that were loaded, and so not computed."""
    seconds: float
    """What computing the loaded tokens would have taken, by the rates that the engine measured."""
    untimed: int
    """Loaded tokens of requests before whose end no rate was known; `seconds` lacks them."""


def read_days(path: Path) -> list[Day]:
    """Sum up a journal by day, with the part of it that was renamed. Raises as `journal_lines`."""
    older = path.with_name(f"{path.name}.1")
    days: dict[str, Day] = {}
    for place in (older, path):
        if place == older and not place.exists():
            continue
        for _, line in journal_lines(place):
            day = time.strftime("%Y-%m-%d", time.localtime(line.time))
            so_far = days.get(day, Day(day, 0, 0, 0, 0, 0.0, 0))
            loaded = sum(line.hits.values())
            days[day] = Day(
                day,
                so_far.num_requests + 1,
                so_far.num_tokens + line.num_tokens,
                so_far.own + line.local,
                so_far.loaded + loaded,
                so_far.seconds + (loaded / line.compute_rate if line.compute_rate > 0 else 0.0),
                so_far.untimed + (0 if line.compute_rate > 0 else loaded),
            )
    return [days[day] for day in sorted(days)]
