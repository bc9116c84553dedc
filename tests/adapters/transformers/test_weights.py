"""Weights in memory that are not those of the files have no name, so their KV is not stored."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.adapters.transformers import StoredKV
from kvferry.engine.model import quiet_transformers
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


CHANGED = {
    # Renamed when they are loaded: all tensors of these classes are.
    "gemma3": "language_model.layers.0.self_attn.v_proj.weight",
    "llava": "language_model.layers.1.mlp.up_proj.weight",
    "internvl": "language_model.norm.weight",
    # Experts that are apart in the files, together in memory; others renamed beside them.
    "mixtral": "layers.1.mlp.experts.gate_up_proj",
    "qwen3_moe": "layers.0.mlp.experts.down_proj",
    "minimax_m3_vl": "language_model.layers.1.mlp.experts.down_proj",
    # Apart in memory, one in the files.
    "lara_mini": "layers.0.linear_attn.in_proj_z.weight",
    "ernie4_5_vl_moe": "language_model.layers.1.mlp.text_moe.gate.weight",
    "kimi_k25": "vision_tower.layers.0.attn.k_proj.weight",
}
"""By type, a parameter in another form than in the files."""


@pytest.mark.parametrize("model_type", CHANGED)
def test_a_change_of_weights_that_loading_renamed_or_joined_is_found(
    any_dir, store_url, model_type, caplog
):
    directory, auto_class = any_dir(model_type)
    with quiet_transformers():
        model = auto_class.from_pretrained(directory, dtype=torch.float32)
    caplog.set_level(logging.INFO)
    StoredKV(model, store_url).close()
    assert "were not compared" not in caplog.text
    with torch.no_grad():
        model.base_model.get_parameter(CHANGED[model_type]).add_(1e-3)
    with pytest.raises(ConfigError, match="was changed after loading"):
        StoredKV(model, store_url)
