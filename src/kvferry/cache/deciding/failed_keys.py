"""Chunks whose read or write failed a short time ago. They are not offered, or it is known why."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.cache.deciding.miss import Miss
from kvferry.contract.messages import LookupMiss

UNREADABLE_SECONDS = 60.0
"""How long a chunk that could not be read is not offered, unless it is stored again. Not for ever,
because another process may repair the record unseen."""

RETRY_SECONDS = 3.0
"""The same if the store did not answer, or no longer had the chunk: nothing is wrong with the
record, and a server that is back is to be used soon."""

REFUSED_SECONDS = 3600.0
"""How long it is known why a chunk was not stored."""

MAX_FAILED = 100_000
"""Number of failed chunks beyond which all are forgotten."""


class FailedKeys:
    """Chunks whose read or write failed a short time ago, and why. Not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._failed: dict[bytes, tuple[float, Miss]] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._failed and self._clock() < self._failed[key][0]

    def why(self, key: bytes) -> Miss:
        """Return why a chunk that is here failed."""
        return self._failed[key][1]

    def add(
        self,
        keys: Iterable[bytes],
        seconds: float,
        reason: LookupMiss,
        why: str = "",
        kind: str = "",
    ) -> None:
        if len(self._failed) > MAX_FAILED:
            self._failed.clear()
        self._failed.update(dict.fromkeys(keys, (self._clock() + seconds, Miss(reason, why, kind))))

    def discard(self, key: bytes) -> None:
        """Forget a chunk: it was stored again."""
        self._failed.pop(key, None)

    def clear(self) -> None:
        self._failed.clear()
