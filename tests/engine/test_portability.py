"""What an engine of one shape stored, engines of every other shape read.

A shape is tensor-parallel size, block size and KV layout. All writers store into one directory,
each a prompt of its own; every reader then reads the prompts of all writers. Ranks beyond the first
run in threads; `test_tensor_parallel` has them in processes.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from kvferry.engine import LLM, SamplingParams
from tests.engine.rank_threads import ThreadedLLM
from tests.engine.test_llm import prompt

pytestmark = pytest.mark.slow

NUM_TOKENS, CHUNK_TOKENS = 300, 32
FIRST = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)


class Shape(NamedTuple):
    tensor_parallel_size: int
    block_size: int
    kv_layout: str

    @property
    def hit(self) -> int:
        """Tokens that a reader of this shape finds of a stored prompt."""
        whole = NUM_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
        return min(whole, NUM_TOKENS - 1) // self.block_size * self.block_size


SHAPES = [
    Shape(*each)
    for each in itertools.product((1, 2, 4), (16, 32, 128), ("HND", "NHD", "cross_layer"))
]
# Every pair of values of two axes, writer's and reader's, is among these.
SOME = [
    *(Shape(1, 16, "HND"), Shape(1, 128, "NHD"), Shape(2, 32, "cross_layer")),
    *(Shape(2, 16, "NHD"), Shape(4, 128, "HND"), Shape(4, 32, "NHD")),
]


def own_hits(path, prompts):
    """First logits of each prompt, from the engine's own prefix cache."""
    with LLM(path) as llm:
        llm.generate(prompts, FIRST)
        again = llm.generate(prompts, FIRST)
    assert all(each.num_cached_tokens > 0 for each in again)
    return [each.first_logits for each in again]


def read(llm, token_ids, hit):
    """A load that does not arrive in time is cut short, so a busy machine may need more tries."""
    for _ in range(4):
        llm.reset_prefix_cache()
        (completion,) = llm.generate([token_ids], FIRST)
        if completion.num_external_tokens == hit:
            break
    return completion


def check(path, store, writers, readers):
    options = {
        "store": f"file://{store}?max_bytes=512MiB",
        "connector_options": {"chunk_tokens": CHUNK_TOKENS, "audit": "off"},
    }
    prompts = [prompt(NUM_TOKENS, seed=100 + index) for index in range(len(writers))]
    expected = own_hits(path, prompts)
    for writer, token_ids in zip(writers, prompts, strict=True):
        with ThreadedLLM(path, **writer._asdict(), **options) as llm:
            (completion,) = llm.generate([token_ids], FIRST)
            assert completion.num_external_tokens == 0
            assert llm.drain(20.0)
    for reader in readers:
        with ThreadedLLM(path, **reader._asdict(), **options) as llm:
            for writer, token_ids, logits in zip(writers, prompts, expected, strict=True):
                completion = read(llm, token_ids, reader.hit)
                assert completion.num_external_tokens == reader.hit, (writer, reader)
                difference = np.abs(completion.first_logits - logits).max()
                assert difference <= 1e-3, (writer, reader, difference)


@pytest.mark.parametrize(
    "arch",
    [
        "llama",
        pytest.param("qwen3", marks=pytest.mark.sweep),
        "gemma3_text",
        pytest.param("gpt_oss", marks=pytest.mark.sweep),
        "deepseek_v3",
    ],
)
def test_what_one_shape_stored_every_other_reads(model_dir, tmp_path, arch):
    """kv heads: split evenly, replicated, in two windows, likewise with sinks, one latent."""
    check(model_dir(arch), tmp_path / "store", SOME, SOME)


@pytest.mark.sweep
def test_all_shapes_read_each_other(model_dir, tmp_path):
    check(model_dir(), tmp_path / "store", SHAPES, SHAPES)
