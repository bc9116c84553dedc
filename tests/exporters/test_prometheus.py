from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.exporters import KVFerryCollector
from kvferry.observe import Counters


def scrape(counters, **labels):
    registry = CollectorRegistry()
    registry.register(KVFerryCollector(counters, labels))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sample.labels.items())): (family.type, sample.value)
        for family in families
        for sample in family.samples
    }


def test_counts_and_durations_have_their_names_and_types():
    counters = Counters()
    counters.count("store_evictions", 3)
    counters.count("load_bytes", 2**40)
    counters.observe("load", 0.25)
    counters.observe("load", 0.5)
    assert scrape(counters) == {
        ("kvferry_store_evictions_total", ()): ("counter", 3.0),
        ("kvferry_load_bytes_total", ()): ("counter", 2.0**40),
        ("kvferry_load_seconds_sum", ()): ("summary", 0.75),
        ("kvferry_load_seconds_count", ()): ("summary", 2.0),
    }


def test_a_scrape_sees_what_was_counted_since_the_last():
    counters = Counters()
    assert scrape(counters) == {}
    counters.count("hits")
    assert scrape(counters)["kvferry_hits_total", ()][1] == 1
    counters.count("hits")
    assert scrape(counters)["kvferry_hits_total", ()][1] == 2


def test_labels_are_on_every_sample():
    counters = Counters()
    counters.count("hits")
    counters.observe("load", 1.0)
    assert {labels for _, labels in scrape(counters, rank="3")} == {(("rank", "3"),)}


def test_a_count_that_only_looks_like_a_duration_stays_a_count():
    counters = Counters()
    counters.count("saved_seconds", 4)
    counters.count("block_count", 5)
    assert scrape(counters) == {
        ("kvferry_saved_seconds_total", ()): ("counter", 4.0),
        ("kvferry_block_count_total", ()): ("counter", 5.0),
    }


def test_characters_that_prometheus_refuses_are_replaced():
    counters = Counters()
    counters.count("miss.wrong-key")
    assert list(scrape(counters)) == [("kvferry_miss_wrong_key_total", ())]
