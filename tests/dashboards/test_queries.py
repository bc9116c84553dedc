"""Every metric of the dashboard and of the alert rules is in a scrape of the embedded engine's
exporter (of vLLM: tests/real_vllm/test_serve.py), and each rule fires for what it names."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest

from kvferry.engine import LLM
from kvferry.exporters import KVFerryCollector
from kvferry.observe import Counters
from kvferry.store.tiers.health import State
from kvferry.testing.models import make_tiny_model
from tests.dashboards.queries import (
    ALERTS,
    OF_SCRAPES,
    asked,
    dashboard,
    expressions,
    missing,
    rules,
    selectors,
)
from tests.debian import environment, unpacked


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
    assert (
        'kvferry_tier_since_seconds{because="",kind="",role="scheduler",state="up",tier="file"}'
        in shown
    )
    assert 'kvferry_store_max_bytes{tier="file"} 6.7108864e+07' in shown
    assert "kvferry_lookup_seconds_count 2.0" in shown


def test_all_expressions_are_understood_and_a_metric_that_is_gone_is_found():
    assert all("__name__" in each for each in expressions())
    assert len(asked()) >= 20
    shown = scrape(Counters())
    gone = shown.replace("kvferry_promise_seconds", "kvferry_other")
    assert missing(gone) == ["kvferry_promise_seconds_bucket"]
    assert missing(shown.replace("tier=", "level=")) == ["kvferry_hit_tokens_total by {'tier'}"]


def test_every_panel_says_what_it_shows_and_obeys_the_variables():
    variables = {each["name"]: each for each in dashboard()["templating"]["list"]}
    assert list(variables) == ["datasource", "instance", "model"]
    for name in ("instance", "model"):
        assert variables[name]["allValue"] == ".*"  # also what lacks the label
        assert dict(selectors(variables[name]["query"]["query"])).keys() <= asked().keys()
    filters = ', instance=~"$instance", model_name=~"$model"}'
    for panel in dashboard()["panels"]:
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            assert target["expr"].count(filters) == target["expr"].count("__name__")


def test_every_rule_says_what_is_wrong_where_and_what_to_do():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names) > 5
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        shown = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        (kept,) = {*re.findall(r"by \(([^)]*)\)", rule["expr"])}
        assert "instance" in shown <= set(kept.split(", "))
        assert set(re.findall(r'state="([^"]*)"', rule["expr"])) <= set(State)
        assert not rule["expr"].count("$")  # the variables are the dashboard's


def series_of(expression: str, **changes: str) -> str:
    """A series that a rule selects, of vLLM or of the embedded engine."""
    ((name, _),) = selectors(expression)
    labels = dict.fromkeys(["tier", "role", "because"], "x") if "tier" in name else {}
    labels |= dict(re.findall(r'(state)="([^"]*)"', expression)) | {"instance": "a"} | changes
    texts = ",".join(f'{label}="{value}"' for label, value in labels.items())
    prefix = "vllm:" if OF_SCRAPES & changes.keys() else ""
    return f"{prefix}{name}{{{texts}}}"


HITS, ASKED = "kvferry_hit_tokens_total", "kvferry_lookup_tokens_total"
STORED, EVICTED = "kvferry_saved_bytes_total", "kvferry_store_evicted_bytes_total"

RATIOS = {
    "KVFerryNothingHits": [
        ("bad", {HITS: "0+10x600 6000x400", ASKED: "0+20x1000"}),
        ("still hits", {HITS: "0+10x1000", ASKED: "0+20x1000"}),
        ("never hit", {HITS: "0x1000", ASKED: "0+20x1000"}),
        ("is idle", {HITS: "0+10x600 6000x400", ASKED: "0+20x600 12000x400"}),
    ],
    "KVFerryStoreThrashes": [
        ("bad", {EVICTED: "0+9x1000", STORED: "0+10x1000", HITS: "0+1x1000", ASKED: "0+20x1000"}),
        ("hits", {EVICTED: "0+9x1000", STORED: "0+10x1000", HITS: "0+9x1000", ASKED: "0+20x1000"}),
        ("fills", {EVICTED: "0+2x1000", STORED: "0+10x1000", HITS: "0+1x1000", ASKED: "0+20x1000"}),
    ],
}
"""Of rules that compare metrics: what each counted by the minute, by instance. The first fires."""


def assert_rules(tmp_path, cases):
    """Let Prometheus' own tool run the rules over the series of each case."""
    given = {"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(given))
    root = unpacked("prometheus")
    done = subprocess.run(
        [root / "usr/bin/promtool", "test", "rules", tmp_path / "cases.yml"],
        env=environment(root), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "vllm:"])
def test_rules_that_compare_metrics_fire_for_what_they_name_alone(tmp_path, prefix):
    cases = []
    for alert, instances in RATIOS.items():
        series = [
            {"series": f'{prefix}{name}{{instance="{instance}"}}', "values": values}
            for instance, counted in instances
            for name, values in counted.items()
        ]
        fired = (
            f'count by (alertname, instance) (ALERTS{{alertstate="firing",alertname="{alert}"}})'
        )
        labels = f'{{alertname="{alert}", instance="{instances[0][0]}"}}'
        expected = [{"labels": labels, "value": 1}]
        test = {"expr": fired, "eval_time": "15h", "exp_samples": expected}
        cases.append({"interval": "1m", "input_series": series, "promql_expr_test": [test]})
    assert_rules(tmp_path, cases)


@pytest.mark.slow
def test_each_rule_fires_for_what_it_names_alone(tmp_path):
    """Counted by Prometheus' own tool: fired for one engine of two, after the time of the rule."""
    cases = []
    for rule in rules():
        if rule["alert"] in RATIOS:
            continue
        is_state = "since_seconds" in rule["expr"]
        bad, good = ("60x60", "0x60") if is_state else ("0+1x60", "7x60")
        if not is_state and "for" not in rule:
            bad = "0x34 1x20"  # a single event is enough
        for more in ({}, {"model_name": "m"}):
            series = [
                {"series": series_of(rule["expr"], **more), "values": bad},
                {"series": series_of(rule["expr"], **more, instance="b"), "values": good},
            ]
            if is_state:
                up = series_of(rule["expr"], **more, instance="c", state="up")
                series.append({"series": up, "values": bad})
            fired = 'count by (alertname, instance) (ALERTS{alertstate="firing"})'
            labels = f'{{alertname="{rule["alert"]}", instance="a"}}'
            cases.append(
                {
                    "interval": "1m",
                    "input_series": series,
                    "promql_expr_test": [
                        {"expr": fired, "eval_time": "1m", "exp_samples": []}
                        if is_state or "for" in rule
                        else {"expr": fired, "eval_time": "0m", "exp_samples": []},
                        {
                            "expr": fired,
                            "eval_time": "45m",
                            "exp_samples": [{"labels": labels, "value": 1}],
                        },
                    ],
                }
            )
    assert_rules(tmp_path, cases)
