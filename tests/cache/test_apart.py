"""Ranks whose memory the scheduler's process cannot open, as on several machines: each writes the
rows that it holds as a record of its own, a shard, and reads it again."""

from __future__ import annotations

import logging
import time
from itertools import permutations
from pathlib import Path

import pytest

from kvferry.cache import replicas
from kvferry.cache.build import PrefixCache
from kvferry.cache.deciding import rank_slots
from kvferry.cache.deciding.scheduler import CacheScheduler
from kvferry.contract.messages import LookupMiss
from kvferry.errors import FaultKind, TransferError
from kvferry.keys import ShardKeys
from kvferry.record.check import RecordInfo, parse_head
from kvferry.store.base import HERE
from kvferry.store.erasures import name_of_key, names_in
from kvferry.store.file.store import FileStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate, StallingStore
from kvferry.types import RequestOptions
from tests.cache.hosts import make_groups
from tests.store.servers.remote_client import DictClient

from .keeping import PROMPT, assert_settles, keys_of, wait_for
from .test_ranks import Refusing

APART = "ranks are on several machines"
OTHER = list(range(100, 141))


def groups(num_kv_heads: int = 4):
    return make_groups(num_layers=3, num_kv_heads=num_kv_heads)


MIXED = (
    *make_groups(num_layers=2, num_kv_heads=1, block_size=4),
    *make_groups(num_layers=3, num_kv_heads=4, head_dim=8, block_size=8),
)
TWO_STAGES = [[(0, 1)], [(1, 3)]]
SPLITS = {
    # groups, ranks, stages, and records that they write of a chunk
    "heads": (groups(), 2, (), 2),
    "layers": (groups(), 2, TWO_STAGES, 2),
    "both": (groups(), 4, TWO_STAGES, 4),
    "replicas": (groups(2), 4, (), 2),
    "one head": (groups(1), 2, (), 1),
    "one head on two machines": (groups(1), 4, (), 1),
    "replicas of one group": (MIXED, 2, (), 2),
    "a stage without a group": (MIXED, 2, [[(0, 2), (0, 1)], [(2, 2), (1, 3)]], 2),
    "a stage without layers": (groups(), 2, [[(0, 3)], [(3, 3)]], 1),
    "a first stage without layers": (groups(), 2, [[(0, 0)], [(0, 3)]], 1),
    "a first of three stages without layers": (groups(), 3, [[(0, 0)], [(0, 2)], [(2, 3)]], 2),
}
WHOLE = {
    "one head",
    "one head on two machines",
    "a stage without layers",
    "a first stage without layers",
}
"""Splits in which a rank holds all, so that the records are whole."""
FIRST_IS_EMPTY = {"a first stage without layers", "a first of three stages without layers"}


class Machines:
    """Whether the ranks of hosts that start now are on machines of their own."""

    def __init__(self, monkeypatch) -> None:
        self.are_many, opened = True, rank_slots.open_slots

        def open_slots(*where):
            if self.are_many:
                raise TransferError("no such process on this machine")
            return opened(*where)

        monkeypatch.setattr(rank_slots, "open_slots", open_slots)


@pytest.fixture(autouse=True)
def machines(monkeypatch, tmp_path) -> Machines:
    # Replicas meet there by the name of their engine.
    monkeypatch.setattr(replicas.tempfile, "gettempdir", lambda: str(tmp_path))
    return Machines(monkeypatch)


class Places:
    """What the stores of a kind keep: each call opens one for every rank."""

    def __init__(self, root: Path) -> None:
        self.root, self.values, self.clients = root, {}, []

    def directory(self, world_size: int):
        """One that all machines share."""
        return [FileStore(self.root / "shared") for _ in range(world_size)]

    def directories(self, world_size: int):
        """One on each machine."""
        return [FileStore(self.root / str(rank)) for rank in range(world_size)]

    def server(self, world_size: int):
        stores = []
        for _ in range(world_size):
            client = DictClient(self.values)
            self.clients.append(client)
            stores.append(RemoteStore("memory://server", client, clock=FakeClock()))
        return stores

    def tiers(self, world_size: int):
        """A directory on each machine before a server."""
        near, far = self.directories(world_size), self.server(world_size)
        return [TieredStore(each) for each in zip(near, far, strict=True)]

    def shards(self) -> list[RecordInfo]:
        found = []
        for path in sorted(self.root.rglob("*.safetensors")):
            content = memoryview(path.read_bytes())
            info = parse_head(content, len(content))
            assert isinstance(info, RecordInfo)
            found.append(info)
        return found


@pytest.fixture
def places(tmp_path) -> Places:
    return Places(tmp_path)


def start(make_host, stores, split: str = "heads", **given):
    """A host over stores of its ranks, which has heard where the ranks' memory is."""
    model, world_size, stages, _ = SPLITS[split]
    host = make_host(
        store="file:///unused",
        rank_stores=stores,
        groups=model,
        world_size=world_size,
        stages=stages,
        **given,
    )
    for each in stores:
        assert each.wait_indexed(60)
    host.scheduler.learn_regions([part.region for part in host.parts])
    return host


def store(host, prompt=PROMPT):
    """Have a host compute and store a prompt."""
    host.run(f"writer of {prompt[0]}", prompt)
    assert_settles(host)
    return host


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("kind", ["directory", "directories", "server", "tiers"])
def test_what_ranks_store_is_read_by_ranks_of_the_same_split(
    make_host, places, kind, split, caplog
):
    _, world_size, _, num_records = SPLITS[split]
    caplog.set_level(logging.INFO)
    stores = getattr(places, kind)
    host = store(start(make_host, stores(world_size), split))
    host.close()
    keys = keys_of(host)
    if kind in ("server", "tiers"):
        wait_for(lambda: len(places.values) == num_records * 5)
    if kind == "directory":
        shards = places.shards()
        assert len(shards) == num_records * 5
        assert {info.of or info.key for info in shards} == set(keys)
        assert all(bool(info.of) != (split in WHOLE) for info in shards)
    reader = start(make_host, stores(world_size), split)
    # The host checks every byte of every rank.
    is_elsewhere = kind in ("directories", "tiers") and split in FIRST_IS_EMPTY
    if is_elsewhere:  # the scheduler role's own directory has nothing
        return
    assert reader.run("reader", PROMPT).num_external_tokens == 40
    assert reader.observer["put_stored"] == 0
    said = [each.getMessage() for each in caplog.records if APART in each.getMessage()]
    assert len(said) == 2  # once for each host
    of_ranks = [line for line in caplog.messages if "stores what it holds of each record" in line]
    assert len(of_ranks) == 2 * world_size


def test_what_was_hashed_before_it_was_known_is_stored_later(make_host, places):
    """The first reports say that the ranks are apart."""
    host = make_host(
        store="file:///unused", rank_stores=places.directory(2), groups=groups(), world_size=2
    )
    request = host.admitted("writer", PROMPT)
    host.prefill(request, budget=24)
    host.prefill(request, budget=24)

    def is_stored() -> bool:
        request.all_token_ids.append(1)
        host.prefill(request, budget=1)
        host.run_for(0.5)
        return len(places.shards()) == 10

    wait_for(is_stored)
    assert_settles(host)
    assert host.observer["save_failed"] == 0
    reader = start(make_host, places.directory(2))
    assert reader.run("reader", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize(
    ("split", "order"),
    [
        ("heads", (0, 1)),
        ("heads", (1, 0)),
        ("a first stage without layers", (0, 1)),
        ("a first stage without layers", (1, 0)),
        *(("a first of three stages without layers", order) for order in permutations(range(3))),
    ],
)
def test_ranks_tell_in_any_order_where_their_memory_is(make_host, places, split, order):
    """Look-ups come in between. Chunks are found by the shard of the first rank with rows."""
    model, world_size, stages, _ = SPLITS[split]
    store(start(make_host, places.directory(world_size), split)).close()
    stores = places.directory(world_size)
    host = make_host(
        store="file:///unused",
        rank_stores=stores,
        groups=model,
        world_size=world_size,
        stages=stages,
    )
    for each in stores:
        assert each.wait_indexed(60)
    ranks = host.scheduler.saves.shared_writes.ranks
    request = host.add("waits", PROMPT)
    for rank in order:
        assert not ranks.are_apart
        host.scheduler.learn_regions([host.ranks[rank].worker.region])
        host.scheduler.lookup(request, 0)
    assert ranks.are_apart
    names = [ranks.shard_of(key, -1) for key in keys_of(host)]
    whole = keys_of(host) if split in WHOLE else None
    assert names == (whole or shard_keys(host, 1 if split in FIRST_IS_EMPTY else 0))
    assert host.admit(request) == 40
    host.prefill(request)


@pytest.mark.parametrize("kind", ["directory", "server"])
def test_a_prefix_of_whole_records_goes_on_with_shards(make_host, places, machines, kind):
    open_stores = getattr(places, kind)
    store(start(make_host, open_stores(2)))
    machines.are_many = False
    together = start(make_host, open_stores(2))
    together.run("writer", PROMPT[:17])
    assert_settles(together)
    assert together.observer["put_stored"] == 2
    for rank in range(2):
        for name in shard_keys(together, rank)[:2]:
            assert delete(together, 0, name)
    together.close()
    machines.are_many = True
    reader = start(make_host, open_stores(2))
    assert reader.run("reader", PROMPT).num_external_tokens == 40
    assert reader.observer["miss_absent"] == 0  # a rank's shard that is stored whole is no miss


@pytest.mark.parametrize("split", ["layers", "both", "replicas"])
def test_ranks_of_another_split_find_nothing_and_store_their_own(make_host, places, split):
    store(start(make_host, places.directory(2)))
    world_size, num_records = SPLITS[split][1], SPLITS[split][3]
    model = SPLITS[split][0]
    other = start(make_host, places.directory(world_size), split)
    assert other.run("reader", PROMPT).num_external_tokens == 0
    assert_settles(other)
    if model == groups():
        assert len(places.shards()) == 10 + 5 * num_records
    assert other.run("again", PROMPT).num_external_tokens == 40


def shard_keys(host, rank: int):
    return [ShardKeys(host.ranks[rank].worker._rows.own.shard).of(key) for key in keys_of(host)]


def of_namespace(host, store):
    return store.in_namespace(host.scheduler.requests.namespace)


def delete(host, rank: int, name) -> bool:
    return of_namespace(host, host.parts[rank].store).delete(name)


@pytest.mark.parametrize("losing", [0, 1])
@pytest.mark.parametrize("kind", ["directory", "directories", "server"])
def test_a_chunk_of_which_one_rank_lost_its_shard_is_a_miss_and_stored_again(
    make_host, places, kind, losing
):
    stores = getattr(places, kind)
    host = store(start(make_host, stores(2)))
    lost = shard_keys(host, losing)[2]
    assert delete(host, losing, lost)
    reader = start(make_host, stores(2), load_timeout_seconds=60.0, clock=(clock := FakeClock()))
    unreadable, whys = reader.scheduler.requests.unreadable, set()
    add = unreadable.add
    unreadable.add = lambda *said: (whys.add(said[3]), add(*said))
    assert reader.run("reader", PROMPT).num_external_tokens == 16
    assert_settles(reader)
    reason = LookupMiss.ABSENT if losing == 0 else LookupMiss.VANISHED
    assert reader.observer[f"miss_tokens/{reason}"] == 24
    assert whys == {"rank 1: absent"} if losing == 1 else not whys
    assert reader.observer["put_stored"] == 1
    reader.forget_memory()
    clock.advance(3600)
    assert reader.run("again", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize("others", ["another chunk's", "another rank's", "a whole one"])
def test_no_shard_is_taken_for_another(make_host, places, others, machines):
    """Mutants that mix parts of two chunks, or of two ranks, are found here."""
    host = store(start(make_host, places.directory(2)))
    first, second = shard_keys(host, 0), shard_keys(host, 1)
    wrong = second[3] if others == "another chunk's" else first[2]
    files = {path.stem[-64:]: path for path in places.root.rglob("*.safetensors")}
    content = files[wrong.hex()].read_bytes()
    if others == "a whole one":
        machines.are_many = False
        whole = make_host(store=f"file://{places.root}/whole", groups=groups())
        whole.run("writer", PROMPT)
        whole.settle()
        name = keys_of(whole)[2].hex()
        found = {path.stem[-64:]: path for path in (places.root / "whole").rglob("*.safetensors")}
        content = found[name].read_bytes()
        machines.are_many = True
    files[second[2].hex()].write_bytes(content)
    reader = start(make_host, places.directory(2))
    assert reader.run("reader", PROMPT).num_external_tokens == 16
    assert reader.observer["miss_other_record"] == 1


@pytest.mark.parametrize("split", ["heads", "layers"])
def test_ranks_that_are_apart_read_whole_records_from_the_first_look_up_on(
    make_host, places, machines, split
):
    machines.are_many = False
    whole = make_host(store=f"file://{places.root}/shared", groups=groups())
    whole.run("writer", PROMPT)
    whole.settle()
    machines.are_many = True
    host = make_host(
        store="file:///unused",
        rank_stores=places.directory(2),
        groups=groups(),
        world_size=2,
        stages=SPLITS[split][2],
    )
    assert host.run("reader", PROMPT).num_external_tokens == 40
    store(host, OTHER)
    assert host.observer["put_stored"] == 10
    host.forget_memory()
    assert host.run("again", PROMPT).num_external_tokens == 40


# -- faults -----------------------------------------------------------------------------------


def written(host, rank: int) -> bool:
    """Whether all shards of a rank are stored."""
    where = of_namespace(host, host.parts[rank].store).where
    return all(where(key) is HERE for key in shard_keys(host, rank))


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("kind", ["directory", "server"])
def test_a_chunk_counts_once_the_last_rank_has_stored_its_shard(make_host, places, kind, slow):
    gate = Gate()
    stores = getattr(places, kind)(2)
    stores[slow] = StallingStore(stores[slow], gate=gate, operations={"put"})
    host = start(make_host, stores)
    host.run("writer", PROMPT)
    where = of_namespace(host, host.scheduler.context.store).where
    wait_for(lambda: (host.run_for(0.1), written(host, 1 - slow))[1])
    host.run_for(0.1)
    assert host.pool.is_writing
    assert not any(where(key) is HERE for key in keys_of(host))
    gate.release()
    assert_settles(host)
    assert written(host, slow)
    assert all(where(key) is HERE for key in keys_of(host))
    is_whole = of_namespace(host, host.parts[0].store).where
    assert not any(is_whole(key) is HERE for key in keys_of(host))


@pytest.mark.parametrize("kind", ["directory", "directories"])
@pytest.mark.parametrize("full", [0, 1])
def test_a_chunk_that_one_rank_cannot_store_is_not_stored(make_host, places, kind, full):
    open_stores = getattr(places, kind)
    stores = open_stores(2)
    stores[full] = Refusing(stores[full])
    host = store(start(make_host, stores))
    where = host.scheduler.context.store.where
    assert not any(where(key) is HERE for key in keys_of(host))
    why = LookupMiss.REFUSED, f"rank {full}: full", FaultKind.FULL
    assert all(host.scheduler.requests.refused.why(key) == why for key in keys_of(host))
    host.close()
    # Another engine finds no shard of one rank, and stores it.
    reader = start(make_host, open_stores(2))
    assert reader.run("reader", PROMPT).num_external_tokens == 0
    assert_settles(reader)
    reader.close()
    reader = start(make_host, open_stores(2))
    assert reader.run("again", PROMPT).num_external_tokens == 40


def test_a_slot_has_no_other_chunk_while_a_rank_writes_from_it(make_host, places):
    """One rank has stored its shard, and another still writes."""
    gate, (first, second) = Gate(), places.directory(2)
    host = start(make_host, [StallingStore(first, gate=gate, operations={"put"}), second])
    request = host.admitted("writer", PROMPT)
    host.step([request], tokens=8)
    wait_for(lambda: (host.step([]), len(places.shards()) == 1)[1])
    assert gate.wait_for_arrival()
    host.step([])
    assert host.pool.num_taken == 1
    gate.release()
    wait_for(lambda: (host.step([]), not host.pool.num_taken)[1])
    assert host.scheduler.context.store.where(keys_of(host)[0]) is HERE


def spoil(host, rank: int) -> None:
    """Have a rank compute wrong KV from now on, as from blocks that were never filled."""
    real = host.ranks[rank].compute

    def compute(request, seeds, start, stop):
        real(request, [seed + 1 for seed in seeds], start, stop)

    host.ranks[rank].compute = compute


def not_copied(host) -> None:
    """A rank puts a step's saves off, as its load has failed."""
    worker = host.ranks[1].worker
    worker._save = worker._put_off


def not_hashed(host) -> None:
    """What a rank hashes is not finite."""
    real = host.ranks[1].compute

    def compute(request, seeds, start, stop):
        real(request, seeds, start, stop)
        for cache in host.ranks[1].caches.values():
            cache[list(request.block_ids[0])] = float("nan")

    host.ranks[1].compute = compute


@pytest.mark.parametrize("fails", [not_copied, not_hashed])
def test_no_rank_writes_what_another_one_cannot(make_host, places, fails):
    """What the others computed in that step may be wrong as well, and looks sound."""
    host = start(make_host, places.directory(2))
    spoil(host, 0)
    fails(host)
    request = host.admitted("writer", PROMPT)
    host.step([request], tokens=41)
    assert_settles(host)
    assert not places.shards()
    host.finish(request)
    host.close()
    again = store(start(make_host, places.directory(2)))
    again.forget_memory()
    assert again.run("reader", PROMPT).num_external_tokens == 40


def test_a_wrong_record_is_taken_out_of_the_store_of_each_rank(make_host, places):
    """Of directories of their own. Else the shard of one rank stays, and counts again."""
    prompt = PROMPT[:9]
    host = start(make_host, places.directories(2))
    for rank in range(2):
        spoil(host, rank)
    request = host.admitted("writer", prompt)
    host.step([request], tokens=9)
    host.finish(request)
    assert_settles(host)
    assert len(places.shards()) == 2
    host.close()
    auditor = start(make_host, places.directories(2), audit=1.0)
    auditor.run("auditor", prompt)
    wait_for(lambda: (auditor.step([]), not any(places.root.rglob("*.safetensors")))[1])
    assert auditor.observer["audit_mismatch"] == 1
    auditor.close()
    writer = start(make_host, places.directories(2))
    writer.run("writer", prompt)
    assert_settles(writer)
    writer.close()
    reader = start(make_host, places.directories(2))
    assert reader.run("reader", prompt).num_external_tokens == 8


def test_a_chunk_that_lacks_a_shard_is_stored_again_whenever_it_is_computed(make_host, places):
    """Also after the time in which it is not read again."""
    host = store(start(make_host, places.directories(2)))
    for name in shard_keys(host, 1):
        assert delete(host, 1, name)
    host.close()
    clock = FakeClock()
    reader = start(make_host, places.directories(2), clock=clock, load_timeout_seconds=60.0)
    request = reader.admitted("reader", PROMPT)
    reader.step([request], tokens=1)
    clock.advance(10.0)
    reader.prefill(request)
    reader.finish(request)
    assert_settles(reader)
    assert reader.observer["put_stored"] == 5
    reader.forget_memory()
    assert reader.run("again", PROMPT).num_external_tokens == 40


def test_a_shard_that_is_wrong_is_not_said_to_be_absent(make_host, places):
    """The whole record, which is tried next, is."""
    host = store(start(make_host, places.directory(2)))
    name = shard_keys(host, 1)[2].hex()
    (path,) = (each for each in places.root.rglob("*.safetensors") if each.stem.endswith(name))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    host.close()
    reader = start(make_host, places.directory(2))
    assert reader.run("reader", PROMPT).num_external_tokens == 16
    reason, why, *_ = reader.scheduler.requests.unreadable.why(keys_of(reader)[2])
    assert (reason, why) == (LookupMiss.DAMAGED, "bad_checksum")


def test_an_erased_chunk_takes_its_shards_along(make_host, places):
    host = store(start(make_host, places.directory(2)))
    names = {name_of_key(key) for key in keys_of(host)}
    for path in places.root.rglob("*.safetensors"):
        content = path.read_bytes()
        info = parse_head(memoryview(content), len(content))
        assert names & set(names_in((info.key, [content]))) == {name_of_key(info.of)}


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_store_that_hangs_on_one_machine_costs_a_bounded_time(make_host, places, stuck):
    store(start(make_host, places.directory(2)))
    gate = Gate()
    stores = places.directory(2)
    stores[stuck] = StallingStore(stores[stuck], gate=gate, operations={"read"})
    reader = start(make_host, stores, load_timeout_seconds=0.3, clock=time.monotonic)
    assert reader.run("reader", PROMPT).num_external_tokens == 0
    gate.release()
    assert_settles(reader)
    reader.run("again", PROMPT)  # right, wherever it comes from
    assert_settles(reader)


def test_a_machine_without_the_store_stores_and_reads_nothing_and_says_who_it_is(make_host, places):
    host = store(start(make_host, places.server(2)))
    stores = places.server(2)
    host = start(make_host, stores)
    places.clients[-1].down = True
    assert host.run("reader", PROMPT).num_external_tokens == 0
    why = host.scheduler.requests.unreadable.why(keys_of(host)[0])
    assert (why.reason, why.kind) == (LookupMiss.AWAY, FaultKind.AWAY)
    assert why.why.startswith("rank 1: ")
    store(host, OTHER)
    refused = host.scheduler.requests.refused.why(keys_of(host, OTHER)[0])
    assert (refused.reason, refused.kind) == (LookupMiss.REFUSED, FaultKind.AWAY)
    assert refused.why.startswith("rank 1: ")


def test_a_rank_that_describes_the_model_in_another_way_says_so_and_all_go_on(
    make_host, places, caplog
):
    host = start(make_host, places.directory(2))
    other = start(make_host, places.directory(2), config={"model_type": "other"})
    host.ranks[1] = other.ranks[1]
    host.run("writer", PROMPT)
    host.settle()
    assert host.run("again", OTHER).num_external_tokens == 0
    assert host.scheduler.identity.state.is_final
    said = [line for line in caplog.messages if "the model" in line]
    assert len(said) == 2  # the scheduler role's, and the rank's
    assert any(line.startswith("rank 1 describes the model in another way") for line in said)
    assert {info.key for info in places.shards()} <= set(shard_keys(host, 0))  # of the first step


@pytest.mark.parametrize("told_by", ["report", "handshake"])
@pytest.mark.parametrize("are_many", [True, False])
@pytest.mark.parametrize("surplus", [-1, 0, 1])
def test_a_machine_with_another_number_of_slots_stops_all(
    make_host, places, machines, monkeypatch, surplus, are_many, told_by
):
    """Else the scheduler role names slots that a rank lacks: sound shards would be taken out, and
    saves would raise."""
    store(start(make_host, places.directory(2))).close()
    machines.are_many = are_many
    count = PrefixCache._count_slots
    monkeypatch.setattr(
        PrefixCache, "_count_slots", lambda cache: count(cache) + surplus * cache._spec.shard.rank
    )
    if told_by == "report":  # what ended first brings it
        monkeypatch.setattr(CacheScheduler, "learn_regions", lambda _self, _regions: None)
    host = start(make_host, places.directory(2))
    host.run("first", range(200, 209))
    host.settle()
    num_read = host.run("reader", PROMPT).num_external_tokens
    host.run("writer", OTHER)
    assert_settles(host)
    assert host.observer["hook_failed"] == 0
    assert host.scheduler.identity.state.is_final == bool(surplus)
    if surplus:
        assert num_read == 0
        assert len(places.shards()) == 10
        number = host.pool.num_slots
        why = (
            f"rank 1 has memory for {number + surplus} chunks, and the scheduler counts on {number}"
        )
        assert why in host.scheduler.identity.state.why
        assert "memory_bytes" in host.scheduler.identity.state.why
    else:
        assert num_read == (40 if are_many else 0)
        assert len(places.shards()) > 10


def test_the_store_of_the_scheduler_role_knows_shards_by_the_keys_of_chunks(make_host, places):
    host = store(start(make_host, places.directory(2)))
    sharded, key = host.scheduler.context.store, keys_of(host)[0]
    shards = [shard_keys(host, rank)[0] for rank in range(2)]
    ranks = host.scheduler.saves.shared_writes.ranks
    assert ranks.names_of([key]) == [key, *shards]
    assert sharded.tier_of(key) == "file"
    sharded.discard(key, "wrong")
    left = {info.key for info in places.shards()}
    assert not left & {key, *shards}
    assert len(left) == 8
    assert sharded.delete(keys_of(host)[1])
    assert not sharded.delete(keys_of(host)[1])
    assert len(places.shards()) == 6


@pytest.mark.parametrize("is_stored", [True, False])
@pytest.mark.parametrize("kind", ["directory", "directories"])
def test_what_a_request_pins_are_the_shards_of_all_ranks(make_host, places, kind, is_stored):
    stores = getattr(places, kind)(2)
    host = start(make_host, stores)
    if is_stored:
        store(host)
    request = host.admitted("kept", PROMPT, options=RequestOptions(pin=3600.0))
    host.prefill(request)
    host.finish(request)
    names = [*shard_keys(host, 0), *shard_keys(host, 1)]

    def pinned() -> set[bytes]:
        entries = [entry for each in stores for entry in each.catalogue().scan()]
        return {entry.key for entry in entries if entry.pinned_until > time.time()}

    wait_for(lambda: (host.step([]), pinned() == set(names))[1])
    assert host.observer["pins_refused"] == 0


@pytest.mark.parametrize("split", ["heads", "replicas", "a stage without layers"])
def test_each_rank_touches_its_shards_of_what_a_request_used(make_host, places, split):
    """Also if its memory had them: each machine may have a directory, which evicts by use."""
    world_size = SPLITS[split][1]
    host = store(start(make_host, places.directories(world_size), split))
    touched = [[] for _ in host.parts]
    for part, keys in zip(host.parts, touched, strict=True):
        part.store.touch = keys.extend
        part.store.read = None  # calls fail
    assert host.run("again", PROMPT).num_external_tokens == 40
    names = [
        shard_keys(host, rank) if host.ranks[rank].worker._rows.own else []
        for rank in range(world_size)
    ]
    wait_for(lambda: (host.step([]), all(map(ends_with, touched, names)))[1])


def ends_with(keys, names) -> bool:
    return keys[len(keys) - len(names) :] == names


def test_replicas_that_share_memory_write_one_shard(make_host, places):
    """The first of them reads and writes; the other one only loads."""
    host = start(make_host, places.directory(4), "replicas", engine_id="stores")
    assert [rank.worker.region.loads_only for rank in host.ranks] == [False, True] * 2
    store(host)
    assert host.observer["put_stored"] == 10
    assert host.observer["put_exists"] == 0
    where = host.scheduler.context.store.where
    assert all(where(key) is HERE for key in keys_of(host))
    reader = start(make_host, places.directory(4), "replicas", engine_id="reads")
    assert reader.run("reader", PROMPT).num_external_tokens == 40


def test_replicas_of_several_machines_share_the_memory_of_the_first_of_each(make_host, places):
    split, given = "one head on two machines", {"ranks_per_machine": 2}
    host = start(make_host, places.directory(4), split, engine_id="stores", **given)
    regions = [rank.worker.region for rank in host.ranks]
    assert [region.loads_only for region in regions] == [False, True] * 2
    names = [region.name for region in regions]
    assert names == [names[0], names[0], names[2], names[2]]
    assert names[0] != names[2]
    store(host)
    assert host.observer["put_stored"] == 5
    reader = start(make_host, places.directory(4), split, engine_id="reads", **given)
    assert reader.run("reader", PROMPT).num_external_tokens == 40
    assert_settles(reader)
    assert not reader.scheduler.identity.state.is_final


@pytest.mark.parametrize("split", ["heads", "layers"])
def test_what_was_read_of_shards_is_audited(make_host, places, split):
    store(start(make_host, places.directory(2), split))
    reader = start(make_host, places.directory(2), split, audit="first")
    assert 0 < reader.run("reader", PROMPT).num_external_tokens < 40
    assert_settles(reader)
    assert reader.observer["audits"] == 1
    assert reader.observer["audit_mismatch"] == 0
