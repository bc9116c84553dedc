"""Two answers to one prompt: how much faster, and whether anything differs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.demo.messages import Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt, computed and reused.

    Attributes:
        question: what the prompt asked.
        prompt_tokens: length of the prompt.
        hit_tokens: of these, read from the store.
        cold_ttft_seconds: time to first token when all of it was computed.
        ttft_seconds: the same with the store.
        max_abs_logit_diff: largest difference of any logit at the first answered position.
        tokens_equal: the answers are the same, token for token.
        answer: the text.
    """

    question: str
    prompt_tokens: int
    hit_tokens: int
    cold_ttft_seconds: float
    ttft_seconds: float
    max_abs_logit_diff: float
    tokens_equal: bool
    answer: str

    @property
    def speedup(self) -> float:
        return self.cold_ttft_seconds / self.ttft_seconds


def compare(question: str, cold: Answer, reused: Answer) -> Comparison:
    """Compare by logits first: greedy text can agree while the KV cache is wrong."""
    a = np.load(cold.logits, allow_pickle=False)
    b = np.load(reused.logits, allow_pickle=False)
    return Comparison(
        question=question,
        prompt_tokens=reused.prompt_tokens,
        hit_tokens=reused.hit_tokens,
        cold_ttft_seconds=cold.ttft_seconds,
        ttft_seconds=reused.ttft_seconds,
        # No number is no agreement; but JSON knows no infinity.
        max_abs_logit_diff=float(np.nan_to_num(np.abs(a - b), nan=np.finfo(a.dtype).max).max()),
        tokens_equal=cold.token_ids == reused.token_ids,
        answer=reused.text,
    )
