"""What the engine refuses to serve, and why; what it takes from a model directory."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import engine_spec
from kvferry.engine.kv_pool import KVCodec, LatentCodec
from kvferry.engine.model import PagedModel, Probe, load_tokenizer
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.paged_attention import AttentionCall, Scores
from kvferry.errors import ConfigError
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.testing.models import make_tiny_model


def write_config(path, model_type: str, **values):
    config = AutoConfig.for_model(model_type, **values)
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "values", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("mamba", {}, "recurrent"),
        ("bloom", {}, "attention interface"),
        ("vit", {}, "causal"),
        ("llama4_text", {"num_hidden_layers": 4}, "chunked_attention"),
        ("llava", {}, "more than text"),
        ("phi4_multimodal", {}, "more than text"),
        ("gemma4_text", {}, "what KV all layers have: 'head_dim' is .* may vary across layers$"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic' rotary",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_read(
    tmp_path, model_type, values, reason
):
    with pytest.raises(ConfigError, match=reason) as refusal:
        ModelConfig(write_config(tmp_path, model_type, **values), EngineConfig())
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


def test_attention_with_extras_is_refused_when_it_is_seen(model_dir):
    geometry = ModelConfig(model_dir(num_hidden_layers=1), EngineConfig()).geometry
    probe = Probe(KVCodec())
    kv = torch.zeros(1, 4, 3, 8)
    rest = {"is_causal": True, "dropout": 0.1, "position_bias": torch.zeros(1)}
    probe.attend(AttentionCall(0, kv, kv, kv, Scores(), rest))
    with pytest.raises(ConfigError, match="its attention uses position_bias, which"):
        probe.check(geometry, model_dir())


def test_a_model_that_loads_but_does_not_run_is_refused_in_one_line(tmp_path):
    # Of two routed experts, the default of eight is to be chosen per token.
    make_tiny_model(tmp_path, "deepseek_v3", num_experts_per_tok=8)
    with pytest.raises(ConfigError, match="loads but does not run") as refusal:
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")
    assert "\n" not in str(refusal.value)


def test_attention_that_looks_ahead_is_refused_when_it_is_seen(tmp_path):
    make_tiny_model(tmp_path, "bert")
    with pytest.raises(ConfigError, match="is_causal=False"):
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")


def test_keys_and_values_of_other_sizes_are_refused_when_they_are_seen(tmp_path):
    make_tiny_model(tmp_path, "youtu")
    with pytest.raises(ConfigError, match=r"kv heads and what is kept .* \[\(8, 30\)\]"):
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "unheard-of"}', "{}"])
def test_a_config_that_is_none_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError) as refusal:
        ModelConfig(tmp_path, EngineConfig())
    assert "\n" not in str(refusal.value)


def test_missing_weights_and_broken_tokenizers_are_named(model_dir, tmp_path):
    shutil.copy(model_dir() / "config.json", tmp_path)
    with pytest.raises(ConfigError, match="cannot load the weights"):
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_missing_tensor_is_refused_and_not_made_up(model_dir, tmp_path):
    shutil.copytree(model_dir(), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks 1 of .*layers\.1\.mlp\.up_proj\.weight"):
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")


def test_without_transformers_the_line_to_install_it_is_given(model_dir, monkeypatch):
    path = model_dir()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[transformers\]'"):
        ModelConfig(path, EngineConfig())


def test_dtype_follows_the_config_unless_set(tmp_path):
    make_tiny_model(tmp_path, dtype="bfloat16")
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    auto = ModelConfig(tmp_path, EngineConfig())
    assert auto.geometry.torch_dtype is torch.bfloat16
    told = ModelConfig(tmp_path, EngineConfig(dtype="float32"))
    assert told.geometry.torch_dtype is torch.float32
    specs = [engine_spec(model, EngineConfig(block_size=8)) for model in (auto, told)]
    assert specs[0].identity != specs[1].identity


def test_the_spec_names_the_model(model_dir):
    engine = EngineConfig(block_size=8)
    specs = [engine_spec(ModelConfig(model_dir(seed=seed), engine), engine) for seed in (0, 1)]
    (group,) = specs[0].groups
    assert (group.num_layers, group.num_kv_heads, group.content_size) == (3, 4, 16)
    assert (group.dtype, group.block_size, group.window) == ("float32", 8, None)
    (part,) = specs[0].tables
    assert part.layer_names == ("layers.0", "layers.1", "layers.2")
    assert specs[0].identity.weights != specs[1].identity.weights
    assert specs[0].identity.config == specs[1].identity.config


@pytest.mark.parametrize(
    "damage", [lambda content: content[:5000], lambda content: b"", lambda content: b"x" * 100]
)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_damaged_weights_are_refused_in_one_line(model_dir, tmp_path, name, damage):
    shutil.copy(model_dir() / "config.json", tmp_path)
    (tmp_path / name).write_bytes(damage((model_dir() / "model.safetensors").read_bytes()))
    with pytest.raises(ConfigError, match="cannot load the weights") as refusal:
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")
    assert "\n" not in str(refusal.value)


def test_weights_of_another_shape_are_refused_by_name_and_without_a_report(
    model_dir, tmp_path, capfd
):
    shutil.copytree(model_dir(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 2}))
    with pytest.raises(ConfigError, match=r"k_proj\.weight has shape \[32, 64\].*\[16, 64\]"):
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")
    assert "REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("device", ["no-such-device", "cuda:77"])
def test_a_device_that_is_not_there_is_refused(model_dir, device):
    with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
        PagedModel(ModelConfig(model_dir(), EngineConfig()), device)


def test_a_class_that_a_caller_registered_has_no_identity(model_dir, monkeypatch):
    class Other(LlamaForCausalLM):
        pass

    config = ModelConfig(model_dir(), EngineConfig())
    monkeypatch.setitem(MODEL_FOR_CAUSAL_LM_MAPPING._extra_content, LlamaConfig, Other)
    assert config.model_class() is Other
    with pytest.raises(ConfigError, match=r"Other computes the model.*run it without a store"):
        engine_spec(config, EngineConfig())
    spec = engine_spec(config, EngineConfig(), weights_version="v1")
    assert spec.identity.weights_version == "v1"


def test_a_question_whether_to_run_code_is_never_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("asked"))
    config = {"model_type": "new", "auto_map": {"AutoConfig": "configuration_new.New"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "configuration_new.py").write_text("")
    with pytest.raises(ConfigError, match=r"config\.json cannot be used"):
        ModelConfig(tmp_path, EngineConfig())


def test_layers_of_one_window_are_a_group_and_all_are_in_one_table(model_dir):
    engine = EngineConfig(block_size=8)
    spec = engine_spec(ModelConfig(model_dir("gemma3_text"), engine), engine)
    assert [(group.num_layers, group.window) for group in spec.groups] == [(2, 29), (2, None)]
    assert [part.layer_names for part in spec.tables] == [
        ("layers.0", "layers.2"),
        ("layers.1", "layers.3"),
    ]
    # The engine keeps all tokens of every layer.
    assert [(part.table, part.block_size, part.window) for part in spec.tables] == [
        (0, 8, None),
        (0, 8, None),
    ]


def test_a_latent_is_one_head_that_every_rank_holds(model_dir):
    engine = EngineConfig(tensor_parallel_size=4)
    model = ModelConfig(model_dir("deepseek_v3"), engine)
    spec = engine_spec(model, engine)
    (group,) = spec.groups
    for rank in range(4):
        (shard,) = tensor_parallel_shard(spec.groups, rank, 4).groups
        assert (group.num_kv_heads, group.content_size) == (1, 16 + 8)
        assert (shard.heads, shard.writes) == ((0, 1), rank == 0)


def test_a_latent_is_kept_with_rotated_pairs_side_by_side():
    """The order of other engines; DeepSeek-V3 in Transformers has another."""
    latent, apart = torch.zeros(1, 1, 1, 2), torch.tensor([[[[0.0, 2.0, 4.0, 1.0, 3.0, 5.0]]]])
    codec = LatentCodec({}, has_pairs_apart=True)
    codec.update(latent, apart, 0)
    assert codec.encode(0, latent, latent)[0, 0, 0].tolist() == [0, 0, 0, 1, 2, 3, 4, 5]
    codec = LatentCodec({}, has_pairs_apart=False)
    codec.update(latent, apart, 0)
    assert codec.encode(0, latent, latent)[0, 0, 0].tolist() == [0, 0, 0, 2, 4, 1, 3, 5]


def test_layers_with_other_windows_than_the_config_says_are_refused(model_dir, tmp_path):
    shutil.copytree(model_dir(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sliding_window": 12}))
    with pytest.raises(ConfigError, match="windows of all tokens, by the config of 12"):
        PagedModel(ModelConfig(tmp_path, EngineConfig()), "cpu")


def test_a_tokenizer_of_a_class_that_is_not_known_here_is_read_from_its_file(tmp_path):
    """As a directory is that another release of Transformers saved."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(
        str(tmp_path / "tokenizer.json")
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "FromTheFuture"}')
    assert load_tokenizer(tmp_path)("a")["input_ids"] == [0]
