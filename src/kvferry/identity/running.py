"""What a host runs, as one value, and the identity that follows from it.

Each host (vLLM, SGLang, the embedded engine) fills a `RunningModel`, and nothing else of a host is
read here. It has no defaults: a host that does not say something does not type-check, and what this
module learns to ask for, every host has to answer. Hosts whose models are read from memory, as in
Transformers, have deviations of their own and call `identify`.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.identity.directory import identify, length_dependent_rope, written_config
from kvferry.identity.weights import Loads, newest_change, weights_digest
from kvferry.keys import JsonValue, ModelIdentity, relevant_config

logger = logging.getLogger(__name__)

FROM_FILES = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Load formats that read the same tensors from a model directory."""

_FROM_OTHER_FILES = ("pt", "npcache", "mistral", "gguf", "bitsandbytes", "sharded_state")
"""Load formats that read other files of a model directory, which may hold other weights. With a
format in neither list, the weights may not be those of the files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where the files of a model are.

    Attributes:
        name: the path or the name of the model, as the host was given it.
        weights: path of the weights, where they are not at `name`; else empty.
        revision: commit, branch or tag of a hub; None: the default one.
        cache_dir: directory of the hub's snapshots; None: the user's own.
        is_on_hugging_face: whether a name is one of Hugging Face. A snapshot of that name may hold
            other weights than the model on another hub.
        load_format: how the host reads weights, by vLLM's name of it, in lower case.
        loads: which of the weight files the host reads.
    """

    name: str
    weights: str
    revision: str | None
    cache_dir: str | None
    is_on_hugging_face: bool
    load_format: str
    loads: Loads

    @property
    def path(self) -> Path:
        return Path(self.name)

    def find(self) -> Path | None:
        """Return the path of the weights: a directory, a single file, or Hugging Face's snapshot on
        this disk; None if they are not on this disk."""
        path = Path(self.weights or self.name)
        if path.exists():
            return path
        if not self.is_on_hugging_face:
            return None
        try:
            from huggingface_hub import snapshot_download
            from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
        except ImportError:
            return None
        try:
            found = snapshot_download(
                self.name,
                revision=self.revision,
                # A cache of the operator's own may hold another commit than the user's.
                cache_dir=self.cache_dir,
                local_files_only=True,
            )
        except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
            return None
        return Path(found)

    def has_config(self) -> bool:
        """Whether a `config.json` lies beside the weights."""
        source = self.find()
        return source is not None and (source / "config.json").is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningModel:
    """A model as a host runs it: all that decides its KV and is not in its files.

    Attributes:
        files: where the model is.
        read_since: the host may have read files from this time on (seconds since the epoch), so
            that those which changed later may not be what it runs. `math.inf`: it reads them later.
        dtype: dtype of the computation, such as "bfloat16".
        running: the model's configuration as it runs; empty if the host runs what is written.
        written: the configuration as the host reads it from the files; None if it cannot be read
            again, and then all of `running` counts.
        classes: the classes that compute the model, each with the digest of its file, if the host's
            own do not.
        max_length: tokens of the longest sequence, which counts where rotary angles depend on it.
        runs_code: whether the host runs Python code that comes with a model.
        code_map: `auto_map` of the running configuration: the classes of that code.
        code_revision: commit of the code on a hub; None: as the weights.
        config_path: path of a configuration that the operator put in place of the model's, if any.
        quantization: name of the method that quantises weights, if any.
        quantization_options: what the operator set for it.
        is_quantized_in_files: whether the running configuration says how the files are quantised.
        quantization_file: file that the operator named to say how to quantise, if any.
        heeds_model_opt: whether the host quantises by what ModelOpt writes beside `config.json`.
        loader_options: options of the load format.
        kv_dtype: dtype of KV, or "auto" for the model's.
        kv_layers_left_out: layers that keep KV in the model's dtype all the same.
        scales_by_requests: whether the scales of KV are taken from the first requests.
        latents_of: what keeps the latents of this model for hosts of its kind alone, if anything.
        lora: settings that decide how adapters are read, by name.
        queries: settings that decide whether queries are quantised, by name.
        kernels: kernels that the operator chose, by name; they count for quantised weights.
        platform_options: what the operator told a third-party platform.
        variables: environment variables that decide numbers, with their values.
    """

    files: ModelFiles
    read_since: float
    dtype: str
    running: Mapping[str, Any]
    written: Mapping[str, Any] | None
    classes: Sequence[str]
    max_length: int
    runs_code: bool
    code_map: object
    code_revision: str | None
    config_path: str | None
    quantization: str | None
    quantization_options: object
    is_quantized_in_files: bool
    quantization_file: Path | None
    heeds_model_opt: bool
    loader_options: object
    kv_dtype: str
    kv_layers_left_out: Sequence[str]
    scales_by_requests: bool
    latents_of: str | None
    lora: Mapping[str, object]
    queries: Mapping[str, object]
    kernels: Mapping[str, object]
    platform_options: object
    variables: Mapping[str, str]


def read_written(read: Callable[[], Any]) -> Mapping[str, Any] | None:
    """Return the configuration that a host's own reader reads from a model's files, for `written`;
    None if it fails, which is logged."""
    try:
        config: Mapping[str, Any] = read().to_dict()
    except (OSError, ValueError, TypeError) as error:
        # There is nothing to compare with, so all of it counts.
        logger.warning("cannot reread the model's config (%s): identity covers all of it", error)
        return None
    return config


def model_identity(
    model: RunningModel,
    weights_version: str | None,
    hashed: Callable[[Callable[[], bytes]], bytes] = lambda read: read(),
) -> ModelIdentity:
    """Return the identity of a running model.

    Args:
        weights_version: the operator's name for the weights, used where they cannot be hashed.
        hashed: gets a function that hashes the weights, after all else, and returns their digest.

    Raises:
        ConfigError: KV that cannot be identified, or weights that cannot be read and have no
            `weights_version`.
    """
    files = model.files
    source = files.find()
    weights = _weights_elsewhere(files, source, weights_version)
    if source is not None and files.has_config():
        config = written_config(source)
    else:  # another format: as the host reads it
        config = _plain(model.running)
    code = _custom_code(model, source, config.get("auto_map"), weights_version)
    if code is not None:
        config["code"] = code
    is_own = weights is None and weights_version is None and source == files.path
    before = newest_change(files.path) if is_own else math.inf

    def read() -> bytes:
        digest = weights_digest(
            source or files.path, weights_version=weights_version, loads=files.loads
        )
        if is_own:
            _refuse_recent(model, "weights", newest_change(files.path), before)
        return digest

    return identify(
        source or files.path,
        dtype=model.dtype,
        deviations=_deviations(model) | _quantization_of_files(model, source),
        weights_version=weights_version,
        name=files.name,
        weights=weights or hashed(read),
        config=config,
    )


# --- weights --------------------------------------------------------------------------------------


def _weights_elsewhere(
    files: ModelFiles, source: Path | None, weights_version: str | None
) -> bytes | None:
    """Return what stands for weights that are not those of files on this disk; None if they are."""
    is_known = files.load_format in FROM_FILES + _FROM_OTHER_FILES
    if files.load_format == "dummy" or (not is_known and weights_version is None):
        logger.warning(
            "load_format=%s: weights are not those of the files, so nothing is shared with other "
            "processes",
            files.load_format,
        )
        return secrets.token_bytes(32)
    if source is None or not is_known:
        if weights_version is None:
            raise ConfigError(
                f"the weights of {files.name!r} are not on this machine's disk and so have no "
                'digest; set "weights_version" to a name that changes whenever they do'
            )
        return blake3(f"{files.name}\0{weights_version}".encode()).digest()
    return None


def _refuse_recent(
    model: RunningModel, what: str, changed: float, before: float = math.inf
) -> None:
    """Refuse files that changed since the host read them. Hub snapshots are content-addressed and
    are not checked. A host that reads them later may have started long ago: there, files are
    refused that changed after `before`, when they were looked at first."""
    if changed > min(model.read_since, before):
        raise ConfigError(
            f"the {what} in {model.files.name} changed after this process started, so it may load "
            "others than it hashed: start again when they are complete"
        )


# --- code -----------------------------------------------------------------------------------------


def _custom_code(
    model: RunningModel, source: Path | None, stored_map: object, weights_version: str | None
) -> str | None:
    """Return what identifies the model's own Python code; None if the host runs none of it.

    That is a digest of all Python files in the model's directory, or the class names of code
    elsewhere. A host runs such code only if it is told to, and only what an `auto_map` names. It
    may have a class of its own for the model; as this is unknown here, the code counts.

    Args:
        source: the model's directory, or its snapshot of a hub.
        stored_map: `auto_map` of the model's config.json.
        weights_version: stands, too, for code that is not in the directory.

    Raises:
        ConfigError: code that is not in the directory and has no version.
    """
    named = sorted({*_classes(stored_map), *_classes(model.code_map)})
    if not named or not model.runs_code:
        return None
    directory = _code_directory(model, source, named)
    files = sorted(directory.rglob("*.py")) if directory is not None else []
    if directory is None or not files:
        if weights_version is None:
            raise ConfigError(
                f"trust_remote_code runs code that is not in the model's directory ({named[0]}); "
                'copy it there, or set "weights_version" to a name that changes whenever it does'
            )
        return ", ".join(named)
    if weights_version is None and directory == model.files.path:
        _refuse_recent(model, "code", max(file.stat().st_ctime for file in files))
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


def _code_directory(model: RunningModel, source: Path | None, named: Sequence[str]) -> Path | None:
    """The model's own directory if all its code is from there, else None."""
    files = model.files
    repositories = {name.partition("--")[0] for name in named if "--" in name}
    if (
        repositories - {files.name}
        or model.config_path not in (None, files.name)
        or model.code_revision not in (None, files.revision)
    ):
        return None
    if files.path.is_dir():
        return files.path
    # Weights in a directory of their own may be of another commit than the code.
    return source if source is not None and source.is_dir() and not files.cache_dir else None


# --- deviations -----------------------------------------------------------------------------------


def _deviations(model: RunningModel) -> dict[str, JsonValue]:
    """The part of the configuration that decides KV bytes and is not in the model's files."""
    found: dict[str, JsonValue] = {}
    changed = _changed_fields(model)
    if changed:
        found["overrides"] = changed
    if model.classes:
        found["model_class"] = list(model.classes)
    load_format, options = model.files.load_format, model.loader_options
    if load_format not in FROM_FILES:
        found["load_format"] = f"{load_format} {options!r}" if options else load_format
    # The options may also quantise layers that a quantised checkpoint left as they were.
    is_in_files = model.quantization is None or model.is_quantized_in_files
    if model.quantization_options or not is_in_files:
        found["online_quantization"] = {
            "method": str(model.quantization),
            "options": repr(model.quantization_options),
        }
    found |= _settings(model)
    if model.kv_dtype not in ("auto", model.dtype):
        found["kv_cache_dtype"] = model.kv_dtype
        if model.kv_layers_left_out:
            found["kv_cache_dtype_skip_layers"] = list(model.kv_layers_left_out)
        if model.scales_by_requests:
            raise ConfigError(
                "calculate_kv_scales=True takes the scales of the KV cache from the first "
                "requests, so equal prompts have other KV in every process; use a checkpoint with "
                "scales"
            )
    if model.latents_of is not None:
        found["latents_of"] = model.latents_of
    if length_dependent_rope(model.running):
        found["max_model_len"] = model.max_length
    return found


def _settings(model: RunningModel) -> dict[str, JsonValue]:
    """The options and variables that the operator set and that make other KV of equal files."""
    found = {f"lora_{name}": value for name, value in model.lora.items()}
    found |= {f"attention_{name}": value for name, value in model.queries.items()}
    if model.quantization is not None:
        found |= {name: value for name, value in model.kernels.items() if value != "auto"}
    found["additional_config"] = model.platform_options
    if model.quantization_file is not None:
        digest = blake3(model.quantization_file.read_bytes()).hexdigest()
        found["quantization_config_file"] = digest
    return {**model.variables, **{name: repr(value) for name, value in found.items() if value}}


def _quantization_of_files(model: RunningModel, source: Path | None) -> dict[str, JsonValue]:
    """What ModelOpt writes beside `config.json`. Where a host quantises by it, others do not, so it
    counts as a deviation. Raises ConfigError if it cannot be read."""
    path = None if source is None else source / "hf_quant_config.json"
    if not model.heeds_model_opt or path is None or not path.is_file():
        return {}
    try:
        return {"hf_quant_config": json.loads(path.read_bytes())}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the quantisation in {path}: {error}") from error


def _changed_fields(model: RunningModel) -> dict[str, JsonValue]:
    """The fields in which the running config differs from the written one."""
    runs = _plain(model.running)
    if model.written is None:
        return runs
    written = _plain(model.written)
    return {
        name: runs.get(name)
        for name in sorted(runs.keys() | written.keys())
        if name not in ("dtype", "torch_dtype") and runs.get(name) != written.get(name)
    }


def _plain(config: Mapping[str, Any]) -> dict[str, JsonValue]:
    """`config` without irrelevant fields, as plain JSON values."""
    return dict(relevant_config(json.loads(json.dumps(config, default=str))))
