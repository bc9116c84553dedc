"""Comparisons for proofs: what a model computes in one way, and in another.

A difference that rounding does not explain is a `ConfigError`, which names what differs.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.cache_leaves import Path, name_of, relative_error, slots
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.blocks.tolerance import (
    TOLERANCE,
    TOLERANCE_OF_8_BITS,
    TOLERANCE_OF_8_BITS_WITH_EXPERTS,
)
from kvferry.errors import ConfigError

NUM_GENERATED = 4
"""Tokens that are generated for a comparison."""


class Limits(NamedTuple):
    """Limits of relative differences."""

    leaves: float
    """Of a leaf that was computed in other pieces."""
    logits: float
    """Of logits on top of such leaves."""
    restored: float
    """Of logits of the same computation on a restored cache."""


def limits_of(host: HostModel) -> Limits:
    """Return what rounding explains.

    Raises:
        ConfigError: it explains any difference.
    """
    if not host.tolerances:
        raise ConfigError(
            "it rounds activations to 4 bits: in pieces it computes as much otherwise as another "
            "model, so that nothing can be proven"
        )
    dtype = str(host.model.dtype).removeprefix("torch.")
    leaves = host.tolerances.get(dtype, TOLERANCE.get(dtype, TOLERANCE["bfloat16"])).error
    logits = host.logits_limit
    if host.tolerances in (TOLERANCE_OF_8_BITS, TOLERANCE_OF_8_BITS_WITH_EXPERTS):
        # In other pieces, a value may be rounded to the next of 256.
        return Limits(leaves, leaves, logits / 10)
    return Limits(leaves, logits, logits / 10)


def in_pieces(host: HostModel, ids: torch.Tensor, stops: list[int]) -> Any:
    """Prefill a new prompt in pieces."""
    cache, at = host.new_cache(), 0
    for stop in stops:
        cache, _ = host.run(ids[:, at:stop], cache, at)
        at = stop
    return cache


def copies_of(found: dict[Path, Any]) -> dict[Path, Any]:
    """Copy leaves, which further tokens may change."""
    return {
        path: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for path, value in found.items()
    }


def refuse_generated(
    host: HostModel, ids: torch.Tensor, given: Mapping[str, Any], restored: Any,
    left: Mapping[str, Any], limit: float,
) -> None:  # fmt: skip
    """Compare the logits of `generate` without and with a restored cache, as long as both choose
    the same tokens.

    Args:
        given, left: other arguments without and with it.
    """
    mask = torch.ones_like(ids)
    alone = answer_of(host, ids, mask, NUM_GENERATED, given)
    reused = answer_of(host, ids, mask, NUM_GENERATED, {**left, host.cache_argument: restored})
    for number in range(min(len(alone.logits), len(reused.logits))):
        if not torch.equal(alone.tokens[:, :number], reused.tokens[:, :number]):
            return
        what = f"token {number + 1} of generate() with a restored cache and without one"
        refuse_logits(what, alone.logits[number], reused.logits[number], limit)


class Answer(NamedTuple):
    """What `generate` computed."""

    logits: tuple[torch.Tensor, ...]
    tokens: torch.Tensor
    cache: Any


def answer_of(
    host: HostModel, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int,
    others: Mapping[str, Any],
) -> Answer:  # fmt: skip
    """Let `generate` compute so many tokens, given a cache or other arguments."""
    device = host.model.device
    host.reset_all()
    output = host.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,  # as in every call that is served, whatever the model's default is
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **others,
    )
    return Answer(output.logits, output.sequences[:, ids.shape[1] :], host.cache_of_output(output))


def refuse_difference(name: str, one: torch.Tensor, other: torch.Tensor, limit: float) -> None:
    """Compare a leaf of a prefill in one piece with that in pieces."""
    if one.shape != other.shape:
        raise ConfigError(
            f"leaf {name} of its cache is {list(one.shape)} after a prefill in one piece and "
            f"{list(other.shape)} in pieces"
        )
    found = relative_error(one, other)
    if not found <= limit:
        raise ConfigError(
            f"Transformers computes leaf {name} of its cache otherwise in pieces than in one "
            f"piece, by {found:.1e} of its norm, so that no stored piece can be gone on from"
        )


def refuse_changed_leaves(kept: dict[Path, Any], restored: Any) -> None:
    """Compare every leaf of a restored cache with the stored one, bit for bit."""
    found = slots(restored)
    for path, value in kept.items():
        other = found[path].value if path in found else None
        if isinstance(value, torch.Tensor):
            is_same = isinstance(other, torch.Tensor) and torch.equal(value, other)
        else:
            is_same = type(value) is type(other) and value == other
        if not is_same:
            raise ConfigError(f"leaf {name_of(path)} of its cache is not restored as it was")


def refuse_logits(what: str, expected: torch.Tensor, logits: torch.Tensor, limit: float) -> None:
    found = float((expected.double() - logits.double()).abs().max() / expected.abs().max())
    if not found <= limit:
        raise ConfigError(f"logits of {what} differ by {found:.1e} of the largest")
