"""Who holds which layers, kv heads and tokens; who reads what from whom. Pure arithmetic.

`TpKVTopology` has vLLM's names and its 0.14 conventions, for connectors written against it.
`KVPlacement` and `read_plan` answer the same questions with pipeline and context parallelism, and
never read a replicated head twice.
"""

from kvferry.topology.placement import KVPlacement, RankId
from kvferry.topology.reads import RemoteRead, TokenRuns, read_plan, readers
from kvferry.topology.shards import tensor_parallel_shard
from kvferry.topology.tp_kv import AttentionBackend, TpKVTopology

__all__ = [
    "AttentionBackend",
    "KVPlacement",
    "RankId",
    "RemoteRead",
    "TokenRuns",
    "TpKVTopology",
    "read_plan",
    "readers",
    "tensor_parallel_shard",
]
