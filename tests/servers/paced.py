"""Answers that come slowly."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator


def paced(pieces: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    """The pieces, with a pause behind each."""
    for piece in pieces:
        yield piece
        time.sleep(seconds)
