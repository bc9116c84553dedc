"""Weights that take longer to hash than a host's start may wait.

A host gives its engine some minutes to start, and ends it then. So a start waits a short time for
the digest; after that the engine serves without the cache until a thread has hashed the weights.
Adapters give `LateWeights.hashed` to `model_identity`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from kvferry.cache.epoch import BEING_HASHED
from kvferry.errors import ConfigError
from kvferry.identity import Loads, weights_digest
from kvferry.keys import UNREAD
from kvferry.v1.running_model import model_files

logger = logging.getLogger(__name__)

NO_DIGEST = "the weights have no digest"

WEIGHTS_SECONDS = 20.0
"""How long a start waits for the weights to be hashed."""


class LateWeights:
    """The digest of the weights of one process of a host.

    Attributes:
        why: why there is no digest; empty if there is one, or none is needed.
        has_failed: whether there will be none.
        found: what is being hashed; its thread sets the result, or what it raised. None if the
            start waited for it.
        late: gets the digest that a start did not wait for, on the thread that hashes, unless it is
            cancelled. None if there is nothing to come.
    """

    def __init__(self) -> None:
        self.why = ""
        self.has_failed = False
        self.found: Future[bytes] | None = None
        self.late: Future[bytes] | None = None

    def hashed(self, read: Callable[[], bytes]) -> bytes:
        """Return what `read` returns or raises; `UNREAD` if that takes long, and a thread goes on.
        That is a daemon: a process that ends does not wait for it."""
        found: Future[bytes] = Future()

        def run() -> None:
            try:
                found.set_result(read())
            except BaseException as error:  # raised or logged below
                found.set_exception(error)

        threading.Thread(target=run, name="kvferry-weights", daemon=True).start()
        if wait([found], WEIGHTS_SECONDS).done:
            return found.result()
        self.why = BEING_HASHED
        logger.warning(
            "kvferry: the weights are not hashed after %g s; the engine starts, and nothing is "
            "loaded or stored until they are",
            WEIGHTS_SECONDS,
        )
        self.late = Future()
        found.add_done_callback(partial(self._end, self.late))
        self.found = found
        return UNREAD

    def _end(self, late: Future[bytes], found: Future[bytes]) -> None:
        error = found.exception()
        if error is not None:
            logger.error("kvferry is off: the weights have no digest: %s", error)
            self.why, self.has_failed = NO_DIGEST, True
        elif late.set_running_or_notify_cancel():
            logger.info("kvferry: the weights are hashed")
            late.set_result(found.result())

    def take(self) -> bytes | None:
        """Return the late digest, once, if it has come. Never waits."""
        late = self.late
        if late is None or not late.done():
            return None
        self.late, self.why = None, ""
        return late.result()


def begin_hashing(vllm_config: Any) -> None:  # noqa: ANN401 - the host's
    """Hash the weights on a thread, once per process, while the host does something else. A
    connector asks later, finds the files' digests in their cache, and says what fails."""
    try:
        files = model_files(vllm_config)
        source = files.find()
        if source is not None:
            _begin(source, files.loads)
    except Exception:  # no head start is no reason to end the host's start
        logger.debug("kvferry: weights are not hashed ahead", exc_info=True)


@cache
def _begin(source: Path, loads: Loads) -> None:
    def read() -> None:
        with suppress(ConfigError):
            weights_digest(source, loads=loads)

    threading.Thread(target=read, name="kvferry-weights", daemon=True).start()
