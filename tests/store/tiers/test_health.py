"""The state of a tier, without threads: what each event leads to."""

from __future__ import annotations

import math

import pytest

from kvferry.errors import ConfigError, Fault, FaultKind, StoreError, StorePlaceError
from kvferry.store.tiers.health import Health, Patience, State
from kvferry.testing.clock import FakeClock

PATIENCE = Patience()
AWAY = StoreError(FaultKind.AWAY, "it does not answer")
DOWN = Fault(FaultKind.AWAY, "down")
NOT_A_STORE = StorePlaceError("it is not a kvferry store")
WRONG = ConfigError("no such option")


def make(*events, clock=None):
    """A tier's health after these events; opened first, unless the first event is about that."""
    health = Health("store x://y", clock or FakeClock(), PATIENCE)
    if not (events and events[0][0] in ("open_failed", "is_left_out", "close")):
        health.opened()
    for name, *given in events:
        getattr(health, name)(*given)
    return health


FAIL = ("failed", DOWN)
DOUBT = [FAIL] * PATIENCE.max_failures
LOST = ("is_lost", DOWN)
GO_AWAY = [*DOUBT, LOST]
COME_BACK = ("trial_answered",)
LATE = ("is_left_out", "did not open")


@pytest.mark.parametrize(
    ("events", "state", "accepts_writes", "seconds_to_try"),
    [
        ([], State.UP, True, math.inf),
        ([FAIL] * 2, State.UP, True, math.inf),
        ([FAIL, FAIL, ("answered",), FAIL, FAIL], State.UP, True, math.inf),
        ([FAIL, FAIL, COME_BACK, FAIL, FAIL], State.UP, True, math.inf),
        (DOUBT, State.UP, True, -math.inf),
        ([*DOUBT, ("answered",)], State.UP, True, -math.inf),
        ([*DOUBT, COME_BACK], State.UP, True, math.inf),
        ([*DOUBT, COME_BACK, FAIL, FAIL], State.UP, True, math.inf),
        ([("write_failed", DOWN), *DOUBT, COME_BACK], State.REFUSING, False, math.inf),
        ([LOST], State.AWAY, False, 0.5),
        (GO_AWAY, State.AWAY, False, 0.5),
        ([*GO_AWAY, FAIL], State.AWAY, False, 0.5),
        ([*GO_AWAY, ("answered",)], State.AWAY, False, 0.5),
        ([*GO_AWAY, COME_BACK], State.UP, True, math.inf),
        ([*GO_AWAY, COME_BACK, FAIL, FAIL], State.UP, True, math.inf),
        ([*GO_AWAY, COME_BACK, *GO_AWAY], State.AWAY, False, 1.0),
        ([("write_failed", DOWN)], State.REFUSING, False, -math.inf),
        ([("write_failed", DOWN), COME_BACK], State.REFUSING, False, math.inf),
        ([("write_failed", DOWN), ("stored",)], State.REFUSING, False, -math.inf),
        ([("write_failed", DOWN), *GO_AWAY], State.AWAY, False, 0.5),
        ([("write_failed", DOWN), *GO_AWAY, COME_BACK], State.UP, True, math.inf),
        ([("no_room",)], State.REFUSING, False, math.inf),
        ([("no_room",), *GO_AWAY], State.AWAY, False, 0.5),
        ([*GO_AWAY, ("no_room",), COME_BACK], State.UP, True, math.inf),
        ([*GO_AWAY, ("write_failed", DOWN), COME_BACK], State.UP, True, math.inf),
        ([("close",), ("opened",)], State.CLOSED, False, math.inf),
        ([*GO_AWAY, ("close",), COME_BACK], State.CLOSED, False, math.inf),
        ([("close",), FAIL, ("no_room",)], State.CLOSED, False, math.inf),
        ([("open_failed", AWAY)], State.OPENING, False, 5.0),
        ([("open_failed", NOT_A_STORE)], State.OPENING, False, 5.0),
        ([("open_failed", WRONG)], State.OPENING, False, math.inf),
        ([("open_failed", AWAY), ("open_failed", NOT_A_STORE)], State.OPENING, False, 5.0),
        ([("open_failed", AWAY), ("open_failed", OSError())], State.OPENING, False, math.inf),
        ([("open_failed", AWAY), ("opened",)], State.UP, True, math.inf),
        ([("open_failed", AWAY), *[FAIL] * 2, ("opened",), FAIL], State.UP, True, math.inf),
        ([LATE, FAIL, COME_BACK], State.OPENING, False, -math.inf),
        ([FAIL, ("open_failed", AWAY)], State.UP, True, math.inf),
    ],
)
def test_events_lead_to_a_state(events, state, accepts_writes, seconds_to_try):
    clock = FakeClock()
    health = make(*events, clock=clock)
    assert health.state is state
    assert health.accepts_writes is accepts_writes
    assert health.next_try - clock() == seconds_to_try


def test_one_failure_that_took_long_is_enough_for_a_trial():
    health = make()
    health.failed(DOWN, is_long=True)
    assert health.next_try == -math.inf
    assert health.state is State.UP
    assert "not used until it answers: down" in health.is_lost(DOWN)
    assert health.state is State.AWAY


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        ([("opened",)], []),
        ([LATE, ("opened",)], ["did not open", "opened after"]),
        (
            [("open_failed", AWAY), ("open_failed", AWAY), LATE, ("opened",)],
            ["cannot be opened: it does not answer: serving without it", "opened after"],
        ),
        ([("open_failed", NOT_A_STORE)], []),
        ([("open_failed", WRONG)], []),
        (
            [
                ("open_failed", NOT_A_STORE),
                ("is_left_out", "cannot be opened"),
                ("open_failed", NOT_A_STORE),
            ],
            ["cannot be opened"],
        ),
        (
            [LATE, *[("open_failed", NOT_A_STORE)] * 2, ("open_failed", AWAY)],
            [
                "did not open",
                "cannot be opened: it is not a kvferry store",
                "does not answer: serv",
            ],
        ),
        ([LATE, ("open_failed", WRONG)], ["did not open", "cannot be opened: no such option"]),
        ([("opened",), *[FAIL, ("answered",)] * 20], []),
        (
            [("opened",), *GO_AWAY, FAIL, COME_BACK],
            ["not used until it answers: down", "used again after 0.0 s"],
        ),
        (
            [
                ("opened",),
                *[("write_failed", Fault(FaultKind.READ_ONLY, "read-only")), COME_BACK] * 3,
                ("no_room",),
                ("stored",),
            ],
            ["answers, but a value could not be stored: read-only"],
        ),
        (
            [("opened",), ("write_failed", Fault(FaultKind.READ_ONLY, "read-only")), *GO_AWAY],
            ["not used until"],
        ),
        (
            [
                ("opened",),
                ("write_failed", Fault(FaultKind.READ_ONLY, "read-only")),
                ("close",),
                COME_BACK,
            ],
            [],
        ),
        ([("opened",), *[("no_room",)] * 3], ["answers, but it has no room for a value"]),
    ],
)
def test_a_change_has_one_log_line(events, lines):
    health = Health("store x://y", FakeClock(), PATIENCE)
    logged = [line for name, *given in events if (line := getattr(health, name)(*given))]
    assert len(logged) == len(lines)
    for line, part in zip(logged, lines, strict=True):
        assert line.startswith("store x://y")
        assert part in line


def test_below_a_mount_that_was_away_no_store_is_made():
    assert make(LATE).may_create
    assert not make(("open_failed", AWAY)).may_create
    assert make(("open_failed", NOT_A_STORE)).may_create


def test_trials_of_an_away_store_come_at_growing_pauses():
    clock = FakeClock()
    health = make(*GO_AWAY, clock=clock)
    pauses = []
    for _ in range(6):
        waited = 0.0
        while not health.claim_try():
            clock.advance(0.125)
            waited += 0.125
        assert not health.claim_try()
        pauses.append(waited)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    opening = make(LATE)
    assert opening.claim_try()
    assert not opening.claim_try(), "one at a time"


def test_a_store_that_comes_and_goes_is_asked_less_and_less_and_says_little():
    clock = FakeClock()
    health = make(clock=clock)
    logged, num_away = [], 0
    for _ in range(600):  # a minute: trials succeed, and what comes then fails
        clock.advance(0.1)
        if health.is_up:
            num_away += 1
            logged.append(health.is_lost(DOWN))
        elif health.claim_try():
            logged.append(health.trial_answered())
    assert num_away < 20
    assert len(list(filter(None, logged))) == 3


def test_writes_pause_longer_with_each_failure_until_one_succeeds():
    clock = FakeClock()
    health = make(clock=clock)

    def pause():
        health.write_failed(DOWN)
        health.trial_answered()
        waited = 0.0
        while not health.accepts_writes:
            clock.advance(0.125)
            waited += 0.125
        assert health.state is State.REFUSING
        return waited

    assert [pause() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    health.stored()
    assert health.state is State.UP
    assert pause() == 0.5


def test_refusals_end_when_a_write_succeeds_long_after_the_last():
    clock = FakeClock()
    health = make(("no_room",), clock=clock)
    clock.advance(PATIENCE.accepts_again_seconds - 1)
    assert not health.stored()
    clock.advance(1)
    assert health.stored() == "store x://y: takes values again"
    assert not health.stored()
