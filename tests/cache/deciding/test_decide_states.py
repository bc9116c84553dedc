"""What a look-up of a model with recurrent states comes to: a hit ends where a state is.

A prompt is a word as in `test_decide`. Behind every second chunk there may be a state, given by a
letter for each: H held, C with slots but not brought yet, S stored, A the store is asked for it; a
dot: there is none.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.blocks.tables import Tables
from kvferry.cache.config import StatePlaces
from kvferry.cache.deciding.lookup import Ask, Compute, Decision, Fetch, Lookup, Promise, Wait
from kvferry.cache.deciding.miss import ABSENT, Miss
from kvferry.cache.deciding.policy import LoadPolicy
from kvferry.cache.deciding.search import Asking, Awaiting, Fetching, Wanted
from kvferry.cache.deciding.survey import ASKED, COMING, HELD, STORED
from kvferry.contract.messages import LookupMiss
from kvferry.contract.spec import EngineSpec, StateSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.store.base import ASK_SECONDS
from kvferry.types import ChunkKey, MultimodalItem, StateComponent, StateKind, StateRun, TablePart
from tests.cache.deciding.test_decide import (
    ASKED_LONG,
    ASKS,
    CHUNK,
    NOW,
    PATIENCE,
    PLAN,
    SLOTS,
    survey_of,
)
from tests.cache.hosts import make_groups

BLOCK, PARTS = 2 * CHUNK, 3
LETTERS = {"H": HELD, "C": COMING, "S": STORED, "A": ASKED, ".": ""}
STATE = StateComponent(
    name="ssm",
    num_heads=1,
    rank_heads=1,
    content_size=4,
    dtype="float32",
    runs=(StateRun(0, 4, 0, 4, 1),),
)


def make_lookup() -> Lookup:
    groups = make_groups(block_size=BLOCK)
    spec = EngineSpec(
        identity=ModelIdentity(weights=b"w" * 32, config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
        states=StateSpec(
            kinds=(StateKind(num_layers=1, components=(STATE,)),),
            tables=(
                TablePart(table=1, group=0, layers=(0,), layer_names=("s",), block_size=BLOCK),
            ),
        ),
    )
    rates = LoadPolicy(PATIENCE, lambda: NOW)
    return Lookup(Tables(spec), CHUNK, PATIENCE, rates, StatePlaces(PARTS, BLOCK // CHUNK, 1))


def decide(
    word: str,
    states: str,
    state: Any = ASKS,
    *,
    local: int = 0,
    taken: int = 0,
    wanted: dict[str, Any] | None = None,
    slots: int = SLOTS,
    audits_own: bool = False,
) -> Decision:
    keys = [ChunkKey(number.to_bytes(32)) for number in range(len(word))]
    first = local // CHUNK
    survey = survey_of(word, first, taken)
    chunks = [
        chunk._replace(state=LETTERS[states[number // 2]] if number % 2 else "")
        for number, chunk in enumerate(survey.chunks, first)
    ]
    sought = Wanted(keys, **{"began_at": NOW - 10, **(wanted or {})})
    asked = Ask(sought, CHUNK * len(word) + 1, local, NOW, state, audits_own=audits_own)
    return make_lookup().decide(survey._replace(chunks=chunks, num_slots=slots), asked)


def no_state(kv: int, state: int) -> Miss:
    return Miss(LookupMiss.NO_STATE, f"KV of {kv} tokens is here, a state after {state} of them")


LATE = Fetching(NOW, NOW - 1)
PROMISED = {
    "all is held": ("HHHHHH", "HHH", {}, 48, None, 0),
    "only the last state is": ("HHHHHH", "..H", {}, 48, None, 0),
    "a state is in the middle": ("HHHHHH", ".H.", {}, 32, no_state(48, 32), 48),
    "a state is at the start": ("HHHHHH", "H..", {}, 16, no_state(48, 16), 48),
    "KV ends before the state": ("HHHHHL", "HHH", {}, 32, ABSENT, 0),
    "KV ends within a block": ("HHHHHL", "H..", {}, 16, no_state(32, 16), 32),
    "a later state comes too late": ("HHHHHH", ".HS", {"state": LATE}, 32,
                                     Miss(LookupMiss.DEADLINE), 0),
    "a later state has no slot": ("HHHHHH", "H.S", {"state": LATE, "taken": SLOTS}, 16,
                                  Miss(LookupMiss.NO_MEMORY), 0),
    "a later state has more parts than slots": ("HHHH", "HS", {"slots": 6}, 16,
                                                Miss(LookupMiss.NO_MEMORY), 0),
    "the host has its first tokens": ("HHHHHH", "HH.", {"local": 16}, 32, no_state(48, 32), 48),
    "the store did not answer in time": ("HHHH", "HA", {"state": ASKED_LONG}, 16,
                                         no_state(32, 16), 32),
    "a state is in an item": ("HHHHHH", "HHH", {"wanted": {"items": (
        MultimodalItem(digest="i", offset=20, length=40),)}}, 16, None, 0),
    "the last state is in an item": ("HHHHHH", "HH.", {"wanted": {"items": (
        MultimodalItem(digest="i", offset=30, length=4),)}}, 16, no_state(48, 16), 48),
}  # fmt: skip
"""The prompt, its states, the look-up; the end of the hit, why it is not longer, and where a state
is missed."""


@pytest.mark.parametrize("case", PROMISED)
def test_a_hit_ends_where_kv_and_a_state_are_held(case):
    word, states, how, stop, miss, junction = PROMISED[case]
    found = decide(word, states, **how)
    act = found.act
    assert isinstance(act, Promise)
    assert (act.hit.stop, act.miss, found.junction) == (stop, miss, junction)
    assert act.hit.state == stop // CHUNK - 1
    assert act.hit.num_slots == len(act.hit.numbers) + PARTS


COMPUTED = {
    "there is no state": ("HHHHHH", "...", {}, no_state(48, 0), 48),
    "none behind what the host has": ("HHHHHH", "H..", {"local": 16}, no_state(48, 16), 48),
    "none comes in time": ("HHHH", "..", {"state": LATE}, no_state(32, 0), 32),
    "there is no KV": ("LHHH", "HH", {}, ABSENT, 0),
    "there is a chunk of KV": ("HLHH", "HH", {}, ABSENT, 0),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_without_a_state_all_is_computed_and_it_is_said_where_one_is_missed(case):
    word, states, how, miss, junction = COMPUTED[case]
    found = decide(word, states, **how)
    assert found.act == Compute(miss)
    assert found.junction == junction


FETCHED = {
    "KV and state are stored": ("SSSS", ".S", 32),
    "the state is stored": ("HHHH", "HS", 32),
    "the state is coming": ("HHHH", ".C", 32),
    "KV is stored": ("SSHH", ".H", 32),
}


@pytest.mark.parametrize("case", FETCHED)
def test_what_of_a_hit_and_its_state_is_not_held_is_fetched(case):
    word, states, stop = FETCHED[case]
    act = decide(word, states).act
    assert isinstance(act, Fetch)
    assert (act.hit.stop, act.hit.state, act.hit.num_parts) == (stop, stop // CHUNK - 1, PARTS)


def test_the_answer_about_states_is_awaited_as_long_as_that_about_chunks():
    act = decide("HHHH", "HA").act
    assert act == Wait(ASKS, None, None)


def test_chunks_that_another_engine_brings_are_fetched_before_their_state_is_known():
    act = decide("SSLL", "..", wanted={"plan": PLAN}).act
    assert isinstance(act, Wait)
    assert act.hit is not None
    assert (act.brings, act.hit.state, act.hit.num_parts) == (range(2), None, 0)


WAIT = Awaiting(NOW + 1, 4)
AWAITED = {
    "the chunks are here": ("SSSS", "..", {}, (None, range(3, 4))),
    "so is an earlier state": ("SSSS", "H.", {}, (None, range(3, 4))),
    "the last chunks are not": ("SSLL", "..", {}, (2, range(2, 4))),
    "so is the state": ("SSSS", ".S", {}, None),
    "the host has all up to there": ("SSSS", "..", {"local": 32}, None),
    "the host has the first tokens": ("SSSS", "..", {"local": 16}, (None, range(3, 4))),
    "it did not come in time": ("SSSS", "..", {"state": Awaiting(NOW, 4, has_come=True)}, None),
}
"""The prompt, its states, the look-up, and what is waited for: the next chunk and the question; or
nothing is."""


@pytest.mark.parametrize("case", AWAITED)
def test_the_state_behind_the_last_chunk_of_another_engine_is_awaited(case):
    word, states, how, expected = AWAITED[case]
    how = {"state": WAIT, **how}
    plan = PLAN._replace(num_chunks=4)
    act = decide(word, states, wanted={"plan": plan, "began_at": NOW}, **how).act
    if expected is None:
        assert not isinstance(act, Wait) or isinstance(act.state, Asking)
        return
    assert isinstance(act, Wait)
    assert (act.next_chunk, act.asks) == expected
    until = NOW + ASK_SECONDS if expected[0] is None else WAIT.until
    assert act.state == WAIT._replace(until=until)


AUDITED = {
    "its last chunk, on the state before": ("HHHHHH", "HHH", {}, 5, 32),
    "its last chunk, on a state long before": ("HHHHHH", "H.H", {}, 5, 16),
    "its last chunk, on what is computed": ("HHHHHH", "..H", {}, 5, 0),
    "its last chunk, on what the host has": ("HHHHHH", "H.H", {"local": 16}, 5, 16),
    "its first chunk": ("HHHHHH", "HHH", {"place": 0.1}, 0, 0),
    "the chunk behind it, at no cost": ("HHHHHH", ".H.", {}, 4, 32),
    "that chunk of a block that is not whole": ("HHHHHL", "HH.", {}, 4, 32),
    "before what was computed here": ("HHHHOH", "HH.", {}, 3, 16),
    "also what was computed here": ("HHHHOH", "HH.", {"audits_own": True}, 4, 32),
    "its first chunk, although KV is behind it": ("HHHHHH", "HH.", {"place": 0.1}, 0, 0),
}
"""The prompt, its states, the look-up; the chunk that is compared, and where the hit ends."""


@pytest.mark.parametrize("case", AUDITED)
def test_what_is_compared_of_a_hit_is_computed_on_the_state_that_is_loaded(case):
    word, states, how, audited, stop = AUDITED[case]
    more = {name: value for name, value in how.items() if name != "place"}
    act = decide(word, states, wanted={"place": how.get("place", 0.9)}, **more).act
    assert isinstance(act, Promise)
    assert (act.hit.audited, act.hit.stop) == (audited, stop)
    is_loaded = stop > how.get("local", 0)
    assert act.hit.state == (stop // CHUNK - 1 if is_loaded else None)
    assert act.hit.numbers[-1] == audited
    assert act.hit.is_shortened == (audited < act.hit.whole.stop)


def test_the_chunk_to_compare_is_fetched_with_the_hit():
    act = decide("HHHHSS", ".H.", wanted={"place": 0.9}).act
    assert isinstance(act, Fetch)
    assert (act.hit.stop, act.hit.audited, act.hit.numbers) == (32, 4, range(5))


def test_a_hit_that_is_to_be_compared_may_still_come():
    act = decide("SSLLLL", "H..", wanted={"plan": PLAN, "place": 0.9}).act
    assert isinstance(act, Wait)
    assert (act.brings, act.hit and act.hit.state) == (range(2), None)
