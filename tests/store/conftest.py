"""Servers that the tests of remote stores run against, and time for busy ones to answer."""

import pytest

from tests.servers import patience
from tests.servers.mooncake import mooncake
from tests.servers.seaweed import seaweed

__all__ = ["mooncake", "seaweed"]


@pytest.fixture
def patient_calls(monkeypatch):
    """A call whose deadline the store sets does not fail because the machine is busy."""
    patience.make_patient(monkeypatch)
