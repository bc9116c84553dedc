"""Facts and the curve of a trace, and its picture."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.simulate.reuse import optimum, previous_references
from kvferry.simulate.simulator import Simulator, default_capacities, write_png
from tests.simulate.reference import conversations, lru_hits, make_trace

PROMPTS = conversations(seed=3, num_requests=150)
TOKENS = 16


@pytest.fixture
def simulator() -> Simulator:
    lengths = [len(prompt) * TOKENS - 5 for prompt in PROMPTS]
    return Simulator(make_trace(PROMPTS, TOKENS, lengths))


@pytest.mark.parametrize("capacity", [5, 40])
def test_a_point_of_the_curve(simulator, capacity):
    point = simulator.point(capacity, 10)
    hits = lru_hits(PROMPTS, capacity)
    ends = [at == len(prompt) - 1 for prompt in PROMPTS for at in range(len(prompt))]
    assert point["lru"] == pytest.approx(sum(hits) / len(hits))
    references = [block for prompt in PROMPTS for block in prompt]
    assert point["optimum"] == optimum(previous_references(np.array(references)), capacity).mean()
    assert point["lru"] <= point["optimum"]
    whole = [TOKENS - 5 * end for end in ends]
    assert point["lru_hit_tokens"] == sum(
        tokens for tokens, hit in zip(whole, hits, strict=True) if hit
    )
    assert point["capacity_bytes"] == capacity * TOKENS * 10
    assert "capacity_bytes" not in simulator.point(capacity, None)


def test_with_room_for_all_lru_is_the_optimum(simulator):
    facts = simulator.facts()
    point = simulator.point(facts["unique_blocks"], None)
    assert point["lru"] == point["optimum"] == facts["hit_rate_without_limit"]


@pytest.mark.parametrize("state_blocks", [1, 2, 3, 100])
@pytest.mark.parametrize("capacity", [5, 40, 1000])
def test_hits_of_a_model_with_states_end_at_one(capacity, state_blocks):
    prompts = [*PROMPTS[:60], [], *PROMPTS[60:]]  # one is shorter than a block
    trace = make_trace(prompts, TOKENS, [len(prompt) * TOKENS for prompt in prompts])
    point, every = (Simulator(trace, blocks).point(capacity, None) for blocks in (state_blocks, 1))
    hits, at = lru_hits(prompts, capacity), 0
    total = 0
    for prompt in prompts:
        total += sum(hits[at : at + len(prompt)]) // state_blocks * state_blocks
        at += len(prompt)
    assert point["lru"] == pytest.approx(total / at)
    assert point["lru_hit_tokens"] == total * TOKENS
    assert point["lru"] <= point["optimum"] <= every["optimum"]


def test_facts_of_a_trace_without_reuse():
    simulator = Simulator(make_trace([[1, 2], [3]], TOKENS))
    assert simulator.facts()["hit_rate_without_limit"] == 0.0
    assert simulator.point(2, None)["optimum"] == 0.0


def test_capacities_reach_from_small_to_all():
    assert default_capacities(3) == [1, 2, 3]
    assert default_capacities(2600) == [10, 20, 50, 100, 200, 500, 1000, 2000, 2600]


def test_the_picture_of_a_curve(simulator, tmp_path):
    rows = [simulator.point(capacity, None) for capacity in (3, 9)]
    write_png(tmp_path / "curve.png", rows, "trace.jsonl")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
