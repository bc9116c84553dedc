"""Choosing tokens."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.generation import Sampler, SamplingParams
from kvferry.errors import ConfigError

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def draw(count: int = 4000, **params) -> torch.Tensor:
    """Relative frequency of each token over many positions."""
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 5, **params}))
    drawn = torch.tensor([sampler.sample(LOGITS, position) for position in range(count)])
    return torch.bincount(drawn, minlength=4) / count


def test_zero_temperature_takes_the_best():
    assert Sampler(SamplingParams()).sample(LOGITS, 0) == 0


def test_frequencies_follow_the_probabilities():
    # Five standard deviations of a frequency of one half.
    assert torch.allclose(draw(), torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.04)


def test_temperature_sharpens():
    expected = torch.softmax(LOGITS / 0.5, -1)
    assert torch.allclose(draw(temperature=0.5), expected, atol=0.04)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.5, 1), (0.51, 2), (0.8, 2), (0.96, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    frequencies = draw(1000, top_p=top_p)
    assert (frequencies > 0).tolist() == [True] * kept + [False] * (4 - kept)


def test_a_position_has_one_sample_whatever_came_before():
    params = SamplingParams(temperature=1.0, seed=3)
    in_order, backwards = Sampler(params), Sampler(params)
    forward = [in_order.sample(LOGITS, position) for position in range(50)]
    assert [backwards.sample(LOGITS, position) for position in reversed(range(50))] == forward[::-1]
    assert len(set(forward)) > 1


def test_without_a_seed_requests_differ():
    def sequence() -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0))
        return [sampler.sample(LOGITS, position) for position in range(60)]

    assert sequence() != sequence()


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"logprobs": -1},
    ],
)
def test_parameters_out_of_range_are_refused_by_name(params):
    (name,) = params
    with pytest.raises(ConfigError, match=name):
        SamplingParams(**params)
