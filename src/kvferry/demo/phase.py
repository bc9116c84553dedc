"""`python -m kvferry.demo.phase SPEC RESULT`: one process that asks all questions of one phase.

`SPEC` and `RESULT` are JSON files; arrays stand in `.npy` files beside them. The process prints one
line per answer, for the progress bar of the parent.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import numpy as np

from kvferry.engine import LLM, Completion, SamplingParams
from kvferry.errors import KVError, StoreError

_WARM_UP_TOKENS = 12
"""Shorter than a chunk, so never stored: takes what a first forward costs out of every figure."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and the store it may use."""

    prompt: list[int]
    store: str


class PhaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Order for one phase.

    Attributes:
        model_dir: the model.
        asks: in this order; consecutive ones with the same store share an engine, whose own prefix
            cache is off.
        max_tokens: answer length.
        chunk_tokens: tokens per stored record.
        logits_dir: where the logits of the first answered position go, one `.npy` per prompt.
    """

    model_dir: str
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


def run_phase(spec: PhaseSpec) -> list[Answer]:
    """Answers in the order of `spec.asks`, computed in float32."""
    answers: list[Answer] = []
    for store, asks in itertools.groupby(spec.asks, key=lambda ask: ask.store):
        answers += _ask_all(spec, store, list(asks), first=len(answers))
    return answers


def _ask_all(spec: PhaseSpec, store: str, asks: list[Ask], first: int) -> list[Answer]:
    params = SamplingParams(max_tokens=spec.max_tokens, return_logits=True)
    answers = []
    with LLM(
        spec.model_dir,
        store=store,
        connector_options={"chunk_tokens": spec.chunk_tokens},
        dtype="float32",
        prefix_caching=False,
    ) as llm:
        llm.generate([asks[0].prompt[:_WARM_UP_TOKENS]], SamplingParams(max_tokens=2))
        for index, ask in enumerate(asks, start=first):
            [completion] = llm.generate([ask.prompt], params)
            logits = Path(spec.logits_dir) / f"{index}.npy"
            answers.append(_answer(completion, logits))
            print(index, flush=True)
    return answers


def _answer(completion: Completion, logits: Path) -> Answer:
    if completion.first_logits is None or completion.ttft_seconds is None:
        raise StoreError("the engine ended a request before its first token")
    np.save(logits, completion.first_logits, allow_pickle=False)
    return Answer(
        prompt_tokens=len(completion.prompt_token_ids),
        hit_tokens=completion.num_external_tokens,
        ttft_seconds=completion.ttft_seconds,
        token_ids=list(completion.token_ids),
        text=completion.text or "",
        logits=str(logits),
    )


def main(spec_path: Path, result_path: Path) -> int:
    """Run the phase described in one file and write its answers to another; the exit code."""
    spec = msgspec.json.decode(spec_path.read_bytes(), type=PhaseSpec)
    try:
        answers = run_phase(spec)
    except KVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result_path.write_bytes(msgspec.json.encode(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
