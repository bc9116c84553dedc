"""What the demo and its phases tell each other: JSON in files, arrays as `.npy` beside them."""

from __future__ import annotations

import msgspec


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and the store it may use."""

    prompt: list[int]
    store: str


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Order for one phase.

    Attributes:
        model_dir: the model.
        dtype: of weights, computation and KV.
        asks: in this order; consecutive ones with the same store share an engine, whose own prefix
            cache is off.
        max_tokens: answer length.
        chunk_tokens: tokens per stored record.
        logits_dir: where the logits of the first answered position go, one `.npy` per prompt.
    """

    model_dir: str
    dtype: str
    asks: list[Ask]
    max_tokens: int
    chunk_tokens: int
    logits_dir: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one prompt.

    Attributes:
        prompt_tokens: length of the prompt.
        hit_tokens: of these, read from the store instead of computed.
        ttft_seconds: from the request to its first token.
        token_ids: the answer.
        text: the answer, decoded.
        logits: file of `[vocab]` float32.
    """

    prompt_tokens: int
    hit_tokens: int
    ttft_seconds: float
    token_ids: list[int]
    text: str
    logits: str


class PhaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Answers in the order of `PhaseSpec.asks`."""

    answers: list[Answer]
