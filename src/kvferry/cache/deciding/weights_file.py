"""The file of the option `weights_version_file`: whether a reset kept the weights of the start.

A host resets a connector when weights may change, for example when it falls asleep, and does not
say what it loads before it goes on. So the text is read at the first look-up after a reset.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.store.io_pool import IOPool, Job

logger = logging.getLogger(__name__)

READ_SECONDS = 1.0
"""How long look-ups wait for the text. If it takes longer, the weights count as changed."""


class WeightsFile:
    """The text that names the weights, as it was at the start. Once it was another, or could not be
    read, the weights never count as those of the start again: the host's own cache may still hold
    KV of the others. Runs in: scheduler; an I/O thread reads.

    Args:
        path: the file; None: any reset may have changed the weights.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """

    def __init__(self, path: str | None, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._text = "" if path is None else _read(path)
        self._pool = IOPool(1, "kvferry-weights")
        self._job: Job[str] | None = None
        self._until = 0.0
        self.is_open = False

    def ask(self, *, is_sound: bool) -> None:
        """Ask, from the next look-up on, whether the weights are still those of the start. Not
        `is_sound`: records of the first epoch may be of other weights, so it is over."""
        if not is_sound:
            self._text = ""
        self.is_open, self._job = bool(self._text), None

    def is_unchanged(self) -> bool | None:
        """Whether the text is that of the start; None: not known yet."""
        if self._job is None:
            path = str(self._path)
            self._job = self._pool.submit(lambda _job: _read(path))
            self._until = self._clock() + READ_SECONDS
        if not self._job.poll() and self._clock() < self._until:
            return None
        self.is_open = False
        if self._job.result == self._text:
            return True
        logger.info("the weights are others: %s does not say %r", self._path, self._text)
        self._text = ""
        return False

    def close(self) -> None:
        self._pool.close(0.0)


def _read(path: str) -> str:
    """Return the text without spaces around it. Raises ConfigError if there is none."""
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"weights_version_file: cannot read {path}: {error}") from error
    if not text:
        raise ConfigError(f"weights_version_file: {path} is empty; write a name of the weights")
    return text
