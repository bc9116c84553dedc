"""Ranks that hold the same kv heads share host memory: it is held, read and verified once."""

from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from kvferry.cache import replicas
from kvferry.cache.memory import SlotMemory
from kvferry.cache.moving import slot_io
from kvferry.cache.replicas import Replicas
from kvferry.contract.spec import EngineSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.testing.stores.hooks import wait_until
from tests.cache.hosts import make_groups
from tests.cache.keeping import PROMPT
from tests.cache.test_ranks import groups, store_prompt

ENGINE = "engine of this test"


@pytest.fixture(autouse=True)
def _rooms(tmp_path, monkeypatch):
    monkeypatch.setattr(replicas.tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.fixture
def made(monkeypatch):
    """All memory of slots that is made."""
    found = []
    init = SlotMemory.__init__

    def noted(memory, *args, **options):
        init(memory, *args, **options)
        found.append(memory)

    monkeypatch.setattr(SlotMemory, "__init__", noted)
    return found


@pytest.fixture
def opened(monkeypatch):
    """The keys of the records that ranks have begun to read."""
    found = []
    read = slot_io.read_record

    def noted(store, schema, record, *args, **options):
        found.append(record.key)
        return read(store, schema, record, *args, **options)

    monkeypatch.setattr(slot_io, "read_record", noted)
    return found


@pytest.mark.parametrize(
    ("world_size", "num_kv_heads", "num_held"), [(4, 1, 1), (4, 2, 2), (4, 4, 4), (2, 4, 2)]
)
def test_what_several_ranks_hold_is_kept_and_read_once(
    make_host, made, opened, tmp_path, world_size, num_kv_heads, num_held
):
    url = f"file://{tmp_path}/store"
    model = groups(num_kv_heads)
    writer = store_prompt(
        make_host, url, world_size=world_size, model=model, engine_id=f"{ENGINE} w"
    )
    assert writer.observer["put_stored"] == 5
    assert len(made) == num_held
    made.clear()
    host = make_host(store=url, groups=model, world_size=world_size, engine_id=ENGINE)
    for number in range(3):  # the host checks every byte on every rank
        assert host.run(f"r{number}", PROMPT).num_external_tokens == 40
        host.forget_memory()
    assert len(made) == num_held
    assert len(opened) == 3 * 5 * num_held
    assert writer.run("again", PROMPT).num_external_tokens == 40


def spec_of(rank: int, world_size: int = 2, num_kv_heads: int = 1, engine: str | None = ENGINE):
    model = make_groups(num_kv_heads=num_kv_heads)
    return EngineSpec(
        identity=ModelIdentity(weights=b"w" * 32, config={"model_type": "simulated"}),
        groups=model,
        shard=tensor_parallel_shard(model, rank, world_size),
        engine_id=engine,
    )


def test_ranks_find_each_other_in_any_order():
    found = []
    second = threading.Thread(target=lambda: found.append(Replicas(spec_of(1), 4, 4096)))
    second.start()
    first = Replicas(spec_of(0), 4, 4096)
    second.join(60)
    (other,) = found
    assert (first.loads_only, other.loads_only) == (False, True)
    first.memory.slot(3)[:4] = b"seen"
    assert bytes(other.memory.slot(3)[:4]) == b"seen"


@pytest.mark.parametrize(
    "other",
    [
        {"engine": "another engine"},
        {"engine": None},
        {"rank": 2, "world_size": 4, "num_kv_heads": 2},
        {"num_kv_heads": 2},
    ],
)
def test_ranks_of_another_engine_or_of_other_heads_have_memory_of_their_own(other, caplog):
    first = Replicas(spec_of(0), 4, 4096)
    alone = Replicas(spec_of(**{"rank": 1} | other), 4, 4096, seconds=0.0)
    assert not alone.loads_only
    assert alone.memory.name != first.memory.name
    assert ("has its own" in caplog.text) == (other == {"engine": "another engine"})


KILLED = """
import os, sys
from kvferry.cache import replicas
replicas.tempfile.gettempdir = lambda: sys.argv[1]
from tests.cache.test_shared_slots import spec_of
held = replicas.Replicas(spec_of(0), 4, 4096)
os._exit(0)
"""


def test_what_a_killed_engine_left_behind_is_not_shared(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, timeout=120)
    assert len(list(tmp_path.glob("kvferry-slots-*/*"))) == 1
    assert not Replicas(spec_of(1), 4, 4096, seconds=0.0).loads_only
    first = Replicas(spec_of(0), 4, 4096)
    assert Replicas(spec_of(1), 4, 4096, seconds=0.0).memory.name == first.memory.name


def test_a_rank_that_looks_as_the_first_one_replaces_the_file_of_a_killed_engine_meets_it(
    tmp_path, monkeypatch
):
    """Else it would say where no other rank looks how far it has come."""
    killed = Replicas(spec_of(0), 4, 4096)
    (place,) = tmp_path.glob("kvferry-slots-*/*")
    place.write_bytes(place.read_bytes().replace(b"kvferry-", b"elsewhere"))
    first = []

    def map_file(*args):
        found = mmap.mmap(*args)
        if not first:
            first.append(None)  # its own call does not come here again
            first[0] = Replicas(spec_of(0), 4, 4096)
        return found

    monkeypatch.setattr(replicas, "mmap", SimpleNamespace(mmap=map_file))
    other = Replicas(spec_of(1), 4, 4096)
    assert other.memory.name == first[0].memory.name
    assert not first[0].are_past(1)
    other.move_past(1)
    assert first[0].are_past(1)
    assert killed.memory.name != other.memory.name


def test_a_directory_of_others_is_not_used(tmp_path):
    Replicas(spec_of(0), 4, 4096)
    (place,) = tmp_path.glob("kvferry-slots-*")
    place.chmod(0o777)
    first = Replicas(spec_of(0), 4, 4096)
    assert not Replicas(spec_of(1), 4, 4096, seconds=0.0).loads_only
    assert first.are_past(7)


def test_the_first_rank_knows_what_the_others_have_loaded():
    first = Replicas(spec_of(0, world_size=3), 4, 4096)
    others = [Replicas(spec_of(rank, world_size=3), 4, 4096) for rank in (1, 2)]
    assert first.are_past(0)
    assert not first.are_past(1)
    others[0].move_past(5)
    assert not first.are_past(5)
    others[1].move_past(4)
    assert first.are_past(4)
    assert not first.are_past(5)


def two_ranks(make_host, tmp_path):
    """Return an engine of two ranks that share five slots, over a store that has the prompt."""
    url, model = f"file://{tmp_path}/store", groups(1)
    store_prompt(make_host, url, world_size=1, model=model)
    return make_host(
        store=url, groups=model, world_size=2, engine_id=ENGINE, num_slots=5, io_threads=8
    )


class Slow:
    """A mark that is reached when the test says so."""

    def __init__(self):
        self.reached = False

    def poll(self):
        return self.reached


@pytest.mark.parametrize("waits", [True, False])
def test_no_slot_is_filled_again_while_another_rank_loads_from_it(
    make_host, opened, tmp_path, monkeypatch, waits
):
    """The second rank's device is slow. Without the wait, this test sees it."""
    host = two_ranks(make_host, tmp_path)
    first, second = (rank.worker for rank in host.ranks)
    if not waits:
        monkeypatch.setattr(Replicas, "are_past", lambda _self, _number: True)
    slow = Slow()
    monkeypatch.setattr(second._copies, "slots_read", lambda: slow)
    request = host.add("r", PROMPT)
    assert host.admit(request) == 40
    host.prefill(request)
    host.forget_memory()
    opened.clear()
    other = host.add("other", PROMPT)
    host.scheduler.lookup(other, 0)
    host.step([])
    if waits:
        wait_until(first.io.pool._queue.empty, "the reads are under way")
        assert opened == []
        slow.reached = True

    def is_read() -> bool:
        host.step([])
        return bool(opened)

    wait_until(is_read, "a chunk is read")
    slow.reached = True
    assert host.admit(other) == 40
    host.prefill(other)


def test_what_another_rank_loads_from_is_not_saved_over(make_host, tmp_path, monkeypatch):
    host = two_ranks(make_host, tmp_path)
    slow = Slow()
    monkeypatch.setattr(host.ranks[1].worker._copies, "slots_read", lambda: slow)
    request = host.add("r", PROMPT)
    assert host.admit(request) == 40
    host.prefill(request)
    held = bytes(host.ranks[0].worker._memory.view)
    new = host.add("new", [token + 500 for token in PROMPT])
    assert host.admit(new) == 0
    host.prefill(new)  # its chunks take the slots of the other prompt
    for _ in range(3):
        new.all_token_ids.append(1)
        host.prefill(new)
    assert bytes(host.ranks[0].worker._memory.view) == held
    slow.reached = True
    stored = host.parts[0].store.stat().num_records

    def is_stored():
        new.all_token_ids.append(1)
        host.prefill(new)
        return host.observer["put_stored"] >= stored

    wait_until(is_stored, "the chunks are offered again, and stored")


@pytest.mark.parametrize("told_by", ["report", "handshake"])
def test_an_engine_that_shares_memory_with_another_serves_without_the_cache(
    make_host, caplog, tmp_path, told_by
):
    url, model = f"file://{tmp_path}/store", groups(1)
    store_prompt(make_host, url, world_size=1, model=model)
    hosts = [
        make_host(store=url, groups=model, world_size=2, engine_id=name)
        for name in (ENGINE, "stranger")
    ]
    worker, stranger = hosts[0].ranks[1].worker, hosts[1].ranks[0].worker
    worker._region = replace(worker._region, name=stranger._region.name)
    if told_by == "handshake":
        hosts[0].scheduler.learn_regions([rank.worker.region for rank in hosts[0].ranks])
        assert hosts[0].run("first", PROMPT).num_external_tokens == 0
    for number in range(3):
        hosts[0].run(f"r{number}", [*PROMPT, number])
        hosts[0].settle()
    assert "rank 1 shares host memory with another engine" in caplog.text
    assert hosts[0].run("last", PROMPT).num_external_tokens == 0
