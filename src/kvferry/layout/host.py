"""What a host like vLLM says of itself: its KV layout, and the blocks of its steps.

vLLM reads a process-wide configuration and a registry; these functions take arguments instead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from kvferry.errors import ConfigError, ContractError, LayoutError
from kvferry.layout.spec import ALIASES, MEMORY_ORDERS

DEFAULT_CACHE_LAYOUT = "NHD"

CACHE_LAYOUTS = (*ALIASES, *MEMORY_ORDERS)
"""Layouts that hosts know: two names, and since vLLM 0.32 the orders in memory."""


def get_kv_connector_cache_layout(
    vllm_config: Any = None,  # noqa: ANN401 - the host's
    connector_class: Any | None = None,  # noqa: ANN401 - the same
) -> str:
    """The KV layout that the connector wants; "NHD" without a connector or a wish.

    Args:
        vllm_config: the host's configuration; its `kv_transfer_config` names the connector.
        connector_class: that class, where the configuration gives no module to import it from; has
            a class method `get_required_kvcache_layout(vllm_config)`.

    Raises:
        ConfigError: a connector is named, and its class can be found nowhere.
        LayoutError: the connector wants a layout that no host knows.
    """
    if vllm_config is None or vllm_config.kv_transfer_config is None:
        return DEFAULT_CACHE_LAYOUT
    found = connector_class or _named_class(vllm_config.kv_transfer_config)
    layout: str | None = found.get_required_kvcache_layout(vllm_config)
    if layout is None:
        return DEFAULT_CACHE_LAYOUT
    if layout not in CACHE_LAYOUTS:
        raise LayoutError(
            f"the connector wants KV layout {layout!r}; known: {', '.join(CACHE_LAYOUTS)}"
        )
    return layout


def _named_class(kv_transfer_config: Any) -> Any:  # noqa: ANN401 - the host's
    name = kv_transfer_config.kv_connector
    path = getattr(kv_transfer_config, "kv_connector_module_path", None)
    if not path:
        raise ConfigError(
            f"connector {name!r} is named without kv_connector_module_path: set it, or pass "
            "connector_class"
        )
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"connector {name!r} is not in {path!r}: {error}") from error


def get_current_attn_backend(
    vllm_config: Any,  # noqa: ANN401 - the host's
) -> type[Any]:
    """The attention backend's class: that of the first attention layer.

    Args:
        vllm_config: the host's configuration; `compilation_config.static_forward_context` has every
            layer of the model by name.

    Raises:
        LayoutError: there is no attention layer.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        if hasattr(layer, "get_attn_backend"):
            backend: type[Any] = layer.get_attn_backend()
            return backend
    raise LayoutError(
        f"none of the {len(layers)} layers in static_forward_context has an attention backend: "
        "ask after the model was built"
    )


def yield_req_data(
    scheduler_output: Any,  # noqa: ANN401 - the host's, of any version
) -> Iterator[tuple[str, tuple[list[int], ...] | None, bool]]:
    """The requests of a step with the blocks they got.

    Args:
        scheduler_output: a `kvferry.v1.SchedulerOutput`, or that of any host.

    Yields:
        Request id; new block ids per KV group, None if no block was added; whether the request was
        preempted and now resumes: its new blocks then replace those it had.

    Raises:
        ContractError: parallel lists of the step differ in length.
    """
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids, False
    cached = scheduler_output.scheduled_cached_reqs
    request_ids = cached.req_ids
    # A set since vLLM 0.12, a list of flags before.
    resumed_ids = getattr(cached, "resumed_req_ids", None)
    if resumed_ids is None:
        resumed = cached.resumed_from_preemption
    else:
        resumed = [request_id in resumed_ids for request_id in request_ids]
    if not len(request_ids) == len(cached.new_block_ids) == len(resumed):
        raise ContractError(
            f"a step names {len(request_ids)} continuing requests, {len(cached.new_block_ids)} "
            f"lists of new blocks and {len(resumed)} flags: they must be parallel"
        )
    yield from zip(request_ids, cached.new_block_ids, resumed, strict=True)
