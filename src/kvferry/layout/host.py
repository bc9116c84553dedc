"""What a host of vLLM's shape says about its KV layout, read off its configuration.

Where vLLM reads a process-wide current configuration and a registry, these take what they need.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from kvferry.errors import ConfigError, LayoutError

DEFAULT_CACHE_LAYOUT = "NHD"

CACHE_LAYOUTS = ("NHD", "HND", "LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""Layouts that hosts know: two names, and since vLLM 0.32 the orders of the axes layer, block, kv
head, token, content. NHD is LBNHC and HND is LBHNC."""


class ConnectorClass(Protocol):
    """The class of a connector; hosts ask it without an instance."""

    def get_required_kvcache_layout(self, vllm_config: Any) -> str | None: ...  # noqa: ANN401


@runtime_checkable
class AttentionLayer(Protocol):
    """A layer that has KV."""

    def get_attn_backend(self) -> type[Any]: ...


class CompilationConfig(Protocol):
    @property
    def static_forward_context(self) -> Mapping[str, Any]:
        """Every layer of the model by name, those without KV too."""


class HostConfig(Protocol):
    """The part of a host's configuration that is read here."""

    @property
    def compilation_config(self) -> CompilationConfig: ...


def get_kv_connector_cache_layout(
    vllm_config: Any = None,  # noqa: ANN401 - the host's
    connector_class: ConnectorClass | None = None,
) -> str:
    """The KV layout that the connector wants; "NHD" without a connector or a wish.

    Args:
        vllm_config: the host's configuration; its `kv_transfer_config` names the connector.
        connector_class: that class, where the configuration gives no module to import it from.

    Raises:
        ConfigError: a connector is named, and its class can be found nowhere.
        LayoutError: the connector wants a layout that no host knows.
    """
    if vllm_config is None or vllm_config.kv_transfer_config is None:
        return DEFAULT_CACHE_LAYOUT
    found = connector_class or _named_class(vllm_config.kv_transfer_config)
    layout = found.get_required_kvcache_layout(vllm_config)
    if layout is None:
        return DEFAULT_CACHE_LAYOUT
    if layout not in CACHE_LAYOUTS:
        raise LayoutError(
            f"the connector wants KV layout {layout!r}; known: {', '.join(CACHE_LAYOUTS)}"
        )
    return layout


def _named_class(kv_transfer_config: Any) -> ConnectorClass:  # noqa: ANN401 - the host's
    name = kv_transfer_config.kv_connector
    path = getattr(kv_transfer_config, "kv_connector_module_path", None)
    if not path:
        raise ConfigError(
            f"connector {name!r} is named without kv_connector_module_path: set it, or pass "
            "connector_class"
        )
    try:
        found: ConnectorClass = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"connector {name!r} is not in {path!r}: {error}") from error
    return found


def get_current_attn_backend(vllm_config: HostConfig) -> type[Any]:
    """The attention backend's class: that of the first attention layer.

    Raises:
        LayoutError: there is no attention layer.
    """
    layers = vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        if isinstance(layer, AttentionLayer):
            return layer.get_attn_backend()
    raise LayoutError(
        f"none of the {len(layers)} layers in static_forward_context has an attention backend: "
        "ask after the model was built"
    )
