"""The options of a request: beside the fields of proxies, and refused by name."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.contract.handover import read_handover, read_options, write_explanation
from kvferry.errors import ConfigError
from kvferry.journal import JournalAnswer
from kvferry.types import DEFAULT_OPTIONS, Handover, RequestOptions
from tests.contract.test_handover import ANYTHING, TOY_PROXY, answer

ALL = {"store": False, "load": False, "max_load_tokens": 7, "pin": 60, "explain": True}
EXPLANATION = write_explanation(
    local=4, hits={"file": 8}, misses={"slower": 16, "partial": 2}, why="numbers",
    not_stored={"refused": 16}, not_stored_why="full", kind="away", not_stored_kind="full",
)  # fmt: skip


def test_clients_do_not_see_the_addresses_of_peers():
    hits = {"file": 8, "peer 10.0.0.1:7100": 16, "peer 10.0.0.2:7100": 32}
    told = write_explanation(**JournalAnswer(0, hits, {}, "")._asdict())
    assert told["by_tier"] == {"file": 8, "peer": 48}


def test_each_option_is_read_from_either_place_and_nothing_is_changed():
    params, arguments = {"kvferry": {"store": False, "pin": 1}}, {"kvferry": {"pin": 2.5}}
    before = copy.deepcopy((params, arguments))
    assert read_options({"kvferry": ALL}) == RequestOptions(**ALL)
    assert read_options(None, {"kvferry": ALL, "other": 1}) == RequestOptions(**ALL)
    assert read_options(params, arguments) == RequestOptions(store=False, pin=2.5)
    assert (params, arguments) == before


@pytest.mark.parametrize("given", [None, {}, {"kvferry": None}, {"kvferry": {}}, [1], "kvferry", 7])
def test_whoever_asks_for_nothing_gets_the_defaults(given):
    assert read_options(given, given) is DEFAULT_OPTIONS


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stor": False}, "unknown option 'stor'; did you mean 'store'?"),
        ({"zzzzz": 1}, "unknown option 'zzzzz'; known: explain, load, max_load_tokens, pin, store"),
        ({"x" * 10_000: 1}, f"unknown option '{'x' * 40}';"),
        ({"\x1b[31m": 1}, r"unknown option '\x1b[31m'"),
        ({7: 1}, "unknown option '7'"),
        ({"store": 1}, "Expected `bool`, got `int` - at `$.store`"),
        ({"load": "no"}, "`$.load`"),
        ({"explain": None}, "`$.explain`"),
        ({"max_load_tokens": -1}, "`$.max_load_tokens`"),
        ({"max_load_tokens": 1.5}, "`$.max_load_tokens`"),
        ({"max_load_tokens": True}, "`$.max_load_tokens`"),
        ({"pin": "1h"}, "`$.pin`"),
        ({"pin": -1}, "`$.pin`"),
        ({"pin": float("nan")}, "`$.pin`"),
        ({"pin": 86_401}, "Expected `float` <= 86400.0 - at `$.pin`"),
        ("text", "kvferry is a str, not an object of options"),
        ([1], "kvferry is a list, not an object of options"),
    ],
)
def test_what_is_wrong_is_named_in_one_short_line(options, says):
    with pytest.raises(ConfigError) as refused:
        read_options({"kvferry": options})
    assert says in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 200


def test_options_stand_beside_a_stamp_and_do_not_look_like_one():
    stamped = answer()
    both = {**stamped, "kvferry": {**stamped["kvferry"], **EXPLANATION, "explain": True}}
    assert read_options(both) == RequestOptions(explain=True)
    assert read_handover(both) == read_handover(stamped)
    assert read_options(stamped) is DEFAULT_OPTIONS
    for beside in ({"explain": True}, EXPLANATION, ALL):
        # Else a prefill would be taken for a turn that goes on from another engine.
        asked = {**TOY_PROXY, "kvferry": beside}
        assert read_handover(asked) == Handover(gives=True, answers=True)
        source = read_handover({**stamped, "kvferry": beside}).source
        assert source.stamp is None


def test_an_explanation_adds_up_and_names_the_first_miss():
    assert EXPLANATION == {
        "prompt_tokens": 30,
        "local_tokens": 4,
        "hit_tokens": 8,
        "by_tier": {"file": 8},
        "miss_reason": "slower",
        "miss_tokens": {"slower": 16, "partial": 2},
        "why": "numbers",
        "kind": "away",
        "not_stored": {"refused": 16},
        "not_stored_why": "full",
        "not_stored_kind": "full",
    }


OPTIONS = st.dictionaries(st.sampled_from([*ALL, "v", "key", "hit_tokens"]) | st.text(), ANYTHING)


@given(params=ANYTHING | st.fixed_dictionaries({"kvferry": OPTIONS}))
def test_whatever_a_client_writes_is_read_or_refused(params):
    before = repr(params)
    with suppress(ConfigError):
        assert isinstance(read_options(params), RequestOptions)
    assert repr(params) == before
