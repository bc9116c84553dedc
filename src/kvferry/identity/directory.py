"""The configuration of a model directory, and what it means for KV that is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, relevant_config

LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope", "su")
"""Rotary embeddings whose angles depend on the longest sequence of a forward, or on the longest
that an engine serves; "su" is an older name of "longrope"."""


def written_config(model_dir: Path) -> dict[str, JsonValue]:
    """`config.json` of `model_dir` without the fields that cannot change KV bytes.

    The tokenizer is no part of it: token ids are hashed, not text.

    Raises:
        ConfigError: there is no readable config, it is not a JSON object, or which config and
            weights are loaded depends on the versions of the libraries that load them.
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
            f"{path} names configuration_files, of which each version of Transformers reads "
            f"another; copy the one to use over {path.name} and remove the field"
        )


def length_dependent_rope(config: object) -> str | None:
    """The type of a rotary embedding anywhere in `config` whose angles depend on a length, as one
    of `LENGTH_DEPENDENT_ROPE`; None if there is none."""
    if not isinstance(config, Mapping):
        return None
    kind = config.get("rope_type", config.get("type"))
    if isinstance(kind, str) and kind in LENGTH_DEPENDENT_ROPE:
        return kind
    inner = map(length_dependent_rope, config.values())
    return next((found for found in inner if found is not None), None)
