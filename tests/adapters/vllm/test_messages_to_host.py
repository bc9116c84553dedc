"""Options, counters and events: what crosses between vLLM and the plug-in besides KV."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.adapters.vllm.connector import connector_options, take_rules
from kvferry.adapters.vllm.events import EventTranslator
from kvferry.adapters.vllm.host import own_report
from kvferry.adapters.vllm.metrics import NOW, PromMetrics, Stats
from kvferry.contract.messages import ChunksRemoved, ChunkStored, WorkerMeta
from kvferry.errors import ConfigError
from kvferry.observe import FAMILIES, TIME_BOUNDS, Counters
from kvferry.store.url import parse_store_url
from kvferry.types import NO_EXTRA_KEYS, ExtraKeys
from kvferry.v1.host import CLIENT_OPTIONS


def test_without_a_store_one_in_the_users_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = connector_options({"chunk_tokens": 64})
    assert options == {
        "store": f"file://{tmp_path}/kvferry/kv?max_bytes=10GiB",
        "chunk_tokens": 64,
    }


NAMES = ["a b", "50%41", "c#d", "what?", "a&b=c;d", "ä", "plain"]


@pytest.mark.parametrize("name", NAMES)
def test_configurations_of_the_example_connector_name_a_directory(name):
    options = connector_options({"shared_storage_path": f"/data/{name}"})
    url = parse_store_url(options["store"])
    assert (url.scheme, url.path, url.options) == ("file", f"/data/{name}", {})


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_directory_of_any_name_holds_the_default_store(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    url = parse_store_url(connector_options({})["store"])
    assert (url.path, url.options) == (f"{tmp_path / name}/kvferry/kv", {"max_bytes": "10GiB"})


def test_options_that_are_no_object_are_refused():
    with pytest.raises(ConfigError, match="is a list, not an object"):
        connector_options(["store"])


RULES = {
    "none": ({}, (True, CLIENT_OPTIONS)),
    "some": ({"client_options": ["store", "explain"]}, (True, {"store", "explain"})),
    "no client option": ({"handover": False, "client_options": []}, (False, set())),
    "a text": ({"client_options": "store"}, "must be a list"),
    "true": ({"client_options": True}, "must be a list"),
    "a mistake": ({"client_options": ["pins"]}, "did you mean 'pin'"),
    "no name": ({"client_options": [{}]}, "unknown option of requests"),
    "a number": ({"handover": 1}, "must be true or false"),
}


@pytest.mark.parametrize(("given", "expected"), RULES.values(), ids=RULES)
def test_rules_for_requests_are_taken_or_refused(given, expected):
    options = {"store": "memory://a", **given}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            take_rules(options)
    else:
        assert take_rules(options) == expected
        assert options == {"store": "memory://a"}


@dataclass
class HostStats:
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self):
        return self.data


class FerryStats(Stats, HostStats):
    pass


class Note(WorkerMeta, frozen=True):
    what: tuple[str, ...]

    def aggregate(self, other):
        return Note(self.what + other.what)


def test_counters_start_from_zero_when_taken():
    counters = Counters()
    assert counters.pop_all() == {}
    counters.count("hits", 2)
    counters.observe("save", 0.5)
    counters.observe("save", 0.25)
    buckets = {TIME_BOUNDS.index(0.25): 1, TIME_BOUNDS.index(0.5): 1}
    assert counters.pop_all() == {
        "hits": 2,
        "save_seconds": 0.75,
        **{f"save_bucket/{number}": count for number, count in buckets.items()},
    }
    assert counters.pop_all() == {}


def test_stats_of_ranks_add_up_and_do_not_touch_each_other():
    first, second = FerryStats(data={"a": 1}), FerryStats(data={"a": 2, "b": 3})
    given = first.data
    assert first.aggregate(second).data == {"a": 3, "b": 3}
    assert (given, second.data) == ({"a": 1}, {"a": 2, "b": 3})
    assert first.reduce() == {"a": 3, "b": 3}
    first.reset()
    assert first.is_empty()


def test_messages_ride_along_and_do_not_reach_the_log():
    first, second = FerryStats(), FerryStats(data={"a": 1})
    first.carried_meta, second.carried_meta = (Note((name,)) for name in "xy")
    assert not first.is_empty()
    across = pickle.loads(pickle.dumps(first.aggregate(second)))
    assert across.carried_meta.what == ("x", "y")
    assert across.to_dict() == {"a": 1}


@dataclass
class HostOutput:
    kv_connector_stats: Any


def test_of_what_workers_count_a_connector_hears_its_own():
    def heard(stats):
        return own_report(HostOutput(stats), "KVFerryConnector").kv_connector_stats

    full = FerryStats(data={"a": 1})
    assert heard(None) is None
    assert heard(full) is heard(HostStats({"KVFerryConnector": full, "Other": HostStats()})) is full
    others = HostStats({"Other": HostStats()})
    assert heard(others) is others


class HostPromMetrics:
    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        pass


class FerryPromMetrics(PromMetrics, HostPromMetrics):
    pass


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def prom(registry):
    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    return FerryPromMetrics(None, types, ["model_name", "engine"], labels)


def value_in(registry, name, **labels):
    everywhere = {"model_name": "m", "engine": "1"}
    return registry.get_sample_value(f"vllm:kvferry_{name}", {**everywhere, **labels})


def test_counters_reach_prometheus_under_their_own_or_a_common_name(registry, prom):
    prom.observe({"hit_tokens/file": 128, "miss_bad_checksum": 2}, 1)
    prom.observe({"hit_tokens/file": 2, "hits": 1, "store_corrected_bytes": -5}, 1)
    prom.observe({"tier_reads/s3/failed": 3, "miss_tokens": 4}, 1)
    assert value_in(registry, "hit_tokens_total", tier="file") == 130
    assert value_in(registry, "tier_reads_total", tier="s3", result="failed") == 3
    assert value_in(registry, "miss_tokens_total", reason="") == 4
    assert value_in(registry, "events_total", event="miss_bad_checksum") == 2
    plain = {name for name, of in FAMILIES.items() if not of.labels}
    assert {name: value_in(registry, f"{name}_total") for name in plain} == {
        **dict.fromkeys(plain, 0),
        "hits": 1,
    }


def test_durations_keep_their_buckets_and_their_sum_on_the_way(registry, prom):
    counters = Counters()
    measured = [0.00002, 0.003, 0.004, 0.1, 0.7, 70.0]
    for seconds in measured:
        counters.observe("fetch", seconds)
    first = FerryStats(data=counters.pop_all())
    counters.observe("fetch", 0.003)
    measured.append(0.003)
    both = first.aggregate(FerryStats(data=counters.pop_all()))
    assert both.reduce() == {"fetch_seconds": pytest.approx(sum(measured))}
    prom.observe(both.data, 1)
    assert value_in(registry, "fetch_seconds_count") == len(measured)
    assert value_in(registry, "fetch_seconds_sum") == pytest.approx(sum(measured))
    for bound in TIME_BOUNDS:
        expected = sum(seconds <= bound for seconds in measured)
        assert value_in(registry, "fetch_seconds_bucket", le=str(bound)) == expected
    assert value_in(registry, "save_seconds_count") == 0


def test_a_tier_shows_its_last_state_alone_whatever_the_reasons(registry, prom):
    place = "tier_since_seconds/s3/worker"
    labels = {"tier": "s3", "role": "worker"}

    def shown():
        found = {}
        for family in registry.collect():
            for sample in family.samples:
                if sample.name == "vllm:kvferry_tier_since_seconds" and sample.value:
                    assert {name: sample.labels[name] for name in labels} == labels
                    found[sample.labels["state"], sample.labels["because"]] = sample.value
        return found

    data = FerryStats(data={"hits": 1, NOW: {f"{place}/up//": 5.0}})
    newer = FerryStats(data={"hits": 1, NOW: {"pool_slots/held": 3}})
    prom.observe(data.aggregate(newer).data, 1)
    assert value_in(registry, "pool_slots", state="held") == 3
    assert shown() == {("up", ""): 5.0}
    prom.observe({NOW: {f"{place}/away//it said: a/b": 7.0}}, 1)
    assert shown() == {("away", "it said: a/b"): 7.0}
    for number in range(100):
        prom.observe({NOW: {f"{place}/away//reason {number}": 8.0 + number}}, 1)
    assert shown() == {("away", "other"): 107.0}


class BlockRemoved(msgspec.Struct):
    block_hashes: list[bytes]


class EarlyBlockStored(msgspec.Struct):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class BlockStored(EarlyBlockStored):
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


@dataclass
class Events:
    BlockStored: type
    BlockRemoved: type = BlockRemoved


def stored(extra_keys=NO_EXTRA_KEYS):
    return ChunkStored(key=b"k", parent=b"p", token_ids=(7, 8), extra_keys=extra_keys)


def test_chunks_become_events_of_the_host():
    translator = EventTranslator(Events(BlockStored), "STORAGE")
    made = list(translator.translate([stored(), ChunksRemoved(keys=(b"k",))]))
    assert made[0] == BlockStored([b"k"], b"p", [7, 8], 2, None, "STORAGE", None, None)
    assert made[1] == BlockRemoved([b"k"])


class LaterBlockStored(BlockStored):
    colour: str = msgspec.UNSET  # type: ignore[assignment]

    def __post_init__(self):
        raise TypeError("colour is needed")


def test_events_of_a_host_that_wants_others_are_not_sent(caplog):
    translator = EventTranslator(Events(LaterBlockStored), "STORAGE")
    assert translator.translate([stored()]) == []
    assert translator.translate([ChunksRemoved(keys=(b"k",))]) == []
    assert caplog.text.count("none are sent") == 1


def test_extra_keys_are_published_or_the_chunk_is_not():
    salted = stored(ExtraKeys(cache_salt="s", lora="digest"))
    (event,) = EventTranslator(Events(BlockStored), "STORAGE").translate([salted])
    assert event.extra_keys == [("digest", "s")]
    assert not list(EventTranslator(Events(EarlyBlockStored), "STORAGE").translate([salted]))
