"""The cache of a model, by the name that the installed Transformers gives it."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import LlamaForCausalLM

_NAME = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def with_cache(cache: Any) -> dict[str, Any]:
    """The argument of a forward, and of `generate`."""
    return {_NAME: cache}


def cache_of(output: Any) -> Any:
    """The cache in an output of a model, or of `generate`."""
    return output[_NAME]
