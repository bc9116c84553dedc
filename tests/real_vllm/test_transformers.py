"""A plain Transformers model and vLLM read what the other stored."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.store.url import open_store
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import TOLERANCE, Process, expected_hit, kvferry, wait_for_records


def test_plain_transformers_and_vllm_read_each_other(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, first: Process
) -> None:
    by_transformers, by_vllm = make_prompt(300), make_prompt(300)
    model = AutoModelForCausalLM.from_pretrained(models["plain"], dtype=torch.float32)

    def run(kv: StoredKV, prompt: list[int]) -> tuple[int, list[int]]:
        output = kv.generate(
            torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        cold = model.generate(
            torch.tensor([prompt]), max_new_tokens=4, min_new_tokens=4, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        for logits, expected in zip(output.logits, cold.logits, strict=True):
            assert (logits - expected).abs().max() <= TOLERANCE
        return kv.num_loaded, output.sequences[0, len(prompt) :].tolist()

    with StoredKV(model, tmp_path.as_uri()) as kv:
        num_loaded, tokens = run(kv, by_transformers)
    assert num_loaded == 0
    with first.engine(models["plain"], kvferry(tmp_path)) as engine:
        answers = engine.generate([by_transformers, by_vllm], max_tokens=4)
    assert [answer.cached for answer in answers] == [expected_hit(300), 0]
    assert answers[0].tokens == tokens
    wait_for_records(tmp_path, 4)
    store = open_store(tmp_path.as_uri())
    with StoredKV(model, store) as kv:
        # By itself it waits for its store's index so long only that it still starts quickly.
        assert store.wait_indexed(30)
        num_loaded, tokens = run(kv, by_vllm)
    assert num_loaded == 256
    assert answers[1].tokens == tokens
