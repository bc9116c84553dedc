"""Whatever begins, renews or ends the cache, before any hook: what is computed stays right, pins
are given back, and what is loaded and stored from then on is what the state says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.cache.epoch import BEING_HASHED, CacheIdentity
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import LookupMiss
from kvferry.errors import StoreError
from kvferry.journal import journal_lines
from kvferry.keys import UNREAD, ModelIdentity, Namespace
from kvferry.types import KVGroup
from tests.cache.keeping import PROMPT, open_store, wait_for

WEIGHTS = b"w" * 32
HIT = 40
OTHER = range(1000, 1041)


class After(NamedTuple):
    """What holds once the event has come."""

    hits: tuple[int | None, int]  # of the prompt that is stored, in turn; None: either
    stored: bool  # what is computed anew, and found by an engine that begins
    reset_hits: tuple[int, int]  # the same as `hits` after one more reset
    miss: LookupMiss | None = None


class Event(NamedTuple):
    happens: Callable[[CacheIdentity], object]
    after: After
    starts: bool = False  # without a digest
    before: Callable[[CacheIdentity], object] = lambda _identity: None


ON = After((HIT, HIT), True, (0, HIT))
RENEWED = After((None, HIT), False, (0, HIT))
OFF = After((0, 0), False, (0, 0), LookupMiss.NOT_LOADING)

EVENTS = {
    "named": Event(lambda it: it.name(WEIGHTS), ON, starts=True),
    "named after a reset": Event(lambda it: it.name(WEIGHTS), RENEWED, True, lambda it: it.reset()),
    "without a digest": Event(
        lambda it: it.stop("no digest", LookupMiss.HASHING),
        OFF._replace(miss=LookupMiss.HASHING),
        starts=True,
    ),
    "reset": Event(lambda it: it.reset(), RENEWED),
    "as at the start": Event(lambda it: it.resume_first(), ON, before=lambda it: it.reset()),
    "distrusted": Event(
        lambda it: it.distrust("differs"),
        After((0, 0), False, (0, HIT), LookupMiss.OTHER_MODEL),
    ),
    "stopped": Event(lambda it: it.stop("broken"), OFF),
    "distrusted, then stopped": Event(
        lambda it: (it.distrust("differs"), it.stop("broken"), it.distrust("differs")), OFF
    ),
}

POINTS = {
    "on_new_request": ("on_new_request", 0),
    "the first look-up": ("lookup", 0),
    "a later look-up": ("lookup", 1),
    "between a promise and its blocks": ("update_after_alloc", 0),
    "the plan of a fetch": ("build_plan", 0),
    "the report of a fetch": ("update_output", 0),
    "between a promise and its plan": ("build_plan", -1),
    "between a plan and its report": ("update_output", -1),
    "the end": ("request_finished", 0),
}
"""A hook, and before which of its calls: -1 is the first after blocks were given."""


class Interrupted(GuardedScheduler):
    """Something happens before one call of a hook, as on another thread."""

    def meet(self, role: Any, point: tuple[str, int], event: Callable[[], object]) -> None:
        counts: dict[str, int] = {}
        has_blocks, left = False, [event]

        def watch(name: str) -> None:
            hook = getattr(role, name)

            def called(*args: Any) -> Any:
                nonlocal has_blocks
                number, counts[name] = counts.get(name, 0), counts.get(name, 0) + 1
                wanted = has_blocks if point[1] < 0 else number == point[1]
                if left and name == point[0] and wanted:
                    left.pop()()
                has_blocks |= name == "update_after_alloc"
                return hook(*args)

            setattr(role, name, called)

        for name in {each for each, _ in POINTS.values()}:
            watch(name)
        self.left = left


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("event", EVENTS)
def test_an_event_before_any_hook(make_host, directory: Path, event: str, point: str):
    happens, after, starts, before = EVENTS[event]
    weights = UNREAD if starts else WEIGHTS
    host = make_host(store=open_store(directory), weights=weights)
    role, identity = host.scheduler, host.parts[0].identity
    before(identity)
    host.scheduler = Interrupted(role, host.observer, block_size=host.block_size)
    host.scheduler.meet(role, POINTS[point], lambda: happens(identity))
    for name, prompt in (("reads", PROMPT), ("writes", OTHER)):
        request = host.add(name, prompt)
        host.admit(request)
        host.complete(request)  # every byte in its blocks is looked at
        host.settle()
    # A request that was never looked up twice meets no later look-up, for example.
    if host.scheduler.left:
        host.scheduler.left.pop()()
    assert host.pool.num_taken == 0
    assert identity.state.miss is after.miss
    for expected in (after.hits, after.reset_hits):
        hits = []
        for number in range(2):
            hits.append(host.run(f"{expected} {number}", PROMPT).num_external_tokens)
            host.settle()
        assert hits[1] == expected[1]
        assert hits[0] == expected[0] or expected[0] is None
        assert host.pool.num_taken == 0
        assert host.scheduler.reset()
    assert host.observer["hook_failed"] <= 1, "only of blocks for a promise of before"
    assert host.observer["records_corrupt"] == 0
    other = make_host(store=open_store(directory))
    assert other.run("elsewhere", PROMPT).num_external_tokens == HIT, "what was stored is right"
    assert other.run("of this test", OTHER).num_external_tokens in (0, HIT)


@pytest.mark.parametrize("event", EVENTS)
def test_what_is_stored_afterwards_is_found_by_whoever_may(make_host, tmp_path, event: str):
    happens, after, starts, before = EVENTS[event]
    host = make_host(store=open_store(tmp_path), weights=UNREAD if starts else WEIGHTS)
    identity = host.parts[0].identity
    before(identity)
    happens(identity)
    host.run("writes", PROMPT)
    host.settle()
    other = make_host(store=open_store(tmp_path))
    assert other.run("reads", PROMPT).num_external_tokens == (HIT if after.stored else 0)


def test_a_request_of_a_time_without_a_name_is_not_stored_later(make_host, tmp_path: Path):
    """Its journal says why, although there is a name when it ends."""
    journal = tmp_path / "journal"
    host = make_host(store=open_store(tmp_path / "s"), weights=UNREAD, record=str(journal))
    early = host.add("early", PROMPT)
    assert host.admit(early) == 0
    host.step([early], tokens=8)
    host.parts[0].identity.name(WEIGHTS)
    host.complete(early)
    host.settle()
    assert host.observer["put_stored"] == 0
    assert host.run("later", PROMPT).num_external_tokens == 0
    host.settle()
    wait_for(lambda: host.observer["put_stored"] == 5)
    host.close()
    said = {line.request: line for _, line in journal_lines(journal)}
    assert said["early"].misses == said["early"].not_stored == {"hashing": len(PROMPT)}
    assert said["early"].why == BEING_HASHED
    assert "hashing" not in said["later"].misses


def identity_of(weights: bytes = WEIGHTS) -> CacheIdentity:
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=4)
    return CacheIdentity(
        ModelIdentity(weights=weights, config={}), lambda model: Namespace.of(model, (group,), 8)
    )


def test_one_outage_has_one_text_and_nothing_follows_a_final_one():
    identity = identity_of()
    assert identity.stop("the first")
    for writes in (
        lambda: identity.stop("another"),
        lambda: identity.distrust("differs"),
        identity.reset,
        identity.resume_first,
        lambda: identity.name(b"o" * 32),
    ):
        writes()
        assert identity.state[1:] == (LookupMiss.NOT_LOADING, "the first", True)


def test_each_epoch_has_a_number_and_a_name_of_its_own():
    identity = identity_of()
    first = identity.state.epoch
    assert first == (0, identity.first)
    seen = {first}
    for number in (1, 2):
        identity.reset()
        assert identity.state.epoch.number == number
        seen.add(identity.state.epoch)
    assert len({epoch.namespace for epoch in seen}) == 3
    identity.resume_first()
    assert identity.state.epoch == first
    assert identity.distrust("differs")
    assert not identity.distrust("again")
    identity.reset()
    assert identity.state.miss is None


def test_a_name_is_taken_once_and_not_after_the_end():
    identity = identity_of(UNREAD)
    assert identity.state == (None, LookupMiss.HASHING, BEING_HASHED, False)
    assert identity.first == identity.state.namespace == b""
    identity.name(WEIGHTS)
    assert identity.first == identity_of().first == identity.wait_first().digest
    identity.name(b"o" * 32)
    assert identity.first == identity_of().first
    assert identity.model.weights == WEIGHTS
    closed = identity_of(UNREAD)
    for _ in range(2):
        closed.close()
    with pytest.raises(StoreError, match="closed before"):
        closed.wait_first()
    closed.name(WEIGHTS)
    assert closed.state.epoch is None
