"""What the front end keeps per request, and what it hands out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvferry.engine.request import FinishReason, Request
from kvferry.engine.sampling import Sampler, SamplingParams, TokenLogprobs


class Tokenizer(Protocol):
    """The part of a Transformers tokenizer that the engine uses."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...


class TokenEvent(NamedTuple):
    """One generated token of a stream."""

    request_id: str
    token_id: int
    text: str
    """What the token adds; "" while a character is incomplete, or without a tokenizer."""
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    """Set on the last event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The result of one prompt.

    Attributes:
        token_ids: generated tokens, the one that ended the text included.
        text: of `token_ids` without special tokens; None without a tokenizer.
        logprobs: one entry per generated token, None if not asked for.
        num_cached_tokens: prompt tokens found in the engine's own prefix cache.
        num_external_tokens: prompt tokens beyond these that the connector brought.
        ttft_seconds: from queueing to the first token, None if there is none.
        first_logits: `[vocab]` float32 logits of the first generated position, if asked for.
        params: what the connector tells the client, mostly None.
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
    """Text of a growing list of tokens, piece by piece.

    Decodes a window that starts a few tokens back: many tokenizers write a token differently at the
    start of a text, and characters may take several tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._window_start = 0
        self._emitted = 0  # tokens whose text is out

    def add(self, token_id: int, *, is_last: bool = False) -> str:
        """The text that `token_id` completes."""
        self._token_ids.append(token_id)
        before = self._decode(self._window_start, self._emitted)
        text = self._decode(self._window_start, len(self._token_ids))
        # The replacement character at the end stands for the first bytes of an unfinished one.
        if not is_last and (len(text) <= len(before) or text.endswith("\ufffd")):
            return ""
        self._window_start, self._emitted = self._emitted, len(self._token_ids)
        return text[len(before) :]

    def _decode(self, start: int, stop: int) -> str:
        return self._tokenizer.decode(self._token_ids[start:stop], skip_special_tokens=True)


class Generation:
    """One request as its caller sees it: sampling, text, times."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        streams: bool = False,
    ) -> None:
        """Follow `request`; with `streams`, turn its tokens into `events`."""
        self.request = request
        self.events: deque[TokenEvent] | None = deque() if streams else None
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

    def emit(self) -> None:
        """Turn the token that the last step added, if any, into an event. Call after every step."""
        request = self.request
        if self.events is None or request.num_generated_tokens == self._num_emitted:
            return
        token_id = request.all_token_ids[-1]
        reason = None if request.outcome is None else request.outcome.reason
        text = ""
        if self._detokenizer is not None:
            text = self._detokenizer.add(token_id, is_last=reason is not None)
        logprobs = self._logprobs[-1] if self._logprobs else None
        self.events.append(TokenEvent(request.request_id, token_id, text, logprobs, reason))
        self._num_emitted += 1

    def completion(self) -> Completion:
        """The result; the request must have ended."""
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
