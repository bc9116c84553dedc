"""`python -m kvferry.demo.phase SPEC RESULT`: one process that asks all questions of one phase.

Prints one line per answer, so that whoever waits sees it move.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import msgspec
import numpy as np

from kvferry.demo.messages import Answer, Ask, PhaseResult, PhaseSpec
from kvferry.engine import LLM, Completion, SamplingParams
from kvferry.errors import KVError, StoreError

_WARM_UP_TOKENS = 12
"""Shorter than a chunk, so never stored: takes what a first forward costs out of every figure."""


def run_phase(spec: PhaseSpec) -> PhaseResult:
    """Ask everything in `spec`."""
    answers: list[Answer] = []
    for store, asks in itertools.groupby(spec.asks, key=lambda ask: ask.store):
        answers += _ask_all(spec, store, list(asks), first=len(answers))
    return PhaseResult(answers=answers)


def _ask_all(spec: PhaseSpec, store: str, asks: list[Ask], first: int) -> list[Answer]:
    params = SamplingParams(max_tokens=spec.max_tokens, return_logits=True)
    answers = []
    with LLM(
        spec.model_dir,
        store=store,
        connector_options={"chunk_tokens": spec.chunk_tokens},
        dtype=spec.dtype,
        prefix_caching=False,
    ) as llm:
        llm.generate([asks[0].prompt[:_WARM_UP_TOKENS]], SamplingParams(max_tokens=2))
        for index, ask in enumerate(asks, start=first):
            [completion] = llm.generate([ask.prompt], params)
            logits = Path(spec.logits_dir) / f"{index}.npy"
            answers.append(_answer(completion, ask, logits))
            print(index, flush=True)
    return answers


def _answer(completion: Completion, ask: Ask, logits: Path) -> Answer:
    if completion.first_logits is None or completion.ttft_seconds is None:
        raise StoreError("the engine ended a request before its first token")
    np.save(logits, completion.first_logits, allow_pickle=False)
    return Answer(
        prompt_tokens=len(ask.prompt),
        hit_tokens=completion.num_external_tokens,
        ttft_seconds=completion.ttft_seconds,
        token_ids=list(completion.token_ids),
        text=completion.text or "",
        logits=str(logits),
    )


def main(spec_path: Path, result_path: Path) -> int:
    """Run the phase described in one file and write its result to another; the exit code."""
    spec = msgspec.json.decode(spec_path.read_bytes(), type=PhaseSpec)
    try:
        result = run_phase(spec)
    except KVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result_path.write_bytes(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
