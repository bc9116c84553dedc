"""Asking the connector, without ever waiting for it longer than agreed."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvferry.contract.messages import ASK_AGAIN, MISS, LookupResult
from kvferry.contract.scheduler import SchedulerRole
from kvferry.engine.request import Request
from kvferry.observe import Observer

MAX_FAILED_LOADS = 3
"""After so many failed loads a request is not offered a hit again. A connector that keeps promising
what it cannot bring would otherwise keep the request going round for ever."""


class Lookups:
    """The questions of one scheduler to its connector.

    A request is answered with a miss, and the connector not asked again, once it has been told to
    ask again for longer than the deadline, or its loads have failed too often. Runs in: scheduler.
    """

    def __init__(
        self,
        role: SchedulerRole,
        deadline_seconds: float,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._role = role
        self._deadline_seconds = deadline_seconds
        self._observer = observer
        self._clock = clock
        self._asked_since: dict[str, float] = {}
        self._failed_loads: dict[str, int] = {}

    def ask(self, request: Request, num_local_tokens: int) -> LookupResult:
        """What the connector can bring beyond the local hit; `num_tokens` None to ask again."""
        request_id = request.request_id
        if self._failed_loads.get(request_id, 0) >= MAX_FAILED_LOADS:
            return MISS
        result = self._role.lookup(request, num_local_tokens)
        if result.num_tokens is not None:
            self._asked_since.pop(request_id, None)
            return result
        now = self._clock()
        if now - self._asked_since.setdefault(request_id, now) < self._deadline_seconds:
            return ASK_AGAIN
        self._observer.count("lookup_deadline")
        self.give_up(request)
        return MISS

    def load_failed(self, request: Request) -> None:
        """A load of this request did not bring all that was promised."""
        self._failed_loads[request.request_id] = self._failed_loads.get(request.request_id, 0) + 1

    def give_up(self, request: Request) -> None:
        """Do not ask for this request again."""
        self._failed_loads[request.request_id] = MAX_FAILED_LOADS

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._asked_since.pop(request.request_id, None)
        self._failed_loads.pop(request.request_id, None)
