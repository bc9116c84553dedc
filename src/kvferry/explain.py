"""Why tokens of a prompt would be computed, or were: for the command `kvferry explain`.

A store is asked whether it has the chunks of the prompt, what it remembers of removed chunks,
whether its index lists those that it lacks, and which namespaces it describes. It is listed only if
it cannot name its namespaces otherwise or, for a limited time, if all else explains no miss: then
the prompt may be in shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from typing import NamedTuple, TypeVar

from kvferry.contract.messages import LookupMiss
from kvferry.errors import Fault, LayoutError, StoreError
from kvferry.keys import ChunkKeys, Namespace, state_keys
from kvferry.record.check import ReadFault, RecordInfo
from kvferry.record.join import whole_schema
from kvferry.store.base import Store
from kvferry.store.catalogue import Indexed, Removal
from kvferry.store.maintenance import read_header
from kvferry.survey import Differences, Holding, chunk_tokens_of, shards_of, survey, unread
from kvferry.types import NO_EXTRA_KEYS, ChunkKey, ExtraKeys

T = TypeVar("T")

MAX_REMOVALS = 1 << 16
MAX_NAMESPACES = 1000
"""How many namespaces of a store are compared with the one asked for; usually there are few."""

_NEVER_STORED = "never stored, as far as the removals go back that the store remembers"
_FORGETFUL = "the store does not remember what it removed"
_IN_SHARDS = (
    "stored only in shards, of ranks on several machines: engines with the same split read these, "
    "`kvferry copy --join` makes whole records"
)
_LACKS_SHARDS = (
    "stored only in shards, of ranks on several machines, and not all are here, so that engines "
    "that share this store compute it: {why}"
)

COMPARE_SECONDS = 10.0
"""Time for searching other namespaces for the prompt, and as much for listing its shards."""


class Run(NamedTuple):
    """Consecutive chunks of a prompt with the same reason."""

    first_token: int
    num_tokens: int
    why: LookupMiss | None = None
    """None: they would hit."""
    detail: str = ""
    """Tier of a hit, or details of the reason in words."""
    at: float | None = None
    """When the first chunk of the run was removed, seconds since the epoch."""
    by: str = ""
    """Which process removed it."""
    num_bytes: int = 0
    """Size of its records, as far as they are stored."""


class Space(NamedTuple):
    """A described namespace whose keys follow from tokens."""

    namespace: Namespace
    differs: Differences
    """What differs between this namespace (first value) and the one asked for (second)."""

    @property
    def chunk_tokens(self) -> int:
        return chunk_tokens_of(self.namespace) or 1


class Explanation(NamedTuple):
    """What one namespace has of a prompt."""

    space: Space
    runs: list[Run]
    """Runs that cover the whole prompt, in order."""
    states: tuple[int, ...] = ()
    """After how many of the leading tokens that are stored a state is stored, too."""
    state_bytes: int = 0
    """Size of the records of the last of them."""

    @property
    def hit_tokens(self) -> int:
        return sum(run.num_tokens for run in self.runs if run.why is None)

    @property
    def known_tokens(self) -> int:
        """Tokens that the namespace has, or had: of all others nothing shows that they were ever
        stored in it."""
        never = (LookupMiss.ABSENT, LookupMiss.PARTIAL)
        return sum(run.num_tokens for run in self.runs if run.why not in never)

    @property
    def first_miss(self) -> Run | None:
        """The first run that misses, and not only because hits are whole blocks, if there is one;
        None for an empty prompt."""
        misses = [run for run in self.runs if run.why is not None]
        others = (run for run in misses if run.why is not LookupMiss.PARTIAL)
        return next(others, misses[0] if misses else None)


class Nearest(NamedTuple):
    """The other namespace that has most of a prompt's start, or is most alike."""

    space: Space
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAnswer:
    """Why the hit of a prompt ends where it ends.

    Attributes:
        num_tokens: length of the prompt.
        found: the prompt in each namespace that was asked for, the longest hit first; of equal
            hits, the one that had most of the prompt, then the one most like what was asked for.
        elsewhere: a namespace that was not asked for and has more of the prompt. If `found` is
            empty, it may also be the most similar namespace.
        without_extra: leading tokens that are stored for requests without salt and LoRA.
        away: why a tier did not answer, by its name.
        unread: why descriptions of some namespaces are not known, of which one may be nearer.
    """

    num_tokens: int
    found: list[Explanation]
    elsewhere: Nearest | None = None
    without_extra: int = 0
    away: Mapping[str, Fault] = field(default_factory=dict)
    unread: tuple[Fault, ...] = ()

    @property
    def hit_tokens(self) -> int:
        return self.found[0].hit_tokens if self.found else 0

    @property
    def reason(self) -> LookupMiss:
        """Why the first token that is no hit is a miss."""
        miss = self.found[0].first_miss if self.found else None
        why = (miss and miss.why) or (LookupMiss.PARTIAL if self.found else LookupMiss.ABSENT)
        if not self.found and self.away:
            return LookupMiss.AWAY
        if why is not LookupMiss.ABSENT:
            return why
        if self.without_extra > self.hit_tokens:
            return LookupMiss.OTHER_KEYS
        if self.elsewhere is not None and self.elsewhere.hit_tokens > self.hit_tokens:
            return LookupMiss.OTHER_NAMESPACE
        return why


def away_lines(away: Mapping[str, Fault]) -> list[str]:
    """Say which tiers do not answer, and why."""
    return [f"{name}: away: {why}" for name, why in away.items()]


def _in_shards(shards: Sequence[RecordInfo]) -> str:
    """Say what shards a chunk has, and which rows are in none."""
    try:
        whole_schema(shards)
    except LayoutError as error:
        return _LACKS_SHARDS.format(why=error)
    return _IN_SHARDS


def _removed(store: Store) -> tuple[Store, dict[ChunkKey, Removal] | None]:
    """Return the newest removal of each key; None if the store remembers none."""
    if (index := Indexed.find(store)) is None:
        return store, None
    return store, {each.key: each for each in reversed(index.removals(MAX_REMOVALS))}


class PromptSearch:
    """The search for one prompt in a store, or in several stores as tiers. Blocks on their I/O.

    A tier that fails is away, and is asked no further: each question could take as long.

    Args:
        tiers: the stores by name, nearest first.
        extra: salt and LoRA adapter of the request.
        block_tokens: tokens of the engine's blocks; a hit is whole blocks.
        away: tiers that could not be opened; it gets those that do not answer, too.

    Attributes:
        token_ids: as given.
        away: why a tier does not answer, by its name. It grows.
        where: the stores, for messages.
        unread: why `namespaces` could not read descriptions, by tier.

    Raises:
        StoreError: no tier answers any more. All methods may raise it.
    """

    def __init__(
        self,
        tiers: Mapping[str, Store],
        token_ids: Sequence[int],
        extra: ExtraKeys = NO_EXTRA_KEYS,
        block_tokens: int = 1,
        away: dict[str, Fault] | None = None,
    ) -> None:
        self._tiers = tiers
        self.token_ids = token_ids
        self._extra = extra
        self._block_tokens = block_tokens
        self.away = {} if away is None else away
        self.where = ", ".join(store.url for store in tiers.values())
        self.unread: tuple[Fault, ...] = ()
        self._described: dict[Store, frozenset[bytes]] = {}
        self._removed = dict(answer for _, answer in self.ask(_removed))

    def ask(self, question: Callable[[Store], T]) -> Iterator[tuple[str, T]]:
        """Yield the answer of each tier that is not away, with its name."""
        for name, store in self._tiers.items():
            if name not in self.away:
                try:
                    yield name, question(store)
                except StoreError as error:
                    self.away[name] = error.fault
        if self._tiers.keys() <= self.away.keys():
            first = next(iter(self.away.values()))
            raise StoreError(first.kind, "; ".join(away_lines(self.away)))

    def namespaces(self, digits: str = "") -> dict[bytes, Namespace | None]:
        """Return the namespaces, `MAX_NAMESPACES` of each tier, whose digests start with `digits`;
        None for one without a sound description."""
        found: dict[bytes, Namespace | None] = {}
        self.unread = ()
        for _, holdings in self.ask(lambda store: self._surveyed(store, digits)):
            if (why := unread(holdings)) is not None:
                self.unread += (why,)
            for each in holdings:
                found[each.digest] = found.get(each.digest) or each.namespace
        return found

    def _surveyed(self, store: Store, digits: str) -> list[Holding]:
        """Return what a tier says of its namespaces. Lists a server once at most."""
        is_whole = len(digits) == 64
        digests = [bytes.fromhex(digits)] if is_whole else sorted(self._described_in(store))
        wanted = [each for each in digests if each.hex().startswith(digits)]
        found = survey(store, wanted[:MAX_NAMESPACES])
        if is_whole and found[0].fault is not None:  # nothing can be said of this one
            raise StoreError(*found[0].fault)
        if is_whole:  # which may be of no namespace
            found = [
                each
                for each in found
                if each.is_described or each.digest in self._described_in(store)
            ]
        return found

    def _described_in(self, store: Store) -> frozenset[bytes]:
        """The namespaces that a tier describes; none if it cannot list them."""
        if store not in self._described:
            self._described[store] = frozenset()
            with suppress(StoreError):
                self._described[store] = frozenset(store.catalogue().described())
        return self._described[store]

    def of_tokens(self) -> list[Namespace]:
        """Return the namespaces whose keys follow from tokens."""
        known = [each for each in self.namespaces().values() if each is not None]
        return [each for each in known if chunk_tokens_of(each) is not None]

    def answer(
        self, spaces: Sequence[Space], others: Callable[[], Sequence[Space]]
    ) -> PromptAnswer:
        """Look every chunk up in `spaces`. If the first miss stays unexplained, also look how much
        of the prompt is stored without salt and LoRA, and in `others`, called only then; at last,
        whether shards are all that is stored."""
        found = [self.explain(space) for space in spaces]
        found.sort(key=_rank)
        answer = PromptAnswer(
            num_tokens=len(self.token_ids), found=found, away=self.away, unread=self.unread
        )
        if answer.reason is not LookupMiss.ABSENT:
            return answer
        plain = (
            self._leading(space, NO_EXTRA_KEYS, time.monotonic() + COMPARE_SECONDS)
            for space in (spaces if self._extra != NO_EXTRA_KEYS else ())
        )
        without_extra = max(plain, default=0)
        nearest = self.nearest(others(), answer.hit_tokens)
        answer = replace(answer, elsewhere=nearest, without_extra=without_extra, unread=self.unread)
        if found and answer.reason is LookupMiss.ABSENT:
            answer = replace(answer, found=[self._with_shards(found[0]), *found[1:]])
        return answer

    def explain(self, space: Space) -> Explanation:
        """Look every chunk of the prompt up in one namespace."""
        digest, size = space.namespace.digest, space.chunk_tokens
        keys = ChunkKeys(digest, size, self._extra)
        keys.extend(self.token_ids)
        runs = [
            self._ask(digest, key, Run(number * size, size)) for number, key in enumerate(keys.keys)
        ]
        parts = space.namespace.state_parts
        states = self._end_at_a_state(digest, keys.keys, runs, parts) if parts else ((), 0)
        return Explanation(space, _merged(self._judged(runs)), *states)

    def _with_shards(self, found: Explanation) -> Explanation:
        """Say of which absent chunks there are shards, as far as listings in time show any, and of
        which not all are there, where they were listed to the end."""
        space, size = found.space.namespace, found.space.chunk_tokens
        keys = ChunkKeys(space.digest, size, self._extra)
        keys.extend(self.token_ids)
        runs: list[Run] = []
        absent: dict[tuple[bytes, ChunkKey], int] = {}
        for run in found.runs:
            if run.why is not LookupMiss.ABSENT:
                runs.append(run)
                continue
            for first in range(run.first_token, run.first_token + run.num_tokens, size):
                absent[space.digest, keys.keys[first // size]] = len(runs)
                runs.append(run._replace(first_token=first, num_tokens=size))
        until = time.monotonic() + COMPARE_SECONDS
        shards: dict[int, list[RecordInfo]] = {}
        num_listed = 0
        for store in self._tiers.values():
            with suppress(StoreError):  # it answers, and cannot be listed
                entries = store.catalogue().scan()
                listing = takewhile(lambda _: time.monotonic() < until, entries)
                for _, info in shards_of(store, listing, absent, [space]):
                    if info.is_shard:
                        number = absent[space.digest, ChunkKey(info.of)]
                        shards.setdefault(number, []).append(info)
                num_listed += time.monotonic() < until
        are_all = num_listed == len(self._tiers) and not self.away
        for number, infos in shards.items():
            detail = _in_shards(infos) if are_all else _IN_SHARDS
            runs[number] = runs[number]._replace(detail=detail)
        return found._replace(runs=_merged(runs))

    def _end_at_a_state(
        self, namespace: bytes, keys: Sequence[ChunkKey], runs: list[Run], parts: int
    ) -> tuple[tuple[int, ...], int]:
        """Where a model keeps states, a hit ends with a chunk at whose end one is stored: mark the
        leading chunks behind the last. Return after how many tokens states are stored, and the size
        of the last."""
        leading = next((n for n, run in enumerate(runs) if run.why is not None), len(runs))
        ends, size = [], 0
        for number in range(leading):
            asked = (
                self._ask(namespace, each, Run(0, 0)) for each in state_keys(keys[number], parts)
            )
            found = list(takewhile(lambda each: each.why is None, asked))
            if len(found) == parts:
                ends.append(number)
                size = sum(each.num_bytes for each in found)
        for number in range(ends[-1] + 1 if ends else 0, leading):
            missing = "no state is stored at its end"
            runs[number] = runs[number]._replace(why=LookupMiss.BEHIND, detail=missing)
        return tuple(runs[number].first_token + runs[number].num_tokens for number in ends), size

    def _judged(self, runs: list[Run]) -> list[Run]:
        """Complete the runs of the whole chunks. Only leading chunks are hits, and of these only
        whole blocks."""
        first_miss = next((n for n, run in enumerate(runs) if run.why is not None), len(runs))
        last_stored = max((n for n, run in enumerate(runs) if run.why is None), default=-1)
        stop = self._in_blocks(sum(run.num_tokens for run in runs[:first_miss]))
        judged: list[Run] = []
        for number, run in enumerate(runs):
            if number < first_miss:
                kept = min(run.num_tokens, max(0, stop - run.first_token))
                rest = Run(run.first_token + kept, run.num_tokens - kept, LookupMiss.PARTIAL)
                parts = run._replace(num_tokens=kept), rest
                judged += [part for part in parts if part.num_tokens]
            elif run.why is None:
                judged.append(run._replace(why=LookupMiss.BEHIND))
            elif run.why is LookupMiss.ABSENT and number < last_stored:
                judged.append(run._replace(detail="was stored before: later chunks are there"))
            else:
                judged.append(run)
        num_whole, num_tokens = sum(run.num_tokens for run in runs), len(self.token_ids)
        if num_whole < num_tokens:
            judged.append(Run(num_whole, num_tokens - num_whole, LookupMiss.PARTIAL))
        return judged

    def nearest(self, spaces: Sequence[Space], least: int) -> Nearest | None:
        """Return the namespace that has the longest start of the prompt, if that is more than
        `least` tokens."""
        best = None
        until = time.monotonic() + COMPARE_SECONDS
        for space in spaces:
            if time.monotonic() >= until:
                break
            found = self._leading(space, self._extra, until)
            if found > (best.hit_tokens if best else least):
                best = Nearest(space, found)
        return best

    def _leading(self, space: Space, extra: ExtraKeys, until: float) -> int:
        """Return how many leading tokens are stored, as far as known at monotonic time `until`."""
        digest, size = space.namespace.digest, space.chunk_tokens
        keys = ChunkKeys(digest, size, extra)
        num_chunks = len(self.token_ids) // size
        for number in range(num_chunks):
            if number == len(keys.keys):  # hash the rest only if the first is there
                keys.extend(self.token_ids if number else self.token_ids[:size])
            is_late = time.monotonic() >= until
            if is_late or self._ask(digest, keys.keys[number], Run(0, 0)).why is not None:
                num_chunks = number
                break
        return self._in_blocks(num_chunks * size)

    def _in_blocks(self, num_tokens: int) -> int:
        """Return how many of these leading tokens an engine loads: whole blocks, and never the last
        token."""
        block = self._block_tokens
        return max(0, min(num_tokens, len(self.token_ids) - 1)) // block * block

    def _ask(self, namespace: bytes, key: ChunkKey, run: Run) -> Run:
        """Say of a chunk which tier has it, or why none has."""
        said = {}
        for name, each in self.ask(lambda store: self._look(store, namespace, key, run)):
            if each.why is None:
                return each._replace(detail=name)
            said[name] = each
        known = {name: each for name, each in said.items() if each.why is not LookupMiss.ABSENT}
        if self.away:
            also = (f"{name}: {each.why}" for name, each in known.items())
            detail = "; ".join([*away_lines(self.away), *also])
            return run._replace(why=LookupMiss.AWAY, detail=detail)
        return next(iter([*known.values(), *said.values()]))

    def _look(self, store: Store, namespace: bytes, key: ChunkKey, run: Run) -> Run:
        """Say of a chunk whether one tier has it, or why it does not."""
        values = store.in_namespace(namespace)
        found = read_header(values, key)
        if isinstance(found, RecordInfo):
            if found.schema.namespace == namespace:
                return run._replace(num_bytes=found.schema.record_bytes)
            found = ReadFault.OTHER_RECORD
        if found is not ReadFault.ABSENT:
            return run._replace(why=LookupMiss.DAMAGED, detail=found)
        if (index := Indexed.find(store)) is not None and index.lists(key):
            return run._replace(why=LookupMiss.VANISHED, detail="gone, though the index lists it")
        removed = self._removed[store]
        removal = None if removed is None else removed.get(key)
        if removal is None:
            detail = _FORGETFUL if removed is None else _NEVER_STORED
            return run._replace(why=LookupMiss.ABSENT, detail=detail)
        why, detail = LookupMiss.DELETED, removal.detail
        if removal.reason in set(LookupMiss):
            why = LookupMiss(removal.reason)
        else:  # another release knows others
            detail = f"{removal.reason}: {detail}"
        return run._replace(why=why, detail=detail, at=removal.at, by=removal.by)


def _rank(found: Explanation) -> tuple[int, int, int, bool]:
    """Order namespaces by what they have of a prompt, then by what they had, then by how alike
    they are to the one asked for. (A model directory names no tenant.)"""
    space = found.space
    has_tenant = bool(space.namespace.description.get("tenant"))
    return -found.hit_tokens, -found.known_tokens, len(space.differs), has_tenant


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Merge neighbours with the same reason, detail and remover; keep the first one's time."""
    merged = []
    for _, group in groupby(runs, key=lambda run: (run.why, run.detail, run.by)):
        alike = list(group)
        num_tokens = sum(run.num_tokens for run in alike)
        num_bytes = sum(run.num_bytes for run in alike)
        merged.append(alike[0]._replace(num_tokens=num_tokens, num_bytes=num_bytes))
    return merged
