"""Sampling, text of growing lists of tokens, and the bar of long generations."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.generation import Detokenizer, Sampler, SamplingParams
from kvferry.errors import ConfigError

# ---- choosing tokens

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


# ---- text


class ByteTokenizer:
    """One token per byte of UTF-8; 0 is special."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=False):
        assert skip_special_tokens
        return bytes(token_id for token_id in token_ids if token_id).decode(errors="replace")


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(ByteTokenizer())
    last = len(token_ids) - 1
    return [detokenizer.add(t, is_last=index == last) for index, t in enumerate(token_ids)]


def test_pieces_join_to_the_text():
    text = "a naïve €5 coffee ☕ is 🦀"
    assert "".join(pieces(list(text.encode()))) == text


def test_an_unfinished_character_waits_for_its_last_byte():
    assert pieces(list("€a".encode())) == ["", "", "€", "a"]


def test_special_tokens_add_nothing_and_lose_nothing():
    assert pieces([97, 0, 0, 98]) == ["a", "", "", "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_such():
    assert pieces(list("a€".encode())[:-1]) == ["a", "", "\ufffd"]
