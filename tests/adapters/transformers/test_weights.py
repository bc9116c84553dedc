"""Weights in memory that are not those of the files have no name, so their KV is not stored."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.adapters.transformers import StoredKV
from kvferry.errors import ConfigError
from tests.adapters.transformers.generating import CHUNK, prompt, reuse


def _drop_from_file(directory, name):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_a_parameter_that_no_file_holds_is_refused(
    model_dir, load_model, store_url, tmp_path, name
):
    directory = tmp_path / "model"
    shutil.copytree(model_dir(), directory)
    _drop_from_file(directory, name)
    model = load_model(directory)  # which fills it with random numbers
    with pytest.raises(ConfigError, match=rf"no file with the model's {name}:") as refusal:
        StoredKV(model, store_url)
    assert "\n" not in str(refusal.value)
    assert reuse(model, store_url, prompt(40), weights_version="mine").num_loaded == 0


def test_a_parameter_that_was_added_is_refused(load_model, store_url):
    model = load_model()
    model.model.layers[1].gate = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"no file with the model's model\.layers\.1\.gate"):
        StoredKV(model, store_url)


def test_weights_that_are_tied_or_renamed_count_as_read(model_dir, load_model, store_url):
    for arch, options in (("llama", {"tie_word_embeddings": True}), ("gpt_oss", {})):
        model = load_model(model_dir(arch, **options))
        assert reuse(model, f"{store_url}/{arch}", prompt(40)).num_saved == 40 // CHUNK * CHUNK
