"""Ranks on several machines of a model with recurrent states: each writes its rows of a state as
records of its own, as of chunks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.cache.deciding import rank_slots
from kvferry.cache.shards import shard_keys
from kvferry.cli.main import main
from kvferry.errors import TransferError
from kvferry.keys import ChunkKeys, state_key
from kvferry.record.check import RecordInfo, parse_head
from kvferry.types import ChunkKey
from tests.cache.hosts import CacheHost
from tests.cache.test_states import BLOCK, PROMPT, serve, start
from tests.state_models import MODELS

__all__ = ["start"]


@pytest.fixture(autouse=True)
def machines(monkeypatch):
    def open_slots(*where):
        raise TransferError("no such process on this machine")

    monkeypatch.setattr(rank_slots, "open_slots", open_slots)


@pytest.fixture
def start_apart(start):
    """Starts a host whose scheduler role has heard where the ranks' memory is."""

    def start_apart(**options) -> CacheHost:
        host = start(**options)
        host.scheduler.learn_regions([rank.worker.region for rank in host.ranks])
        return host

    return start_apart


def store(host: CacheHost, prompt=PROMPT) -> CacheHost:
    serve(host, "writer", prompt)
    host.settle()
    return host


def stored(root: Path) -> list[RecordInfo]:
    contents = [path.read_bytes() for path in root.rglob("*.safetensors")]
    return [parse_head(memoryview(each), len(each)) for each in contents]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_go_on_from_what_each_stored_of_kv_and_state(start_apart, kind, tp, tmp_path):
    """Of four ranks, two have the same heads of KV, and other ones of the states."""
    store(start_apart(kind=kind, tp=tp)).close()
    found = stored(tmp_path)
    assert all(info.is_shard for info in found)
    reader = start_apart(kind=kind, tp=tp)
    assert serve(reader, "reader", PROMPT) == 4 * BLOCK


@pytest.mark.parametrize("kind", MODELS)
def test_what_ranks_stored_is_joined_for_engines_of_any_split(start_apart, kind, tmp_path):
    store(start_apart(kind=kind, tp=2)).close()
    url = (tmp_path / "store").as_uri()
    assert main(["copy", url, url, "--join"]) == 0
    for tp in (1, 4):
        reader = start_apart(kind=kind, tp=tp)
        assert serve(reader, "reader", PROMPT) == 4 * BLOCK
        reader.close()


@pytest.mark.parametrize("losing", [0, 1])
@pytest.mark.parametrize("part", [0, -1])
def test_a_state_that_lacks_a_shard_is_a_miss_and_stored_again(start_apart, losing, part, tmp_path):
    host = store(start_apart(tp=2))
    records = host.ranks[losing].worker._records
    number = range(len(records.parts))[part]
    states = [state_key(key, number) for key in chunk_keys(host)]
    names = {shard_keys(records)[number].of(key).hex() for key in states}
    host.close()
    lost = [path for path in tmp_path.rglob("*.safetensors") if path.stem[-64:] in names]
    assert lost
    for path in lost:
        path.unlink()
    reader = store(start_apart(tp=2))
    assert reader.observer["put_stored"] == len(lost)
    reader.close()
    assert serve(start_apart(tp=2), "again", PROMPT) == 4 * BLOCK


def chunk_keys(host: CacheHost) -> list[ChunkKey]:
    cache = host.parts[0]
    keys = ChunkKeys(cache.schema.namespace, cache.schema.chunk_tokens)
    keys.extend(PROMPT)
    return keys.keys


def test_what_was_read_of_shards_of_states_is_audited(start_apart):
    store(start_apart(tp=2)).close()
    reader = start_apart(tp=2, audit=1.0, draw=lambda: 0.9)
    assert 0 < serve(reader, "reader", PROMPT) < 4 * BLOCK
    reader.settle()
    assert reader.observer["audits"] == 1
    assert reader.observer["audit_mismatch"] == 0
