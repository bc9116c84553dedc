"""When something that failed is tried again."""

from __future__ import annotations

import pytest

from kvferry.store.backoff import Backoff
from kvferry.testing.clock import FakeClock


@pytest.mark.parametrize(
    ("given", "outcomes", "pauses"),
    [
        ({}, "fffff", [1, 1, 1, 1, 1]),
        ({"longest": 5.0}, "fffff", [1, 2, 4, 5, 5]),
        ({"longest": 5.0}, "ffsff", [1, 2, 0, 1, 2]),
        ({}, "", []),
    ],
)
def test_a_try_is_due_after_each_pause_and_not_before(given, outcomes, pauses):
    clock = FakeClock()
    backoff, found = Backoff(clock, 1.0, **given), []
    assert backoff.is_over
    for outcome in outcomes:
        backoff.failed() if outcome == "f" else backoff.succeeded()
        waited = 0.0
        while not backoff.is_over:
            assert waited < 60, "it is never tried again"
            clock.advance(0.25)
            waited += 0.25
        found.append(waited)
        assert backoff.pause == (waited or backoff.pause)
    assert found == pauses
