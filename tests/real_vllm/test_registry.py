"""The layers of a model that keep state are the layers that kvferry names, or refuses by name."""

from __future__ import annotations

import ast
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, as it is imported
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvferry.adapters.vllm.layers import layers_of
from kvferry.adapters.vllm.states import served_states
from kvferry.errors import ConfigError
from tests.adapters.transformers.tiny_configs import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_TYPES,
    NOT_BUILT,
    tiny_config,
)
from tests.real_vllm.host import RELEASE

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(RELEASE < (0, 32), reason="the models are those of 0.32"),
]

FULL = {"use_sliding_window": False, "layer_types": ["full_attention"] * 4}
OF_CHECKPOINTS: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 16, "first_k_dense_replace": 1},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "lfm2": {
        "conv_dim": 64,
        "block_dim": 64,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
    "qwen2": FULL,
    "qwen3": FULL,
}
"""Fields that vLLM reads, and Transformers' configurations have otherwise or not."""

BY_SOURCE = {
    "afmoe", "deepseek_v32", "deepseek_v4", "gemma3", "gemma4", "gemma4_unified", "glm_moe_dsa",
    "hy_v3", "hy_v4", "inkling_text", "kimi_linear", "llama4", "llama4_text", "longcat_flash",
    "mimo_v2_flash", "minimax_m2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen4_exp", "qwen4_exp_text",
}  # fmt: skip
"""Not built here: their kernels need a GPU, their modules torchvision, or their classes fields that
only configurations of checkpoints have."""


def architecture(model_type: str) -> str:
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


ARCHITECTURES = set(ModelRegistry.get_supported_archs())
BUILT = [
    each
    for each in MODEL_TYPES
    if each not in NOT_BUILT and each not in BY_SOURCE and architecture(each) in ARCHITECTURES
]


def config_of(model_type: str, folder: Path) -> Any:
    """The configuration of an engine of a tiny model, without weights."""
    config, name = tiny_config(model_type), architecture(model_type)
    config.architectures = [name]
    for field, value in OF_CHECKPOINTS.get(model_type, {}).items():
        setattr(config, field, value)
    config.save_pretrained(folder)
    entry = ModelRegistry.models[name]
    if hasattr(entry, "module_name"):  # looked at in this process, not in one for each
        ModelRegistry.register_model(name, entry.load_model_cls())
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=256,
        enforce_eager=True,
    ).create_engine_config()  # fmt: skip


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_experts = config_of("mixtral", tmp_path_factory.mktemp("mixtral"))  # for their group, too
    with set_current_vllm_config(of_experts):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()


def states_of(vllm_config: Any, model: torch.nn.Module) -> dict[str, Any]:
    """By name, the specs of all layers that keep state, as vLLM's runner asks for them."""
    modules = vllm_config.compilation_config.static_forward_context
    known = {id(each) for each in modules.values()}
    found = {
        name: each.get_kv_cache_spec(vllm_config)
        for name, each in modules.items()
        if isinstance(each, AttentionLayerBase)
    }
    for each in model.modules():
        is_bound = id(each) in known or not isinstance(each, AttentionLayerBase)
        assert is_bound or each.get_kv_cache_spec(vllm_config) is None
    return {name: spec for name, spec in found.items() if spec is not None}


RECURRENT = {
    "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
    "qwen3_next", "zamba2",
}  # fmt: skip
WITHOUT_KV = {"falcon_mamba", "mamba", "mamba2"}
REFUSED = {"hrm_text"}
"""With attention to later tokens."""


@pytest.mark.parametrize("model_type", BUILT)
def test_every_layer_that_keeps_state_is_named_or_refused(
    model_type: str, tmp_path: Path, one_rank: None
) -> None:
    vllm_config = config_of(model_type, tmp_path)
    with set_current_vllm_config(vllm_config):
        model = initialize_model(vllm_config)
    states = states_of(vllm_config, model)
    groups = [KVCacheGroupSpec([name], spec) for name, spec in states.items()]
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    recurrent = [name for name, spec in states.items() if isinstance(spec, MambaSpec)]
    unserved = [name for name, spec in states.items() if getattr(spec, "non_causal", False)]
    assert states
    assert bool(recurrent) == (model_type in RECURRENT)
    assert bool(unserved) == (model_type in REFUSED)
    target = vllm_config.model_config
    # For n-grams, vLLM names the model itself as the drafter's.
    n_grams = SimpleNamespace(draft_model_config=target, target_model_config=target)
    for speculative in (None, n_grams):
        object.__setattr__(vllm_config, "speculative_config", speculative)
        if unserved:
            with pytest.raises(ConfigError, match=r"non_causal") as refusal:
                layers_of(vllm_config, config, "cpu")
            assert any(f"layer {name} " in str(refusal.value) for name in unserved)
        else:
            named = [layer.name for layer in layers_of(vllm_config, config, "cpu")]
            assert sorted(named) == sorted(states.keys() - set(recurrent))
    if recurrent:
        layers = layers_of(vllm_config, config, "cpu")
        found, said = (), ""
        try:
            found = served_states(
                vllm_config, config, layers, dim_first=False, hands_off=True
            ).tables
        except ConfigError as refusal:
            said = str(refusal)
        named = [name for part in found for name in part.layer_names]
        if model_type in WITHOUT_KV:
            assert "keeps no state at the end of blocks" in said  # no prefix caching by default
        else:
            assert (sorted(named), said) == (sorted(recurrent), "")


def test_the_table_has_every_causal_model_that_vllm_and_transformers_share() -> None:
    assert len(BUILT) >= 74
    assert {"falcon_h1", "hrm_text"} <= set(BUILT)  # numbers behind `num_hidden_layers`
    assert set(MODEL_TYPES) >= BY_SOURCE


# --- by source ------------------------------------------------------------------------------------

STATELESS = {
    "BaseLinearLayerWithLoRA",
    "Cohere2MoeDecoderLayer",
    "DeepGemmMegaMoEExperts",
    "DeepseekV4MegaMoEExperts",
    "MuseSparkMegaMoEExperts",
}
"""Layers of linear maps and experts, of 0.32 and 0.33."""


def sources() -> Iterator[tuple[str, ast.ClassDef]]:
    root = Path(vllm.__file__).parent
    for folder in ("model_executor", "models", "lora", "v1"):
        for path in sorted((root / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            if "class " in text:
                for node in ast.walk(ast.parse(text)):
                    if isinstance(node, ast.ClassDef):
                        yield f"{path.relative_to(root)}:{node.name}", node


def test_every_module_that_a_model_shows_to_vllms_runner_is_a_layer_with_a_spec() -> None:
    """Of all architectures of the registry, also of those that are not built here. Layers that the
    runner does not see have no blocks."""
    bases: dict[str, set[str]] = {}
    shown: dict[str, str] = {}
    for place, node in sources():
        found = {ast.unparse(each).rpartition(".")[2] for each in node.bases}
        bases.setdefault(node.name, set()).update(found)
        for each in ast.walk(node):
            is_shown = (
                isinstance(each, ast.Assign)
                and isinstance(each.targets[0], ast.Subscript)
                and ast.unparse(each.targets[0].value).endswith("static_forward_context")
            )
            if is_shown:
                shown[place] = node.name

    def is_layer(name: str) -> bool:
        return name == "AttentionLayerBase" or any(map(is_layer, bases.get(name, ())))

    others = {name for name in shown.values() if not is_layer(name)}
    assert len(shown) > 20
    assert others <= STATELESS, sorted(others - STATELESS)
