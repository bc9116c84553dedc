"""Reads in `kvferry/dashboards` what panels and alerts ask of Prometheus, and checks scrapes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

import kvferry

DASHBOARDS = Path(kvferry.__file__).parent / "dashboards"
ALERTS = DASHBOARDS / "alerts.yml"

OF_SCRAPES = {"instance", "model_name"}
"""Labels that Prometheus or vLLM adds; no process of ours shows them."""

_SELECTOR = re.compile(r'\{__name__=~"\(vllm:\)\?(kvferry_\w+)"((?:, \w+=~?"[^"]*")*)\}')
_BY = re.compile(r"by \(([^)]*)\)\s+\((?:\w+\()?\{__name__=~\"\(vllm:\)\?(kvferry_\w+)\"")


def dashboard() -> dict[str, Any]:
    return json.loads((DASHBOARDS / "kvferry.json").read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    of_panels = [each["expr"] for panel in dashboard()["panels"] for each in panel["targets"]]
    return [*of_panels, *(rule["expr"] for rule in rules())]


def selectors(expression: str) -> list[tuple[str, set[str]]]:
    """Return the metrics of an expression, each with the labels by which it is selected."""
    found = _SELECTOR.findall(expression)
    assert len(found) == expression.count("__name__"), expression
    return [(name, set(re.findall(r"(\w+)=", labels))) for name, labels in found]


def asked() -> dict[str, set[str]]:
    """Return the labels by which panels and rules select or sum each metric."""
    found: dict[str, set[str]] = {}
    for expression in expressions():
        for name, labels in selectors(expression):
            found.setdefault(name, set()).update(labels - OF_SCRAPES)
        for labels, name in _BY.findall(expression):
            found[name] |= set(labels.split(", ")) - OF_SCRAPES
    return found


def missing(scrape: str) -> list[str]:
    """Return the asked metrics that a scrape lacks, and those whose samples lack asked labels."""
    families = {}
    for family in text_string_to_metric_families(scrape):
        name = family.name.removeprefix("vllm:")
        suffixes = {"counter": ["_total"], "histogram": ["_bucket"]}.get(family.type, [""])
        families |= {f"{name}{suffix}": family.samples for suffix in suffixes}
    faults = [name for name in asked() if name not in families]
    for name, labels in asked().items():
        for sample in families.get(name, []):
            if sample.name.removeprefix("vllm:") == name and not labels <= sample.labels.keys():
                faults.append(f"{sample.name} by {labels}")
    return faults
