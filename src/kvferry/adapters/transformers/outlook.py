"""What `StoredKV` would serve of a model, by its config.json: before its weights are loaded.

Nothing here reads weights: the model is made without values (on torch's meta device), and a few
tokens show the shapes of its cache. What only values show is found when a `StoredKV` is made: a
cache that is wrong in pieces, tokens that are numbered otherwise than `generate` does (then records
are its own), changed weights, replaced code.
"""

# ruff: noqa: ANN401 - the models and configs of Transformers share no typed surface.

from __future__ import annotations

import copy
import inspect
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.host_model import argument_of_cache, refuse_config
from kvferry.adapters.transformers.plain_kv import UNRUNNABLE, plain_layers, refuse_other_form
from kvferry.adapters.transformers.quantisation import quantisation_of, refuse_unknown_method
from kvferry.engine.model import LOADING, quiet_transformers
from kvferry.engine.model_config import first_line, read_config
from kvferry.errors import ConfigError


class Served(StrEnum):
    """What `StoredKV` would do with a model."""

    SHARED = "served, in records that engines and vLLM share"
    OWN = "served, in records of its own"
    PROVEN_FIRST = "served in records of its own if its cache passes a proof at the first start"
    REFUSED = "refused"


class Outlook(NamedTuple):
    """What `StoredKV` would do with a model, and why no more; `why` may be empty."""

    served: Served
    why: str

    def __str__(self) -> str:
        return f"{self.served}: {self.why}" if self.why else str(self.served)


def outlook(directory: Path) -> Outlook:
    """Say what `StoredKV` would serve of the model in `directory`.

    Raises:
        ConfigError: Transformers is not installed, or this is no model directory.
    """
    try:
        config = read_config(directory)
        refuse_config(config, directory)
        asked = quantisation_of(config)
        if asked or (directory / "hf_quant_config.json").exists():
            refuse_unknown_method(asked, directory)
        model = _without_values(config, directory)
        argument_of_cache(model, inspect.signature(model.forward).parameters)
    except ConfigError as error:
        if not (directory / "config.json").is_file():
            raise
        return Outlook(Served.REFUSED, str(error))
    try:
        _, layers = plain_layers(config, directory, "float32")
        refuse_other_form(model, layers, str(directory))
    except ConfigError as error:
        return Outlook(Served.PROVEN_FIRST, f"engines do not share them, since {error}")
    if asked:
        return Outlook(Served.OWN, "its weights were published quantised")
    return Outlook(Served.SHARED, "")


def _without_values(config: Any, directory: Path) -> Any:
    """Make the model of a config without values.

    Raises:
        ConfigError: Transformers has no class for it that generates, or cannot make it.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    named = (getattr(transformers, name, None) for name in config.architectures or ())
    mappings: Any = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    if config.get_text_config() is not config:  # the causal LM of some is their text part alone
        mappings.reverse()
    known = [each.get(type(config), None) for each in mappings]
    wanted = next((each for each in named if each in known), None)
    kind = wanted or next((each for each in known if each is not None), None)
    if kind is None:
        raise ConfigError(
            f"{directory} holds a {config.model_type!r} model; Transformers "
            f"{transformers.__version__} has no class for it that generates text"
        )
    try:
        with LOADING, quiet_transformers(), torch.device("meta"):
            made = kind._from_config(copy.deepcopy(config), dtype=torch.float32)
    except (*UNRUNNABLE, ImportError) as error:
        raise ConfigError(
            f"Transformers cannot make its {kind.__name__}: {first_line(error)}"
        ) from error
    return made.eval()
