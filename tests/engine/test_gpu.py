"""The engine on CUDA devices: what it generates, stores and reads is what a CPU does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.engine import LLM, SamplingParams
from tests.engine.test_llm import ARCHITECTURES, prompt

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_logits=True)
LENGTHS = (1, 15, 16, 37, 101)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def generate(path, prompts, **options):
    with LLM(path, **options) as llm:
        completions = llm.generate(prompts, GREEDY)
        llm.drain(10.0)
    return completions


def assert_equal(completions, expected) -> None:
    for ours, theirs in zip(completions, expected, strict=True):
        assert np.abs(ours.first_logits - theirs.first_logits).max() <= 1e-3
        assert ours.token_ids == theirs.token_ids


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_device_generates_what_a_cpu_does_and_both_read_one_store(model_dir, tmp_path, arch):
    path = model_dir(arch)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    options = {
        "store": f"file://{tmp_path}/store?max_bytes=64MiB",
        "connector_options": {"chunk_tokens": 16, "audit": "off"},
    }
    expected = generate(path, prompts)
    assert_equal(generate(path, prompts, device="cuda", max_batched_tokens=50, **options), expected)
    for reader in ({"device": "cuda", "block_size": 32}, {"device": "cpu"}):
        completions = generate(path, prompts, **reader, **options)
        assert_equal(completions, expected)
        assert completions[-1].num_external_tokens > 0


@pytest.mark.parametrize("kv_layout", ["HND", "NHD", "cross_layer"])
def test_any_layout_on_a_device_is_read_on_a_cpu(model_dir, tmp_path, kv_layout):
    path = model_dir()
    options = {
        "store": f"file://{tmp_path}/store?max_bytes=64MiB",
        "connector_options": {"chunk_tokens": 16, "audit": "off"},
    }
    expected = generate(path, [prompt(101)])
    generate(path, [prompt(101)], device="cuda", kv_layout=kv_layout, **options)
    completions = generate(path, [prompt(101)], **options)
    assert_equal(completions, expected)
    assert completions[0].num_external_tokens == 96


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="less than two CUDA devices")
def test_two_devices_generate_what_a_cpu_does(model_dir):
    path = model_dir()
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    expected = generate(path, prompts)
    assert_equal(generate(path, prompts, device="cuda", tensor_parallel_size=2), expected)
