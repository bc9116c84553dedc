"""The conformance kit over vLLM's scheduler: what it finds in vLLM's example connector, as
released, and that it finds nothing in ours."""

from __future__ import annotations

import pytest

from kvferry.testing.connector import RULES
from kvferry.testing.connector.rules import Rule
from kvferry.testing.connector.runner import CaseOutcome, Limits, Runner, Target
from kvferry.testing.connector.suite import ConnectorTests
from tests.real_vllm.host import RELEASE

pytestmark = pytest.mark.skipif(RELEASE != (0, 32), reason="the kit's host is that of vLLM 0.32")

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
EXAMPLE = Target(
    f"{CONNECTORS}.example_connector", "ExampleConnector", {"shared_storage_path": "{dir}"}
)

DEFECTS = {
    "whole prompts alone match": "longer-prompt",
    "what is saved under one key is looked up under another": "one-over-a-block",
    "counts are negative after a longer local hit": "full-pool",
    "all short prompts have one key": "short-prompts",
    "prompt embeddings have the key of no tokens": "prompt-embeddings",
    "a folder is a hit before its files are complete": "killed-in-write",
    "a failed load makes the folder of a hit": "after-a-failed-load",
    "files have no checksum": "flipped",
    "ranks overwrite each other's files": "two-ranks",
    "weights are not in the key": "weights",
    "the configuration is not in the key": "rope",
    "the dtype is not in the key": "dtype",
    "salts are not in the key": "salt",
    "adapters are not in the key": "lora",
    "versions of adapters are not in the key": "lora-version",
    "places of images are not in the key": "images",
    "the first chunk is saved under the key of the prompt": "chunked-prefill",
    "generated tokens are not stored": "generated-tokens",
    "a request that hit stores nothing": "hit-then-more",
    "a resumed request loads by another key than it looked up": "random-walk",
    "blocks of a local hit are written again": "local-blocks",
    "blocks of a hit that was not taken whole are written": "part-of-a-promise",
    "look-ups ask the file system": "quick-look-ups",
    "without attention metadata a promised load is skipped": "no-attention-metadata",
    "a file that is gone ends the engine": "removed",
    "a file that ends half-way ends the engine": "truncated",
    "a full disk ends the engine": "disk-full",
    "saves are skipped in full graphs": "full-graphs",
    "a reset forgets nothing": "reset",
    "each hit is logged": "quiet",
    "weights that replace others at the same path are not in the key": "weights-in-place",
    "a configuration that replaces another is not in the key": "rope-in-place",
    "a prompt that loses its blocks half-way is not stored": "preempted-in-chunks",
    "a folder may hold what another salt stored": "same-end",
}


OURS = {
    "store": "file://{dir}", "chunk_tokens": 16, "memory_bytes": 1 << 20, "audit": "off",
    "save_generated": True,
}  # fmt: skip


class TestOurs(ConnectorTests):
    connector = "kvferry.adapters.vllm:KVFerryConnector"
    options = OURS
    limits = Limits(part=300.0, patience=14.0, for_misses=2.0)


@pytest.mark.parametrize(
    ("name", "kept", "broken", "verdict"),
    [
        ("AppendsBlocksOfHalfAPrompt", "preempted", "preempted-in-chunks", "wrong"),
        # The host of `kvferry.v1` asks no third time.
        ("AnswersAHitAgainAfterAFailure", "reuse", "gone-after-promise", "hangs"),
    ],
)
def test_bugs_of_public_connectors_are_found_over_vllms_scheduler(name, kept, broken, verdict):
    # Not imported here: it inherits from vLLM's class, whose import warns.
    target = Target("tests.testing.public_bugs", name, {"path": "{dir}"})
    with Runner(target, limits=Limits(part=300.0, patience=14.0, steps=1_500)) as runner:
        rule = {rule.name: rule for rule in RULES}
        assert runner.run_case(rule[kept]).verdict == "right"
        assert runner.run_case(rule[broken]).verdict == verdict
        assert runner.host.startswith("vLLM 0.32")


STATES = [  # kept, broken, how
    ("PlainStates", ["states", "states-in-a-full-pool"], None, ""),
    ("LoadsStatesWithinTheStep", [], "states", "wrong"),
    ("FillsTheLastBlockToo", ["states"], "states-in-a-full-pool", "engine dead"),
    ("FillsTheLastBlockAlone", [], "states", "wrong"),
    ("SavesStatesByPosition", ["states"], "states-in-a-full-pool", "wrong"),
    ("SavesOffersAStepLate", ["states"], "states-in-a-full-pool", "wrong"),
    ("LoadsStatesOfABlockMore", [], "states", "wrong"),
]


@pytest.mark.parametrize(("name", "kept", "broken", "verdict"), STATES)
def test_a_connector_that_moves_states_is_found_right_and_its_bugs_are_found(
    name, kept, broken, verdict
):
    target = Target("tests.testing.plain_states", name, {"path": "{dir}"})
    with Runner(target, limits=Limits(part=300.0, patience=14.0)) as runner:
        rule = {rule.name: rule for rule in RULES}
        for case in kept:
            assert runner.run_case(rule[case]).verdict == "right"
        if broken is not None:
            outcome = runner.run_case(rule[broken])
            assert outcome.verdict == verdict, outcome
            assert verdict != "wrong" or "the state behind" in outcome.detail


AGAIN = [pytest.param(6, id="some"), pytest.param(1, id="all", marks=pytest.mark.sweep)]


@pytest.mark.parametrize("every", AGAIN)
@pytest.mark.timeout(900)
def test_vllms_example_connector_has_known_defects_and_shows_them_the_same_twice(every):
    rules = [rule for rule in RULES if rule.name in DEFECTS.values()]
    assert len(rules) == len(DEFECTS) > 20
    once, twice = found_in(rules), found_in(rules[::every])
    kept = [rule.name for rule, outcome in once.items() if rule.is_kept(outcome.verdict)]
    assert kept == []
    assert {outcome.verdict for outcome in once.values()} == {"wrong", "engine dead", "miss"}
    assert twice == {rule: once[rule] for rule in rules[::every]}


def found_in(rules: list[Rule]) -> dict[Rule, CaseOutcome]:
    found: dict[Rule, CaseOutcome] = {}
    with Runner(EXAMPLE, limits=Limits(part=300.0, patience=1.0)) as runner:
        runner.run(rules, found.__setitem__)
    return found
