"""Paces the answers of hostile servers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator


def paced(pieces: Iterable[bytes], seconds: float) -> Iterator[bytes]:
    """Yield the pieces, with a pause after each."""
    for piece in pieces:
        yield piece
        time.sleep(seconds)
