"""Whoever opens a store to write says what its namespace is, and not on the scheduler's thread."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cache.build import PrefixCache
from kvferry.contract.spec import EngineSpec, Mode
from kvferry.keys import ModelIdentity, Namespace
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Counters
from kvferry.store.base import Where
from kvferry.store.file.store import FileStore
from tests.cache.hosts import make_groups

GROUPS = make_groups()


def spec_of(mode: Mode = Mode.BOTH) -> EngineSpec:
    return EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}, name="org/model"),
        groups=GROUPS,
        shard=tensor_parallel_shard(GROUPS, 0, 1),
        mode=mode,
    )


def opened(
    root: Path, *, spec: EngineSpec | None = None, query: str = "", has_scheduler=True, **options
):
    options = {"store": f"{root.as_uri()}{query}", **options}
    return PrefixCache(spec or spec_of(), options, Counters(), has_scheduler=has_scheduler)


def said_of(root: Path, namespace: bytes) -> Namespace | None:
    with FileStore(root, read_only=True) as store:
        text = store.catalogue().description(namespace)
    return None if text is None else Namespace.from_text(namespace, text)


@pytest.mark.parametrize(
    ("chunk", "multiple", "given", "tokens"),
    [(8, 1, {}, 32), (8, 48, {}, 48), (8, 64, {"chunk_tokens": 128}, 128), (1000, 1, {}, 16)],
)
def test_all_ranks_halves_and_block_sizes_choose_the_same_chunks(
    tmp_path, chunk, multiple, given, tokens
):
    heads, layers = 8, 16 * chunk
    found = set()
    for world, block_size in ((1, 16), (2, 16), (8, 128)):
        groups = make_groups(
            num_layers=layers, num_kv_heads=heads, head_dim=32, block_size=block_size
        )
        for rank in range(world):
            shard = tensor_parallel_shard(groups, rank, world)
            spec = replace(spec_of(), groups=groups, shard=shard, chunk_multiple=multiple)
            for schedules in (True, False):
                parts = opened(tmp_path, spec=spec, has_scheduler=schedules, **given)
                parts.close()
                found.add((parts.schema.chunk_tokens, parts.schema.namespace))
    assert [each for each, _ in found] == [tokens]


def test_a_store_knows_the_model_once_an_engine_opened_it(tmp_path):
    parts = opened(tmp_path / "store")
    parts.close()
    said = said_of(tmp_path / "store", parts.schema.namespace)
    assert said is not None
    assert said.model == "org/model"
    assert said.description["weights"] == bytes(32).hex()


def test_a_description_that_was_cut_is_written_again(tmp_path):
    parts = opened(tmp_path / "store")
    parts.close()
    file = tmp_path / "store" / "namespaces" / f"{parts.schema.namespace.hex()}.json"
    file.write_bytes(file.read_bytes()[:20])
    opened(tmp_path / "store").close()
    assert said_of(tmp_path / "store", parts.schema.namespace) is not None


def test_a_role_that_stores_nothing_describes_nothing(tmp_path):
    FileStore(tmp_path / "store").close()
    opened(tmp_path / "store", query="?read_only=true").close()
    opened(tmp_path / "store", spec=spec_of(Mode.READ)).close()
    options = {"store": (tmp_path / "store").as_uri()}
    PrefixCache(spec_of(), options, Counters(), has_scheduler=False).close()
    assert not (tmp_path / "store" / "namespaces").exists()


@pytest.mark.parametrize("in_the_way", ["file", "directory", "link"])
def test_what_stands_in_the_way_of_a_description_stops_no_engine(tmp_path, in_the_way):
    FileStore(tmp_path / "store").close()
    place = tmp_path / "store" / "namespaces"
    if in_the_way == "file":
        place.touch()
    elif in_the_way == "link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    else:
        name = opened(tmp_path / "other")
        name.close()
        (place / f"{name.schema.namespace.hex()}.json").mkdir(parents=True)
    opened(tmp_path / "store").close()
    assert not list(tmp_path.glob("elsewhere/*"))


def test_a_medium_that_hangs_in_describe_delays_no_start(tmp_path, monkeypatch):
    go = threading.Event()
    threads = queue.Queue()

    def hang(self, namespace, description):
        threads.put(threading.current_thread())
        go.wait(60)

    monkeypatch.setattr(FileStore, "describe", hang)
    started = time.monotonic()
    parts = opened(tmp_path / "store", start_timeout_seconds=0.05)
    assert time.monotonic() - started < 30
    assert threads.get(timeout=20) is not threading.main_thread()
    assert parts.store.where(bytes(32)) is not Where.HERE
    go.set()
    parts.close()
