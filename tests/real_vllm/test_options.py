"""Each option of the installed vLLM is known, and does what `options` says of it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of torch, as it is imported
    import vllm.config
    import vllm.engine.arg_utils
    import vllm.envs
    import vllm.model_executor.model_loader

from kvferry.adapters.vllm.host import load_host
from kvferry.identity import model_identity
from kvferry.keys import Namespace
from kvferry.types import KVGroup
from kvferry.v1.running_model import NUMERIC_VARIABLES, running_model
from tests.real_vllm.host import RELEASE
from tests.real_vllm.options import (
    HARMLESS,
    HARMLESS_VARIABLES,
    IDENTITY,
    LATER,
    NO_OPTIONS,
    OPTIONS,
    VARIABLES,
)

pytestmark = pytest.mark.skipif(RELEASE < (0, 32), reason="the table is of 0.32 and 0.33")

GROUPS = (KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16),)


def option_classes() -> dict[str, type]:
    found = {}
    for module in pkgutil.iter_modules(vllm.config.__path__, "vllm.config."):
        for name, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if each.__module__ == module.name and dataclasses.is_dataclass(each):
                found[name] = each
    return found


def names_of(each: type) -> set[str]:
    """Fields, and arguments that are none."""
    return {
        name for name, kind in inspect.get_annotations(each).items() if "ClassVar" not in str(kind)
    }


def test_every_option_of_this_vllm_is_in_the_table_and_no_other() -> None:
    classes = option_classes()
    assert classes.keys() <= OPTIONS.keys() | NO_OPTIONS
    for name, verdicts in OPTIONS.items():
        listed = [option for options in verdicts.values() for option in options.split()]
        assert len(listed) == len(set(listed)), name
        known = names_of(classes[name]) if name in classes else set()
        assert known <= set(listed), name
        if RELEASE == (0, 32):
            assert set(listed) - known <= LATER, name


def test_every_variable_of_this_vllm_is_in_the_table() -> None:
    harmless = HARMLESS_VARIABLES.split()
    named = {each[1:] if each.startswith("/") else f"VLLM_{each}" for each in harmless}
    assert not named & {*VARIABLES, *NUMERIC_VARIABLES}
    assert set(vllm.envs.environment_variables) <= {*named, *VARIABLES, *NUMERIC_VARIABLES}


@contextmanager
def changed(config: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set options by `part.name`; "" is the configuration itself."""
    before = []
    for path, value in values.items():
        part, _, name = path.rpartition(".")
        target = getattr(config, part) if part else config
        before.append((target, name, getattr(target, name, None)))
        object.__setattr__(target, name, value)
    try:
        yield
    finally:
        for target, name, value in reversed(before):
            object.__setattr__(target, name, value)


def digest_of(config: Any) -> bytes:
    identity = model_identity(running_model(config, load_host().load_config), None)
    return Namespace.of(identity, GROUPS, 128).digest


LORA = SimpleNamespace(target_modules=None)
OTHER_MODEL = SimpleNamespace(
    to_dict=lambda: {"model_type": "llama", "num_hidden_layers": 3},
    architectures=["LlamaForCausalLM"],
)

# How an option is changed, and what must be set for it to count.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "AttentionConfig.disable_flashinfer_q_quantization": (
        {}, {"attention_config.disable_flashinfer_q_quantization": True},
    ),
    "AttentionConfig.use_prefill_query_quantization": (
        {}, {"attention_config.use_prefill_query_quantization": True},
    ),
    "CacheConfig.cache_dtype": ({}, {"cache_config.cache_dtype": "fp8"}),
    "CacheConfig.kv_cache_dtype_skip_layers": (
        {"cache_config.cache_dtype": "fp8"}, {"cache_config.kv_cache_dtype_skip_layers": ["0"]},
    ),
    "KernelConfig.moe_backend": (
        {"model_config.quantization": "fp8"}, {"kernel_config.moe_backend": "marlin"},
    ),
    "KernelConfig.linear_backend": (
        {"model_config.quantization": "fp8"}, {"kernel_config.linear_backend": "marlin"},
    ),
    "KernelConfig.linear_backend_per_quant": (
        {"model_config.quantization": "fp8"},
        {"kernel_config.linear_backend_per_quant": {"fp8": "marlin"}},
    ),
    "LoadConfig.load_format": ({}, {"load_config.load_format": "pt"}),
    "LoadConfig.model_loader_extra_config": (
        {"load_config.load_format": "pt"}, {"load_config.model_loader_extra_config": {"a": 1}},
    ),
    **{
        f"LoRAConfig.{name}": ({"lora_config": LORA}, {"lora_config": SimpleNamespace(**{name: 1})})
        for name in OPTIONS["LoRAConfig"][IDENTITY].split()
    },
    "ModelConfig.dtype": ({}, {"model_config.dtype": torch.float16}),
    "ModelConfig.hf_config": ({}, {"model_config.hf_config": OTHER_MODEL}),
    "ModelConfig.hf_overrides": (
        {}, {"model_config.hf_overrides": {"quantization_config_file": __file__}},
    ),
    "ModelConfig.model_impl": ({}, {"model_config.using_transformers_backend": lambda: True}),
    "ModelConfig.quantization": ({}, {"model_config.quantization": "fp8"}),
    "ModelConfig.quantization_config": ({}, {"model_config.quantization_config": {"a": 1}}),
    "VllmConfig.additional_config": ({}, {"additional_config": {"a": 1}}),
}  # fmt: skip

ELSEWHERE = {
    "ModelConfig.model": "another directory: `tests/v1/test_running_model.py`",
    "ModelConfig.model_weights": "another directory: `tests/v1/test_running_model.py`",
    "ModelConfig.hf_text_config": "a part of hf_config",
    "ModelConfig.trust_remote_code": "with code beside the model: `tests/v1/test_running_model.py`",
    **{
        f"QuantizationConfigArgs.{name}": "a part of quantization_config"
        for name in OPTIONS["QuantizationConfigArgs"][IDENTITY].split()
    },
}


def of_verdict(verdict: str) -> list[str]:
    return [
        f"{name}.{option}"
        for name, verdicts in OPTIONS.items()
        for option in verdicts.get(verdict, "").split()
    ]


def test_the_options_of_identity_are_the_ones_that_are_shown_to_be() -> None:
    assert set(of_verdict(IDENTITY)) == CHANGES.keys() | ELSEWHERE.keys()


@pytest.mark.parametrize("option", CHANGES)
def test_an_option_of_identity_makes_another_namespace(option: str, vllm_config: Any) -> None:
    needed, change = CHANGES[option]
    with changed(vllm_config, needed):
        before = digest_of(vllm_config)
        assert digest_of(vllm_config) == before
        with changed(vllm_config, change):
            assert digest_of(vllm_config) != before


def other_than(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return f"{value}x" if isinstance(value, str) else "x"


def test_a_harmless_option_is_in_no_namespace(vllm_config: Any) -> None:
    parts = {
        type(getattr(vllm_config, field.name)).__name__: field.name
        for field in dataclasses.fields(vllm_config)
    }
    before, seen = digest_of(vllm_config), 0
    for each in of_verdict(HARMLESS):
        name, _, option = each.partition(".")
        part = "" if name == "VllmConfig" else parts.get(name)
        target = vllm_config if part == "" else getattr(vllm_config, part or "", None)
        if part is None or not hasattr(target, option) or option in parts.values():
            continue
        path = f"{part}.{option}" if part else option
        with changed(vllm_config, {path: other_than(getattr(target, option))}):
            assert digest_of(vllm_config) == before, each
        seen += 1
    assert seen > 250


def test_a_file_of_scales_of_an_encoder_counts_by_content(tmp_path: Path) -> None:
    from kvferry.adapters.vllm.tier_identity import _scales

    path, found = tmp_path / "scales.json", set()
    for text in ("{}", '{"layer": 2}'):
        path.write_text(text)
        found.add(_scales(SimpleNamespace(mm_encoder_fp8_scale_path=str(path))))
    assert len(found) == 2
    assert _scales(SimpleNamespace(mm_encoder_fp8_scale_path=None)) == ""
