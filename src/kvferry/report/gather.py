"""Sums for `kvferry report`, added up record by record and request by request in bounded memory.

A record does not say to which prompts it belongs, because its key does not name the key before it.
A journal does: each line has the keys of a prompt in order, and a key has only one predecessor. So
the prefix tree shows the last requests of a journal, with the sizes and last uses that the store
knows. Other records are shown by namespace and last use.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.journal import KEY_BYTES, JournalLine
from kvferry.store.catalogue import Entry, Removal

MAX_CHUNKS = 1 << 17
"""Most chunks of the last requests from which the tree is made."""

MAX_RUNS = 400
"""Most runs of chunks in the picture; the largest are shown."""

COMPUTED = "computed: "
"""Start of the names of reasons, beside those of tiers."""

MAX_STEPS = 60
"""Most bars of a picture over time."""

AGES: Mapping[str, float] = {
    "used in the last hour": 3600.0,
    "used in the last day": 86400.0,
    "used in the last week": 7 * 86400.0,
    "not used for a week": math.inf,
}
"""Classes of records by last use: the most seconds since then, by name."""

AGE_UNKNOWN = "last use not known"


class TimeSteps:
    """Sums by name over time, in at most `MAX_STEPS` steps of equal width.

    Attributes:
        seconds: width of a step; it doubles when the times need more steps.
        names: all names, in the order in which they came.
    """

    def __init__(self) -> None:
        self.seconds = 1
        self.names: dict[str, None] = {}
        self._sums: dict[int, Counter[str]] = {}

    def add(self, at: float, name: str, amount: int) -> None:
        """Add `amount` to the sum of a name at a time, seconds since the epoch."""
        self.names[name] = None
        step = int(at // self.seconds)
        if step not in self._sums:
            self._sums[step] = Counter()
            while max(self._sums) - min(self._sums) >= MAX_STEPS:
                self._double()
        self._sums[int(at // self.seconds)][name] += amount

    def _double(self) -> None:
        self.seconds *= 2
        wider: dict[int, Counter[str]] = {}
        for step, sums in self._sums.items():
            wider.setdefault(step // 2, Counter()).update(sums)
        self._sums = wider

    def steps(self) -> Iterator[tuple[float, Counter[str]]]:
        """Yield the start and the sums of each step that has any, in order."""
        for step in sorted(self._sums):
            yield float(step * self.seconds), self._sums[step]


@dataclass(slots=True, eq=False)
class Chunk:
    """A chunk of recorded prompts.

    Attributes:
        parent: the chunk before it in the prompt; None for the first.
        end: tokens of the prompt up to the chunk's end.
        uses: number of requests that it was part of.
        num_bytes: size of its stored record; 0 if it is not stored.
        all_bytes: stored bytes of the chunk and of all that follow it.
        run: first of the chunks in a row that the same requests share, this one among them.
        run_end: of a first one: tokens of the prompt up to the end of its run.
    """

    parent: Chunk | None
    end: int
    uses: int = 0
    num_bytes: int = 0
    all_bytes: int = 0
    last_used: float = 0.0
    namespace: bytes = b""
    run: Chunk = field(init=False)
    run_end: int = 0


class RecordedRequests:
    """The requests of a journal.

    Attributes:
        count: number of all requests.
        num_tokens, hit_tokens: tokens of answered prompts, and those that were not computed.
        tokens: tokens over time, by the tier that had them (`ENGINE`: the engine itself), or by why
            they were computed.
    """

    def __init__(self) -> None:
        self.count = self.num_tokens = self.hit_tokens = 0
        self.tokens = TimeSteps()
        self._recent: deque[tuple[int, list[bytes]]] = deque()  # tokens of a chunk, and keys
        self._num_recent = 0

    def add(self, line: JournalLine) -> None:
        """Add a request. Raises ConfigError if its keys are not hexadecimal."""
        self.count += 1
        sources = line.by_source()
        for name, amount in sources.items():
            self.tokens.add(line.time, name, amount)
        for name, amount in line.misses.items():
            self.tokens.add(line.time, COMPUTED + name, amount)
        self.hit_tokens += sum(sources.values())
        self.num_tokens += sum(sources.values()) + sum(line.misses.values())
        try:
            keys = [bytes.fromhex(key)[:KEY_BYTES] for key in line.keys[:MAX_CHUNKS]]
        except ValueError as error:
            raise ConfigError(f"a journal's keys are hexadecimal: {error}") from error
        self._recent.append((line.chunk_tokens, keys))
        self._num_recent += len(keys)
        while self._num_recent > MAX_CHUNKS:
            self._num_recent -= len(self._recent.popleft()[1])

    def chunks(self) -> dict[bytes, Chunk]:
        """Return the chunks of the last requests by cut key, each after its parent."""
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
        ages: bytes of the records that are in no recorded prompt, by age as in `AGES`.
    """

    num_records: int = 0
    num_bytes: int = 0
    last_used: float = 0.0
    ages: Counter[str] = field(default_factory=Counter)


class Survey:
    """Sums of a store's records, added as a scan finds them.

    Args:
        chunks: the chunks of recorded prompts, each after its parent.
        now: seconds since the epoch.

    Attributes:
        spaces: sums of each namespace, by digest.
    """

    def __init__(self, chunks: Mapping[bytes, Chunk], now: float) -> None:
        self.spaces: dict[bytes, SpaceSums] = {}
        self._chunks = chunks
        self._now = now

    def add(self, entry: Entry) -> None:
        """Add a record. If a server lists it twice, it counts twice."""
        space = self.spaces.setdefault(entry.namespace, SpaceSums())
        space.num_records += 1
        space.num_bytes += entry.stored_bytes
        space.last_used = max(space.last_used, entry.last_used)
        chunk = self._chunks.get(entry.key[:KEY_BYTES])
        if chunk is None:
            space.ages[age(entry.last_used, self._now)] += entry.stored_bytes
        else:
            chunk.num_bytes, chunk.last_used = entry.stored_bytes, entry.last_used
            chunk.namespace = entry.namespace

    def largest_spaces(self) -> dict[bytes, SpaceSums]:
        """Return all namespaces, the largest first."""
        return dict(sorted(self.spaces.items(), key=lambda item: -item[1].num_bytes))

    def runs(self) -> list[Chunk]:
        """Return the first chunks of the largest `MAX_RUNS` runs, and set what is known of them.
        A run comes after the one that it follows."""
        # A run is at least as large as what follows it, and comes first.
        runs = _runs(_with_followers(list(self._chunks.values())))
        return sorted(runs, key=lambda chunk: -chunk.all_bytes)[:MAX_RUNS]


def age(last_used: float, now: float) -> str:
    """Return the name in `AGES` for a last use, or `AGE_UNKNOWN`."""
    if not last_used:
        return AGE_UNKNOWN
    return next((name for name, most in AGES.items() if now - last_used <= most), AGE_UNKNOWN)


def _runs(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Join each chunk with its only follower, if both have equal uses. Return the first ones."""
    followers = Counter(chunk.parent for chunk in chunks)
    for chunk in chunks:
        before, chunk.run = chunk.parent, chunk
        if before is not None:
            chunk.namespace = before.namespace
            if followers[before] == 1 and before.uses == chunk.uses:
                chunk.run = before.run
        chunk.run.run_end = chunk.end
    return [chunk for chunk in chunks if chunk.run is chunk]


def _with_followers(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Return the chunks that are stored or lead to a stored one. A chunk's last use becomes the
    latest of its own and its followers'; if it is not stored, it gets a follower's namespace."""
    for chunk in chunks:
        chunk.all_bytes = chunk.num_bytes
    for chunk in reversed(chunks):
        before = chunk.parent
        if before is not None and chunk.all_bytes:
            before.all_bytes += chunk.all_bytes
            before.last_used = max(before.last_used, chunk.last_used)
            before.namespace = before.namespace or chunk.namespace
    return [chunk for chunk in chunks if chunk.all_bytes]


class Cause(NamedTuple):
    """The removals with one reason and detail."""

    reason: str
    detail: str
    num_records: int
    num_bytes: int
    last_at: float


def causes(removals: Iterable[Removal]) -> list[Cause]:
    """Sum removals, given newest first, by reason and detail; the most frequent come first."""
    found: dict[tuple[str, str], Cause] = {}
    for each in removals:
        place = each.reason, each.detail
        known = found.get(place) or Cause(*place, 0, 0, each.at)
        found[place] = known._replace(
            num_records=known.num_records + 1, num_bytes=known.num_bytes + each.stored_bytes
        )
    return sorted(found.values(), key=lambda cause: -cause.num_records)
