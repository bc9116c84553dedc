"""The identity, by content, of the model that a V1 host runs: weights and effective configuration.

The configuration is the model directory's `config.json` and this host's deviations from it:
overrides by the operator, dtypes, a quantisation done while loading. Engines without deviations
agree on a model's identity, whatever library version read it.

Every connector of a V1 host takes its model's identity from here. A host that lacks an attribute of
vLLM's (the running `hf_config`, a registry of model classes) counts as without deviations there.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.filesystem import process_start
from kvferry.identity import (
    Loads,
    identify,
    length_dependent_rope,
    newest_change,
    weights_digest,
    written_config,
)
from kvferry.keys import ModelIdentity, relevant_config

logger = logging.getLogger(__name__)

_FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that read the same tensors from a model directory."""

_BY_PATTERN = ("auto", "hf", "safetensors")
"""Those of them that choose files as `Loads.BY_PATTERN` says."""

_FROM_OTHER_FILES = ("pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state")
"""Load formats that read other files of a model directory, which may hold other weights. With a
format in neither list, the weights may not be those of the files."""

_LORA_SETTINGS = (
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Fields of vLLM's LoRA configuration that decide which part of an adapter is used, and how it is
read."""

_NUMERIC_VARIABLES = (
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


def model_identity(
    vllm_config: Any,  # noqa: ANN401 - the host's, as all here
    weights_version: str | None,
    load_config: ConfigReader | None = None,
    hashed: Callable[[Callable[[], bytes]], bytes] = lambda read: read(),
) -> ModelIdentity:
    """Return the identity of the model that `vllm_config` describes.

    Args:
        weights_version: the operator's name for the weights, used where they cannot be hashed.
        load_config: reader of the model's written configuration; None for the reader of the vLLM in
            this process. Without any, all of the running configuration enters the identity.
        hashed: gets a function that hashes the weights, after all else, and returns their digest.

    Raises:
        ConfigError: KV that cannot be identified, or weights that cannot be read and have no
            `weights_version`.
    """
    model = vllm_config.model_config
    source = local_model(vllm_config)
    weights = _weights_elsewhere(vllm_config, source, weights_version)
    if source is not None and (source / "config.json").is_file():
        config, is_written = written_config(source), True
    else:  # another format: as vLLM reads it
        config, is_written = _plain(_running_config(model) or {}), False
    code = _custom_code(vllm_config, source, config.get("auto_map"), weights_version)
    if code is not None:
        config["code"] = code
    path = Path(str(model.model))
    is_own = weights is None and weights_version is None and source == path
    before = newest_change(path) if is_own else math.inf

    def read() -> bytes:
        digest = weights_digest(
            source or path, weights_version=weights_version, loads=loads_of(vllm_config)
        )
        if is_own:
            _refuse_recent(path, "weights", newest_change(path), before)
        return digest

    return identify(
        source or path,
        dtype=_dtype(model),
        deviations=_deviations(vllm_config, is_written, load_config or _config_reader())
        | _quantization_of_files(source),
        weights_version=weights_version,
        name=str(model.model),
        weights=weights or hashed(read),
        config=config,
    )


def _weights_elsewhere(
    vllm_config: Any,  # noqa: ANN401 - the host's
    source: Path | None,
    weights_version: str | None,
) -> bytes | None:
    """Return what stands for weights that are not those of files on this disk; None if they are."""
    load_format = _load_format(vllm_config)
    is_known = load_format in _FROM_FILES + _FROM_OTHER_FILES
    if load_format == "dummy" or (not is_known and weights_version is None):
        logger.warning(
            "load_format=%s: weights are not those of the files, so nothing is shared with other "
            "processes",
            load_format,
        )
        return secrets.token_bytes(32)
    if source is None or not is_known:
        name = vllm_config.model_config.model
        if weights_version is None:
            raise ConfigError(
                f"the weights of {name!r} are not on this machine's disk and so have no "
                'digest; set "weights_version" to a name that changes whenever they do'
            )
        return blake3(f"{name}\0{weights_version}".encode()).digest()
    return None


def _refuse_recent(source: Path, files: str, changed: float, before: float = math.inf) -> None:
    """Refuse files that changed since the engine's process started: hosts load a model before they
    ask for its identity. Hub snapshots are content-addressed and are not checked. An engine inside
    a caller's process may have started long after it: there, files are refused that changed after
    `before`, when they were looked at first."""
    if changed > (process_start() if is_engine_process() else before):
        raise ConfigError(
            f"the {files} in {source} changed after this process started, so it may load others "
            "than it hashed: start again when they are complete"
        )


def is_engine_process() -> bool:
    return multiprocessing.parent_process() is not None


def _load_format(vllm_config: Any) -> str:  # noqa: ANN401 - the host's
    return str(getattr(getattr(vllm_config, "load_config", None), "load_format", "auto")).lower()


def loads_of(vllm_config: Any) -> Loads:  # noqa: ANN401 - the host's
    """Which weight files of a directory this host reads."""
    return Loads.BY_PATTERN if _load_format(vllm_config) in _BY_PATTERN else Loads.ALL


def local_model(vllm_config: Any) -> Path | None:  # noqa: ANN401 - the host's
    """The path of the weights: a directory, a single file, or Hugging Face's snapshot on this disk.
    None if there is none, or on another hub: a snapshot of that name may hold other weights."""
    model = vllm_config.model_config
    path = Path(str(getattr(model, "model_weights", "") or model.model))
    if path.exists():
        return path
    if uses_modelscope():
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        found = snapshot_download(
            str(model.model),
            revision=getattr(model, "revision", None),
            # A cache of the operator's own may hold another commit than the user's.
            cache_dir=getattr(getattr(vllm_config, "load_config", None), "download_dir", None),
            local_files_only=True,
        )
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None
    return Path(found)


def _custom_code(
    vllm_config: Any,  # noqa: ANN401 - the host's
    source: Path | None,
    stored_map: object,
    weights_version: str | None,
) -> str | None:
    """Return what identifies the model's own Python code; None if vLLM runs none of it.

    That is a digest of all Python files in the model's directory, or the class names of code
    elsewhere. vLLM runs such code only with `trust_remote_code`, and only what an `auto_map` names.
    vLLM may have a class of its own for the model; as this is unknown here, the code counts.

    Args:
        source: the model's directory, or its snapshot of a hub.
        stored_map: `auto_map` of the model's config.json.
        weights_version: stands, too, for code that is not in the directory.

    Raises:
        ConfigError: code that is not in the directory and has no version.
    """
    model = vllm_config.model_config
    running_map = getattr(getattr(model, "hf_config", None), "auto_map", None)
    named = sorted({*_classes(stored_map), *_classes(running_map)})
    if not named or not getattr(model, "trust_remote_code", False):
        return None
    directory = _code_directory(vllm_config, source, named)
    files = sorted(directory.rglob("*.py")) if directory is not None else []
    if directory is None or not files:
        if weights_version is None:
            raise ConfigError(
                f"trust_remote_code runs code that is not in the model's directory ({named[0]}); "
                'copy it there, or set "weights_version" to a name that changes whenever it does'
            )
        return ", ".join(named)
    if weights_version is None and directory == Path(str(model.model)):
        _refuse_recent(directory, "code", max(file.stat().st_ctime for file in files))
    hasher = blake3()
    for file in files:
        content = blake3(file.read_bytes()).hexdigest()
        hasher.update(f"{file.relative_to(directory)}\0{content}\0".encode())
    return hasher.hexdigest()


def _classes(auto_map: object) -> list[str]:
    """List all entries of an `auto_map`, as `file.Class` or `repository--file.Class`."""
    if not isinstance(auto_map, Mapping):
        return []
    names = [
        name
        for entry in auto_map.values()
        for name in (entry if isinstance(entry, list) else [entry])
    ]
    return [str(name) for name in names if name]


def _code_directory(
    vllm_config: Any,  # noqa: ANN401 - the host's
    source: Path | None,
    named: list[str],
) -> Path | None:
    """The model's own directory if all its code is from there, else None."""
    model = vllm_config.model_config
    repositories = {name.partition("--")[0] for name in named if "--" in name}
    own_revisions = (None, getattr(model, "revision", None))
    if (
        repositories - {str(model.model)}
        or getattr(model, "hf_config_path", None) not in (None, model.model)
        or getattr(model, "code_revision", None) not in own_revisions
    ):
        return None
    path = Path(str(model.model))
    if path.is_dir():
        return path
    # Weights in a directory of their own may be of another commit than the code.
    apart = getattr(getattr(vllm_config, "load_config", None), "download_dir", None)
    return source if source is not None and source.is_dir() and not apart else None


def _deviations(
    vllm_config: Any,  # noqa: ANN401 - the host's
    is_written: bool,
    load_config: ConfigReader | None,
) -> dict[str, Any]:
    """The part of the configuration that decides KV bytes and is not in the model's files."""
    model = vllm_config.model_config
    found: dict[str, Any] = {}
    changed = _changed_fields(model, is_written, load_config)
    if changed:
        found["overrides"] = changed
    classes = _foreign_classes(model)
    if classes:
        found["model_class"] = classes
    load_format = _load_format(vllm_config)
    if load_format not in _FROM_FILES:
        options = getattr(vllm_config.load_config, "model_loader_extra_config", None)
        found["load_format"] = f"{load_format} {options!r}" if options else load_format
    # The options may also quantise layers that a quantised checkpoint left as they were.
    quantization = getattr(model, "quantization_config", None)
    method = getattr(model, "quantization", None)
    is_written_so = hasattr(getattr(model, "hf_config", None), "quantization_config")
    if quantization or (method is not None and not is_written_so):
        found["online_quantization"] = {
            "method": str(method),
            "options": repr(quantization),
        }
    found.update(_options(vllm_config))
    cache = vllm_config.cache_config
    if cache.cache_dtype not in ("auto", _dtype(model)):
        found["kv_cache_dtype"] = str(cache.cache_dtype)
        skipped = getattr(cache, "kv_cache_dtype_skip_layers", None)
        if skipped:
            found["kv_cache_dtype_skip_layers"] = [str(name) for name in skipped]
        if getattr(cache, "calculate_kv_scales", False):
            raise ConfigError(
                "calculate_kv_scales=True takes the scales of the KV cache from the first "
                "requests, so equal prompts have other KV in every process; use a checkpoint with "
                "scales"
            )
    if getattr(model, "use_mla", False) is True:
        # For such models vLLM 0.32 on a CPU computes other KV than Transformers, with or without a
        # cache: its records are for vLLM alone, on devices of one kind.
        device = getattr(getattr(vllm_config, "device_config", None), "device_type", "unknown")
        found["latents_of"] = f"vllm on {device}"
    if length_dependent_rope(_running_config(model)):
        found["max_model_len"] = int(model.max_model_len)
    return found


def _quantization_of_files(source: Path | None) -> dict[str, Any]:
    """What ModelOpt writes beside `config.json`. V1 hosts quantise by it and Transformers does not,
    so it counts as a deviation. Raises ConfigError if it cannot be read."""
    path = None if source is None else source / "hf_quant_config.json"
    if path is None or not path.is_file():
        return {}
    try:
        return {"hf_quant_config": json.loads(path.read_bytes())}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the quantisation in {path}: {error}") from error


def _dtype(model: Any) -> str:  # noqa: ANN401 - the host's
    return str(model.dtype).removeprefix("torch.")


def _options(vllm_config: Any) -> dict[str, str]:  # noqa: ANN401 - the host's
    """The options and variables that the operator set and that make other KV of equal files."""
    found = {
        f"lora_{name}": getattr(getattr(vllm_config, "lora_config", None), name, None)
        for name in _LORA_SETTINGS
    }
    attention = getattr(vllm_config, "attention_config", None)
    found |= {f"attention_{name}": getattr(attention, name, None) for name in _QUERY_SETTINGS}
    if getattr(vllm_config.model_config, "quantization", None) is not None:
        kernels = getattr(vllm_config, "kernel_config", None)
        chosen = {name: getattr(kernels, name, None) for name in _KERNEL_SETTINGS}
        found |= {name: value for name, value in chosen.items() if value != "auto"}
    # Third-party platforms read this, in ways that only they know.
    found["additional_config"] = getattr(vllm_config, "additional_config", None)
    overrides = getattr(vllm_config.model_config, "hf_overrides", None)
    if isinstance(overrides, Mapping) and overrides.get("quantization_config_file"):
        path = Path(overrides["quantization_config_file"])
        found["quantization_config_file"] = blake3(path.read_bytes()).hexdigest()
    return numeric_variables() | {name: repr(value) for name, value in found.items() if value}


def _foreign_classes(model: Any) -> list[str]:  # noqa: ANN401 - the host's
    """The classes that run the model, if not vLLM's own: a plug-in's class and its bases, with the
    digests of their files, or "transformers". Classes of Transformers may order a key's elements
    in another way (the rotated part, in DeepSeek's models)."""
    by_transformers = getattr(model, "using_transformers_backend", None)
    if by_transformers is not None and by_transformers():
        return ["transformers"]
    if not hasattr(model, "registry"):
        return []
    names = getattr(model.hf_config, "architectures", None) or []
    found, _ = model.registry.resolve_model_cls(names, model)
    if found.__module__.startswith("vllm."):
        return []
    known = {"vllm", "torch", *sys.stdlib_module_names}
    classes = [base for base in found.__mro__ if base.__module__.partition(".")[0] not in known]
    return [f"{base.__module__}.{base.__qualname__} {_file_digest(base)}" for base in classes]


def _file_digest(code: type) -> str:
    """Digest of the file that defines `code`; random if there is none to read."""
    path = getattr(sys.modules.get(code.__module__), "__file__", None)
    try:
        return blake3(Path(path or "").read_bytes()).hexdigest(16)
    except OSError:
        return secrets.token_hex(16)


def _changed_fields(
    model: Any,  # noqa: ANN401 - the host's
    is_written: bool,
    load_config: ConfigReader | None,
) -> dict[str, Any]:
    """The fields in which the running config differs from the one that vLLM reads from the model:
    `config.json` if there is one, even if the operator names another. All fields if there is no
    reader or it fails."""
    running = _running_config(model)
    if running is None:
        return {}
    runs = _plain(running)
    if load_config is None:
        return runs
    try:
        config = load_config(
            model.model,
            trust_remote_code=bool(getattr(model, "trust_remote_code", False)),
            revision=getattr(model, "revision", None),
            code_revision=getattr(model, "code_revision", None),
            config_format="hf" if is_written else getattr(model, "config_format", "auto"),
        )
        loaded = _plain(config.to_dict())
    except (OSError, ValueError, TypeError) as error:
        # There is nothing to compare with, so all of it counts.
        logger.warning("cannot reread the model's config (%s): identity covers all of it", error)
        return runs
    return {
        name: runs.get(name)
        for name in sorted(runs.keys() | loaded.keys())
        if name not in ("dtype", "torch_dtype") and runs.get(name) != loaded.get(name)
    }


def _running_config(model: Any) -> Mapping[str, Any] | None:  # noqa: ANN401 - the host's
    """The model's configuration as it runs; None on a host that does not show it."""
    config = getattr(model, "hf_config", None)
    return None if config is None else config.to_dict()


def _config_reader() -> ConfigReader | None:
    """The config reader of the vLLM that runs in this process; None in other hosts."""
    return getattr(sys.modules.get("vllm.transformers_utils.config"), "get_config", None)


def uses_modelscope() -> bool:
    """Whether this host takes models by name from ModelScope, not from Hugging Face."""
    by_sglang = os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true")
    return by_sglang or bool(getattr(_variables(), "VLLM_USE_MODELSCOPE", False))


def numeric_variables() -> dict[str, str]:
    """The variables of `_NUMERIC_VARIABLES` that are set, with the values that vLLM reads from
    their texts, as these may name files."""
    envs = _variables()
    return {
        name: repr(getattr(envs, name, os.environ[name]))
        for name in _NUMERIC_VARIABLES
        if name in os.environ
    }


def _variables() -> object:
    """VLLM's module of environment variables, which every vLLM has imported by now; or None."""
    return sys.modules.get("vllm.envs")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without irrelevant fields, as plain JSON values."""
    return dict(relevant_config(json.loads(json.dumps(config, default=str))))
