from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.exporters import KVFerryCollector
from kvferry.observe import FAMILIES, GAUGES, TIMES, Counters


def families_of(counters, **labels):
    registry = CollectorRegistry()
    registry.register(KVFerryCollector(counters, labels))
    return list(text_string_to_metric_families(generate_latest(registry).decode()))


def scrape(counters, **labels):
    """Samples that are not 0, but for buckets."""
    return {
        (sample.name, tuple(sample.labels.items())): (family.type, sample.value)
        for family in families_of(counters, **labels)
        for sample in family.samples
        if sample.value and not sample.name.endswith("_bucket")
    }


def test_all_that_is_listed_is_there_before_anything_happens():
    found = {family.name: family for family in families_of(Counters())}
    for name, family in FAMILIES.items():
        assert found[f"kvferry_{name}"].type == "counter"
        is_there = not family.labels or name == "hit_tokens"
        assert len(found[f"kvferry_{name}"].samples) == is_there
    for name in GAUGES:
        assert found[f"kvferry_{name}"].type == "gauge"
    for name in TIMES:
        assert found[f"kvferry_{name}_seconds"].type == "histogram"


def test_counts_and_durations_have_their_names_and_types():
    counters = Counters()
    counters.count("store_evictions", 3)
    counters.count("load_bytes", 2**40)
    counters.observe("load", 0.25)
    counters.observe("load", 0.5)
    assert scrape(counters) == {
        ("kvferry_store_evictions_total", ()): ("counter", 3.0),
        ("kvferry_load_bytes_total", ()): ("counter", 2.0**40),
        ("kvferry_load_seconds_sum", ()): ("histogram", 0.75),
        ("kvferry_load_seconds_count", ()): ("histogram", 2.0),
    }


def test_a_duration_is_in_the_buckets_of_all_bounds_that_are_not_below_it():
    counters = Counters()
    for seconds in (0.0, 0.01, 0.011, 1000.0):
        counters.observe("fetch", seconds)
    buckets = {
        float(sample.labels["le"]): sample.value
        for family in families_of(counters)
        for sample in family.samples
        if sample.name == "kvferry_fetch_seconds_bucket"
    }
    assert buckets[0.01] == 2
    assert buckets[0.025] == 3
    assert buckets[50.0] == 3
    assert buckets[float("inf")] == 4


def test_labels_of_a_name_are_labels_of_its_samples():
    counters = Counters()
    counters.count("hit_tokens/file", 2)
    counters.count("hit_tokens", 1)  # of a host without tiers
    counters.count("tier_reads/s3/failed", 3)
    counters.watch(lambda: {"tier_since_seconds/s3/worker/away/late/because: a/b": 7.0})
    because = (
        ("because", "because: a/b"),
        ("kind", "late"),
        ("role", "worker"),
        ("state", "away"),
        ("tier", "s3"),
    )
    assert scrape(counters) == {
        ("kvferry_hit_tokens_total", (("tier", "file"),)): ("counter", 2.0),
        ("kvferry_hit_tokens_total", (("tier", ""),)): ("counter", 1.0),
        ("kvferry_tier_reads_total", (("result", "failed"), ("tier", "s3"))): ("counter", 3.0),
        ("kvferry_tier_since_seconds", because): ("gauge", 7.0),
    }
    assert counters["hit_tokens/file"] == 2


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
