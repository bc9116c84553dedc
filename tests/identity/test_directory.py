"""What the configuration in a model directory says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.identity import identify, length_dependent_rope, written_config


def test_config_loses_its_noise_and_keeps_unknown_fields(tmp_path):
    fields = {"hidden_size": 8, "time_step_limit": [0.0, float("inf")], "brand_new": {"a": 1}}
    noise = {"_name_or_path": "x", "transformers_version": "5.0", "use_cache": False}
    (tmp_path / "config.json").write_text(json.dumps({**fields, **noise}))
    assert written_config(tmp_path) == fields


@pytest.mark.parametrize("names", [["config.4.0.0.json"], {"config.4.0.0.json": 1}])
def test_a_config_of_which_each_version_reads_another_file_is_refused(tmp_path, names):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": 1, "configuration_files": ["config.json"]}))
    assert written_config(tmp_path)["a"] == 1
    path.write_text(json.dumps({"a": 1, "configuration_files": names}))
    with pytest.raises(ConfigError, match=r"copy the one to use over config\.json"):
        written_config(tmp_path)


def test_a_directory_with_an_adapter_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert written_config(tmp_path) == {}
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"PEFT adapter \(adapter_config.json\).*merge it"):
        written_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"x"', "[" * 100_000, "null"])
def test_a_config_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="model config"):
        written_config(tmp_path)


def test_a_missing_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the model config"):
        written_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "dynamic"),
        ({"rope_scaling": {"type": "su"}}, "su"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "longrope"),
        ({"text_config": {"rope_scaling": {"rope_type": "dynamic"}}}, "dynamic"),
        ({"rope_scaling": None}, None),
        (None, None),
    ],
)
def test_rotary_embeddings_that_depend_on_a_length_are_found(config, found):
    assert length_dependent_rope(config) == found


def make_identity(written, *, dtype="float32", deviations=None, name=None):
    return identify(
        Path("nowhere"),
        dtype=dtype,
        deviations=deviations or {},
        name=name,
        weights=bytes(32),
        config=written,
    )


def test_the_dtype_that_runs_replaces_both_names_of_the_written_one():
    either = [{"torch_dtype": "bfloat16", "a": 1}, {"dtype": "bfloat16", "a": 1}, {"a": 1}]
    identities = [make_identity(written) for written in either]
    assert identities[0].config == {"a": 1, "dtype": "float32"}
    assert identities.count(identities[0]) == 3
    assert make_identity({"a": 1}, dtype="bfloat16") != identities[0]


def test_a_deviation_is_another_model_and_a_name_is_not():
    plain = make_identity({"a": 1})
    assert make_identity({"a": 1}, deviations={"overrides": {"a": 2}}) != plain
    assert make_identity({"a": 1}, name="mine") == plain
