"""Makes stores and engines wait longer for what a busy machine makes slow."""

from dataclasses import replace

import pytest

from kvferry import network
from kvferry.store.kind import ServerBounds
from kvferry.store.servers import mooncake, objects, peer, valkey
from kvferry.transfer import client

SECONDS = 20.0
PATIENT = ServerBounds(probe_seconds=SECONDS, quick_seconds=SECONDS)
"""No call whose deadline the store sets fails because the machine is busy."""


def make_connections_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every connection that is made, and its greeting, more time."""
    for module in (client, network):
        monkeypatch.setattr(module, "CONNECT_SECONDS", SECONDS)


def make_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every store that is opened by a URL patient, whoever opens it."""
    make_connections_patient(monkeypatch)
    for module in (mooncake, objects, peer, valkey):

        def opened(url, options, opening, kind=module.KIND):
            return kind.open(url, options, replace(opening, bounds=PATIENT))

        monkeypatch.setattr(module, "KIND", replace(module.KIND, open=opened))


def make_engines_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let embedded engines of this process find what their stores hold, and load it, although the
    machine stalls."""
    monkeypatch.setattr("kvferry.engine.llm.READY_SECONDS", 60.0)
    for name in ("MIN_WAIT_SECONDS", "SLACK_SECONDS"):
        monkeypatch.setattr(f"kvferry.cache.deciding.policy.{name}", 60.0)
