"""What a V1 host runs: the `RunningModel` of vLLM's configuration, or of a host that says less.

Every connector of a V1 host takes its model from here. What a release of vLLM may lack stands in
`_LACKING`, with what the release does then. Anything else must be there: if vLLM renames a field
that decides KV, its model is refused by that field's name, not taken for one without deviations.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.filesystem import process_start
from kvferry.identity import Loads, ModelFiles, RunningModel, read_written
from kvferry.v1.types import V1Config

_BY_PATTERN = ("auto", "hf", "safetensors")
"""Load formats that choose files as `Loads.BY_PATTERN` says."""

_LACKING: Final[Mapping[str, object]] = {
    "model_weights": "",  # since 0.14
    "quantization_config": None,  # since 0.21
    "attention_config": None,  # since 0.13
    "kernel_config": None,  # since 0.16
    "kv_cache_dtype_skip_layers": (),  # since 0.20
    "calculate_kv_scales": False,  # until 0.27
    # Of the parts that came later, fields that came later still.
    "target_modules": None,
    "enable_tower_connector_lora": False,
    "enable_mixed_moe_lora_format": False,
    "enable_moe_shared_loras": False,
    "disable_flashinfer_q_quantization": False,
    "use_prefill_query_quantization": False,
    "moe_backend": "auto",
    "linear_backend": "auto",
    "linear_backend_per_quant": None,
}
"""Fields that some release of vLLM since 0.11 lacks, with what stands for them."""

_LORA_SETTINGS = (
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Fields of vLLM's LoRA configuration that decide which part of an adapter is used, and how it is
read."""

NUMERIC_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_BATCH_INVARIANT",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_ROCM_USE_AITER_MOE_SITUV2",
    "VLLM_USE_DEEP_GEMM_E8M0",
)
"""Environment variables of vLLM that quantise weights, activations or messages between ranks, or
choose the experts of a token: they change KV by more than rounding. Others promise equal bits,
which records of engines without that promise would break, or give blocks that are stored whole
another order."""

_QUERY_SETTINGS = ("disable_flashinfer_q_quantization", "use_prefill_query_quantization")
"""Fields of vLLM's attention configuration that decide whether queries are quantised."""

_KERNEL_SETTINGS = ("moe_backend", "linear_backend", "linear_backend_per_quant")
"""Fields of vLLM's kernel configuration. Of quantised weights, some kernels quantise activations,
too."""

ConfigReader = Callable[..., Any]
"""vLLM's `get_config`: the configuration of a model as it is written."""


def running_model(
    config: Any,  # noqa: ANN401 - the host's, as all here
    read_config: ConfigReader | None = None,
) -> RunningModel:
    """Return the model that vLLM's configuration describes.

    Args:
        read_config: reader of the model's written configuration; None for the reader of the vLLM in
            this process. Without any, all of the running configuration enters the identity.

    Raises:
        ConfigError: a field that decides KV is not there.
    """
    model, cache, load = config.model_config, config.cache_config, config.load_config
    files = model_files(config)
    hf_config = _read(model, "hf_config")
    overrides = _read(model, "hf_overrides")
    named = overrides.get("quantization_config_file") if isinstance(overrides, Mapping) else None
    return RunningModel(
        files=files,
        read_since=read_since(),
        dtype=_dtype(model),
        running=hf_config.to_dict(),
        written=_written(model, files, read_config or _config_reader()),
        classes=_foreign_classes(model),
        max_length=int(_read(model, "max_model_len")),
        runs_code=bool(_read(model, "trust_remote_code")),
        code_map=_of_config(hf_config, "auto_map"),
        code_revision=_read(model, "code_revision"),
        config_path=_read(model, "hf_config_path"),
        quantization=_read(model, "quantization"),
        quantization_options=_read(model, "quantization_config"),
        is_quantized_in_files=hasattr(hf_config, "quantization_config"),
        quantization_file=Path(named) if named else None,
        heeds_model_opt=True,
        loader_options=_read(load, "model_loader_extra_config"),
        kv_dtype=str(_read(cache, "cache_dtype")),
        kv_layers_left_out=[str(name) for name in _read(cache, "kv_cache_dtype_skip_layers") or ()],
        scales_by_requests=bool(_read(cache, "calculate_kv_scales")),
        latents_of=_latents_of(config),
        lora=_settings(_read(config, "lora_config"), _LORA_SETTINGS),
        queries=_settings(_read(config, "attention_config"), _QUERY_SETTINGS),
        kernels=_settings(_read(config, "kernel_config"), _KERNEL_SETTINGS),
        # Third-party platforms read this, in ways that only they know.
        platform_options=_read(config, "additional_config"),
        variables=numeric_variables(),
    )


def as_written(config: V1Config) -> RunningModel:
    """Return the model of a host whose configuration says no more than `V1Config`: it runs what is
    written."""
    return RunningModel(
        files=ModelFiles(
            name=str(config.model_config.model),
            weights="",
            revision=None,
            cache_dir=None,
            is_on_hugging_face=not uses_modelscope(),
            load_format="auto",
            loads=loads_of("auto"),
        ),
        read_since=read_since(),
        dtype=_dtype(config.model_config),
        running={},
        written={},
        classes=(),
        max_length=0,
        runs_code=False,
        code_map=None,
        code_revision=None,
        config_path=None,
        quantization=None,
        quantization_options=None,
        is_quantized_in_files=False,
        quantization_file=None,
        heeds_model_opt=True,
        loader_options=None,
        kv_dtype=str(config.cache_config.cache_dtype),
        kv_layers_left_out=(),
        scales_by_requests=False,
        latents_of=None,
        lora={},
        queries={},
        kernels={},
        platform_options=None,
        variables=numeric_variables(),
    )


def model_files(config: Any) -> ModelFiles:  # noqa: ANN401 - the host's
    """Return where the files of vLLM's model are."""
    model, load = config.model_config, config.load_config
    load_format = str(_read(load, "load_format"))
    return ModelFiles(
        name=str(model.model),
        weights=str(_read(model, "model_weights")),
        revision=_read(model, "revision"),
        cache_dir=_read(load, "download_dir"),
        is_on_hugging_face=not uses_modelscope(),
        load_format=load_format.lower(),
        loads=loads_of(load_format),
    )


def loads_of(load_format: str) -> Loads:
    """Which weight files of a directory vLLM and SGLang read in this format."""
    return Loads.BY_PATTERN if load_format.lower() in _BY_PATTERN else Loads.ALL


def _read(part: Any, name: str) -> Any:  # noqa: ANN401 - the host's
    """Return a field of a part of vLLM's configuration.

    Raises:
        ConfigError: a field that every release has is not there.
    """
    if hasattr(part, name):
        return getattr(part, name)
    if name not in _LACKING:
        raise ConfigError(
            f"the {type(part).__name__} of this vLLM has no {name!r}, which decides KV, so the "
            "model cannot be identified; use a release of kvferry that knows this vLLM's"
        )
    return _LACKING[name]


def _settings(part: Any, names: tuple[str, ...]) -> dict[str, object]:  # noqa: ANN401 - the host's
    return {} if part is None else {name: _read(part, name) for name in names}


def _of_config(hf_config: Any, name: str) -> Any:  # noqa: ANN401 - the host's
    """Return a field of a model's own configuration, which may have any; None if it has not."""
    return getattr(hf_config, name) if hasattr(hf_config, name) else None


def _written(
    model: Any,  # noqa: ANN401 - the host's
    files: ModelFiles,
    read_config: ConfigReader | None,
) -> Mapping[str, Any] | None:
    """Return the configuration that vLLM reads from the model: `config.json` if there is one, even
    if the operator names another."""
    options = {
        "trust_remote_code": bool(_read(model, "trust_remote_code")),
        "revision": files.revision,
        "code_revision": _read(model, "code_revision"),
        "config_format": "hf" if files.has_config() else _read(model, "config_format"),
    }
    if read_config is None:
        return None
    return read_written(partial(read_config, model.model, **options))


def _dtype(model: Any) -> str:  # noqa: ANN401 - the host's
    return str(_read(model, "dtype")).removeprefix("torch.")


def _latents_of(config: Any) -> str | None:  # noqa: ANN401 - the host's
    """For models of latents, vLLM 0.32 on a CPU computes other KV than Transformers, with or
    without a cache: its records are for vLLM alone, on devices of one kind."""
    if _read(config.model_config, "use_mla") is not True:
        return None
    return f"vllm on {_read(config, 'device_config').device_type}"


def _foreign_classes(model: Any) -> list[str]:  # noqa: ANN401 - the host's
    """The classes that run the model, if not vLLM's own: a plug-in's class and its bases, with the
    digests of their files, or "transformers". Classes of Transformers may order a key's elements
    in another way (the rotated part, in DeepSeek's models)."""
    if _read(model, "using_transformers_backend")():
        return ["transformers"]
    names = _of_config(model.hf_config, "architectures") or []
    found, _ = _read(model, "registry").resolve_model_cls(names, model)
    if found.__module__.startswith("vllm."):
        return []
    known = {"vllm", "torch", *sys.stdlib_module_names}
    classes = [base for base in found.__mro__ if base.__module__.partition(".")[0] not in known]
    return [f"{base.__module__}.{base.__qualname__} {_file_digest(base)}" for base in classes]


def _file_digest(code: type) -> str:
    """Digest of the file that defines `code`; random if there is none to read."""
    module = sys.modules.get(code.__module__)
    try:
        return blake3(Path(str(vars(module)["__file__"])).read_bytes()).hexdigest(16)
    except (OSError, TypeError, KeyError):
        return secrets.token_hex(16)


# --- this process ---------------------------------------------------------------------------------


def read_since() -> float:
    """Hosts load a model before they ask for its identity, so an engine's process may have read its
    files from its start on. A caller's process that an engine runs in may be far older."""
    return process_start() if multiprocessing.parent_process() is not None else math.inf


def _config_reader() -> ConfigReader | None:
    """The config reader of the vLLM that runs in this process; None in other hosts."""
    module = sys.modules.get("vllm.transformers_utils.config")
    return None if module is None else module.get_config


def uses_modelscope() -> bool:
    """Whether this host takes models by name from ModelScope, not from Hugging Face."""
    by_sglang = os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true")
    envs = _variables()
    return by_sglang or (envs is not None and bool(envs.VLLM_USE_MODELSCOPE))


def numeric_variables() -> dict[str, str]:
    """The variables of `NUMERIC_VARIABLES` that are set, with the values that vLLM reads from
    their texts, as these may name files."""
    envs = _variables()
    return {
        name: repr(getattr(envs, name) if hasattr(envs, name) else os.environ[name])
        for name in NUMERIC_VARIABLES
        if name in os.environ
    }


def _variables() -> Any:  # noqa: ANN401 - the host's
    """VLLM's module of environment variables, which every vLLM has imported by now; or None."""
    return sys.modules.get("vllm.envs")
