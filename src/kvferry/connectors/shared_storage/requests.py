"""What the scheduler role remembers: of each live request, and of chunks that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvferry.keys import ChunkKeys

BROKEN_SECONDS = 60.0
"""How long a chunk that could not be read is not offered again, unless it is stored anew."""

MAX_BROKEN = 100_000


@dataclass(slots=True)
class RequestState:
    """One live request."""

    keys: ChunkKeys
    ticket: int | None = None
    """Its prefetch, from the plan that carries it to its load or release."""
    promised: tuple[int, int] | None = None
    """Tokens `[start, stop)` of the last positive answer."""
    gave_up: bool = False
    """Its hit was refused or came too late; not tried again before it is admitted."""
    queued_until: float | None = None
    """While staging is taken by others, its hit waits until then."""
    barred: bool = False
    """A load failed on blocks it may share: nothing more of it is saved until it has new ones."""
    next_save: int = 0
    """Chunks before this one are stored, on their way, or will not be saved by this request."""


class BrokenKeys:
    """Chunks whose load failed a short while ago. Not for ever: another process may have mended
    what this one cannot see. Bounded; not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def __contains__(self, key: bytes) -> bool:
        if not self._until:
            return False
        until = self._until.get(key)
        if until is not None and self._clock() >= until:
            del self._until[key]
            return False
        return until is not None

    def add(self, keys: Iterable[bytes]) -> None:
        if len(self._until) > MAX_BROKEN:
            self._until.clear()
        self._until.update(dict.fromkeys(keys, self._clock() + BROKEN_SECONDS))

    def mended(self, key: bytes) -> None:
        """It was stored anew."""
        self._until.pop(key, None)

    def clear(self) -> None:
        self._until.clear()
