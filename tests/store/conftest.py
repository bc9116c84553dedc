"""Fixtures: servers for the tests of remote stores, and patience for busy servers."""

import pytest

from tests.servers import patience


@pytest.fixture
def patient_calls(monkeypatch):
    """No call whose deadline the store sets fails because the machine is busy."""
    patience.make_patient(monkeypatch)
