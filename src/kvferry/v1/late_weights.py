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
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.identity import weights_digest
from kvferry.keys import UNREAD
from kvferry.v1.running_model import local_model

logger = logging.getLogger(__name__)

WEIGHTS_SECONDS = 20.0
"""How long a start waits for the weights to be hashed."""


class LateWeights:
    """The digest of the weights of one process of a host.

    Attributes:
        why: why there is no digest; empty if there is one, or none is needed.
        has_failed: whether there will be none.
    """

    def __init__(self) -> None:
        self.why = ""
        self.has_failed = False
        self._digest: Future[bytes] = Future()

    def hashed(self, read: Callable[[], bytes]) -> bytes:
        """Return what `read` returns or raises; `UNREAD` if that takes long, and a thread goes on.
        That is a daemon: a process that ends does not wait for it."""

        def run() -> None:
            try:
                self._digest.set_result(read())
            except BaseException as error:  # raised or logged where the digest is taken
                self._digest.set_exception(error)

        threading.Thread(target=run, name="kvferry-weights", daemon=True).start()
        if wait([self._digest], WEIGHTS_SECONDS).done:
            return self._digest.result()
        self.why = "the weights are being hashed"
        logger.warning(
            "kvferry: the weights are not hashed after %g s; the engine starts, and nothing is "
            "loaded or stored until they are",
            WEIGHTS_SECONDS,
        )
        return UNREAD

    def take(self) -> bytes | None:
        """Return the digest, once, if it became known after `hashed` gave up. Never waits."""
        if not self.why or self.has_failed or not self._digest.done():
            return None
        error = self._digest.exception()
        if error is not None:
            self.fail()
            logger.error("kvferry is off: the weights have no digest: %s", error)
            return None
        self.why = ""
        logger.info("kvferry: the weights are hashed")
        return self._digest.result()

    def fail(self) -> None:
        """Note that there is no digest that can be used."""
        self.why, self.has_failed = "the weights have no digest", True

    def later(self) -> Future[bytes]:
        """Return what gets the digest of `take`, on the thread that hashes; may be cancelled."""
        later: Future[bytes] = Future()

        def give(_: Future[bytes]) -> None:
            digest = self.take()
            if digest is not None and later.set_running_or_notify_cancel():
                later.set_result(digest)

        self._digest.add_done_callback(give)
        return later


def begin_hashing(vllm_config: Any) -> None:  # noqa: ANN401 - the host's
    """Hash the weights on a thread, once per process, while the host does something else. A
    connector asks later, finds the files' digests in their cache, and says what fails."""
    try:
        source = local_model(vllm_config)
        if source is None or source in _BEGUN:
            return
        _BEGUN.add(source)
        threading.Thread(target=_read, args=[source], name="kvferry-weights", daemon=True).start()
    except Exception:  # no head start is no reason to end the host's start
        logger.debug("kvferry: weights are not hashed ahead", exc_info=True)


def _read(source: Path) -> None:
    with suppress(ConfigError):
        weights_digest(source)


_BEGUN: set[Path] = set()
