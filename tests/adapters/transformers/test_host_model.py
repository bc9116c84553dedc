"""Which models are refused, and that no two of them share KV."""

from __future__ import annotations

import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,
    LlamaConfig,
    LlamaForCausalLM,
    QuantoConfig,
)
from transformers.quantizers.auto import AutoHfQuantizer

from kvferry.adapters.transformers import StoredKV
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import (
    CHUNK,
    assert_same_as_cold,
    generate,
    loaded,
    prompt,
    reuse,
)
from tests.adapters.transformers.tiny_configs import build_model, tiny_config


def test_other_weights_of_the_same_shape_read_nothing(model_dir, load_model, store_url):
    reuse(load_model(model_dir(seed=0)), store_url, prompt(65))
    other = load_model(model_dir(seed=1))
    assert reuse(other, store_url, prompt(65)).num_loaded == 0
    assert reuse(other, store_url, prompt(65)).num_loaded == 64


def test_a_copy_of_the_directory_is_the_same_model(model_dir, load_model, store_url, tmp_path):
    reuse(load_model(), store_url, prompt(65))
    copy = shutil.copytree(model_dir(), tmp_path / "copy")
    assert reuse(load_model(copy), store_url, prompt(65)).num_loaded == 64


def test_a_config_overridden_at_load_reads_nothing_of_the_original(
    model_dir, load_model, store_url
):
    reuse(load_model(), store_url, prompt(65))
    changed = load_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    first = reuse(changed, store_url, prompt(65))
    assert first.num_loaded == 0
    assert_same_as_cold(changed, prompt(65), reuse(changed, store_url, prompt(65)))


def test_what_users_set_for_generation_changes_no_identity(load_model, store_url):
    reuse(load_model(), store_url, prompt(65))
    model = load_model(attn_implementation="eager")
    model.config.pad_token_id = 5
    model.config.use_cache = False
    model.generation_config.temperature = 0.3
    assert reuse(model, store_url, prompt(65)).num_loaded == 64


def _train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)


@pytest.mark.parametrize(
    "change",
    [
        _train,
        lambda model: model.model.layers[1].self_attn.v_proj.weight.data.mul_(1.001),
        lambda model: model.model.norm.weight.data.fill_(0.5),
        lambda model: model.resize_token_embeddings(400),
    ],
    ids=["trained", "one tensor", "a norm", "resized"],
)
def test_a_model_changed_after_loading_needs_a_name(model_dir, load_model, store_url, change):
    model = load_model()
    change(model)
    with pytest.raises(ConfigError, match="was changed after loading") as refusal:
        StoredKV(model, store_url)
    assert "\n" not in str(refusal.value)
    reuse(load_model(), store_url, prompt(65))
    assert reuse(model, store_url, prompt(65), weights_version="mine").num_loaded == 0
    named = reuse(model, store_url, prompt(65), weights_version="mine")
    assert named.num_loaded == 64
    assert_same_as_cold(model, prompt(65), named)


def test_a_name_is_enough_where_the_directory_has_no_weights(
    model_dir, load_model, store_url, tmp_path
):
    model = load_model()
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(Path(model.name_or_path) / "config.json", bare)
    with pytest.raises(ConfigError, match="holds no weights"):
        StoredKV(model, store_url, model_dir=bare)
    for num_loaded in (0, 64):
        named = reuse(model, store_url, prompt(65), model_dir=bare, weights_version="v1")
        assert named.num_loaded == num_loaded
    assert reuse(model, store_url, prompt(65), model_dir=bare, weights_version="v2").num_loaded == 0


@pytest.mark.parametrize(
    "change",
    [
        _train,
        lambda model: model.train(),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: setattr(
            model.model.layers[0].self_attn, "q_proj", torch.nn.Linear(64, 64, bias=False)
        ),
    ],
    ids=["trained", "training mode", "cast", "loaded", "replaced layer"],
)
def test_a_model_changed_under_an_open_store_is_left_alone(load_model, store_url, change, caplog):
    model = load_model()
    reuse(model, store_url, prompt(65))
    counts = Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        assert loaded(kv, prompt(65)) == 64
        change(model)
        for seed in range(2):
            assert loaded(kv, prompt(65, seed)) == 0
            generate(kv, prompt(65, seed))
        assert counts["put_stored"] == 0
    assert caplog.text.count("nothing is read or stored") == 1


def test_generating_is_no_change(model_dir, load_model, store_url):
    for arch in ("llama", "gemma3_text", "gpt_neox"):
        model, counts = load_model(model_dir(arch)), Counters()
        with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
            for _ in range(2):
                generate(kv, prompt(65))
                model(prompt(9), output_hidden_states=True)  # installs hooks that collect them
            assert loaded(kv, prompt(65)) == 64
        assert counts["model_changed"] == 0


def test_a_sharded_model_is_compared_shard_by_shard(model_dir, load_model, store_url, tmp_path):
    load_model().save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").exists()
    model = load_model(tmp_path / "sharded")
    assert reuse(model, store_url, prompt(40)).num_saved == 32
    model.model.layers[2].mlp.down_proj.weight.data.neg_()
    with pytest.raises(ConfigError, match=r"layers\.2\.mlp.down_proj\.weight is not the one"):
        StoredKV(model, store_url)


def test_a_model_of_the_hub_is_found_in_its_cache(
    model_dir, load_model, store_url, tmp_path, monkeypatch
):
    commit = "0123456789abcdef0123456789abcdef01234567"
    entry = tmp_path / "models--someone--tiny"
    shutil.copytree(model_dir(), entry / "snapshots" / commit)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(commit)
    model = load_model("someone/tiny", cache_dir=tmp_path, local_files_only=True)
    assert model.name_or_path == "someone/tiny"
    with pytest.raises(ConfigError, match=r"'someone/tiny', no directory.*pass model_dir="):
        StoredKV(model, store_url)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    reuse(model, store_url, prompt(65))
    named = reuse(model, store_url, prompt(65), model_dir=entry / "snapshots" / commit)
    assert named.num_loaded == 64
    assert reuse(load_model(), store_url, prompt(65)).num_loaded == 64


def test_a_model_without_a_directory_is_refused(model_dir, load_model, store_url):
    config = load_model().config
    config.name_or_path = ""
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"name_or_path is '', no directory .* pass model_dir="):
        StoredKV(model.eval(), store_url)
    with pytest.raises(ConfigError, match="was changed after loading"):
        StoredKV(model.eval(), store_url, model_dir=model_dir())


def test_a_model_that_looks_ahead_is_refused(model_dir, load_model, store_url):
    with pytest.raises(ConfigError, match="is not causal"):
        StoredKV(load_model(model_dir("bert")), store_url)


def test_what_loading_sets_inside_sub_configs_changes_no_identity(load_model, store_url, tmp_path):
    path = write_random_model(tmp_path / "model", partial(build_model, tiny_config("dbrx")))
    input_ids = prompt(65).clamp(max=255)
    options = {"connector_options": {"chunk_tokens": CHUNK}, "dtype": "float32"}
    with LLM(path, store=store_url, **options) as llm:
        llm.generate([input_ids[0].tolist()], SamplingParams(max_tokens=1))
        assert llm.drain(60.0)
    assert reuse(load_model(path), store_url, input_ids).num_loaded == 64


def test_a_recurrent_model_is_refused(load_model, store_url, tmp_path):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    with pytest.raises(ConfigError, match="Mamba"):
        StoredKV(load_model(tmp_path / "mamba"), store_url)


def _adapt(model):
    # What an adapter looks like from outside, without its library.
    adapted = type("Linear", (torch.nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    model.model.layers[0].self_attn.q_proj = adapted(64, 64, bias=False)


def _quantise(model):
    model.hf_quantizer = AutoHfQuantizer.from_config(QuantoConfig(), pre_quantized=False)


def _compile_a_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1])


ABOUT_TORCH = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
"""Torch's own use of what it gave up, on the first compilation."""

COMPILED = r"torch\.compile.*uncompiled model from from_pretrained\(\)"
STATIC = r"cache_implementation='static'.*set it to None"
REFUSED = {
    "training mode": (lambda model: model.train(), r"training mode.*eval\(\)"),
    "quantised": (_quantise, r"was quantised \(quanto\) when it was loaded"),
    "an adapter": (_adapt, "PEFT adapter"),
    "compiled": (torch.compile, COMPILED),
    "a compiled forward": (
        lambda model: setattr(model, "forward", torch.compile(model.forward)),
        COMPILED,
    ),
    "compiled in place": (lambda model: model.compile(), COMPILED),
    "a compiled layer": (_compile_a_layer, COMPILED),
    "a static cache": (
        lambda model: setattr(model.generation_config, "cache_implementation", "static"),
        STATIC,
    ),
}


@ABOUT_TORCH
@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_that_cannot_be_served_is_refused_by_name(load_model, store_url, change, message):
    model = load_model()
    changed = change(model)
    with pytest.raises(ConfigError, match=message) as found:
        StoredKV(model if changed is None else changed, store_url)
    assert "\n" not in str(found.value)


@ABOUT_TORCH
@pytest.mark.slow
def test_generation_with_a_compiled_static_cache_is_no_change(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(40))
    options = CompileConfig(backend="eager")
    options._compile_all_devices = True  # by itself, generate compiles on accelerators only
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        model.generate(
            prompt(5), cache_implementation="static", compile_config=options, max_new_tokens=3
        )
        assert model._compiled_call is not None
        assert loaded(kv, prompt(40)) == 32
        model.compile()
        assert loaded(kv, prompt(40)) == 0


@pytest.mark.parametrize("given", [None, "a/path", torch.nn.Linear(2, 2)])
def test_what_is_no_model_is_refused(store_url, given):
    with pytest.raises(ConfigError, match="give a causal LM"):
        StoredKV(given, store_url)


def test_without_transformers_the_line_to_run_is_named(monkeypatch, store_url):
    monkeypatch.setitem(sys.modules, "transformers.cache_utils", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[transformers\]'"):
        StoredKV(None, store_url)


def test_importing_the_adapter_loads_no_transformers():
    import subprocess

    code = "import kvferry.adapters.transformers, sys; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# ---- what callers hand over


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[5, 6], [7, 8, 9]], "the rows have 2 to 3 tokens; pad them on the left"),
        ([[5, 6], []], "the rows have 0 to 2 tokens"),
        ([[5, 6], 7], "token ids are a list"),
        ("text", "token ids are a str"),
        ({"input_ids": [5]}, "token ids are a dict"),
        (torch.ones((1, 2, 3)), "token ids are a Tensor"),
        (torch.tensor(5), "token ids are a Tensor"),
        ([0.5], "token ids are a list"),
        ([-1, 5], "token id -1 is given; the vocabulary has 320"),
        ([5, 320], "token id 320 is given"),
        (None, "token ids are a NoneType"),
    ],
)
def test_what_is_no_prompt_is_refused(load_model, store_url, given, message):
    with StoredKV(load_model(), store_url) as kv, pytest.raises(ConfigError, match=message):
        kv.prefill(given)


def _offloaded(model):
    model.model.layers[0].mlp.to("meta")
    return model


def _dynamic_int8(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")  # that torch deprecates these
@pytest.mark.parametrize(
    ("change", "word"), [(_offloaded, "offloaded"), (_dynamic_int8, "quantised")]
)
def test_weights_that_are_no_plain_tensors_are_refused_by_name(tmp_path, change, word):
    directory = str(tmp_path)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    model = change(LlamaForCausalLM.from_pretrained(directory).eval())
    with pytest.raises(ConfigError, match=word):
        StoredKV(model, (tmp_path / "store").as_uri())
