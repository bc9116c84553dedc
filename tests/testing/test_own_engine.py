"""The kit for engines of one's own: each broken rule is found, strict or not, and none of them
gives other engines wrong KV."""

from __future__ import annotations

from functools import partial

import pytest

from kvferry.testing.own_engine import CASES, NEW_TOKENS, Finding, try_engine
from tests.testing.toy_engine import ToyEngine

TOKENS = 150

MISTAKES = {  # what strict guards say
    "counts a block too much": "are computed: 0 were local",
    "says nothing of its blocks": "without update_after_alloc",
    "plans each step twice": "a second plan for one step",
    "uses block 0": "in block 0",
    "is never announced": "the host did not show it by on_new_request",
    "takes more than was promised": "promised",
}


def tried(directory, mistake="", *, strict=True, **guard):
    opened = partial(ToyEngine, mistake=mistake, **guard)
    return try_engine(opened, directory, prompt_tokens=TOKENS, strict=strict)


@pytest.mark.parametrize("strict", [True, False])
def test_nothing_is_found_of_an_engine_that_keeps_the_rules(tmp_path, strict):
    assert tried(tmp_path, strict=strict) == []


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_rule_is_found_by_strict_guards(tmp_path, mistake):
    found = tried(tmp_path, mistake)
    assert any(MISTAKES[mistake] in each.said for each in found), found
    assert {each.case for each in found} <= CASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_rule_is_counted_in_service_and_nobody_reads_wrong_kv(tmp_path, mistake):
    found = tried(tmp_path, mistake, strict=False)
    assert any(each.said.startswith("contract_violation: ") for each in found), found
    assert right_readers_find(tmp_path) == []


def right_readers_find(directory):
    """What right engines find wrong in the stores that another one has filled."""
    return [
        each
        for each in try_engine(Reading(directory), directory / "right", prompt_tokens=TOKENS)
        if each.said.startswith("request ")
    ]


class Reading:
    """Opens right engines on copies of the stores of others; prompts are computed in stores of
    their own."""

    def __init__(self, directory):
        self.directory = directory

    def __call__(self, store, observer, *, strict):
        name = store.rsplit("/", 1)[1]
        theirs = self.directory / name
        if theirs.is_dir() and not name.startswith("alone"):
            store = theirs.as_uri()
        return ToyEngine(store, observer, strict=strict)


def test_without_the_guard_s_look_at_the_host_others_do_read_wrong_kv(tmp_path):
    """The toy shows what it is to show."""
    found = tried(tmp_path, "counts a block too much", strict=False, checks_host=False)
    assert not any("contract_violation" in each.said for each in found)
    assert right_readers_find(tmp_path) != []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda tokens: [*tokens[:-1], tokens[-1] + 1], "tokens "),
        (lambda tokens: tokens, "nothing was read"),
    ],
)
def test_wrong_answers_and_hits_that_never_come_are_found(tmp_path, wrong, said):
    class Wrong(ToyEngine):
        asked = 0

        def __init__(self, store, observer, *, strict):
            fresh = f"{store}-{Wrong.asked}" if said == "nothing was read" else store
            super().__init__(fresh, observer, strict=strict)
            Wrong.asked += 1

        def generate(self, request_id, prompt, num_tokens):
            tokens = super().generate(request_id, prompt, num_tokens)
            return tokens if request_id == "alone" else wrong(tokens)

    found = try_engine(Wrong, tmp_path, prompt_tokens=TOKENS)
    assert any(said in each.said for each in found)
    assert all(isinstance(each, Finding) for each in found)
    assert NEW_TOKENS > 1
