"""What one process stores of prompts with images, another reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForImageTextToText

from kvferry.adapters.transformers import StoredKV
from kvferry.engine.model import quiet_transformers
from kvferry.observe import Counters
from tests.adapters.transformers.generating import CHUNK, generate
from tests.adapters.transformers.image_models import (
    IMAGE,
    MODELS,
    ImagePrompt,
    Picture,
    image_prompt,
    mend_llama4,
)

WITHIN = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""Of the largest logit. In bfloat16, another order of sums gives 0.01."""

A, B, C = Picture(1), Picture(2, 3, 4), Picture(3, 3, 4)


class Answer(NamedTuple):
    num_loaded: int
    num_without_store: int
    token_ids: torch.Tensor
    logits: torch.Tensor


def load(directory: str | Path, dtype: torch.dtype):
    mend_llama4()
    with quiet_transformers():
        return AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype)


def answers(directory, url: str, dtype: torch.dtype, prompts: list[ImagePrompt]) -> list[Answer]:
    """Generate with one `StoredKV`."""
    counts, found = Counters(), []
    options = {"chunk_tokens": CHUNK, "observer": counts}
    with StoredKV(load(directory, dtype), url, **options) as kv:
        for ids, inputs in prompts:
            without = counts["generated_without_store"]
            token_ids, logits = generate(kv, ids, **inputs, **WORDS)
            without = counts["generated_without_store"] - without
            found.append(Answer(kv.num_loaded, without, token_ids, logits))
    return found


def answers_of_other_process(directory, url, dtype, prompts, place: Path) -> list[Answer]:
    given, taken = place / "given", place / "taken"
    torch.save((str(directory), url, dtype, [tuple(each) for each in prompts]), given)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    subprocess.run(
        [sys.executable, "-m", __name__, str(given), str(taken)], check=True, cwd=root,
        env=environment,
    )  # fmt: skip
    return [Answer(*each) for each in torch.load(taken)]


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected - found).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        *((each, torch.float32) for each in MODELS),
        *((each, torch.bfloat16) for each in ("qwen3_5", "gemma3")),
    ],
)
def test_another_process_reads_a_prompt_with_images(
    image_dir, store_url, tmp_path, model_type, dtype
):
    directory = image_dir(model_type)
    prompt = image_prompt(model_type, 40, A, 21, B, 50)
    other = image_prompt(model_type, 40, A, 21, C, 50)
    expected, logits = generate(load(directory, dtype), prompt.input_ids, **prompt.inputs, **WORDS)
    _, others = generate(load(directory, dtype), other.input_ids, **other.inputs, **WORDS)
    assert difference(logits, others) > 3 * WITHIN[dtype]
    (stored,) = answers(directory, store_url, dtype, [prompt])
    (read,) = answers_of_other_process(directory, store_url, dtype, [prompt], tmp_path)
    assert stored.num_loaded == 0
    assert read.num_loaded == (prompt.input_ids.shape[1] - 2) // CHUNK * CHUNK
    for answer in (stored, read):
        assert answer.num_without_store == 0
        assert difference(logits, answer.logits) <= WITHIN[dtype]
        assert dtype != torch.float32 or torch.equal(answer.token_ids, expected)


def conversation(directory, model_type: str, num_turns: int) -> tuple[list[ImagePrompt], list]:
    """Return the prompts of the turns, with images in the first and the fourth, and the answers of
    the model without a store."""
    model, pictures = load(directory, torch.float32), []
    prompts, expected = [], []
    row = torch.empty((1, 0), dtype=torch.long)
    for turn in range(num_turns):
        new = {0: [7, A, 30], 3: [9, B, 20]}.get(turn, [25 + turn])
        pictures += [each for each in new if isinstance(each, Picture)]
        row = torch.cat([row, image_prompt(model_type, *new, seed=turn).input_ids], 1)
        inputs = image_prompt(model_type, *pictures).inputs
        types = {name: (row == IMAGE).int() for name in inputs if name.endswith("token_type_ids")}
        prompts.append(ImagePrompt(row, {**inputs, **types}))
        row, _ = generate(model, row, **prompts[-1].inputs, **WORDS)
        expected.append(row)
    return prompts, expected


WORDS = {"new_tokens": 6, "suppress_tokens": [*range(200, 256)]}
"""Of an answer: no tokens of images."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl", "gemma3", "gemma4"])
def test_a_conversation_with_images_goes_on_in_another_process(
    image_dir, store_url, tmp_path, model_type
):
    directory = image_dir(model_type)
    prompts, expected = conversation(directory, model_type, 8)
    found = answers(directory, store_url, torch.float32, prompts[:5])
    found += answers_of_other_process(directory, store_url, torch.float32, prompts[5:], tmp_path)
    for turn, (answer, row) in enumerate(zip(found, expected, strict=True)):
        assert answer.num_without_store == 0
        assert torch.equal(answer.token_ids, row)
        before = prompts[turn - 1].input_ids.shape[1] if turn else 0
        assert max(0, before - 2) // CHUNK * CHUNK <= answer.num_loaded <= before


if __name__ == "__main__":
    torch.save([tuple(each) for each in answers(*torch.load(sys.argv[1]))], sys.argv[2])
