"""Streaming sessions: vLLM makes one request of them, which grows."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Process, kvferry
from tests.real_vllm.host import does
from tests.real_vllm.image_model import make_image_model

CHUNK = 32
SECONDS = 60.0

Session = list[dict[str, Any]]


def run(process: Process, session: Session, *, preempted: bool) -> dict[str, Any]:
    return process.call(
        "converse", SECONDS + 10, pieces=session, preempted=preempted, deadline=SECONDS
    )


def assert_says(expected: dict[str, Any], got: dict[str, Any]) -> None:
    assert [each["token"] for each in got["said"]] == [each["token"] for each in expected["said"]]
    for ours, theirs in zip(got["said"], expected["said"], strict=True):
        assert ours["logprob"] == pytest.approx(theirs["logprob"], abs=1e-3)


def make_pairs(make_prompt: MakePrompt, *, pictures: bool) -> list[tuple[Session, Session, bool]]:
    """Return pairs of sessions of equal tokens, and whether they are preempted. With pictures, the
    two differ by the one in the second or third piece."""
    pairs = []
    for at, preempted in product([2, 3] if pictures else [0], [True, False]):
        prompts = [[3 + token % 250 for token in make_prompt(70)] for _ in range(3)]
        pair: list[Session] = []
        for seed in (1, 2):
            pieces: Session = [{"token_ids": each, "max_tokens": 6} for each in prompts]
            if at:
                pieces[at - 1]["image"] = seed
            pair.append(pieces)
        pairs.append((pair[0], pair[1], preempted))
    return pairs


@does("has streaming sessions", since=(0, 32))
@pytest.mark.parametrize(("what", "generated"), [("text", False), ("pictures", True)])
def test_sessions_of_equal_tokens_read_what_is_theirs(
    what: str, generated: bool, tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """In one process, and again in another one that reads what the first stored."""
    connector = kvferry(tmp_path / "store", chunk_tokens=CHUNK, save_generated=generated)
    model = models["plain"]
    options: dict[str, Any] = {"block_size": CHUNK}
    if what == "pictures":
        model = make_image_model(tmp_path / "model")
        options |= {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}
    pairs = make_pairs(make_prompt, pictures=what == "pictures")

    def converse(process: Process, connector: Any) -> list[dict[str, Any]]:
        with process.engine(model, connector, **options):
            return [
                run(process, session, preempted=preempted)
                for *pair, preempted in pairs
                for session in pair
            ]

    own, written, read = (
        converse(second, None), converse(first, connector), converse(second, connector)
    )  # fmt: skip
    for a, b in zip(own[::2], own[1::2], strict=True):
        assert (a["said"] == b["said"]) == (what == "text")
    for expected, *others in zip(own, written, read, strict=True):
        for answer in others:
            assert_says(expected, answer)
    # The first look-up finds the first piece. Each later one finds all pieces so far.
    for (*_, preempted), a, b in zip(pairs, read[::2], read[1::2], strict=True):
        if preempted:
            assert min(a["hits"], b["hits"]) >= 128 + 192
        assert a["hits"] >= 64
