"""Weights that are hashed only once a test lets them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from unittest.mock import patch

from kvferry.testing.stores.hooks import PATIENCE_SECONDS, wait_until
from kvferry.v1 import late_weights
from kvferry.v1.late_weights import LateWeights

_ONE_PATCHES = threading.Lock()
"""Ranks of several pipeline stages start in threads of their own."""


class GatedWeights(LateWeights):
    """Gives up at once, and goes on hashing once `gate` is set. `found` stands for the digest."""

    def __init__(self, gate: threading.Event, found: Callable[[], bytes] | None = None) -> None:
        super().__init__()
        self._gate = gate
        self._found = found

    def hashed(self, read: Callable[[], bytes]) -> bytes:
        def gated() -> bytes:
            assert self._gate.wait(PATIENCE_SECONDS)
            return (self._found or read)()

        with _ONE_PATCHES, patch.object(late_weights, "WEIGHTS_SECONDS", 0.0):
            return super().hashed(gated)

    def become_known(self) -> None:
        """Hash, and wait until the next step could take up what was found."""
        late = self.late
        self._gate.set()
        wait_until(lambda: self.has_failed or late is None or late.done(), "the weights are hashed")


def is_hashing() -> bool:
    return any(each.name == "kvferry-weights" for each in threading.enumerate())
