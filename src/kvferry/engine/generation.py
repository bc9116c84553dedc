"""Requests and results as callers of `LLM` see them: sampling parameters, tokens, text, times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3

from kvferry.contract.handover import STAMP, read_options
from kvferry.engine.request import FinishReason, Request
from kvferry.errors import ConfigError
from kvferry.types import RequestOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to complete one prompt.

    Attributes:
        max_tokens: tokens to generate at most; fewer where the context or the KV pool ends.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_p: sample from the smallest set of tokens whose probability reaches this.
        seed: makes samples repeatable, whatever else runs in the batch; None draws a seed.
        logprobs: report the chosen token and so many of the most likely ones; None for neither.
        stop_token_ids: tokens that end the text, besides the model's own end-of-text tokens.
        ignore_eos: go on past the model's own end-of-text tokens.
        return_logits: keep the logits of the first generated position (`Completion.first_logits`).
        kv_transfer_params: a proxy's parameters about another engine that prefills or decodes the
            prompt (docs/proxies.md); unknown fields are ignored. The answer is in
            `Completion.params`.
        kvferry: options of this request for the cache, named as in `RequestOptions`, for example
            `{"store": False, "explain": True}`.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_logits: bool = False
    kv_transfer_params: Mapping[str, Any] | None = None
    kvferry: Mapping[str, Any] | None = None

    @property
    def request_options(self) -> RequestOptions:
        """The options in `kvferry`, which override those in `kv_transfer_params["kvferry"]`."""
        return read_options(self.kv_transfer_params, {STAMP: self.kvferry})

    def __post_init__(self) -> None:
        _ = self.request_options  # raises ConfigError for wrong ones
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

    The random numbers of position i depend on the seed and on i alone, so neither other requests of
    the batch nor a preemption nor a repeated step changes a sample.
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
        # The largest p/e with e from Exp(1) is a sample of p. With one draw per token of the
        # vocabulary, the draws do not depend on what top_p kept.
        noise = torch.empty_like(probs).exponential_(generator=self._reseeded(position))
        return int((probs / noise.clamp_min_(1e-30)).argmax())

    def logprobs(self, logits: torch.Tensor, token_id: int) -> TokenLogprobs | None:
        """Log-probabilities of the chosen and the best tokens; None if not asked for."""
        count = self._params.logprobs
        if count is None:
            return None
        logprobs = torch.log_softmax(logits, dim=-1)
        best = logprobs.topk(min(count, logprobs.numel()))
        top = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return TokenLogprobs(float(logprobs[token_id]), top)

    def _reseeded(self, position: int) -> torch.Generator:
        # Adjacent seeds of torch's generator give dependent streams; hashed seeds do not.
        digest = blake3(f"{self._seed}/{position}".encode()).digest(8)
        return self._generator.manual_seed(int.from_bytes(digest, "little", signed=True))


def _keep_top_p(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    ordered, ids = probs.sort(descending=True)
    # A token stays if what comes before it has not reached top_p; the best one always stays.
    dropped = ordered.cumsum(dim=-1) - ordered >= top_p
    return probs.index_fill(0, ids[dropped], 0.0)


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that the engine uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class TokenEvent(NamedTuple):
    """One generated token of a stream."""

    request_id: str
    token_id: int
    text: str
    """Text that the token adds; "" while a character is incomplete, or without a tokenizer."""
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    """Set on the last event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one prompt.

    Attributes:
        token_ids: generated tokens, the one that ended the text included.
        text: text of `token_ids` without special tokens; None without a tokenizer.
        logprobs: one entry per generated token, None if not asked for.
        num_cached_tokens: prompt tokens found in the engine's own prefix cache.
        num_external_tokens: further prompt tokens, whose KV the connector brought.
        ttft_seconds: time from queueing to the first token; None if there is none.
        first_logits: `[vocab]` float32 logits of the first generated position, if asked for.
        params: the connector's message to the client, mostly None.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    num_cached_tokens: int
    num_external_tokens: int
    ttft_seconds: float | None
    first_logits: npt.NDArray[np.float32] | None = None
    params: Mapping[str, Any] | None = None


class Detokenizer:
    """Turns a growing list of tokens into text, piece by piece.

    It decodes a window that starts a few tokens back: many tokenizers write a token differently at
    the start of a text, and a character may take several tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window_start = 0
        self._emitted = 0  # tokens whose text was returned

    def add(self, token_id: int, *, is_last: bool = False) -> str:
        """Return the text that `token_id` completes; "" if a character is incomplete."""
        self._token_ids.append(token_id)
        before = self._decode(self._window_start, self._emitted)
        text = self._decode(self._window_start, len(self._token_ids))
        # A replacement character at the end stands for the first bytes of an unfinished character.
        if not is_last and (len(text) <= len(before) or text.endswith("\ufffd")):
            return ""
        self._window_start, self._emitted = self._emitted, len(self._token_ids)
        return text[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:stop], skip_special_tokens=True)


class Generation:
    """One request as its caller sees it: samples its tokens, keeps its text and times."""

    def __init__(
        self, request: Request, params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self.request = request
        self._num_emitted = 0
        self._params = params
        self._sampler = Sampler(params)
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._logprobs: list[TokenLogprobs] = []
        self._first_logits: torch.Tensor | None = None
        self._queued = time.perf_counter()
        self._ttft_seconds: float | None = None

    def sample(self, logits: torch.Tensor) -> int:
        """Choose the next token from `logits` (`[vocab]` float32)."""
        position = self.request.num_generated_tokens
        token_id = self._sampler.sample(logits, position)
        logprobs = self._sampler.logprobs(logits, token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if position == 0:
            self._ttft_seconds = time.perf_counter() - self._queued
            if self._params.return_logits:
                self._first_logits = logits.to("cpu", copy=True)
        return token_id

    def new_events(self) -> Iterator[TokenEvent]:
        """Yield an event for each token that was generated since the last call."""
        request = self.request
        while self._num_emitted < request.num_generated_tokens:
            index = self._num_emitted
            self._num_emitted += 1
            token_id = request.all_token_ids[request.num_prompt_tokens + index]
            is_newest = self._num_emitted == request.num_generated_tokens
            reason = request.outcome.reason if request.outcome and is_newest else None
            text = ""
            if self._detokenizer is not None:
                text = self._detokenizer.add(token_id, is_last=reason is not None)
            logprobs = self._logprobs[index] if self._logprobs else None
            yield TokenEvent(request.request_id, token_id, text, logprobs, reason)

    def completion(self) -> Completion:
        """The result. Raises RuntimeError if the request has not ended."""
        request = self.request
        outcome, hit = request.outcome, request.hit
        if outcome is None:
            raise RuntimeError(f"{request!r} has not ended")
        token_ids = request.all_token_ids[request.num_prompt_tokens :]
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=tuple(request.all_token_ids[: request.num_prompt_tokens]),
            token_ids=tuple(token_ids),
            text=text,
            finish_reason=outcome.reason,
            logprobs=None if self._params.logprobs is None else tuple(self._logprobs),
            num_cached_tokens=0 if hit is None else hit.num_local_tokens,
            num_external_tokens=0 if hit is None else hit.num_external_tokens,
            ttft_seconds=self._ttft_seconds,
            first_logits=None if self._first_logits is None else self._first_logits.numpy(),
            params=outcome.params,
        )
