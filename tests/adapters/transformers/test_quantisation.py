"""Checkpoints that were published quantised: served under a name that says all that decides their
numbers, or refused."""

from __future__ import annotations

import functools
import shutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import quantize
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Mxfp4Config

from kvferry.adapters.transformers import StoredKV, quantisation
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.identity import refuse_other_code
from kvferry.blocks.tolerance import (
    TOLERANCE,
    TOLERANCE_OF_8_BITS,
    TOLERANCE_WITH_EXPERTS,
)
from kvferry.engine import LLM
from kvferry.errors import ConfigError
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import (
    CHUNK,
    generate,
    loaded,
    prompt,
    reuse,
    run_elsewhere,
)
from tests.adapters.transformers.quantised import FORMATS, change_config, pack, write_quantised
from tests.adapters.transformers.tiny_configs import build_model, tiny_config

LENGTH = 90
HIT = LENGTH // CHUNK * CHUNK

pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers, at loading


@pytest.fixture(autouse=True)
def runs_as_written(request):
    """Transformers compiles what unpacks the weights of bitnet, which takes 20 s. Only the slow
    test has it compiled."""
    is_compiled = request.node.get_closest_marker("slow") is not None
    with torch.compiler.set_stance("default" if is_compiled else "force_eager"):
        yield


@pytest.fixture(scope="session")
def packed_dir(tmp_path_factory):
    """Factory: a checkpoint in a format of `FORMATS`, made once."""
    made: dict[str, Path] = {}

    def factory(name: str) -> Path:
        if name not in made:
            made[name] = write_quantised(tmp_path_factory.mktemp("packed") / "model", name)
        return made[name]

    return factory


@pytest.fixture
def copy_of(packed_dir, tmp_path):
    """Factory: a copy of a checkpoint, which a test may change."""

    def factory(name: str) -> Path:
        return Path(shutil.copytree(packed_dir(name), tmp_path / f"a copy of {name}"))

    return factory


def namespace_of(model, store_url) -> bytes:
    with StoredKV(model, store_url) as kv:
        return kv.namespace


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_served_rightly(packed_dir, load_model, store_url, name, dtype):
    def load():
        return load_model(packed_dir(name), dtype=dtype)

    assert (getattr(load(), "hf_quantizer", None) is not None) == FORMATS[name].stays_packed
    sequences, logits = generate(load(), prompt(LENGTH))
    _, others = generate(load(), prompt(LENGTH, seed=1))
    # A piece of another size may round an activation to the next of its 8 bits.
    within = 1e-4 if dtype == torch.float32 and name != "bitnet" else 0.06
    assert (logits - others)[0].abs().max() > 0.2 * logits.abs().max()
    for num_loaded in (0, HIT):
        found = reuse(load(), store_url, prompt(LENGTH))
        assert found.num_loaded == num_loaded
        assert (found.logits - logits)[0].abs().max() <= within * logits.abs().max()
        if dtype == torch.float32:
            assert found.token_ids == sequences[0].tolist()
    assert found.counts["audits"] == 1
    assert found.counts["audit_mismatches"] == found.counts["audit_doubtful"] == 0


_READER = """
import sys
from transformers import AutoModelForCausalLM
from tests.adapters.transformers.generating import prompt, reuse
for directory, store in zip(sys.argv[1::2], sys.argv[2::2]):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    print(reuse(model, store, prompt(90)).num_loaded)
"""


@pytest.mark.slow
def test_another_process_reads_what_one_stored(packed_dir, load_model, store_url):
    arguments = []
    for name in FORMATS:
        url = f"{store_url}/{name.replace(' ', '-')}"
        assert reuse(load_model(packed_dir(name)), url, prompt(LENGTH)).num_saved == HIT
        arguments += [str(packed_dir(name)), url]
    assert run_elsewhere(_READER, *arguments) == [str(HIT)] * len(FORMATS)


# Without experts: with activations of 8 bits, rounding sends tokens to others.
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "minicpm3", "lfm2"])
def test_a_cache_that_is_a_tree_is_proven_with_packed_weights(tmp_path, store_url, model_type):
    model = build_model(tiny_config(model_type))
    linear = [name for name, each in model.named_modules() if type(each) is torch.nn.Linear]
    directory = write_random_model(tmp_path / "model", lambda: model)
    pack(directory, "bitnet", {f"{name}.weight" for name in linear} - {"lm_head.weight"})
    for num_loaded in (0, 64):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        found = reuse(model, store_url, prompt(LENGTH).clamp(max=200), chunk_tokens=64)
        assert found.num_loaded == num_loaded


# ---- what has another name


def test_another_quantisation_of_the_same_files_is_another_model(copy_of, load_model, store_url):
    changes = {
        "fp8": {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]},
        "mxfp4": {"modules_to_not_convert": ["lm_head"]},
        "int4": {"ignore": ["lm_head", "re:visual.*"]},
        "bitnet": {"rms_norm_eps": 1e-5},
    }
    for name, change in changes.items():
        directory = copy_of(name)
        names = [namespace_of(load_model(directory), store_url)]
        change_config(directory, quantization_config={**FORMATS[name].config, **change})
        names.append(namespace_of(load_model(directory), store_url))
        assert names[0] != names[1]


def test_weights_unpacked_at_load_are_another_model(packed_dir, load_model, store_url):
    packed = namespace_of(load_model(packed_dir("int4")), store_url)
    unpacking = CompressedTensorsConfig(dequantize=True)
    model = load_model(packed_dir("int4"), quantization_config=unpacking)
    assert getattr(model, "hf_quantizer", None) is None
    assert namespace_of(model, store_url) != packed
    # Of the same weights stored unpacked, too.
    for name, options in (("mxfp4", {"quantization_config": Mxfp4Config(dequantize=True)}),):
        unpacked = load_model(packed_dir(name), **options)
        place = packed_dir(name).parent / "unpacked"
        unpacked.save_pretrained(place)
        saved = namespace_of(load_model(place), store_url)
        assert namespace_of(load_model(packed_dir(name), **options), store_url) != saved


@pytest.mark.parametrize("name", ["fp8", "bitnet", "int4"])
def test_another_release_of_a_library_is_another_model(
    packed_dir, load_model, store_url, name, monkeypatch
):
    libraries = (
        "transformers",
        "torch",
        *quantisation.LIBRARIES[FORMATS[name].config["quant_method"]],
    )
    names = {namespace_of(load_model(packed_dir(name)), store_url)}
    version = quantisation.version
    for library in libraries:
        monkeypatch.setattr(
            quantisation, "version", lambda each, it=library: "99" if each == it else version(each)
        )
        names.add(namespace_of(load_model(packed_dir(name)), store_url))
    assert len(names) == 1 + len(libraries)


def test_libraries_decide_nothing_of_other_models(load_model, store_url, monkeypatch):
    name = namespace_of(load_model(), store_url)
    monkeypatch.setattr(quantisation, "version", lambda _: "99")
    assert namespace_of(load_model(), store_url) == name


def test_another_commit_of_a_kernel_is_another_model(
    packed_dir, load_model, store_url, monkeypatch
):
    names = {namespace_of(load_model(packed_dir("bitnet")), store_url)}
    for commit in ("0a1b2c3d", "4e5f6a7b"):
        kernel = types.ModuleType("a_kernel")
        kernel.__file__ = f"/hub/models--some--fp8/snapshots/{commit}/build/torch-cuda/__init__.py"
        monkeypatch.setitem(sys.modules, "a_kernel", kernel)
        names.add(namespace_of(load_model(packed_dir("bitnet")), store_url))
    assert len(names) == 3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_model_that_ran_before_has_the_same_name(
    packed_dir, load_model, store_url, name, attention
):
    def load():
        return load_model(packed_dir(name), attn_implementation=attention)

    if name == "mxfp4" and attention == "sdpa":
        return  # gpt-oss has sinks, which it does not know
    model = load()
    generate(model, prompt(20))  # from here on, compressed-tensors has unpacked its weights
    assert namespace_of(model, store_url) == namespace_of(load(), store_url)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8", TOLERANCE),  # unpacked, so that activations stay as they are
        ("mxfp4", TOLERANCE_WITH_EXPERTS),
        ("int4", TOLERANCE),
        ("fp8 by row", TOLERANCE_OF_8_BITS),
        ("bitnet", TOLERANCE_OF_8_BITS),
    ],
)
def test_audits_allow_what_the_activations_that_run_explain(packed_dir, load_model, name, expected):
    assert HostModel(load_model(packed_dir(name)), None, None).tolerances == expected


class _Packed(torch.Tensor):
    """A tensor as torchao's: of parts, and without most of what a tensor can do."""

    @staticmethod
    def __new__(cls, part):
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

    def __init__(self, part):
        self.part = part

    def __tensor_flatten__(self):
        return ["part"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "detach":
            return cls(args[0].part)
        if name in ("view", "slice", "flatten"):
            raise NotImplementedError(name)
        return func(*tree_map(lambda each: getattr(each, "part", each), args), **(kwargs or {}))


def test_a_tensor_of_a_library_is_watched_by_its_parts(load_model, store_url):
    model = load_model()
    projection = model.model.layers[1].mlp.up_proj
    weight = projection.weight.detach().clone()
    projection.weight = torch.nn.Parameter(_Packed(weight), requires_grad=False)
    with StoredKV(model, store_url, weights_version="packed", chunk_tokens=CHUNK) as kv:
        for num_loaded in (0, HIT):
            assert loaded(kv, prompt(LENGTH)) == num_loaded
        weight.mul_(0.5)  # what only its part shows
        assert loaded(kv, prompt(LENGTH)) == 0


# ---- what is refused


def test_packed_weights_are_compared_with_their_files(packed_dir, load_model, store_url, caplog):
    for name in ("bitnet", "int4", "fp8 by row"):
        model = load_model(packed_dir(name))
        found = dict(model.state_dict())
        packed = next(each for key, each in found.items() if "down_proj.weight" in key)
        packed.view(torch.uint8)[0, 0] ^= 1
        with pytest.raises(ConfigError, match=r"down_proj\.weight\S* is not the one in"):
            StoredKV(model, store_url)
    for name in ("fp8", "mxfp4"):  # unpacked, so nothing is known of them, which the log says
        with caplog.at_level("INFO"):
            namespace_of(load_model(packed_dir(name)), store_url)
        assert "stored in another form than in memory" in caplog.text
        caplog.clear()
        model = load_model(packed_dir(name))
        with torch.no_grad():
            model.model.embed_tokens.weight[0, 0] += 1
        with pytest.raises(ConfigError, match=r"embed_tokens\.weight is not the one in"):
            StoredKV(model, store_url)


def test_a_model_that_was_quantised_at_load_is_refused(load_model, packed_dir, store_url):
    model = load_model(packed_dir("bitnet"))
    model.hf_quantizer.pre_quantized = False
    with pytest.raises(ConfigError, match=r"was quantised \(bitnet\) when it was loaded"):
        StoredKV(model, store_url)


def test_a_method_whose_kernels_are_not_known_is_refused(load_model, packed_dir, store_url):
    model = load_model(packed_dir("bitnet"))
    model.hf_quantizer.quantization_config = SimpleNamespace(quant_method="vptq")
    with pytest.raises(ConfigError, match="quantised by 'vptq'"):
        StoredKV(model, store_url)


def test_the_engine_refuses_what_it_has_no_name_for(packed_dir, store_url):
    """Whatever unpacks it here, another engine would read its records."""
    for name in FORMATS:
        with pytest.raises(ConfigError, match="published quantised"):
            LLM(packed_dir(name), store=store_url, dtype="float32")


def test_code_of_a_library_counts_by_its_file(load_model, packed_dir, store_url, monkeypatch):
    """Of a checkpoint in a format of that library alone; a replacement has another file."""
    linear = type("Linear", (torch.nn.Linear,), {"__module__": "compressed_tensors.nn"})
    for name, has_its_file in (("int4", True), ("bitnet", True), ("int4", False)):
        model = load_model(packed_dir(name))
        code = quantize if has_its_file else functools.wraps(quantize)(lambda x: x)
        monkeypatch.setattr(linear, "forward", code, raising=False)
        model.lm_head.__class__ = linear
        if name == "int4" and has_its_file:
            refuse_other_code(model)
        else:
            with pytest.raises(ConfigError, match=r"class nn\.Linear computes the model"):
                refuse_other_code(model)


@pytest.mark.parametrize("is_in_config", [True, False])
def test_packed_weights_that_transformers_takes_for_plain_ones_are_refused(
    copy_of, load_model, store_url, is_in_config
):
    directory = copy_of("fp8")
    asked = {"quant_method": "modelopt", "quant_algo": "FP8"}
    change_config(directory, quantization_config=asked if is_in_config else None)
    if not is_in_config:
        (directory / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    model = load_model(directory)
    with pytest.raises(ConfigError, match="Transformers ignores the") as refusal:
        StoredKV(model, store_url)
    assert "\n" not in str(refusal.value)
