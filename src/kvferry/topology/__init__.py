"""The ranks of engines: their layers and kv heads, and how two engines' ranks map. Pure arithmetic.

`TpKVTopology` has vLLM's names and its 0.14 conventions, for connectors written against it.
"""

from kvferry.topology.shards import tensor_parallel_shard
from kvferry.topology.tp_kv import AttentionBackend, TpKVTopology

__all__ = [
    "AttentionBackend",
    "TpKVTopology",
    "tensor_parallel_shard",
]
