"""Fixtures: servers for the tests of remote stores, and patience for busy servers."""

import pytest

from tests.servers import patience
from tests.servers.mooncake import mooncake
from tests.servers.seaweed import seaweed

__all__ = ["mooncake", "seaweed"]


@pytest.fixture
def patient_calls(monkeypatch):
    """No call whose deadline the store sets fails because the machine is busy."""
    patience.make_patient(monkeypatch)
