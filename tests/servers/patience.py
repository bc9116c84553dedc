"""Makes stores wait longer for servers that a busy machine makes slow."""

from dataclasses import replace

import pytest

from kvferry.store.kind import ServerBounds
from kvferry.store.servers import mooncake, objects, valkey

PATIENT = ServerBounds(quick_seconds=20.0)
"""No call whose deadline the store sets fails because the machine is busy."""


def make_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every store that is opened by a URL patient, whoever opens it."""
    for module in (mooncake, objects, valkey):

        def opened(url, options, opening, kind=module.KIND):
            return kind.open(url, options, replace(opening, bounds=PATIENT))

        monkeypatch.setattr(module, "KIND", replace(module.KIND, open=opened))
