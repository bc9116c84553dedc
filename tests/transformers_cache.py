"""Passes a KV cache to a Transformers model by the argument name of the installed release."""

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
    """Return the keyword argument that gives a cache to a forward or to `generate`."""
    return {_NAME: cache}


def cache_of(output: Any) -> Any:
    """Return the cache in an output of a model or of `generate`."""
    return output[_NAME]
