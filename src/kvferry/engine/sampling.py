"""How the next token is chosen, and the choosing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What one request asks for.

    Attributes:
        max_tokens: tokens to generate at most; fewer where the context or the KV pool ends.
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_p: sample from the smallest set of tokens whose probability reaches this.
        seed: makes samples repeatable, whatever else runs in the batch; None draws one.
        logprobs: report the chosen token and this many most likely ones per step; None for none.
        stop_token_ids: tokens that end the text, besides the model's own end-of-text tokens.
        ignore_eos: go on past the model's own end-of-text tokens.
        return_logits: keep the logits of the first generated position (`Completion.first_logits`).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_logits: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be 1 or more")
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}; it must be 0 or more, and finite"
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.logprobs is not None and self.logprobs < 0:
            raise ConfigError(f"logprobs is {self.logprobs}; it must be 0 or more")


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one generated position, before temperature and top_p."""

    chosen: float
    top: dict[int, float]
    """Token id to log-probability of the most likely tokens, best first."""


class Sampler:
    """Chooses tokens for one request.

    The random numbers of position i depend on the seed and on i alone: neither the batch a step
    happens to have, nor a preemption, nor a step that had to be repeated changes a sample.
    """

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator(device="cpu")
        self._seed = params.seed if params.seed is not None else self._generator.seed()

    def sample(self, logits: torch.Tensor, position: int) -> int:
        """Choose the token of generated position `position` from `logits` (`[vocab]`, float32)."""
        params = self._params
        if params.temperature == 0.0:
            return int(logits.argmax())
        probs = torch.softmax(logits.cpu() / params.temperature, dim=-1)
        if params.top_p < 1.0:
            probs = _keep_top_p(probs, params.top_p)
        # The largest p/e with e from Exp(1) is a sample of p, and one draw per token of the
        # vocabulary does not depend on what top_p left over.
        noise = torch.empty_like(probs).exponential_(generator=self._reseeded(position))
        return int((probs / noise.clamp_min_(1e-30)).argmax())

    def logprobs(self, logits: torch.Tensor, token_id: int) -> TokenLogprobs | None:
        """Log-probabilities around a chosen token, None if the request asked for none."""
        count = self._params.logprobs
        if count is None:
            return None
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.topk(min(count, logprobs.numel()))
        top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return TokenLogprobs(float(logprobs[token_id]), top)

    def _reseeded(self, position: int) -> torch.Generator:
        # Adjacent seeds of torch's generator are not independent streams; a hash makes them so.
        digest = hashlib.blake2b(f"{self._seed}/{position}".encode(), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little", signed=True))


def _keep_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, ids = probs.sort(descending=True)
    # A token stays if what comes before it has not reached top_p; the best one always stays.
    dropped = ordered.cumsum(dim=-1) - ordered >= top_p
    return probs.index_fill(0, ids[dropped], 0.0)
