"""Options, counters and events: what crosses between vLLM and the plug-in besides KV."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, Counter

from kvferry.adapters.vllm.connector import connector_options
from kvferry.adapters.vllm.events import EventTranslator
from kvferry.adapters.vllm.host import own_report
from kvferry.adapters.vllm.metrics import METRICS, make_prom_class, make_stats_class
from kvferry.contract.messages import ChunksRemoved, ChunkStored, WorkerMeta
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.types import NO_EXTRA_KEYS, ExtraKeys
from kvferry.v1.types import CarriedMeta


def test_without_a_store_one_in_the_users_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = connector_options({"chunk_tokens": 64})
    assert options == {
        "store": f"file://{tmp_path}/kvferry/kv?max_bytes=10GiB",
        "chunk_tokens": 64,
    }


def test_configurations_of_the_example_connector_name_a_directory():
    assert connector_options({"shared_storage_path": "/a b"}) == {"store": "file:///a b"}


def test_options_that_are_no_object_are_refused():
    with pytest.raises(ConfigError, match="is a list, not an object"):
        connector_options(["store"])


@dataclass
class HostStats:
    data: dict[str, Any] = field(default_factory=dict)

    def to_dict(self):
        return self.data


FerryStats = make_stats_class(HostStats)
FerryStats.__module__, FerryStats.__qualname__ = __name__, "FerryStats"


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
    assert counters.pop_all() == {"hits": 2, "save_seconds": 0.75, "save_count": 2}
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
    first.carried_meta, second.carried_meta = (CarriedMeta(Note((name,))) for name in "xy")
    assert not first.is_empty()
    across = pickle.loads(pickle.dumps(first.aggregate(second)))
    assert across.carried_meta.meta.what == ("x", "y")
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
        self._counter_cls = metric_types[Counter]


def test_counters_reach_prometheus_under_their_own_or_a_common_name():
    registry = CollectorRegistry()

    def counter(**kwargs):
        return Counter(**kwargs, registry=registry)

    metrics = make_prom_class(HostPromMetrics)(
        None, {Counter: counter}, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    metrics.observe({"hit_tokens": 128, "miss_bad_leaf": 2}, 1)
    metrics.observe({"hit_tokens": 2, "store_corrected_bytes": -5}, 1)

    def value(name, **labels):
        return registry.get_sample_value(
            f"vllm:kvferry_{name}_total", {"model_name": "m", "engine": "1", **labels}
        )

    assert value("hit_tokens") == 130
    assert value("events", event="miss_bad_leaf") == 2
    assert {name: value(name) for name in METRICS if name != "hit_tokens"} == dict.fromkeys(
        METRICS.keys() - {"hit_tokens"}, 0
    )


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
