"""Tiny models with recurrent states beside attention, and how vLLM's CPU build serves them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from kvferry.testing.models import write_random_model
from tests.real_vllm.conftest import Pool
from tests.real_vllm.harness import EXAMPLES, Process

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, dict[str, Any]] = {
    # Mamba-2: a recurrent state.
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 192,
    },
    # Short convolutions: the last few tokens.
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
        # Of checkpoints; vLLM reads them, and Transformers writes none.
        "conv_dim": 128,
        "block_dim": 128,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
    },
    # States and attention in each layer. vLLM numbers the states behind the layers of attention.
    "falcon_h1": {
        "head_dim": 32,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    # Mamba-2 with a group of B and C for some heads, and layers of experts' width between.
    "nemotron_h": {
        "hybrid_override_pattern": "M*-M*-",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 64,
    },
    # Gated delta nets. vLLM's CPU kernels take heads of 128 values in bfloat16.
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    # Likewise, with states in float32, as its checkpoints say.
    "qwen3_5_text": {
        "mamba_ssm_dtype": "float32",
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}

BLOCKS = {"qwen3_next": 384, "qwen3_5_text": 640}
"""Tokens of a block, for which vLLM chooses a multiple of 128 that has room for a state."""

NEED_TORCHVISION = {"qwen3_5_text"}
"""vLLM imports their module with one for images, whose package its CPU build lacks."""

TORCHVISION = '''
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType


class Named(type):
    def __getattr__(cls, name):
        return named(name)


def named(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Named(name, (), {})


class Names:
    """Finds and loads any module of the package."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("torchvision.") else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = named
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(Names())
'''
"""A package in which all names are there and none does anything, for models of text."""


def write_torchvision(root: Path) -> Path:
    """Write that package to `root`, for the path of Python; return `root`."""
    (root / "torchvision").mkdir(parents=True)
    (root / "torchvision" / "__init__.py").write_text(TORCHVISION)
    about = root / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    return root


def with_torchvision(pool: Pool, root: Path) -> tuple[Process, Process]:
    """Return two processes that find that package, in place of `first` and `second`."""
    paths = str(write_torchvision(root)), str(EXAMPLES), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, paths))
    return pool.get("images 1", PYTHONPATH=path), pool.get("images 2", PYTHONPATH=path)


def options_of(arch: str) -> dict[str, Any]:
    """Return the arguments of vLLM for a model. Steps of a block: on a CPU, Mamba-2 keeps no state
    of a token within a step."""
    options: dict[str, Any] = {
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "max_num_batched_tokens": BLOCKS.get(arch, 128),
    }
    if arch in BLOCKS:
        options["dtype"] = "bfloat16"
    return options


def write_hybrid(root: Path, arch: str, *, seed: int = 5, **changes: Any) -> Path:
    """Write a model of random weights to `root`, with fields of its configuration changed; return
    its directory."""
    config = AutoConfig.for_model(arch, **{**SHAPE, **MODELS[arch], **changes})
    build = partial(AutoModelForCausalLM.from_config, config)
    return write_random_model(root / arch, build, seed=seed)
