"""Two engines agree on a model's identity exactly if they make the same KV from the same tokens."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvferry.blocks.tolerance import tolerances_for
from kvferry.errors import ConfigError
from kvferry.identity import ModelFiles, RunningModel, running, weights_digest, written_config
from kvferry.keys import Namespace
from kvferry.types import KVGroup
from kvferry.v1 import running_model as reading
from kvferry.v1.running_model import model_files
from tests.adapters.vllm.fakes import (
    HFConfig,
    identity_of,
    load_config,
    make_code,
    make_config,
    registry_of,
    write_model,
)

GROUP = KVGroup(num_layers=2, num_kv_heads=2, content_size=8, dtype="float32", block_size=4)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def namespace(config, version=None):
    return Namespace.of(identity_of(config, version, load_config), (GROUP,), 128).digest


def test_a_model_run_as_it_is_written_is_what_its_files_say(model):
    identity = identity_of(make_config(model), None, load_config)
    expected = written_config(model)
    expected.pop("torch_dtype")
    assert identity.config == {**expected, "dtype": "float32"}
    assert identity.weights == weights_digest(model)
    assert identity.name == str(model)


def test_a_copy_elsewhere_is_the_same_model(model, tmp_path):
    other = tmp_path / "elsewhere"
    shutil.copytree(model, other)
    assert namespace(make_config(model)) == namespace(make_config(other))


def with_rope(model, **changes):
    values = load_config(model).to_dict()
    values["rope_parameters"]["rope_theta"] = 5e5
    return {"model_config__hf_config": HFConfig(values), **changes}


def write_rope_elsewhere(model):
    return write_model(model.with_name("elsewhere"), rope_parameters={"rope_theta": 5e5})


OVERRIDES = {
    "dtype": {"model_config__dtype": torch.bfloat16},
    "kv dtype": {"cache_config__cache_dtype": "fp8_e4m3"},
    "online quantisation": {"model_config__quantization": "fp8"},
    "implementation": {"model_config__using_transformers_backend": lambda: True},
    "LoRA modules": {"lora_config": SimpleNamespace(target_modules=["o_proj"])},
    "options of a platform": {"additional_config": {"kv": "compressed"}},
    "rope": with_rope,
    "config from elsewhere": lambda model: {
        "model_config__hf_config": load_config(elsewhere := write_rope_elsewhere(model)),
        "model_config__hf_config_path": str(elsewhere),
    },
}


@pytest.mark.parametrize("changes", OVERRIDES.values(), ids=OVERRIDES.keys())
def test_what_the_operator_changes_is_another_model(model, changes):
    changes = changes(model) if callable(changes) else changes
    assert namespace(make_config(model, **changes)) != namespace(make_config(model))


SHARED_WITH_NOBODY = {
    "dummy weights": ({"load_config__load_format": "dummy"}, False),
    "an unknown loader": ({"load_config__load_format": "tensorizer"}, True),
    "a class without a file": (
        {"model_config__registry": registry_of(make_code("nowhere"))},
        False,
    ),
}
"""And whether a version of the weights says all that is not known."""


@pytest.mark.parametrize(
    ("changes", "version_tells"), SHARED_WITH_NOBODY.values(), ids=SHARED_WITH_NOBODY
)
def test_what_cannot_be_known_is_shared_with_nobody(model, changes, version_tells):
    config = make_config(model, **changes)
    assert namespace(config) != namespace(config)
    assert (namespace(config, "v1") == namespace(config, "v1")) is version_tells
    assert namespace(config, "v1") != namespace(config, "v2")


def test_quantisation_by_the_checkpoint_is_known_from_its_config_alone(tmp_path):
    model = write_model(tmp_path / "q", quantization_config={"quant_method": "fp8"})
    marlin = make_config(model, model_config__quantization="fp8_marlin")
    assert namespace(marlin) == namespace(make_config(model, model_config__quantization="fp8"))


def test_quantisation_of_what_a_quantised_checkpoint_left_is_another_model(tmp_path):
    model = write_model(tmp_path / "q", quantization_config={"quant_method": "fp8"})
    plain = make_config(model, model_config__quantization="fp8")
    more = make_config(
        model, model_config__quantization="fp8", model_config__quantization_config={"moe": "int8"}
    )
    assert namespace(more) != namespace(plain)


@pytest.mark.parametrize("written", [{}, {"quantization_config": {"quant_method": "modelopt"}}])
def test_what_model_opt_writes_beside_the_config_is_another_model(tmp_path, written):
    """vLLM reads a field that is not in `config.json`, but the reader of what is written does so,
    too."""
    model = write_model(tmp_path / "q", **written)
    config = make_config(model, model_config__quantization="modelopt")
    config.model_config.hf_config.quantization_config = {"quant_method": "modelopt"}
    found = [namespace(config)]
    for algorithm in ("FP8", "NVFP4"):
        text = json.dumps({"quantization": {"quant_algo": algorithm}})
        (model / "hf_quant_config.json").write_text(text)
        found.append(namespace(config))
    assert len(set(found)) == 3
    assert tolerances_for(identity_of(config, None, load_config).config) == {}


def test_a_quantisation_that_cannot_be_read_is_refused(model):
    (model / "hf_quant_config.json").write_text("{")
    with pytest.raises(ConfigError, match="hf_quant_config"):
        identity_of(make_config(model), None, load_config)


def test_variables_that_quantise_are_another_model(model, monkeypatch):
    before = namespace(make_config(model))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert namespace(make_config(model)) == before
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    by_equal_bits = namespace(make_config(model))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT")
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    by_int8 = namespace(make_config(model))
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    assert len({before, by_equal_bits, by_int8, namespace(make_config(model))}) == 4


def test_a_file_that_says_how_to_quantise_counts_by_content(model, tmp_path):
    path = tmp_path / "torchao.json"
    config = make_config(model, model_config__hf_overrides={"quantization_config_file": str(path)})
    found = []
    for text in ("{}", '{"bits": 4}'):
        path.write_text(text)
        found.append(namespace(config))
    assert found[0] != found[1]


def import_plugin(path, monkeypatch, *, base="...", child="..."):
    """The class of a plug-in, and the one it inherits from, each in a module of its own."""
    (path / "their_base.py").write_text(f"class Base: {base}")
    (path / "their_models.py").write_text(
        f"from their_base import Base\nclass Llama(Base): {child}"
    )
    monkeypatch.syspath_prepend(path)
    importlib.invalidate_caches()
    for name in ("their_base", "their_models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("their_models")
    return module.Llama, module.Base


def test_a_model_class_of_a_plug_in_is_another_model_and_its_files_count(
    model, tmp_path, monkeypatch
):
    def by(code):
        return namespace(make_config(model, model_config__registry=registry_of(code)))

    own = by(make_code("vllm.model_executor.models.llama"))
    assert own == by(make_code("vllm.models.llama", name="Renamed"))
    code, base = import_plugin(tmp_path, monkeypatch)
    theirs = by(code)
    assert theirs == by(code)
    assert theirs not in (own, by(base))
    for number, changed in enumerate(("base", "child")):
        path = tmp_path / str(number)
        path.mkdir()
        other, _ = import_plugin(path, monkeypatch, **{changed: "scale = 2"})
        assert by(other) != theirs


def test_a_name_on_modelscope_is_not_the_snapshot_of_hugging_face(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    written = write_hub(cache, 1.0)
    config = make_config(
        written,
        model_config__model="some/model",
        load_config__download_dir=str(cache),
    )
    assert model_files(config).find() is not None
    with monkeypatch.context() as of_sglang:
        of_sglang.setenv("SGLANG_USE_MODELSCOPE", "true")
        assert model_files(config).find() is None
    variables = SimpleNamespace(VLLM_USE_MODELSCOPE=True)
    monkeypatch.setitem(sys.modules, "vllm.envs", variables)
    assert model_files(config).find() is None


@pytest.mark.parametrize(("rope_type", "differs"), [("default", False), ("dynamic", True)])
def test_the_context_length_counts_where_rope_depends_on_it(tmp_path, rope_type, differs):
    rope = {"rope_type": rope_type, "rope_theta": 1e4}
    model = write_model(tmp_path / "m", rope_parameters=rope)
    short = namespace(make_config(model))
    long = namespace(make_config(model, model_config__max_model_len=128))
    assert (short != long) == differs


def test_latents_are_for_vllm_alone(model):
    config = identity_of(make_config(model, model_config__use_mla=True)).config
    assert config["latents_of"] == "vllm on cpu"
    assert "latents_of" not in identity_of(make_config(model), None, load_config).config


def test_weights_that_are_nowhere_on_disk_need_a_version(model, tmp_path):
    config = make_config(model, model_config__model=str(tmp_path / "not-here"))
    with pytest.raises(ConfigError, match='set "weights_version"') as caught:
        identity_of(config, None, load_config)
    assert "\n" not in str(caught.value)
    first = identity_of(config, "v1", load_config)
    assert first.weights != identity_of(config, "v2", load_config).weights


def test_a_config_in_another_format_counts_where_it_differs(model):
    def by_format(path, *, config_format, **_):
        values = load_config(path).to_dict()
        return HFConfig(values if config_format == "hf" else {**values, "rope_theta": 5e5})

    def digest(config_format):
        config = make_config(model, model_config__config_format=config_format)
        config.model_config.hf_config = by_format(model, config_format=config_format)
        return Namespace.of(identity_of(config, None, by_format), (GROUP,), 128).digest

    assert digest("mistral") != digest("hf")


@pytest.mark.parametrize(
    ("load_format", "is_shared"),
    [("safetensors", True), ("fastsafetensors", True), ("pt", False), ("mistral", False)],
)
def test_a_format_that_reads_other_files_is_another_model(model, load_format, is_shared):
    found = namespace(make_config(model, load_config__load_format=load_format))
    assert (found == namespace(make_config(model))) == is_shared
    assert found == namespace(make_config(model, load_config__load_format=load_format))


TRUSTED = {"model_config__trust_remote_code": True}


def write_custom(path, auto_map=None):
    auto_map = auto_map or {"AutoConfig": "configuration_x.X", "AutoModel": "modeling_x.X"}
    write_model(path, auto_map=auto_map)
    (path / "modeling_x.py").write_text("from .parts import SCALE\n")
    (path / "parts.py").write_text("SCALE = 1.0\n")
    return path


def test_custom_code_is_known_by_all_files_of_the_directory(tmp_path):
    model = write_custom(tmp_path / "model")
    copied = shutil.copytree(model, tmp_path / "copy")
    trusted = namespace(make_config(model, **TRUSTED))
    assert namespace(make_config(copied, **TRUSTED)) == trusted
    assert namespace(make_config(model)) != trusted
    without = namespace(make_config(model))
    (copied / "parts.py").write_text("SCALE = 2.0\n")
    assert namespace(make_config(copied, **TRUSTED)) != trusted
    (copied / "parts.py").rename(copied / "pieces.py")
    assert namespace(make_config(copied, **TRUSTED)) != trusted
    assert namespace(make_config(copied)) == without  # which runs none of it


def test_trust_alone_changes_nothing(model):
    (model / "convert.py").write_text("SCALE = 2.0\n")
    assert namespace(make_config(model, **TRUSTED)) == namespace(make_config(model))


@pytest.mark.parametrize(
    ("auto_map", "changes"),
    [
        ({"AutoModel": "someone/else--modeling_x.X"}, {}),
        ({"AutoModel": ["modeling_x.X", "someone/else--fast.X"]}, {}),
        (None, {"model_config__code_revision": "v2"}),
        (None, {"model_config__hf_config_path": "elsewhere"}),
    ],
)
def test_custom_code_from_elsewhere_needs_a_version(tmp_path, auto_map, changes):
    config = make_config(write_custom(tmp_path / "model", auto_map), **TRUSTED, **changes)
    with pytest.raises(ConfigError, match=r'copy it there, or set "weights_version"') as refusal:
        namespace(config)
    assert "\n" not in str(refusal.value)
    assert namespace(config, "v1") == namespace(config, "v1")
    stock = make_config(tmp_path / "model", **changes)
    assert namespace(config, "v1") not in (namespace(config, "v2"), namespace(stock, "v1"))


def test_code_that_the_directory_does_not_hold_is_from_elsewhere(tmp_path):
    model = write_model(tmp_path / "model", auto_map={"AutoModel": "modeling_x.X"})
    with pytest.raises(ConfigError, match=r"not in the model's directory \(modeling_x.X\)"):
        namespace(make_config(model, **TRUSTED))


def write_hub(cache, fill):
    """A hub's cache that holds one commit of `some/model`."""
    commit = f"{int(fill):040x}"
    model = write_model(cache / "models--some--model" / "snapshots" / commit, fill=fill)
    refs = cache / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(commit)
    return model


def test_a_model_of_a_hub_is_the_commit_in_the_cache_that_the_operator_names(tmp_path):
    digests = []
    for fill in (1.0, 2.0):
        cache = tmp_path / str(fill)
        expected = weights_digest(write_hub(cache, fill))
        config = make_config(
            cache / "models--some--model" / "snapshots" / f"{int(fill):040x}",
            model_config__model="some/model",
            load_config__download_dir=str(cache),
        )
        digests.append(identity_of(config, None, lambda *_, **__: HFConfig({})).weights)
        assert digests[-1] == expected
    assert digests[0] != digests[1]


def test_a_single_file_of_weights_is_hashed(model, tmp_path):
    other = write_model(tmp_path / "other", fill=2.0)
    first, second = (
        namespace(make_config(path, model_config__model_weights=str(path / "model.safetensors")))
        for path in (model, other)
    )
    assert first != second


def test_scales_taken_from_requests_are_refused(model):
    config = make_config(
        model, cache_config__cache_dtype="fp8", cache_config__calculate_kv_scales=True
    )
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        identity_of(config, None, load_config)


def test_a_config_that_cannot_be_read_again_counts_as_a_whole(model):
    def unreadable(*_, **__):
        raise OSError("gone")

    identity = identity_of(make_config(model), None, unreadable)
    assert identity.config["overrides"]["num_hidden_layers"] == 2


def test_weights_that_changed_after_the_process_started_are_refused(tmp_path):
    """The host had loaded its weights before it asked who they are."""
    script = """
import sys
from pathlib import Path
from kvferry.errors import ConfigError
from tests.adapters.vllm.fakes import identity_of, load_config, make_config, write_model
from kvferry.v1 import running_model

path = Path(sys.argv[1])
identity_of(make_config(path), None, load_config)
write_model(path, fill=2.0)
identity_of(make_config(path), None, load_config)  # inside a caller's process
running_model.multiprocessing.parent_process = lambda: True
identity_of(make_config(path), "v2", load_config)
try:
    identity_of(make_config(path), None, load_config)
except ConfigError as error:
    assert "changed after this process started" in str(error), error
else:
    sys.exit("not refused")
"""
    path = write_model(tmp_path / "model", fill=1.0)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("version", [None, "v1"])
def test_a_version_is_enough_where_a_directory_has_no_weights(tmp_path, version):
    path = write_model(tmp_path / "model")
    for file in path.glob("*.safetensors"):
        file.unlink()
    if version is None:
        with pytest.raises(ConfigError, match="holds no weights"):
            identity_of(make_config(path), version, load_config)
    else:
        identities = [identity_of(make_config(path), v, load_config) for v in ("v1", "v1", "v2")]
        assert identities[0] == identities[1] != identities[2]
        assert identities[1].weights != identities[2].weights


# --- what a host does not say ---------------------------------------------------------------------

ALWAYS_THERE = {
    "model_config": "model_weights? revision code_revision hf_config_path dtype"
    " trust_remote_code hf_config hf_overrides quantization quantization_config? max_model_len"
    " use_mla registry using_transformers_backend",
    "cache_config": "cache_dtype kv_cache_dtype_skip_layers? calculate_kv_scales?",
    "load_config": "load_format download_dir model_loader_extra_config",
    "": "lora_config additional_config attention_config? kernel_config?",
}
"""The fields of vLLM's configuration that are read, by part; with ? those of some releases only."""

FIELDS = [(part, each) for part, names in ALWAYS_THERE.items() for each in names.split()]


@pytest.mark.parametrize(("part", "name"), FIELDS)
def test_a_field_that_every_release_has_is_missed_by_name(model, part, name):
    config = make_config(model)
    before = namespace(config)
    holder = getattr(config, part) if part else config
    vars(holder).pop(name.rstrip("?"), None)
    if name.endswith("?"):
        assert namespace(config) == before
        return
    with pytest.raises(ConfigError, match=f"'{name}'") as refusal:
        namespace(config)
    assert "\n" not in str(refusal.value)


def readings():
    """The source of all that reads or uses what a host runs, by name."""
    from kvferry.adapters.sglang import identity as of_sglang
    from kvferry.engine import connector as of_engine

    return {
        "identity/running": inspect.getsource(running),
        "v1/running_model": inspect.getsource(reading),
        "adapters/sglang": inspect.getsource(of_sglang._running_model),
        "engine/connector": inspect.getsource(of_engine._running_model),
    }


def test_nothing_of_a_host_is_read_with_a_default():
    from tests.adapters.sglang import host

    with host.installed():
        sources = readings()
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                assert len(node.args) == 2, (name, ast.unparse(node))


@pytest.mark.parametrize("value", [RunningModel, ModelFiles])
def test_a_host_has_to_fill_every_field(value):
    for field in dataclasses.fields(value):
        assert field.kw_only, field.name
        assert field.default is field.default_factory is dataclasses.MISSING, field.name


@pytest.mark.slow  # half a minute where mypy has no cache yet
def test_a_host_that_leaves_a_field_out_does_not_type_check(tmp_path):
    """Of each field, a host that fills all others; and one that fills them all."""
    names = [field.name for field in dataclasses.fields(RunningModel)]
    hosts = [None, *names]
    lines = ["from typing import Any", "from kvferry.identity import RunningModel", ""]
    for left_out in hosts:
        filled = ", ".join(f"{each}=said" for each in names if each != left_out)
        lines.append(f"def host_{left_out}(said: Any) -> RunningModel:")
        lines.append(f"    return RunningModel({filled})")
    stub = tmp_path / "stub_host.py"
    stub.write_text("\n".join(lines) + "\n")
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(stub)],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in ran.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(names), ran.stdout + ran.stderr
    for name, error in zip(names, errors, strict=True):
        assert f'Missing named argument "{name}"' in error
