"""Servers that the tests of remote stores run against, and time for busy ones to answer."""

import pytest

from kvferry.store.servers import objects, remote
from tests.servers.mooncake import mooncake
from tests.servers.seaweed import seaweed

__all__ = ["mooncake", "seaweed"]


@pytest.fixture
def patient_calls(monkeypatch):
    """A call whose deadline the store sets does not fail because the machine is busy."""
    monkeypatch.setattr(remote, "DELETE_SECONDS", 20.0)
    monkeypatch.setattr(remote, "DESCRIBE_SECONDS", 20.0)
    monkeypatch.setattr(objects, "CHECK_SECONDS", 20.0)
