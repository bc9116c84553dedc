"""kvferry as a KV connector of vLLM.

    --kv-transfer-config '{"kv_connector": "KVFerryConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": "file:///var/cache/kvferry?max_bytes=200GiB"}}'

The name is known to vLLM through the entry point `register`; without entry points, add
`"kv_connector_module_path": "kvferry.adapters.vllm"`. `docs/vllm.md` has the options.

host.py       the types and functions of the installed vLLM; most differences between versions
host_frames.py  what vLLM does not hand to its tiers, among the variables of their callers
plugin.py     the class that vLLM constructs, on vLLM's own base class
connector.py  what that class does, with the base class of any host; options, log at start
kv_specs.py   the specs by which vLLM describes KV, and what each of their fields decides
layers.py     what each layer keeps, and the models that are refused
stages.py     the layers of all pipeline stages, which their ranks tell each other
spec.py       the layers as an `EngineSpec`, vLLM's tensors in a layout of ours
request_identity.py  the identity of LoRA adapters and of multimodal items
metrics.py    counters for vLLM's log and Prometheus
events.py     stored and removed chunks, as vLLM's KV events
tier.py       a tier of vLLM's own offloading: the class, its options
tier_rows.py  the tier's work: look-ups, and jobs, each reported once, over `row_cache.py`
tier_identity.py  what vLLM's block hashes leave out of a row's identity
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.adapters.vllm.plugin import KVFerryConnector

__all__ = ["KVFerryConnector", "register"]

CONNECTOR = "KVFerryConnector"


def register() -> None:
    """Make the name `KVFerryConnector` known to vLLM. An entry point of `vllm.general_plugins`,
    which every process of vLLM calls, some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)


def __getattr__(name: str) -> object:
    if name == CONNECTOR:
        from kvferry.adapters.vllm.plugin import KVFerryConnector

        return KVFerryConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
