"""Every metric of the dashboard is in a scrape of the embedded engine's exporter. (Of vLLM:
tests/real_vllm/test_serve.py.)"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvferry.engine import LLM
from kvferry.exporters import KVFerryCollector
from kvferry.observe import Counters
from kvferry.testing.models import make_tiny_model
from tests.dashboards.queries import asked, expressions, missing


def scrape(counters):
    registry = CollectorRegistry()
    registry.register(KVFerryCollector(counters))
    return generate_latest(registry).decode()


def test_every_query_is_of_metrics_that_an_engine_shows(tmp_path):
    counters = Counters()
    model = make_tiny_model(tmp_path / "model", seed=1)
    options = {"chunk_tokens": 16}
    store = f"file://{tmp_path}/store?max_bytes=64MiB"
    with LLM(model, store=store, connector_options=options, observer=counters) as llm:
        for _ in range(2):
            llm.generate([list(range(3, 43))])
            llm.drain(30.0)
        shown = scrape(counters)
    assert missing(shown) == []
    assert 'kvferry_tier_since_seconds{because="",role="scheduler",state="up",tier="file"}' in shown
    assert 'kvferry_store_max_bytes{tier="file"} 6.7108864e+07' in shown
    assert "kvferry_lookup_seconds_count 2.0" in shown


def test_all_expressions_are_understood_and_a_metric_that_is_gone_is_found():
    assert all("__name__" in each for each in expressions())
    assert len(asked()) >= 20
    shown = scrape(Counters())
    gone = shown.replace("kvferry_promise_seconds", "kvferry_other")
    assert missing(gone) == ["kvferry_promise_seconds_bucket"]
    assert missing(shown.replace("tier=", "level=")) == ["kvferry_hit_tokens_total by {'tier'}"]
