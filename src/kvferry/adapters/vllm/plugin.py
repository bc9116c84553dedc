"""The class that vLLM constructs, for the vLLM that is installed. Importing this imports vLLM."""

from __future__ import annotations

from kvferry.adapters.vllm.connector import FerryConnector
from kvferry.adapters.vllm.host import load_host
from kvferry.adapters.vllm.metrics import PromMetrics, Stats
from kvferry.contract.messages import WorkerMeta
from kvferry.v1.types import PlanMetadata

HOST = load_host()

# Hosts check that messages are of their own types.
HOST.metadata.register(PlanMetadata)
if HOST.worker_meta is not None:
    HOST.worker_meta.register(WorkerMeta)


class FerryStats(Stats, HOST.stats):  # type: ignore[misc, name-defined]
    """Counters on their way to vLLM's log."""


class FerryPromMetrics(PromMetrics, HOST.prom_metrics):  # type: ignore[misc, name-defined]
    """Counters on their way to Prometheus."""


class KVFerryConnector(FerryConnector, HOST.base, HOST.hma):  # type: ignore[misc, name-defined]
    """See `FerryConnector`."""

    host, stats_class, prom_class = HOST, FerryStats, FerryPromMetrics
