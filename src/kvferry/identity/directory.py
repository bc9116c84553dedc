"""The identity of a running model: its directory's configuration and deviations from that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvferry.errors import ConfigError
from kvferry.identity.weights import Loads, weights_digest
from kvferry.keys import JsonValue, ModelIdentity, relevant_config

LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope", "su")
"""Rotary embeddings whose angles depend on the longest sequence of a forward pass, or on the
longest that an engine serves. "su" is an older name of "longrope"."""


def written_config(model_dir: Path) -> dict[str, JsonValue]:
    """Read `config.json` of `model_dir`, without the fields that cannot change KV bytes.

    The tokenizer is no part of the identity: token ids are hashed, not text.

    Raises:
        ConfigError: the config is unreadable or no JSON object, or different library versions would
            load different configs or weights.
    """
    if (model_dir / "adapter_config.json").exists():
        raise ConfigError(
            f"{model_dir} holds a PEFT adapter (adapter_config.json), which Transformers applies "
            "where PEFT is installed and other engines do not; merge it and save the model to a "
            "directory of its own, or keep the adapter in another directory than the model"
        )
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_bytes())
        if isinstance(config, dict):
            _refuse_other_files(config, path)
            return relevant_config(config)
    except OSError as error:
        raise ConfigError(f"cannot read the model config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the model config {path} is not JSON: {error}") from error
    raise ConfigError(f"the model config {path} is a {type(config).__name__}, not an object")


def _refuse_other_files(config: Mapping[str, JsonValue], path: Path) -> None:
    names = config.get("configuration_files")
    if isinstance(names, list | Mapping) and set(map(str, names)) - {path.name}:
        raise ConfigError(
            f"{path} names configuration_files, and each version of Transformers reads a different "
            f"one; copy the one to use over {path.name} and remove the field"
        )


def length_dependent_rope(config: object) -> str | None:
    """Find the type of a rotary embedding anywhere in `config` that is one of
    `LENGTH_DEPENDENT_ROPE`; None if there is none."""
    if not isinstance(config, Mapping):
        return None
    kind = config.get("rope_type", config.get("type"))
    if isinstance(kind, str) and kind in LENGTH_DEPENDENT_ROPE:
        return kind
    inner = map(length_dependent_rope, config.values())
    return next((found for found in inner if found is not None), None)


def identify(
    source: Path,
    *,
    dtype: str | None,
    deviations: Mapping[str, JsonValue],
    weights_version: str | None = None,
    name: str | None = None,
    weights: bytes | None = None,
    config: Mapping[str, JsonValue] | None = None,
    loads: Loads = Loads.ALL,
) -> ModelIdentity:
    """Make the identity of a running model. Engines that run the same directory without deviations
    get the same identity, whichever library read it.

    Args:
        source: directory of weights and config.json; not read for what is given below.
        dtype: dtype of the computation, such as "bfloat16"; replaces the config's `torch_dtype` and
            `dtype`. None: it is theirs.
        deviations: everything else that affects KV bytes but is not in the directory: overrides,
            quantisation at load time, foreign code. Each host has its own function for this.
        weights_version, name: see `ModelIdentity`.
        weights: what stands for `weights_digest` of `source`.
        config: what stands for `written_config` of `source`.
        loads: which of the weight files are read.

    Raises:
        ConfigError: as `written_config` and `weights_digest`.
    """
    written = dict(written_config(source) if config is None else config)
    dtype_of_files = written.pop("torch_dtype", None)
    dtype_of_files = written.get("dtype", dtype_of_files) or "float32"
    return ModelIdentity(
        weights=weights or weights_digest(source, weights_version=weights_version, loads=loads),
        config={**written, "dtype": dtype or str(dtype_of_files), **deviations},
        weights_version=weights_version,
        name=name,
    )
