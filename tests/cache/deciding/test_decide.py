"""What a look-up comes to, by what there is: cases of values, without a pool, a store or a clock.

A prompt is a word with a letter for each of its chunks, of `CHUNK` tokens: H held, O held and
computed here, C with a slot but not brought yet, S stored. The first chunk of another letter ends
what is known: A the store is asked for it, E it may come, L it lacks, F it could not be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.blocks.tables import Tables
from kvferry.cache.deciding.lookup import (
    MAX_ASKED,
    Ask,
    Compute,
    Decision,
    Fetch,
    Lookup,
    Promise,
    Wait,
)
from kvferry.cache.deciding.miss import ABSENT, Miss
from kvferry.cache.deciding.policy import MIN_WAIT_SECONDS, LoadPolicy
from kvferry.cache.deciding.search import (
    Asking,
    Awaiting,
    Fetching,
    HandoverPlan,
    Wanted,
    Worth,
)
from kvferry.cache.deciding.survey import (
    ASKED,
    COMING,
    EXPECTED,
    FAILED,
    HELD,
    LACKING,
    STORED,
    ChunkView,
    Survey,
)
from kvferry.contract.messages import LookupMiss
from kvferry.contract.spec import EngineSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import ChunkKey, MultimodalItem
from tests.cache.hosts import make_groups
from tests.host_tables import parts_of_tables, table_per_group

BLOCK, CHUNK, SLOTS, PATIENCE, NOW = 4, 8, 10, 5.0, 1000.0
ALL = frozenset([0])

AWAY = Miss(LookupMiss.AWAY, "the store is away")
BROKEN = Miss(LookupMiss.DAMAGED, "its root is wrong")
NOT_PRODUCED = Miss(LookupMiss.NOT_PRODUCED, "the rest did not come")
NO_MEMORY, DEADLINE = Miss(LookupMiss.NO_MEMORY), Miss(LookupMiss.DEADLINE)
AT_MOST_12 = Miss(LookupMiss.NOT_LOADING, "the request loads 12 tokens at most")

VIEWS = {
    "H": ChunkView(HELD, ALL),
    "O": ChunkView(HELD, ALL, is_own=True),
    "C": ChunkView(COMING),
    "S": ChunkView(STORED, tier="near"),
    "A": ChunkView(ASKED, miss=AWAY),
    "E": ChunkView(EXPECTED, miss=ABSENT),
    "L": ChunkView(LACKING, miss=ABSENT),
    "F": ChunkView(FAILED, miss=BROKEN),
}

ASKS, ASKED_LONG = Asking(NOW + 1), Asking(NOW)
PLAN = HandoverPlan(num_chunks=4, until=NOW + 4, latest=NOW + 40, miss=NOT_PRODUCED)
HELD_BY_PEER = PLAN._replace(is_held=True)
AWAITED = Awaiting(NOW + 3, 2)


def make_lookup(window: int | None = None, rates: LoadPolicy | None = None) -> Lookup:
    (full,) = make_groups(block_size=BLOCK)
    groups = (full,) if window is None else (replace(full, window=window),)
    spec = EngineSpec(
        identity=ModelIdentity(weights=b"w" * 32, config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
        tables=parts_of_tables(table_per_group(groups)),
    )
    return Lookup(Tables(spec), CHUNK, PATIENCE, rates or LoadPolicy(PATIENCE, lambda: NOW))


def slow_rates(*, is_due: bool = False) -> LoadPolicy:
    """The tier is slower than computing. `is_due`: so it is time to try it again."""
    times = iter([NOW - 1000.0 * is_due])
    rates = LoadPolicy(PATIENCE, lambda: next(times, NOW))
    rates.saw_slow_load("near", 100, 10.0)
    rates.saw_compute(1000, 1.0)
    return rates


def survey_of(word: str, first: int = 0, taken: int = 0) -> Survey:
    views = [VIEWS[letter] for letter in word[first:]]
    ends = [number for number, view in enumerate(views) if view.miss is not None]
    stop = ends[0] if ends else len(views)
    return Survey(first, views[:stop], views[stop] if ends else None, SLOTS, taken)


def decide(
    word: str,
    state: Any = ASKS,
    *,
    local: int = 0,
    taken: int = 0,
    lookup: Lookup | None = None,
    num_tokens: int | None = None,
    wanted: dict[str, Any] | None = None,
    **ask: Any,
) -> Decision:
    keys = [ChunkKey(number.to_bytes(32)) for number in range(len(word))]
    num_tokens = CHUNK * len(word) + 1 if num_tokens is None else num_tokens
    asked = Ask(Wanted(keys, began_at=NOW - 10, **(wanted or {})), num_tokens, local, NOW, state)
    survey = survey_of(word, local // CHUNK, taken)
    return (lookup or make_lookup()).decide(survey, asked._replace(**ask))


def test_all_names_of_a_chunk_are_in_the_cases():
    assert len({view.what for view in VIEWS.values()}) == 7


# -- promise, fetch or compute --------------------------------------------------------------------

PROMISED = {
    "all is held": ("HHH", {}, 24, None),
    "the last token is computed": ("HHH", {"num_tokens": 24}, 20, None),
    "the next chunk is lacking": ("HHL", {}, 16, ABSENT),
    "the next chunk could not be read": ("HHF", {}, 16, BROKEN),
    "the store did not answer in time": ("HHA", {"state": ASKED_LONG}, 16, AWAY),
    "it comes too late": ("HHS", {"state": Fetching(NOW, NOW - 1)}, 16, DEADLINE),
    "it has no slot": ("HHS", {"state": Fetching(NOW, 0.0), "taken": SLOTS}, 16, NO_MEMORY),
    "its slot is not filled": ("HHC", {"state": Fetching(NOW, 0.0), "taken": SLOTS}, 16, DEADLINE),
    "no slot was found for it": ("HHS", {"in_vain": 24}, 16, DEADLINE),
    "the request wants no more": ("HHH", {"wanted": {"most": 12}}, 12, AT_MOST_12),
    "the request wants what is there": ("HHL", {"wanted": {"most": 12}}, 12, AT_MOST_12),
    "it would end in an item": (
        "HHH", {"wanted": {"items": (MultimodalItem(digest="i", offset=10, length=20),)}}, 8, None,
    ),
    "nothing comes of a wait": ("HHL", {"wanted": {"plan": PLAN}, "may_appear": False}, 16,
                                NOT_PRODUCED),
}  # fmt: skip
"""The prompt, the look-up, the end of the hit, and why it is not longer."""


@pytest.mark.parametrize("case", PROMISED)
def test_the_longest_hit_that_is_held_is_promised(case):
    word, how, stop, miss = PROMISED[case]
    act = decide(word, **how).act
    assert isinstance(act, Promise)
    assert (act.hit.start, act.hit.stop, act.miss) == (0, stop, miss)


def test_what_the_engine_has_itself_is_not_promised():
    act = decide("HHHL", local=12).act
    assert isinstance(act, Promise)
    assert (act.hit.start, act.hit.stop, act.hit.numbers) == (12, 24, range(1, 3))


COMPUTED = {
    "nothing is there": ("LHH", {}, ABSENT),
    "a store is at fault": ("AHH", {"state": ASKED_LONG}, AWAY),
    "the first chunk could not be read": ("FHH", {}, BROKEN),
    "nothing is wanted": ("HHH", {"wanted": {"most": 0}},
                          Miss(LookupMiss.NOT_LOADING, "the request loads 0 tokens at most")),
    "the host has all": ("HHH", {"local": 24}, None),
    "no slot for the copy": ("HH", {"wanted": {"place": 0.9}, "has_spare": False}, NO_MEMORY),
    "the wait was in vain": ("LHH", {"state": Asking(NOW, Awaiting(NOW - 1, 0)),
                                     "wanted": {"plan": PLAN}}, NOT_PRODUCED),
    "all was given to another place": ("LHH", {"wanted": {"plan": HandoverPlan(
        miss=Miss(LookupMiss.OTHER_PRODUCER, "version 2"))}},
        Miss(LookupMiss.OTHER_PRODUCER, "version 2")),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPUTED)
def test_otherwise_all_is_computed_and_it_is_said_why(case):
    word, how, miss = COMPUTED[case]
    assert decide(word, **how).act == Compute(miss)


FETCHED = {
    "all is stored": ("SSS", {}, 24, range(3)),
    "some is held": ("HSH", {}, 24, range(3)),
    "what is stored ends": ("HSL", {}, 16, range(2)),
    "an earlier fetch found no slot": ("SSS", {"in_vain": 24}, None, None),
    "another request fills it": ("HCH", {}, 24, range(3)),
}


@pytest.mark.parametrize("case", FETCHED)
def test_what_is_not_held_is_fetched(case):
    word, how, stop, numbers = FETCHED[case]
    act = decide(word, **how).act
    if stop is None:  # all of it is one run: no shorter hit needs less
        assert act == Compute(DEADLINE)
        return
    assert isinstance(act, Fetch)
    assert (act.stop, act.hit.numbers) == (stop, numbers)
    assert act.state == Fetching(NOW + PATIENCE, NOW)


def test_a_fetch_keeps_its_deadline_and_has_as_long_as_computing_takes():
    running = Fetching(NOW + 1, NOW - 1)
    assert decide("SSS", running).act.state is running
    rates = LoadPolicy(PATIENCE, lambda: NOW)
    rates.saw_compute(1000, 0.1)
    assert decide("SSS", lookup=make_lookup(rates=rates)).act.state.until == NOW + MIN_WAIT_SECONDS


def test_a_hit_of_more_chunks_than_slots_is_shorter():
    act = decide("H" * (SLOTS + 2)).act
    assert isinstance(act, Promise)
    assert (act.hit.stop, act.miss) == (CHUNK * SLOTS, NO_MEMORY)
    # If it is audited, it leaves a slot for the copy, and ends before the chunk that is compared.
    act = decide("H" * (SLOTS + 2), wanted={"place": 0.9}).act
    assert (act.hit.stop, act.hit.audited) == (CHUNK * (SLOTS - 2), SLOTS - 2)


def test_a_window_needs_the_last_chunks_only():
    lookup = make_lookup(window=9)
    act = decide("SSSHH", lookup=lookup).act
    assert isinstance(act, Promise)
    assert (act.hit.stop, act.hit.numbers) == (40, range(4, 5))
    # A shorter hit needs other chunks.
    act = decide("SSSHS", Fetching(NOW, 0.0), lookup=lookup).act
    assert (act.hit.stop, act.hit.numbers) == (32, range(3, 4))


# -- waits ----------------------------------------------------------------------------------------

HAS_COME = Awaiting(NOW + PATIENCE, 3, has_come=True)
WAITS = {
    # The store has not answered.
    "asked": ("HA", ASKS, {}, Wait(ASKS, None, 1)),
    # Another engine brings the rest: from the start, longer, and longer again.
    "begins": ("LLLL", ASKS, {"wanted": {"plan": PLAN}},
               Wait(Awaiting(PLAN.until, 0), ABSENT, 0, range(4))),
    "goes on": ("LLLL", AWAITED, {"wanted": {"plan": PLAN}, "is_due": False},
                Wait(AWAITED, ABSENT, 0)),
    "asked again": ("LLLL", AWAITED, {"wanted": {"plan": PLAN}},
                    Wait(AWAITED, ABSENT, 0, range(4))),
    "it may come": ("LELL", AWAITED, {"wanted": {"plan": HELD_BY_PEER}, "is_due": False,
                                      "local": CHUNK}, Wait(AWAITED, ABSENT, 1)),
    # The wait has ended: the store is asked once more.
    "once more": ("LLLL", Awaiting(NOW, 0), {"wanted": {"plan": PLAN}},
                  Wait(Asking(NOW + 0.25, Awaiting(NOW, 0)), ABSENT, 0, range(4))),
    # Also if the host looks up late, and had no answer before.
    "at all": ("LLLL", ASKED_LONG, {"wanted": {"plan": PLAN._replace(until=NOW)}},
               Wait(Asking(NOW + 0.25, Awaiting(NOW, 0)), ABSENT, 0, range(4))),
}  # fmt: skip


@pytest.mark.parametrize("case", WAITS)
def test_it_waits_for(case):
    word, state, how, expected = WAITS[case]
    assert decide(word, state, **how) == Decision(expected)


def test_what_came_is_fetched_and_gives_the_rest_more_time():
    decision = decide("SSSL", AWAITED, wanted={"plan": PLAN}, is_due=False)
    act = decision.act
    assert isinstance(act, Wait)
    assert (act.state, act.asks, act.brings) == (HAS_COME, range(3, 4), range(3))
    assert decision.came
    # Also after the deadline.
    late = AWAITED._replace(until=NOW - 1)
    assert decide("SSSL", late, wanted={"plan": PLAN}).act.state == HAS_COME
    # Half of the slots are left to requests that do not wait.
    act = decide("SSSL", AWAITED, wanted={"plan": PLAN}, taken=SLOTS // 2).act
    assert (act.state, act.hit) == (HAS_COME, None)
    # At the latest time it ends all the same.
    late = PLAN._replace(latest=NOW + 1)
    assert decide("SSSL", AWAITED, wanted={"plan": late}).act.state.until == NOW + 1


def test_what_the_engine_has_itself_did_not_come():
    decision = decide("HHHL", Awaiting(NOW + 3, 0), wanted={"plan": PLAN}, local=24)
    assert (decision.act.state, decision.came) == (Awaiting(NOW + 3, 0), False)


ENDED = {
    "all came": ("HHHH", AWAITED, PLAN, 0, True),
    "a peer lacks it": ("HHLL", AWAITED, HELD_BY_PEER, 0, False),
    "a chunk could not be read": ("HHFL", AWAITED, PLAN, 0, False),
    "asked once more": ("HHLL", Asking(NOW, Awaiting(NOW - 1, 2)), PLAN, 0, False),
    "the host has what was awaited": ("HHHL", AWAITED, PLAN._replace(num_chunks=3), 24, False),
    "a wait that was over at once": ("HHLL", ASKS, PLAN._replace(until=NOW - 10), 0, False),
}


@pytest.mark.parametrize("case", ENDED)
def test_it_waits_no_more_if(case):
    word, state, plan, local, came = ENDED[case]
    decision = decide(word, state, wanted={"plan": plan}, local=local)
    assert not isinstance(decision.act, Wait)
    assert decision.came == came


def test_a_question_that_is_repeated_is_short():
    plan = PLAN._replace(num_chunks=2 * MAX_ASKED)
    act = decide("L" * (2 * MAX_ASKED), AWAITED, wanted={"plan": plan}).act
    assert act.asks == range(MAX_ASKED)


# -- slow tiers -----------------------------------------------------------------------------------

SLOWER = Miss(LookupMiss.SLOWER, "expected 4.800 s to load, 0.024 s to compute")


def test_what_is_computed_sooner_is_not_loaded_and_that_is_kept():
    lookup = make_lookup(rates=slow_rates())
    decision = decide("SSS", lookup=lookup)
    assert decision == Decision(Compute(SLOWER), worth=Worth(0, SLOWER.why))
    # What the request does not want takes no time.
    act = decide("SSS", lookup=lookup, wanted={"most": 12}).act
    assert act == Compute(Miss(LookupMiss.SLOWER, "expected 3.200 s to load, 0.016 s to compute"))
    # Also if the tier is fast again, but for what is in memory by now.
    kept = {"worth": decision.worth, "is_chosen": True}
    assert decide("SSS", **kept).act == Compute(SLOWER)
    act = decide("HSS", **kept).act
    assert isinstance(act, Promise)
    assert (act.hit.stop, act.miss) == (8, SLOWER)
    act = decide("SHS", local=8, **kept).act
    assert (act.hit.start, act.hit.stop) == (8, 16)


def test_what_was_chosen_once_is_not_chosen_again():
    lookup = make_lookup(rates=slow_rates())
    assert isinstance(decide("SSS", lookup=lookup, is_chosen=True).act, Fetch)
    assert isinstance(decide("SSS", Fetching(NOW + 1, NOW), lookup=lookup).act, Fetch)


def test_nobody_waits_for_what_would_not_be_loaded():
    lookup = make_lookup(rates=slow_rates())
    assert isinstance(decide("SSLL", AWAITED, lookup=lookup, wanted={"plan": PLAN}).act, Compute)


def test_a_slow_tier_is_tried_again():
    decision = decide("SSS", lookup=make_lookup(rates=slow_rates(is_due=True)))
    assert isinstance(decision.act, Fetch)
    assert (decision.worth, decision.is_trial) == (None, True)


# -- audits ---------------------------------------------------------------------------------------

AUDITED = {
    "at its end": ("HHH", 0.9, False, 2, 16),
    "at its start": ("HHH", 0.1, False, 0, 0),
    "not what was computed here": ("HHO", 0.9, False, 1, 8),
    "also what was computed here": ("HHO", 0.9, True, 2, 16),
    "nothing, as all was computed here": ("OOO", 0.9, False, None, 24),
}


@pytest.mark.parametrize("case", AUDITED)
def test_a_hit_is_compared(case):
    word, place, audits_own, audited, stop = AUDITED[case]
    act = decide(word, wanted={"place": place}, audits_own=audits_own).act
    assert isinstance(act, Promise)
    assert (act.hit.audited, act.hit.stop, act.hit.whole) == (audited, stop, range(3))


def test_what_the_engine_has_itself_is_not_computed_again_for_an_audit():
    act = decide("HHH", local=20, wanted={"place": 0.9}).act
    assert (act.hit.start, act.hit.stop, act.hit.audited) == (20, 20, 2)


def test_a_decision_changes_nothing():
    rates = slow_rates(is_due=True)
    lookup = make_lookup(rates=rates)
    first = decide("HSSL", AWAITED, lookup=lookup, wanted={"plan": PLAN})
    assert decide("HSSL", AWAITED, lookup=lookup, wanted={"plan": PLAN}) == first
