"""kvferry as a KV connector of vLLM.

    --kv-transfer-config '{"kv_connector": "KVFerryConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "file:///var/cache/kvferry?max_bytes=200GiB"}}'

The name is known to vLLM through the entry point `register`; without entry points, add
`"kv_connector_module_path": "kvferry.adapters.vllm"`. `docs/vllm.md` has the options.

host.py      what this vLLM offers; the only file that knows versions
plugin.py    the class that vLLM constructs, on vLLM's own base class
connector.py how such a class is made for any host
spec.py      vLLM's configuration as an `EngineSpec`
identity.py  which model it really runs, LoRA adapters included
items.py     multimodal items, and how this vLLM reads them
caches.py    the layer tensors as the layouts we know
options.py   `kv_connector_extra_config`
metrics.py   counters for vLLM's log and Prometheus
startup.py   what is logged once
events.py    what was stored and removed, as vLLM's KV events
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.adapters.vllm.plugin import KVFerryConnector

__all__ = ["KVFerryConnector", "register"]

CONNECTOR = "KVFerryConnector"


def register() -> None:
    """Make `"kv_connector": "KVFerryConnector"` enough. Entry point of
    `vllm.general_plugins`, which every process of vLLM runs, some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)


def __getattr__(name: str) -> object:
    if name == CONNECTOR:
        from kvferry.adapters.vllm.plugin import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
