"""Prefetches under way: which chunks each holds in staging, on which ranks, and until when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.connectors.shared_storage.messages import ChunkRef, Prefetched
from kvferry.connectors.shared_storage.reservations import Reservations

LEASE_SECONDS = 10.0
"""How long past its deadline a request may sit on staging that others ask for."""


@dataclass(slots=True)
class Ticket:
    """One prefetch, from lookup to load or release, of what a hit of `[start, stop)` needs."""

    number: int
    chunks: tuple[ChunkRef, ...]
    hit: tuple[int, int]
    opened: float
    deadline: float
    num_ranks: int
    in_hand_by_rank: dict[int, int] = field(default_factory=dict)
    done_ranks: set[int] = field(default_factory=set)
    seconds: float = 0.0
    """What the slowest rank that is done took."""
    reservations: Reservations | None = None
    """Hold its chunks until the plan that tells of it, if it was opened in memory."""

    @property
    def complete(self) -> bool:
        """Every rank has reported the end."""
        return len(self.done_ranks) == self.num_ranks

    @property
    def num_in_hand(self) -> int:
        """Leading chunks that every rank is known to hold verified."""
        if len(self.in_hand_by_rank) < self.num_ranks:
            return 0
        return min(self.in_hand_by_rank.values())

    @property
    def tokens_in_hand(self) -> int:
        """About how many tokens of the hit they bring."""
        return (self.hit[1] - self.hit[0]) * self.num_in_hand // len(self.chunks)


class Tickets:
    """All open prefetches of an engine and the staging they use. Not thread-safe.

    Args:
        num_ranks: ranks that each must report.
        num_slots: chunks that fit into staging on every rank.
        clock: monotonic seconds.
        in_memory: where what the only rank keeps can be taken from here; None if it cannot.
    """

    def __init__(
        self,
        num_ranks: int,
        num_slots: int,
        clock: Callable[[], float],
        in_memory: Callable[[], Reservations | None] = lambda: None,
    ) -> None:
        self._num_ranks = num_ranks
        self._free = num_slots
        self._loading = 0  # taken until the loads of the next plan are done
        self._clock = clock
        self._in_memory = in_memory
        self._numbers = itertools.count(1)
        self._open: dict[int, Ticket] = {}
        self._new: list[Ticket] = []
        self._releases: list[int] = []

    @property
    def has_news(self) -> bool:
        """True while a plan must go out although nothing is scheduled."""
        return bool(self._new or self._releases)

    def room(self, num_chunks: int) -> int:
        """Chunks, of so many, that there is room for now."""
        if num_chunks > self._free and self._open:
            self._expire(self._clock())
        return min(num_chunks, self._free)

    @property
    def any_open(self) -> bool:
        """True if there may be more room once open prefetches have ended."""
        return bool(self._open or self._loading)

    def open(self, chunks: tuple[ChunkRef, ...], hit: tuple[int, int], deadline: float) -> int:
        """Ask for `chunks`, for which there is room."""
        return self._open_numbered(next(self._numbers), chunks, hit, deadline).number

    def open_in_memory(
        self, chunks: tuple[ChunkRef, ...], hit: tuple[int, int], deadline: float
    ) -> int | None:
        """`open` for chunks that are all in hand now; None if they are not, or not known to be."""
        reservations = self._in_memory()
        if reservations is None:
            return None
        number = next(self._numbers)
        if not reservations.reserve(number, chunks):
            return None
        ticket = self._open_numbered(number, chunks, hit, deadline)
        ticket.in_hand_by_rank[0] = len(chunks)
        ticket.done_ranks.add(0)
        ticket.reservations = reservations
        return number

    def _open_numbered(
        self, number: int, chunks: tuple[ChunkRef, ...], hit: tuple[int, int], deadline: float
    ) -> Ticket:
        ticket = Ticket(number, chunks, hit, self._clock(), deadline, self._num_ranks)
        self._free -= len(chunks)
        self._open[number] = ticket
        self._new.append(ticket)
        return ticket

    def get(self, number: int | None) -> Ticket | None:
        return None if number is None else self._open.get(number)

    def report(self, rank: int, news: Prefetched) -> Ticket | None:
        """A rank tells how far it is. Reports may repeat; they never take anything back."""
        ticket = self._open.get(news.ticket)
        if ticket is not None:
            known = ticket.in_hand_by_rank.get(rank, 0)
            ticket.in_hand_by_rank[rank] = max(news.num_chunks, known)
            if news.done:
                ticket.done_ranks.add(rank)
                ticket.seconds = max(ticket.seconds, news.seconds)
        return ticket

    def close(self, number: int, *, told: bool) -> None:
        """Give the staging back. `told`: the workers learn it from a load of this ticket."""
        ticket = self._open.pop(number, None)
        if ticket is None:
            return
        if told:  # and not by a prefetch of that same plan, which begins before its loads
            self._loading += len(ticket.chunks)
        else:
            self._free += len(ticket.chunks)
            self.release(number)

    def release(self, number: int) -> None:
        """Have the workers drop a ticket that is closed: also for a load that will not happen."""
        new = next((ticket for ticket in self._new if ticket.number == number), None)
        if new is None:
            self._releases.append(number)
            return
        self._new.remove(new)  # they never heard of it
        if new.reservations is not None:
            new.reservations.cancel(number)

    def _expire(self, now: float) -> None:
        """Take staging back from requests that got their hit in hand and are not admitted."""
        for ticket in list(self._open.values()):
            if now > ticket.deadline + LEASE_SECONDS:
                self.close(ticket.number, told=False)

    def drain(self) -> tuple[list[Ticket], list[int]]:
        """What the next plan carries: new prefetches and releases."""
        self._free += self._loading
        self._loading = 0
        if not self.has_news:
            return _NOTHING
        news, self._new = self._new, []
        releases, self._releases = self._releases, []
        return news, releases


_NOTHING: tuple[list[Ticket], list[int]] = ([], [])
