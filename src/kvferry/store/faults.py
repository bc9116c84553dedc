"""What a directory store does when its medium fails: answer, count, log. The `Health` of its tier
says when it is written to again.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable

from kvferry.observe import Observer
from kvferry.store.base import PutResult

logger = logging.getLogger(__name__)

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOG_EVERY_SECONDS = 60.0


class MediumFaults:
    """The failures of one medium: turns each `OSError` into an answer, a count and a log line.
    Thread-safe.

    Attributes:
        refusal: why the last failed write failed; empty if the medium had no room.
    """

    def __init__(self, name: str, observer: Observer, clock: Callable[[], float]) -> None:
        self._name = name
        self.observer = observer
        self.clock = clock
        self._lock = threading.Lock()
        self.refusal = ""
        self._logged: dict[tuple[str, int | None], float] = {}

    def write_failed(self, error: OSError) -> PutResult:
        """Count a failed write and name its outcome."""
        no_space = error.errno in _NO_SPACE
        self.refusal = "" if no_space else error.strerror or type(error).__name__
        self.observer.count("store_put_no_space" if no_space else "store_put_failed")
        self._log("write", error)
        return PutResult.NO_SPACE if no_space else PutResult.FAILED

    def failed(self, what: str, error: OSError) -> None:
        """Count and log any other operation that failed."""
        self.observer.count(f"store_{what}_failed")
        self._log(what, error)

    def _log(self, what: str, error: OSError) -> None:
        """Log at most one line a minute for each operation and kind of error."""
        kind, now = (what, error.errno), self.clock()
        with self._lock:
            if now - self._logged.get(kind, -_LOG_EVERY_SECONDS) < _LOG_EVERY_SECONDS:
                return
            self._logged[kind] = now
        reason = error.strerror or str(error)
        logger.warning(
            "store %s: %s failed: %s; kvferry works without it", self._name, what, reason
        )
