"""Reads from dashboards/kvferry.json what its panels ask Prometheus for, and checks scrapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DASHBOARD = Path(__file__).parents[2] / "dashboards" / "kvferry.json"

_SELECTOR = re.compile(r'\{__name__=~"\(vllm:\)\?(kvferry_\w+)"(?:, (\w+)=~"[^"]*")?\}')
_BY = re.compile(r"by \(([^)]*)\) \((?:rate\()?\{__name__=~\"\(vllm:\)\?(kvferry_\w+)\"")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def asked() -> dict[str, set[str]]:
    """Return the labels by which the panels select or sum each metric."""
    found: dict[str, set[str]] = {}
    for expression in expressions():
        for name, label in _SELECTOR.findall(expression):
            found.setdefault(name, set()).update({label} - {""})
        for labels, name in _BY.findall(expression):
            found[name] |= set(labels.split(", "))
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
