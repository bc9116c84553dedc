"""The state of a tier, without threads: what each event leads to, by table and by property."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.errors import ConfigError, StoreError, StorePlaceError
from kvferry.store.tiers.health import Health, Limit, Patience, State
from kvferry.testing.clock import FakeClock

PATIENCE = Patience()
AWAY = StoreError("it does not answer")
NOT_A_STORE = StorePlaceError("it is not a kvferry store")
WRONG = ConfigError("no such option")


def make(*events, clock=None):
    """A tier's health after these events; opened first, unless the first event is about that."""
    health = Health("store x://y", clock or FakeClock(), PATIENCE)
    if not (events and events[0][0] in ("open_failed", "is_late", "close")):
        health.opened()
    for name, *given in events:
        getattr(health, name)(*given)
    return health


FAIL = ("failed", "down", 0)
GO_AWAY = [FAIL] * PATIENCE.max_failures


@pytest.mark.parametrize(
    ("events", "state", "accepts_writes", "seconds_to_try"),
    [
        ([], State.UP, True, math.inf),
        ([FAIL] * 2, State.UP, True, math.inf),
        ([FAIL, FAIL, ("succeeded", 0), FAIL, FAIL], State.UP, True, math.inf),
        (GO_AWAY, State.AWAY, False, 0.5),
        ([*GO_AWAY, FAIL], State.AWAY, False, 0.5),
        ([*GO_AWAY, ("succeeded", 0)], State.AWAY, False, 0.5),
        ([*GO_AWAY, ("succeeded", 1)], State.UP, True, math.inf),
        ([*GO_AWAY, ("succeeded", 1), *GO_AWAY], State.UP, True, math.inf),
        ([("write_failed", 0.0, 0)], State.REFUSING, False, -math.inf),
        ([("write_failed", 0.0, 0), ("begin_check",)], State.REFUSING, False, math.inf),
        ([("write_failed", 0.0, 0), ("stored",)], State.REFUSING, False, -math.inf),
        ([("no_room", 1.0)], State.REFUSING, False, math.inf),
        ([("no_room", 1.0), *GO_AWAY], State.AWAY, False, 0.5),
        ([*GO_AWAY, ("no_room", 1.0), ("succeeded", 1)], State.UP, True, math.inf),
        ([*GO_AWAY, ("write_failed", 1.0, 0), ("succeeded", 1)], State.UP, True, math.inf),
        ([*GO_AWAY, ("succeeded", 1), ("write_failed", 1.0, 0)], State.UP, True, math.inf),
        ([("close",), ("opened",)], State.CLOSED, False, math.inf),
        ([*GO_AWAY, ("close",), ("succeeded", 1)], State.CLOSED, False, math.inf),
        ([("close",), FAIL, ("no_room", 1.0)], State.CLOSED, False, math.inf),
        ([("open_failed", AWAY)], State.OPENING, False, 5.0),
        ([("open_failed", NOT_A_STORE)], State.OPENING, False, 5.0),
        ([("open_failed", WRONG)], State.OPENING, False, math.inf),
        ([("open_failed", AWAY), ("open_failed", NOT_A_STORE)], State.OPENING, False, 5.0),
        ([("open_failed", AWAY), ("open_failed", OSError())], State.OPENING, False, math.inf),
        ([("open_failed", AWAY), ("opened",)], State.UP, True, math.inf),
        ([("is_late", 2.0), FAIL, ("succeeded", 0)], State.OPENING, False, -math.inf),
    ],
)
def test_events_lead_to_a_state(events, state, accepts_writes, seconds_to_try):
    clock = FakeClock()
    health = make(*events, clock=clock)
    assert health.state is state
    assert health.accepts_writes is accepts_writes
    assert health.next_try - clock() == seconds_to_try


@pytest.mark.parametrize(
    ("events", "lines"),
    [
        ([("opened",)], []),
        ([("is_late", 2.0), ("opened",)], ["did not open within 2 s", "opened after"]),
        (
            [("open_failed", AWAY), ("open_failed", AWAY), ("is_late", 2.0), ("opened",)],
            ["cannot be opened: it does not answer: serving without it", "opened after"],
        ),
        ([("open_failed", NOT_A_STORE)], []),
        ([("open_failed", WRONG)], []),
        (
            [(name, NOT_A_STORE) for name in ("open_failed", "is_left_out", "open_failed")],
            ["it is not a kvferry store: serving without it until it can"],
        ),
        (
            [("is_late", 2.0), *[("open_failed", NOT_A_STORE)] * 2, ("open_failed", AWAY)],
            [
                "did not open",
                "cannot be opened: it is not a kvferry store",
                "does not answer: serv",
            ],
        ),
        (
            [("is_late", 2.0), ("open_failed", WRONG)],
            ["did not open", "cannot be opened: no such option"],
        ),
        ([("opened",), *[FAIL, ("succeeded", 0)] * 20], []),
        (
            [("opened",), *GO_AWAY, FAIL, ("succeeded", 1)],
            ["not used until it answers: down", "used again after 0.0 s"],
        ),
        (
            [("opened",), *[("write_refused", "read-only")] * 3, ("no_room", 0.0), ("stored",)],
            ["answers, but a value could not be stored: read-only"],
        ),
        ([("opened",), *[("no_room", 0.0)] * 3], ["answers, but it has no room for a value"]),
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
    assert make(("is_late", 1.0)).may_create
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


def test_a_store_that_comes_and_goes_is_asked_less_and_less_and_says_little():
    clock = FakeClock()
    health = make(clock=clock)
    logged = []
    for _ in range(600):  # a minute: trials succeed, and what comes then fails
        clock.advance(0.1)
        if health.is_up:
            logged += [health.failed("why", health.generation) for _ in GO_AWAY]
        elif health.claim_try():
            logged.append(health.succeeded(health.generation))
    assert health.generation < 20
    assert len(list(filter(None, logged))) == 3


def test_writes_pause_for_a_share_of_what_the_failed_one_took():
    clock = FakeClock()
    health = make(("write_failed", 2.0, 0), clock=clock)
    clock.advance(8.4)
    assert not health.accepts_writes
    clock.advance(0.2)
    assert health.accepts_writes
    assert health.state is State.REFUSING
    health.stored()
    assert health.state is State.UP


def test_refusals_end_when_a_write_succeeds_long_after_the_last():
    clock = FakeClock()
    health = make(("no_room", 0.0), clock=clock)
    clock.advance(PATIENCE.accepts_again_seconds - 1)
    assert not health.stored()
    clock.advance(1)
    assert health.stored() == "store x://y: takes values again"
    assert not health.stored()


def test_a_limit_follows_what_calls_took():
    limit = Limit(0.5, 30.0)
    assert limit.seconds == 2.0
    for _ in range(50):
        limit.saw(1.0)
    assert 2.0 <= limit.seconds < 2.5
    for _ in range(100):
        limit.saw(0.001)
    assert limit.seconds == 0.5
    for _ in range(100):
        limit.saw(1000.0)
    assert limit.seconds == 30.0


class AnyEvents(RuleBasedStateMachine):
    """Any events in any order keep what a tier relies on."""

    def __init__(self):
        super().__init__()
        self.clock = FakeClock()
        self.health = Health("store x", self.clock, PATIENCE)
        self.in_a_row = 0
        self.went_away_at = 0.0

    generations = st.integers(0, 3)

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.6, 6.0, 100.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(error=st.sampled_from([AWAY, NOT_A_STORE]))
    def open_fails(self, error):
        before = self.health.state
        self.health.open_failed(error)
        assert self.health.state is before

    @rule()
    def opens(self):
        was_opening = self.health.state is State.OPENING
        self.health.opened()
        assert not was_opening or self.health.state is State.UP
        if was_opening:
            self.in_a_row = 0

    @rule(old=generations)
    def fails(self, old):
        was_up, generation = self.health.is_up, self.health.generation
        self.health.failed("why", generation - old)
        if was_up and not old:
            self.in_a_row += 1
        assert (self.health.generation > generation) == (was_up and self.in_a_row >= 3)
        if self.health.generation > generation:
            assert self.health.state is State.AWAY
            self.in_a_row, self.went_away_at = 0, self.clock()

    @rule(old=generations)
    def succeeds(self, old):
        before = self.health.state
        self.health.succeeded(self.health.generation - old)
        if not old and before not in (State.OPENING, State.CLOSED):
            self.in_a_row = 0
            assert self.health.is_up
        else:
            assert self.health.state is before

    @rule(old=generations, seconds=st.floats(0.0, 10.0))
    def write_fails(self, old, seconds):
        was_up = self.health.is_up
        self.health.write_failed(seconds, self.health.generation - old)
        assert self.health.is_up is was_up, "a store that refuses writes is read"
        if was_up and not old:
            assert not self.health.accepts_writes

    @rule(seconds=st.floats(0.0, 10.0))
    def has_no_room(self, seconds):
        was_up = self.health.is_up
        self.health.no_room(seconds)
        assert self.health.is_up is was_up

    @rule()
    def stores(self):
        accepted = self.health.accepts_writes
        self.health.stored()
        assert self.health.accepts_writes is accepted

    @rule()
    def tries(self):
        is_due = self.clock() >= self.health.next_try
        assert self.health.claim_try() is is_due
        self.health.begin_check()
        assert not self.health.claim_try(), "one at a time"

    @precondition(lambda self: self.health.state is State.AWAY)
    @rule()
    def is_tried_soon(self):
        assert self.health.next_try <= self.clock() + PATIENCE.longest_pause_seconds

    @rule(is_time=st.integers(0, 9))
    def closes(self, is_time):
        if not is_time:
            self.health.close()

    @invariant()
    def agrees_with_itself(self):
        health = self.health
        assert not health.accepts_writes or health.is_up
        assert health.state is not State.CLOSED or health.next_try == math.inf
        assert health.is_up == (health.state in (State.UP, State.REFUSING))


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
