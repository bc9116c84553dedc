"""The KV of draft layers: stored beside chunks, brought back with them if it is there, and never a
reason for or against a hit."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kvferry.cache import replicas
from kvferry.cache.deciding import rank_slots
from kvferry.cache.moving import drafts as drafts_module
from kvferry.cli.main import main
from kvferry.contract.driver import StepDriver
from kvferry.contract.spec import DraftSpec
from kvferry.errors import FaultKind, StoreError, TransferError
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.record.check import RecordInfo
from kvferry.store.base import NO_DEADLINE
from kvferry.store.erasures import name_of_key
from kvferry.store.file.store import FileStore
from kvferry.store.maintenance import inspect, is_misnamed
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.faults import FailingStore
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ExtraKeys, TablePart
from tests.cache.hosts import make_groups
from tests.cache.moving.simulated_device import SimulatedDevice
from tests.host_tables import HostRank
from tests.simulated_host import prefix_seeds

from .keeping import NUM_CHUNKS, PROMPT, assert_settles, flip, keys_of, wait_for

MODEL = make_groups(num_layers=12, num_kv_heads=4)
DRAFTER, OTHER = b"d" * 16, b"o" * 16
GROUPS = make_groups(num_layers=1, num_kv_heads=4, head_dim=8)


MODEL_OF_ONE = make_groups(num_layers=40, num_kv_heads=1)
GROUPS_OF_ONE = make_groups(num_layers=1, num_kv_heads=1, head_dim=8)


def drafts_of(rank: int, *, drafter: bytes = DRAFTER, groups=GROUPS, world_size: int = 1):
    """The draft layers of one rank, in the model's only table."""
    tables = tuple(
        TablePart(
            table=0,
            group=index,
            layers=tuple(range(group.num_layers)),
            layer_names=tuple(f"draft.{index}.{layer}" for layer in range(group.num_layers)),
            block_size=group.block_size,
        )
        for index, group in enumerate(groups)
    )
    shard = tensor_parallel_shard(groups, rank, world_size)
    return DraftSpec(drafter=drafter, groups=groups, shard=shard, tables=tables)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def make(make_host, url: str):
    def make(
        drafter: bytes | None = DRAFTER, *, world_size=1, groups=GROUPS, model=MODEL, **options
    ):
        drafts = partial(drafts_of, drafter=drafter, groups=groups, world_size=world_size)
        options.setdefault("memory_bytes", 64 << 20)
        return make_host(
            **{"store": url, "groups": model, **options},
            world_size=world_size,
            drafts=None if drafter is None else drafts,
        )

    return make


def stored(make, **options):
    """Store the prompt; return the engine."""
    writer = make(**options)
    writer.run("writer", PROMPT)
    writer.settle()
    assert_settles(writer)
    return writer


def read(host) -> tuple[int, int]:
    """Read the prompt. Return the tokens of the hit, and of how many the drafts are wrong."""
    request = host.admitted("reader", PROMPT)
    host.prefill(request)
    seeds = prefix_seeds(request)
    wrong = sum(rank.wrong_drafts(request, seeds, len(PROMPT)) for rank in host.ranks)
    hit = request.num_external_tokens
    host.finish(request)
    return hit, wrong


def files_of(directory: Path) -> dict[str, Path]:
    """The files of records by name."""
    found = [path for path in directory.rglob("*.safetensors") if "quarantine" not in path.parts]
    return {path.name: path for path in found}


def draft_files(directory: Path) -> list[Path]:
    """Those of drafts, in the order of the prompt."""
    heads = {path: path.read_bytes()[:4096] for path in files_of(directory).values()}
    found = [path for path, head in heads.items() if b'"draft.' in head]
    return sorted(found, key=lambda path: int(re.search(rb'first_token":"(\d+)', heads[path])[1]))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_drafts_come_back_with_the_hit_of_another_engine(make, world_size):
    writer = stored(make, world_size=world_size)
    wait_for(lambda: writer.observer["saved_drafts"] == NUM_CHUNKS * world_size)
    reader = make(world_size=world_size)
    assert read(reader) == (40, 0)
    assert reader.observer["loaded_drafts"] == NUM_CHUNKS * world_size
    assert reader.observer["lacking_drafts"] == 0


@pytest.mark.parametrize("has_room", [True, False])
def test_of_a_long_prompt_all_drafts_are_stored_while_there_is_room(make, monkeypatch, has_room):
    """Several ranks hash chunks faster than a store takes drafts."""
    if not has_room:
        monkeypatch.setattr(drafts_module, "MAX_WAITING_BYTES", 1)
    writer = make(world_size=2, num_blocks=600)
    writer.run("writer", range(801))
    assert_settles(writer)
    names = ("saved_drafts", "drafts_failed")
    wait_for(lambda: sum(writer.observer[each] for each in names) == 200)
    found = [writer.observer[each] for each in names]
    assert (found == [200, 0]) is has_room


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({"drafter": None}, {}),
        ({"drafter": OTHER}, {}),
        ({"groups": make_groups(num_layers=2, num_kv_heads=4, head_dim=8)}, {}),
        ({"world_size": 2}, {}),
        ({"world_size": 2}, {"world_size": 4}),
        ({}, {"drafter": None}),
    ],
    ids=str,
)
def test_drafts_that_lack_or_are_of_another_drafter_or_split_cost_no_hit(make, writer, reader):
    stored(make, **writer)
    reader = make(**reader)
    hit, wrong = read(reader)
    assert hit == 40
    assert wrong == 40 * len(reader.ranks) * (reader.ranks[0].worker._drafts is not None)
    assert not [name for name in reader.observer.sums() if re.match("miss_(?!tokens)", name)]


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 5000), Path.unlink])
def test_a_damaged_or_missing_record_of_drafts_costs_its_own_drafts_alone(make, tmp_path, damage):
    stored(make)
    files = draft_files(tmp_path)
    assert len(files) == NUM_CHUNKS
    damage(files[2])
    reader = make()
    assert read(reader) == (40, 8)
    assert reader.observer["lacking_drafts"] == 1
    assert reader.observer["records_corrupt"] == 0
    assert len(draft_files(tmp_path)) == NUM_CHUNKS - 1


class NoDrafts(FailingStore):
    """A store that fails for records of drafts alone."""

    def __init__(self, inner, operation: str) -> None:
        super().__init__(inner, operations=[operation])
        self.of_drafts: set[bytes] = set()

    def read(self, key, *args):
        return super().read(key, *args) if key in self.of_drafts else self.inner.read(key, *args)

    def put(self, key, buffers, *args):
        is_draft = b'"draft.' in bytes(buffers[0][:1024])
        return super().put(key, buffers, *args) if is_draft else self.inner.put(key, buffers, *args)


def test_a_store_that_fails_for_drafts_alone_stores_and_serves_all_else(make, url):
    store = NoDrafts(FileStore(url.removeprefix("file://")), "put")
    writer = stored(make, store=store)
    assert (writer.observer["put_stored"], writer.observer["saved_drafts"]) == (NUM_CHUNKS, 0)
    assert writer.observer["save_failed"] == 0
    assert read(make()) == (40, 40)


def test_a_store_that_fails_to_read_drafts_serves_all_else(make, url, tmp_path):
    stored(make)
    store = NoDrafts(FileStore(url.removeprefix("file://")), "read")
    store.of_drafts = {bytes.fromhex(path.name[:64]) for path in draft_files(tmp_path)}
    assert read(make(store=store)) == (40, 40)


class LateDrafts(WrapperStore):
    """A store whose reads of drafts end at their deadlines; others first take a while."""

    def __init__(self, inner, of_drafts: set[bytes], seconds: float) -> None:
        super().__init__(inner)
        self.of_drafts, self.seconds = of_drafts, seconds
        self.given: list[float] = []

    def read(self, key, ranges, deadline=NO_DEADLINE):
        left = self.seconds if key not in self.of_drafts else deadline - time.monotonic()
        threading.Event().wait(left)
        if key in self.of_drafts:
            self.given.append(left)
            raise StoreError(FaultKind.LATE, "late")
        return self.inner.read(key, ranges, deadline)


@pytest.mark.parametrize("seconds", [0.0, 1.1 * Patience().long_seconds])
def test_late_drafts_hold_up_few_reads_and_send_no_tier_away(
    make, url, tmp_path, monkeypatch, seconds
):
    stored(make)
    of_drafts = {bytes.fromhex(path.name[:64]) for path in draft_files(tmp_path)}
    late = LateDrafts(FileStore(url.removeprefix("file://")), of_drafts, seconds)
    monkeypatch.setattr(drafts_module, "PAUSE_SECONDS", 3600.0)
    reader = make(store=TieredStore([late]), io_threads=2)
    assert read(reader) == (40, 40)
    assert 1 <= (num_late := len(late.given)) <= 2  # each thread had begun one
    assert max(late.given) < Patience().long_seconds
    reader.forget_memory()
    reader.ranks[0].worker._drafts._paused_until = 0.0
    assert read(reader) == (40, 40)
    assert len(late.given) > num_late


def test_records_of_the_model_do_not_know_of_the_drafter(make, tmp_path):
    stored(make)
    with_drafts = {name: path.read_bytes() for name, path in files_of(tmp_path).items()}
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    stored(make, drafter=None)
    alone = {name: path.read_bytes() for name, path in files_of(tmp_path).items()}
    assert len(alone) == NUM_CHUNKS
    assert alone.items() <= with_drafts.items()


def test_drafts_that_are_not_finite_are_not_stored(make):
    writer = make()
    request = writer.admitted("writer", PROMPT)
    writer.ranks[0].values = lambda layer, seeds: (
        HostRank.values(writer.ranks[0], layer, seeds)
        * (float("nan") if layer.name.startswith("draft") else 1.0)
    )
    writer.prefill(request)
    writer.finish(request)
    assert_settles(writer)
    assert (writer.observer["put_stored"], writer.observer["saved_drafts"]) == (NUM_CHUNKS, 0)
    assert writer.observer["save_not_finite"] == 0


def test_tensors_of_drafts_that_are_not_as_described_cost_their_drafts_alone(make, caplog):
    writer = make()
    [rank] = writer.ranks
    rank.worker.unregister_kv_caches()
    of_drafts = rank.caches["draft.0.0"]
    num_blocks, heads, size, content = of_drafts.shape
    split = of_drafts.new_zeros(2 * num_blocks, heads, size // 2, content)
    rank.worker.register_kv_caches(rank.caches | {"draft.0.0": split})
    assert "neither stored nor loaded" in caplog.text
    writer.run("writer", PROMPT)
    assert_settles(writer)
    assert (writer.observer["put_stored"], writer.observer["saved_drafts"]) == (NUM_CHUNKS, 0)


def test_a_fault_that_is_not_foreseen_in_drafts_loses_no_chunk(make, monkeypatch):
    writer = make()
    [rank] = writer.ranks
    rank.driver = StepDriver(rank.worker)  # as hosts have it: a fault is logged, and they go on

    def fails(_chunks):
        raise RuntimeError("not foreseen")

    monkeypatch.setattr(rank.worker._drafts._copies, "gather", fails)
    writer.run("writer", PROMPT)
    assert_settles(writer)
    assert (writer.observer["put_stored"], writer.observer["saved_drafts"]) == (NUM_CHUNKS, 0)


def test_a_drafter_as_large_as_the_model_is_left_out(make, caplog):
    writer = stored(make, groups=MODEL)
    assert "would be no smaller" in caplog.text
    assert (writer.observer["put_stored"], writer.observer["saved_drafts"]) == (NUM_CHUNKS, 0)


def test_a_prompt_is_erased_with_its_drafts(make, url, tmp_path):
    writer = make()
    for salt in ("alice", "bob"):
        writer.run(salt, PROMPT, extra_keys=ExtraKeys(cache_salt=salt))
    assert_settles(writer)
    assert len(draft_files(tmp_path)) == 2 * NUM_CHUNKS
    (ids := tmp_path / "ids").write_text(json.dumps(PROMPT))
    namespace = writer.scheduler.requests.namespace.hex()
    prompt = ["--namespace", namespace, "--tokens", str(ids), "--salt", "alice"]
    assert main(["rm", url, *prompt, "--yes"]) == 0
    assert len(files_of(tmp_path)) == 2 * NUM_CHUNKS
    assert len(draft_files(tmp_path)) == NUM_CHUNKS
    assert main(["rm", url, "--salt", "bob", "--yes"]) == 0
    assert files_of(tmp_path) == {}


def test_drafts_of_what_was_erased_are_not_written_and_taken_back(make, tmp_path):
    writer = make()
    writer.run("writer", PROMPT)
    assert_settles(writer)
    erasures = writer.parts[0].store._erasures
    erasures._hear({name_of_key(key): 0.0 for key in keys_of(writer)})
    assert files_of(tmp_path) == {}
    writer.forget_memory()
    writer.run("again", PROMPT)
    assert_settles(writer)
    assert files_of(tmp_path) == {}


def test_commands_take_records_of_drafts_for_what_they_are(make, url, tmp_path):
    stored(make)
    assert main(["verify", url]) == 0
    other = f"file://{tmp_path}/other"
    assert main(["copy", url, other, "--join"]) == 0
    assert len(draft_files(tmp_path / "other")) == NUM_CHUNKS
    assert read(make(store=other)) == (40, 0)


@pytest.mark.parametrize("options", [[], ["--join"]], ids=str)
def test_a_prompt_is_copied_with_its_drafts_also_where_they_are(make, url, tmp_path, options):
    writer, other = stored(make), f"file://{tmp_path}/other"
    (ids := tmp_path / "ids").write_text(json.dumps(PROMPT))
    prompt = ["--namespace", writer.scheduler.requests.namespace.hex(), "--tokens", str(ids)]
    for _ in range(2):
        assert main(["copy", url, other, *prompt, *options]) == 0
    assert len(draft_files(tmp_path / "other")) == NUM_CHUNKS
    assert read(make(store=other)) == (40, 0)


def test_the_name_of_a_record_of_drafts_is_its_drafters(make, tmp_path):
    stored(make)
    store = FileStore(tmp_path / "store")
    try:
        heads = [inspect(store, entry) for entry in store.catalogue().scan()]
    finally:
        store.close()
    found = [info for info in heads if isinstance(info, RecordInfo) and info.of]
    assert {info.schema.drafter for info in found} == {DRAFTER}
    assert not any(info.is_shard or is_misnamed(info) for info in found)
    renamed = replace(found[0], key=found[1].key)
    assert is_misnamed(renamed)


def test_a_device_that_is_late_brings_drafts_with_the_rest(make):
    """Streams that run beside each other, and copies that go on after a call has returned."""
    device = SimulatedDevice()
    writer = stored(make, setup=device.setup(chunk_tokens=8))
    assert writer.observer["saved_drafts"] == NUM_CHUNKS
    assert read(make(setup=SimulatedDevice().setup(chunk_tokens=8))) == (40, 0)


class Ordered(WrapperStore):
    """A store that notes what is written, in order, and what is used."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.written: list[tuple[bool, int]] = []
        self.touched: set[bytes] = set()

    def touch(self, keys):
        self.touched |= set(keys)

    def put(self, key, buffers, *args):
        head = bytes(buffers[0][:4096])
        of = int(re.search(rb'first_token":"(\d+)', head)[1])
        self.written.append((b'"draft.' in head, of))
        return self.inner.put(key, buffers, *args)


def test_whoever_finds_a_chunk_finds_its_drafts(make, url):
    store = Ordered(FileStore(url.removeprefix("file://")))
    stored(make, store=store)
    assert len(store.written) == 2 * NUM_CHUNKS
    for of in range(0, 40, 8):
        assert store.written.index((True, of)) < store.written.index((False, of))


def test_ranks_that_share_memory_share_the_drafts_in_it(make, monkeypatch, tmp_path):
    monkeypatch.setattr(replicas.tempfile, "gettempdir", lambda: str(tmp_path))
    one = {"groups": GROUPS_OF_ONE, "model": MODEL_OF_ONE, "world_size": 2}
    writer = stored(make, **one, engine_id="writer")
    wait_for(lambda: writer.observer["saved_drafts"] == NUM_CHUNKS)
    assert writer.ranks[1].worker._replicas.loads_only
    reader = make(**one, engine_id="reader")
    assert read(reader) == (40, 0)
    assert reader.observer["loaded_drafts"] == 2 * NUM_CHUNKS
    assert len(draft_files(tmp_path)) == NUM_CHUNKS


def test_ranks_on_several_machines_write_and_read_their_drafts(make, monkeypatch, tmp_path):
    def closed(*_where):
        raise TransferError("no such process on this machine")

    monkeypatch.setattr(rank_slots, "open_slots", closed)
    split = {"world_size": 2, "model": make_groups(num_layers=24, num_kv_heads=4)}
    writer = make(**split)
    for name in ("first", "second"):  # ranks turn out to be apart once they have reported
        writer.forget_memory()
        writer.run(name, PROMPT)
        assert_settles(writer)
    assert writer.observer["saved_drafts"] == 2 * NUM_CHUNKS
    assert len(draft_files(tmp_path)) == 2 * NUM_CHUNKS
    reader = make(**split)
    assert [read(reader)[0] for _ in range(2)][1] == 40
    assert reader.observer["loaded_drafts"] > 0


def test_drafts_that_are_loaded_from_memory_are_as_used_as_their_chunks(make, url, tmp_path):
    store = Ordered(FileStore(url.removeprefix("file://")))
    writer = stored(make, store=store)
    drafts = {bytes.fromhex(path.name[:64]) for path in draft_files(tmp_path)}
    assert read(writer) == (40, 0)
    wait_for(lambda: store.touched >= drafts)
    assert store.touched - drafts == set(keys_of(writer))


def test_another_epoch_of_weights_has_other_drafts(make, tmp_path):
    host = stored(make)
    before = set(draft_files(tmp_path))
    host.scheduler.reset()
    host.run("reset", PROMPT)
    assert_settles(host)
    after = set(draft_files(tmp_path)) - before
    assert len(after) == NUM_CHUNKS
    namespaces = {
        re.search(rb'namespace":"(\w+)', path.read_bytes()[:4096])[1] for path in before | after
    }
    assert len(namespaces) == 2
