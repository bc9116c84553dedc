from __future__ import annotations

import json

import pytest

from kvferry.errors import ConfigError
from kvferry.exporters import JsonLinesExporter
from kvferry.observe import Counters
from kvferry.testing.clock import FakeClock


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_write_appends_one_line(tmp_path):
    path, counters, clock = tmp_path / "metrics.jsonl", Counters(), FakeClock(start=100.0)
    with JsonLinesExporter(path, counters, labels={"rank": "0"}, clock=clock) as exporter:
        counters.count("hits", 2)
        assert exporter.write()
        clock.advance(5)
        counters.observe("load", 0.5)
        assert exporter.write()
    assert lines(path) == [
        {"time": 100.0, "rank": "0", "hits": 2},
        {"time": 105.0, "rank": "0", "hits": 2, "load_count": 1, "load_seconds": 0.5},
    ]


def test_two_exporters_share_a_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with (
        JsonLinesExporter(path, Counters(), labels={"rank": "0"}) as first,
        JsonLinesExporter(path, Counters(), labels={"rank": "1"}) as second,
    ):
        for exporter in (first, second, first):
            assert exporter.write()
    assert [line["rank"] for line in lines(path)] == ["0", "1", "0"]


def test_a_closed_exporter_writes_nothing(tmp_path):
    exporter = JsonLinesExporter(tmp_path / "metrics.jsonl", Counters())
    exporter.close()
    exporter.close()
    assert exporter.write() is False


def test_a_full_disk_is_false_and_no_exception():
    with JsonLinesExporter("/dev/full", Counters()) as exporter:
        assert exporter.write() is False


def test_a_path_that_cannot_be_opened_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"absent.*directory"):
        JsonLinesExporter(tmp_path / "absent" / "metrics.jsonl", Counters())
