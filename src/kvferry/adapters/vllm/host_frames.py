"""What vLLM does not hand to its tiers, found among the local variables of the callers.

A tier gets names and sizes. This is the only module that looks at callers' frames: a release that
renames these variables is found here, by `tests/real_vllm/test_host_frames.py`, and meanwhile its
tiers are refused, or keep nothing of the request in doubt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any


def added_request() -> Any:  # noqa: ANN401 - the host's
    """The request that is being added in this thread; None if it is not found among the callers'
    variables. vLLM tells its tiers a request's id alone."""
    for frame in _callers():
        request: Any = frame.f_locals.get("request")
        if hasattr(request, "lora_request"):
            return request
    return None


def constructing() -> tuple[Any, Any] | None:
    """Return the configuration of the engine whose connector is being constructed in this thread,
    and what became of its KV caches (a `KVCacheConfig`); None if none is.

    vLLM hands a tier names and sizes, but neither the running model's configuration, nor where its
    weights are, nor its KV specs. So this looks for the connector among the callers.
    """
    for frame in _callers():
        names = frame.f_locals
        is_connector = any(
            base.__name__ == "KVConnectorBase_V1" for base in type(names.get("self")).__mro__
        )
        if is_connector and frame.f_code.co_name == "__init__" and names.get("kv_cache_config"):
            return names["vllm_config"], names["kv_cache_config"]
    return None


def _callers() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
