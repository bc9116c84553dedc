"""Models that compute other KV than their directory says share nothing with it."""

from __future__ import annotations

import copy
import functools
import json
import shutil

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama import modeling_llama

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.identity import deviations
from kvferry.adapters.transformers.weights import is_all_of_files
from kvferry.engine import LLM
from kvferry.engine.config import EngineConfig
from kvferry.engine.model_config import ModelConfig
from kvferry.errors import ConfigError
from tests.adapters.transformers.generating import (
    CHUNK,
    assert_same_as_cold,
    generate,
    loaded,
    prompt,
    reuse,
)

DENSE = ("llama", "qwen3", "mistral", "gpt_neox", "gemma3_text", "gemma2", "olmo2", "phi3")
ARCHITECTURES = (*DENSE, "deepseek_v3", "deepseek_v2", "gpt_oss")


def attention_of(model):
    """The name of its implementation, as Transformers keeps it."""
    return model.config._attn_implementation


def use_attention(config, name):
    """Set the implementation, past what Transformers checks."""
    config._attn_implementation_internal = name


def assert_own_namespace(model, store_url, tokens, **options):
    """The model reads nothing of what the store holds, and then its own records, rightly."""
    assert reuse(model, store_url, tokens, **options).num_loaded == 0
    warm = reuse(model, store_url, tokens, **options)
    assert warm.num_loaded == (tokens.shape[1] - 1) // CHUNK * CHUNK
    # In bfloat16, neighbours of a logit of 4 to 8 differ by 0.03.
    assert_same_as_cold(model, tokens, warm, within=0.04)


def assert_refused(model, store_url, match, **options):
    with pytest.raises(ConfigError, match=match) as refusal:
        StoredKV(model, store_url, **options)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_as_it_is_loaded_deviates_in_nothing(model_dir, load_model, arch, dtype):
    directory = model_dir(arch)
    name = str(dtype).removeprefix("torch.")
    stored = ModelConfig(directory, EngineConfig(dtype=name)).transformers_config
    model = load_model(directory, dtype=dtype)
    before = torch.random.get_rng_state()
    assert deviations(model, stored) == {}
    assert torch.equal(before, torch.random.get_rng_state())
    if model._supports_sdpa:
        for implementation in ("eager", "sdpa"):
            model.set_attn_implementation(implementation)
            assert deviations(model, stored) == {}
            assert attention_of(model) == implementation


# ---- files


@pytest.mark.parametrize("names", [["config.json", "config.4.0.0.json"], {"config.4.0.0.json": 1}])
def test_a_config_that_depends_on_the_version_of_transformers_is_refused(
    model_dir, load_model, store_url, tmp_path, names
):
    directory = shutil.copytree(model_dir(), tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "configuration_files": names}))
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (directory / "config.4.0.0.json").write_text(json.dumps(config))
    model = load_model(directory)
    assert model.config.rope_parameters["rope_theta"] == 500.0
    assert_refused(model, store_url, "names configuration_files.*copy the one to use over")
    with pytest.raises(ConfigError, match="names configuration_files"):
        LLM(directory, store=store_url)


def test_a_directory_with_an_adapter_is_refused(model_dir, load_model, store_url, tmp_path):
    directory = shutil.copytree(model_dir(), tmp_path / "model")
    model = load_model(directory)
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "elsewhere", "r": 4}
    (directory / "adapter_config.json").write_text(json.dumps(adapter))
    assert_refused(model, store_url, r"PEFT adapter.*merge it")
    with pytest.raises(ConfigError, match="PEFT adapter"):
        LLM(directory, store=store_url)
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        LLM(directory, store=store_url)


# ---- code

CODE = """
from transformers import LlamaForCausalLM
from .attention import SCALE

class Custom(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.scaling = SCALE
"""


def write_custom(directory, scale):
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_custom.Custom"}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "modeling_custom.py").write_text(CODE)
    (directory / "attention.py").write_text(f"SCALE = {scale}\n")


def test_custom_code_of_a_directory_needs_a_name(
    model_dir, load_model, store_url, tmp_path, monkeypatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    directory = shutil.copytree(model_dir(), tmp_path / "model")
    write_custom(directory, 0.9)
    stock = load_model(directory, trust_remote_code=False)
    reuse(stock, store_url, prompt(65))
    reuse(stock, store_url, prompt(65), weights_version="v1")
    custom = load_model(directory, trust_remote_code=True)
    _, logits = generate(custom, prompt(65))
    assert (logits - generate(stock, prompt(65))[1]).abs().max() > 0.01
    assert_refused(custom, store_url, r"modeling_custom.Custom computes.*pass a weights_version")
    assert_own_namespace(custom, store_url, prompt(65), weights_version="v1")
    # The engine runs no code of a directory, so it shares with a model that runs none either.
    options = {"chunk_tokens": CHUNK, "audit": "off"}
    with LLM(directory, store=store_url, connector_options=options) as llm:
        done = llm.generate([prompt(65)[0].tolist()])[0]
    assert done.num_external_tokens > 0


def half(*args, **kwargs):
    output, weights = sdpa_attention_forward(*args, **kwargs)
    return output * 0.5, weights


@functools.wraps(sdpa_attention_forward)
def disguised(*args, **kwargs):
    return half(*args, **kwargs)


def eager_half(*args, **kwargs):
    return half(*args, **kwargs)


class TestFunctions:
    """Attention, masks, experts and functions of modeling files, from outside Transformers."""

    @pytest.fixture(autouse=True)
    def _put_back(self, monkeypatch):
        for interface in (AttentionInterface, AttentionMaskInterface, ExpertsInterface):
            monkeypatch.setattr(interface, "_global_mapping", interface._global_mapping.copy())

    @pytest.fixture
    def stored(self, load_model, store_url):
        reuse(load_model(), store_url, prompt(65))
        reuse(load_model(), store_url, prompt(65), weights_version="v1")
        return store_url

    def test_a_function_of_the_user_needs_a_name(self, load_model, stored):
        AttentionInterface.register("half", half)
        AttentionMaskInterface.register("half", sdpa_mask)
        model = load_model(attn_implementation="half")
        assert_refused(model, stored, r"attention 'half' \(test_identity.half\) computes")
        assert_own_namespace(model, stored, prompt(65), weights_version="v1")

    @pytest.mark.parametrize(
        "function",
        [half, disguised, functools.partial(sdpa_attention_forward), torch.no_grad()(half)],
    )
    def test_a_known_name_with_another_function_needs_a_name(self, load_model, stored, function):
        AttentionInterface.register("sdpa", function)
        model = load_model(attn_implementation="sdpa")
        assert_refused(model, stored, "attention 'sdpa'")
        assert_own_namespace(model, stored, prompt(65), weights_version="v1")

    def test_another_name_for_a_known_function_needs_a_name(self, load_model, stored):
        # It has no mask function, so that windows are not masked.
        AttentionInterface.register("mine", sdpa_attention_forward)
        assert_refused(load_model(attn_implementation="mine"), stored, "attention 'mine'")

    def test_another_mask_needs_a_name(self, load_model, stored):
        AttentionMaskInterface.register("sdpa", lambda *args, **kwargs: None)
        assert_refused(load_model(attn_implementation="sdpa"), stored, "mask 'sdpa'")

    def test_a_replaced_eager_function_needs_a_name(self, load_model, stored, monkeypatch):
        monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_half)
        assert_refused(load_model(attn_implementation="eager"), stored, "eager_half")

    @pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "eager_attention_forward"])
    def test_a_replaced_function_of_the_modeling_file_needs_a_name(
        self, load_model, stored, monkeypatch, name
    ):
        original = getattr(modeling_llama, name)

        @functools.wraps(original)
        def replaced(*args, **kwargs):
            return original(*args, **kwargs)

        monkeypatch.setattr(modeling_llama, name, replaced)
        assert_refused(load_model(), stored, f"function '{name}'")

    def test_a_replaced_forward_of_a_class_needs_a_name(self, load_model, stored, monkeypatch):
        forward = modeling_llama.LlamaMLP.forward
        monkeypatch.setattr(
            modeling_llama.LlamaMLP, "forward", lambda self, x: forward(self, x) * 0.5
        )
        model = load_model()
        assert_refused(model, stored, "class modeling_llama.LlamaMLP computes")
        assert_own_namespace(model, stored, prompt(65), weights_version="v1")

    def test_a_layer_with_a_config_of_its_own_is_seen(self, load_model, stored):
        AttentionInterface.register("half", half)
        model = load_model()
        attention = model.model.layers[1].self_attn
        attention.config = copy.deepcopy(attention.config)
        use_attention(attention.config, "half")
        assert_refused(model, stored, "attention 'half'")

    def test_experts_of_the_user_need_a_name(self, model_dir, load_model, store_url):
        model = load_model(model_dir("gpt_oss"))
        reuse(model, store_url, prompt(40))
        ExpertsInterface.register(model.config._experts_implementation, half)
        assert_refused(load_model(model_dir("gpt_oss")), store_url, "experts")

    def test_kernels_of_a_hub_need_a_name(self, load_model, stored):
        model = load_model()
        model._use_kernels = True
        assert_refused(model, stored, "kernel of a hub")

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: AttentionInterface.register("sdpa", half),
            lambda model: AttentionMaskInterface.register("sdpa", lambda *a, **k: None),
            lambda model: model.set_attn_implementation("eager"),
            lambda model: use_attention(model.model.layers[0].self_attn.config, "eager"),
        ],
        ids=["function", "mask", "implementation", "of one layer"],
    )
    def test_another_function_under_an_open_store_ends_its_use(self, load_model, stored, change):
        model = load_model(attn_implementation="sdpa")
        attention = model.model.layers[0].self_attn
        attention.config = copy.deepcopy(attention.config)
        with StoredKV(model, stored, chunk_tokens=CHUNK) as kv:
            assert loaded(kv, prompt(65)) == 64
            change(model)
            assert loaded(kv, prompt(65)) == 0

    def test_a_class_that_is_patched_under_an_open_store_ends_its_use(
        self, load_model, stored, monkeypatch
    ):
        with StoredKV(load_model(), stored, chunk_tokens=CHUNK) as kv:
            assert loaded(kv, prompt(65)) == 64
            monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x)
            assert loaded(kv, prompt(65)) == 0


# ---- attention that ignores what the model asks for


def test_attention_without_the_sinks_of_the_model_shares_nothing(model_dir, load_model, store_url):
    path = model_dir("gpt_oss")
    eager = load_model(path, attn_implementation="eager")
    with torch.no_grad():
        for layer in eager.model.layers:
            layer.self_attn.sinks.fill_(3.0)
    path = path.parent / "with sinks"
    eager.save_pretrained(path)
    reuse(load_model(path), store_url, prompt(65))
    model = load_model(path)
    assert attention_of(model) == "eager"
    use_attention(model.config, "sdpa")
    _, without = generate(model, prompt(65))
    assert (without - generate(eager, prompt(65))[1]).abs().max() > 0.01
    assert_own_namespace(model, store_url, prompt(65))
    assert attention_of(model) == "sdpa"


def test_attention_that_cannot_cap_shares_nothing_with_one_that_can(
    model_dir, load_model, store_url, monkeypatch
):
    model = load_model(model_dir("gemma2"), attn_implementation="eager")
    stored = model.config.to_dict()
    assert "attention" not in deviations(model, model.config)
    use_attention(model.config, "sdpa")  # which Transformers 4 accepts
    found = deviations(model, model.config)
    assert found["attention"][0] == "sdpa"
    assert model.config.to_dict() == stored


# ---- buffers and dtypes


def test_frequencies_rounded_by_a_cast_are_another_model(model_dir, load_model, store_url):
    path = model_dir(max_position_embeddings=4096)
    tokens = prompt(1008)
    loaded = load_model(path, dtype=torch.bfloat16)
    reuse(loaded, store_url, tokens, audit="off")
    cast = load_model(path).to(torch.bfloat16)
    difference = (generate(cast, tokens)[1] - generate(loaded, tokens)[1]).abs().max()
    assert difference > 0.1
    assert_own_namespace(cast, store_url, tokens, audit="off")
    # They stay rounded when it is cast back.
    reuse(load_model(path), store_url, tokens, audit="off")
    back = load_model(path)
    back.model.rotary_emb.to(torch.bfloat16).to(torch.float32)
    assert_own_namespace(back, store_url, tokens, audit="off")


@pytest.mark.parametrize(
    ("arch", "buffer"),
    [
        ("llama", "model.rotary_emb.inv_freq"),
        ("gemma3_text", "model.rotary_emb.sliding_attention_inv_freq"),
        ("gemma3_text", "model.embed_tokens.embed_scale"),
    ],
)
def test_a_changed_buffer_is_another_model(model_dir, load_model, store_url, arch, buffer):
    reuse(load_model(model_dir(arch)), store_url, prompt(65), audit="off")
    model = load_model(model_dir(arch))
    model.get_buffer(buffer).mul_(1.001)
    assert_own_namespace(model, store_url, prompt(65), audit="off")


def test_layers_kept_in_another_dtype_are_another_model(model_dir, load_model, store_url):
    path = model_dir("gemma3_text")
    reuse(load_model(path, dtype=torch.bfloat16), store_url, prompt(65), audit="off")
    model = load_model(path, dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.input_layernorm.float()
    assert_own_namespace(model, store_url, prompt(65), audit="off")


def test_a_buffer_of_the_files_that_was_rounded_is_another_model(model_dir, load_model):
    model = load_model(model_dir("deepseek_v3"), dtype=torch.bfloat16)
    assert deviations(model, model.config) == {}
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule(bias.rpartition(".")[0]).to(torch.bfloat16)
    assert deviations(model, model.config)["dtypes"][bias] == "bfloat16"


def test_a_twin_that_is_not_loaded_keeps_nobody_from_sharing(
    model_dir, load_model, store_url, tmp_path
):
    """But a model that was loaded from the twin is another, if it differs."""
    tokens = prompt(60)
    reuse(load_model(), store_url, tokens)
    both = tmp_path / "both"
    shutil.copytree(model_dir(), both)
    other = load_model(model_dir(seed=1))
    torch.save(other.state_dict(), both / "pytorch_model.bin")
    assert reuse(load_model(both), store_url, tokens).num_loaded == 59 // CHUNK * CHUNK
    by_twin = load_model(both, use_safetensors=False)
    assert_refused(by_twin, store_url, "was changed after loading")
    renamed = {f"other.{name}": each for name, each in other.state_dict().items()}
    assert not is_all_of_files(renamed, both)  # so all files count


def test_a_twin_that_differs_in_one_row_alone_is_another_model(
    model_dir, load_model, store_url, tmp_path
):
    """As where some tokens were trained. No sample of rows shows it, so the twin's file counts."""
    tokens = prompt(60)
    for name, number in (("one", 1.0), ("two", 2.0)):
        shutil.copytree(model_dir(), tmp_path / name)
        trained = dict(load_model(tmp_path / name).state_dict())
        rows = trained["model.embed_tokens.weight"].clone()
        rows[tokens[0, 3]] += number
        trained["model.embed_tokens.weight"] = rows
        torch.save(trained, tmp_path / name / "pytorch_model.bin")
        by_twin = load_model(tmp_path / name, use_safetensors=False)
        assert not is_all_of_files(by_twin.state_dict(), tmp_path / name)
        assert reuse(by_twin, store_url, tokens).num_loaded == 0
    plain = load_model(tmp_path / "one")
    assert is_all_of_files(plain.state_dict(), tmp_path / "one")
