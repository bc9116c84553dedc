"""The sample V1 connector in the embedded engine: real model, real KV, another engine reads it."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.contract.spec import Roles
from kvferry.engine.generation import SamplingParams
from kvferry.engine.llm import LLM
from kvferry.observe import Counters
from kvferry.v1.driven import V1SchedulerRole, V1WorkerRole
from kvferry.v1.types import KVConnectorRole
from tests.v1.test_driven import load_sample, make_config

PROMPT = [3 + 7 * i % 200 for i in range(45)]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, return_logits=True)


@pytest.fixture
def generate(model_dir, tmp_path):
    sample = load_sample()

    def run(*, connector=True, block_size=8, **options):
        config = make_config(block_size=block_size, path=str(tmp_path))
        roles = None
        if connector:
            roles = Roles(
                V1SchedulerRole(sample.SampleConnector(config, KVConnectorRole.SCHEDULER)),
                V1WorkerRole(sample.SampleConnector(config, KVConnectorRole.WORKER)),
            )
        observer = Counters()
        with LLM(
            model_dir("llama"), roles=roles, observer=observer, dtype="float32",
            block_size=block_size, num_blocks=64, num_threads=1, **options,
        ) as llm:  # fmt: skip
            (completion,) = llm.generate([PROMPT], PARAMS)
        assert observer["hook_failed"] == observer["contract_violation"] == 0
        return completion

    return run


@pytest.mark.parametrize("max_batched_tokens", [13, 2048])
def test_a_v1_connector_saves_and_loads_in_the_embedded_engine(generate, max_batched_tokens):
    plain = generate(connector=False)
    cold = generate(max_batched_tokens=max_batched_tokens)
    warm = generate(max_batched_tokens=max_batched_tokens)
    assert (cold.num_external_tokens, warm.num_external_tokens) == (0, 40)
    assert plain.token_ids == cold.token_ids == warm.token_ids
    assert np.abs(plain.first_logits - warm.first_logits).max() <= 1e-4


def test_the_oracle_sees_wrong_kv(generate, tmp_path):
    import torch

    plain = generate()
    for file in tmp_path.glob("*.pt"):
        layers = torch.load(file)
        torch.save({name: kv * 1.5 for name, kv in layers.items()}, file)
    wrong = generate()
    assert wrong.num_external_tokens == 40
    assert np.abs(plain.first_logits - wrong.first_logits).max() > 1e-3


def test_damaged_files_are_recomputed(generate, tmp_path):
    plain = generate()
    for file in sorted(tmp_path.glob("*.pt")):
        file.write_bytes(file.read_bytes()[:100])
    recomputed = generate()
    assert recomputed.token_ids == plain.token_ids
    assert np.abs(plain.first_logits - recomputed.first_logits).max() <= 1e-4
