"""What a report shows, added up record by record and request by request, in bounded memory.

The keys of a chain do not say which key they follow: a record alone does not say to which prompts
it belongs. A journal does: each of its lines names the keys of a prompt in order, and a key has one
predecessor only. So the prefix tree is that of the last requests of a journal, with the sizes and
last uses that the store knows; other records are shown by namespace and last use.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.journal import KEY_BYTES, JournalLine
from kvferry.store.base import Entry, Removal

MAX_CHUNKS = 1 << 17
"""Chunks of the last requests that the tree is made of."""

MAX_BRANCHES = 400
"""Runs of chunks in the picture: the largest."""

MAX_SPACES = 4096
"""Namespaces that are shown one by one; those of later ones are summed up as `OTHER_SPACES`."""

OTHER_SPACES = b"others"

MAX_STEPS = 60
"""Bars of a picture over time."""

MAX_NAMES = 10
"""Tiers or reasons that are shown one by one in a picture over time."""

OTHER = "other"

_END_OF_TIME = 1 << 33
"""Seconds since the epoch; journals and indexes are files that anyone may have written."""

AGES: Mapping[str, float] = {
    "used in the last hour": 3600.0,
    "used in the last day": 86400.0,
    "used in the last week": 7 * 86400.0,
    "not used for a week": math.inf,
}
"""Records by last use: name to the seconds since then, at most."""

AGE_UNKNOWN = "last use not known"


class TimeSteps:
    """Sums by name over time, in at most `MAX_STEPS` steps of equal width, wherever the times lie.

    Attributes:
        seconds: width of a step.
        names: those shown one by one, and `OTHER` for the rest.
    """

    def __init__(self) -> None:
        self.seconds = 1
        self.names: list[str] = []
        self._sums: dict[int, Counter[str]] = {}
        self._first, self._last = _END_OF_TIME, 0

    def add(self, at: float, name: str, amount: int) -> None:
        """Add to what happened at a time, seconds since the epoch."""
        if name not in self.names:
            name = name if len(self.names) < MAX_NAMES else OTHER
            if name not in self.names:
                self.names.append(name)
        step = int(_seconds(at) // self.seconds)
        self._sums.setdefault(step, Counter())[name] += max(0, amount)
        self._first, self._last = min(self._first, step), max(self._last, step)
        while self._last - self._first >= MAX_STEPS:
            self._double()

    def _double(self) -> None:
        self.seconds *= 2
        self._first, self._last = self._first // 2, self._last // 2
        wider: dict[int, Counter[str]] = {}
        for step, sums in self._sums.items():
            wider.setdefault(step // 2, Counter()).update(sums)
        self._sums = wider

    def steps(self) -> Iterator[tuple[float, Counter[str]]]:
        """Start of each step in which there was something, and its sums, in order."""
        for step in sorted(self._sums):
            yield float(step * self.seconds), self._sums[step]


def _seconds(at: float) -> float:
    return min(max(at, 0.0), float(_END_OF_TIME)) if math.isfinite(at) else 0.0


@dataclass(slots=True)
class Chunk:
    """A chunk of recorded prompts.

    Attributes:
        parent: the chunk before it in the prompt; None for the first.
        end: tokens of the prompt up to its end.
        uses: requests that it was part of.
        num_bytes: stored; 0 if it is not.
        all_bytes: stored of it and of what follows it; known once `branches` was asked for.
    """

    parent: Chunk | None
    end: int
    uses: int = 0
    num_bytes: int = 0
    all_bytes: int = 0
    last_used: float = 0.0
    namespace: bytes = b""


class RecordedRequests:
    """The requests of a journal.

    Attributes:
        count: of all requests.
        hits: tokens by tier, and of `ENGINE`.
        misses: tokens by reason.
    """

    def __init__(self) -> None:
        self.count = 0
        self.hits, self.misses = TimeSteps(), TimeSteps()
        self._recent: deque[tuple[int, list[bytes]]] = deque()  # tokens of a chunk, and keys
        self._num_recent = 0

    def add(self, line: JournalLine) -> None:
        """Raises ConfigError for keys that are none."""
        self.count += 1
        for name, amount in line.by_source().items():
            self.hits.add(line.time, name, amount)
        for name, amount in line.misses.items():
            self.misses.add(line.time, name, amount)
        try:
            keys = [bytes.fromhex(key)[:KEY_BYTES] for key in line.keys[:MAX_CHUNKS]]
        except ValueError as error:
            raise ConfigError(f"a journal's keys are hexadecimal: {error}") from error
        self._recent.append((line.chunk_tokens, keys))
        self._num_recent += len(keys)
        while self._num_recent > MAX_CHUNKS:
            self._num_recent -= len(self._recent.popleft()[1])

    def chunks(self) -> dict[bytes, Chunk]:
        """Of the last requests, by cut key; each after its parent."""
        found: dict[bytes, Chunk] = {}
        for chunk_tokens, keys in self._recent:
            parent = None
            for number, key in enumerate(keys, 1):
                chunk = found.get(key)
                if chunk is None:
                    chunk = found[key] = Chunk(parent, number * chunk_tokens)
                chunk.uses += 1
                parent = chunk
        return found


@dataclass(slots=True)
class SpaceSums:
    """The records of a namespace.

    Attributes:
        ages: bytes by `AGES`, of the records that are in no recorded prompt.
    """

    num_records: int = 0
    num_bytes: int = 0
    last_used: float = 0.0
    ages: Counter[str] = field(default_factory=Counter)


class Branch(NamedTuple):
    """A run of chunks that the same recorded requests share."""

    namespace: bytes
    parent: int | None
    """Index of the run before it in the list; None for the start of prompts."""
    first_token: int
    end_token: int
    num_bytes: int
    """Stored, of this run and all that follow it."""
    uses: int
    last_used: float


class Survey:
    """The records of a store, as a scan finds them.

    Args:
        chunks: of recorded prompts, each after its parent.
        now: seconds since the epoch.

    Attributes:
        spaces: sums by digest.
    """

    def __init__(self, chunks: Mapping[bytes, Chunk], now: float) -> None:
        self.spaces: dict[bytes, SpaceSums] = {}
        self._chunks = chunks
        self._now = now

    def add(self, entry: Entry) -> None:
        """A record that a server lists twice counts twice, as in `kvferry stat`."""
        digest = entry.namespace
        if digest not in self.spaces and len(self.spaces) >= MAX_SPACES:
            digest = OTHER_SPACES
        space = self.spaces.setdefault(digest, SpaceSums())
        space.num_records += 1
        space.num_bytes += entry.num_bytes
        space.last_used = max(space.last_used, entry.last_used)
        chunk = self._chunks.get(entry.key[:KEY_BYTES])
        if chunk is None:
            space.ages[age(entry.last_used, self._now)] += entry.num_bytes
        else:
            chunk.num_bytes, chunk.last_used = entry.num_bytes, entry.last_used
            chunk.namespace = digest

    def largest_spaces(self) -> dict[bytes, SpaceSums]:
        """All namespaces, the largest first."""
        return dict(sorted(self.spaces.items(), key=lambda item: -item[1].num_bytes))

    def branches(self) -> list[Branch]:
        """The largest `MAX_BRANCHES` runs of the tree, each after its parent."""
        return _largest(_runs(self._chunks.values()))


def age(last_used: float, now: float) -> str:
    """The name in `AGES` of a last use, or `AGE_UNKNOWN`."""
    if not last_used:
        return AGE_UNKNOWN
    return next((name for name, most in AGES.items() if now - last_used <= most), AGE_UNKNOWN)


def _runs(chunks: Iterable[Chunk]) -> list[Branch]:
    """Chunks in a row that were used equally often, and have one stored successor, as one."""
    kept = _with_followers(list(chunks))
    followers = Counter(id(chunk.parent) for chunk in kept)
    runs: list[Branch] = []
    run_of: dict[int, int] = {}
    for chunk in kept:
        before = chunk.parent
        index = None if before is None else run_of[id(before)]
        if (
            index is not None
            and before is not None
            and followers[id(before)] == 1
            and before.uses == chunk.uses
        ):
            run = runs[index]
            runs[index] = run._replace(end_token=chunk.end)
        else:
            start = 0 if before is None else before.end
            space = chunk.namespace if index is None else runs[index].namespace
            sums = chunk.all_bytes, chunk.uses, chunk.last_used
            runs.append(Branch(space, index, start, chunk.end, *sums))
            index = len(runs) - 1
        run_of[id(chunk)] = index
    return runs


def _with_followers(chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks of which something is stored, or of what follows them; their last uses and
    namespaces are then those of both."""
    for chunk in chunks:
        chunk.all_bytes = chunk.num_bytes
    for chunk in reversed(chunks):
        before = chunk.parent
        if before is not None and chunk.all_bytes:
            before.all_bytes += chunk.all_bytes
            before.last_used = max(before.last_used, chunk.last_used)
            before.namespace = before.namespace or chunk.namespace
    return [chunk for chunk in chunks if chunk.all_bytes]


def _largest(runs: Sequence[Branch]) -> list[Branch]:
    # A parent is at least as large as what follows it, and comes first.
    chosen = sorted(range(len(runs)), key=lambda index: (-runs[index].num_bytes, index))
    kept = sorted(chosen[:MAX_BRANCHES])
    place = {index: number for number, index in enumerate(kept)}
    return [
        run._replace(parent=None if run.parent is None else place[run.parent])
        for run in (runs[index] for index in kept)
    ]


class Cause(NamedTuple):
    """Why records were removed."""

    reason: str
    detail: str
    num_records: int
    num_bytes: int
    last_at: float


def causes(removals: Iterable[Removal]) -> list[Cause]:
    """Removals, newest first, by reason and detail; the most frequent first."""
    found: dict[tuple[str, str], Cause] = {}
    for each in removals:
        place = each.reason, each.detail
        known = found.get(place)
        found[place] = (
            Cause(*place, 1, each.num_bytes, each.at)
            if known is None
            else known._replace(
                num_records=known.num_records + 1, num_bytes=known.num_bytes + each.num_bytes
            )
        )
    return sorted(found.values(), key=lambda cause: -cause.num_records)
