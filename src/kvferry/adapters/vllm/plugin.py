"""The class that vLLM constructs, for the vLLM that is installed. Importing this imports vLLM."""

from __future__ import annotations

from kvferry.adapters.vllm.connector import make_connector_class
from kvferry.adapters.vllm.host import load_host
from kvferry.adapters.vllm.metrics import make_prom_class, make_stats_class

HOST = load_host()

# At module level under their own names: objects of these classes cross processes.
FerryStats = make_stats_class(HOST.stats)
FerryPromMetrics = make_prom_class(HOST.prom_metrics)
KVFerryConnector = make_connector_class(HOST, FerryStats, FerryPromMetrics)

for _made in (FerryStats, FerryPromMetrics, KVFerryConnector):
    _made.__module__ = __name__
    _made.__qualname__ = _made.__name__
