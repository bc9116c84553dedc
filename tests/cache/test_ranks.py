"""Several ranks write one record together and read only their part of it."""

from __future__ import annotations

import pytest
from msgspec import structs

from benchmarks.host import HostStep
from kvferry.blocks.tables import BlockSlice
from kvferry.cache.messages import (
    CacheMeta,
    Filled,
    RankReport,
    Save,
    SlotChunk,
)
from kvferry.contract.messages import LookupMiss, WorkerOutput
from kvferry.errors import ConfigError, Fault, FaultKind
from kvferry.record.check import ReadFault
from kvferry.store.base import Put
from kvferry.store.file.store import FileStore
from kvferry.testing.wrappers import WrapperStore
from tests.cache.hosts import make_groups
from tests.cache.pools import check_pool

from .keeping import PROMPT, assert_settles, keys_of, lose_chunk, run_until_stored, wait_for


def groups(num_kv_heads: int = 4):
    return make_groups(num_layers=3, num_kv_heads=num_kv_heads)


def store_prompt(
    make_host, url: str, *, world_size: int, num_kv_heads: int = 4, model=None, **options
):
    model = model or groups(num_kv_heads)
    host = make_host(store=url, groups=model, world_size=world_size, **options)
    run_until_stored(host, PROMPT, budget=8)
    return host


@pytest.fixture
def url(tmp_path) -> str:
    return f"file://{tmp_path}/store"


@pytest.mark.parametrize("num_kv_heads", [4, 1, 2])
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 2), (4, 4), (1, 4), (4, 1), (2, 4)])
def test_stored_at_one_tensor_parallel_size_read_at_another(
    make_host, url: str, writers: int, readers: int, num_kv_heads: int
):
    host = store_prompt(make_host, url, world_size=writers, num_kv_heads=num_kv_heads)
    assert host.observer["put_stored"] == 5
    assert host.parts[0].store.stat().num_records == 5
    reader = make_host(store=url, groups=groups(num_kv_heads), world_size=readers)
    # The host checks every byte of every rank.
    assert reader.run("reader", PROMPT).num_external_tokens == 40


def test_a_chunk_is_in_hand_on_all_ranks_or_not_promised(make_host, url: str, tmp_path):
    store_prompt(make_host, url, world_size=1)
    reader = make_host(store=url, groups=groups(), world_size=2)
    # Damage a row of the last head, which only rank 1 reads.
    record = sorted((tmp_path / "store").rglob("*.safetensors"))[0]
    content = bytearray(record.read_bytes())
    content[-1] ^= 1
    record.write_bytes(content)
    hit = reader.run("reader", PROMPT).num_external_tokens
    assert hit in (0, 8, 16, 24, 32)
    assert reader.observer["miss_bad_checksum"] == 1


def test_ranks_that_race_with_other_writers_leave_one_whole_record(make_host, url: str):
    hosts = [make_host(store=url, groups=groups(), world_size=world_size) for world_size in (1, 2)]
    requests = [host.admitted("w", PROMPT) for host in hosts]

    def is_stored() -> bool:
        for host, request in zip(hosts, requests, strict=True):
            request.all_token_ids.append(3)  # what was put off is saved with the next tokens
            host.prefill(request, budget=16)
            host.settle()
        return sum(host.observer["put_stored"] for host in hosts) == 5

    wait_for(is_stored)
    reader = make_host(store=url, groups=groups(), world_size=4)
    assert reader.run("reader", PROMPT).num_external_tokens == 40
    assert reader.observer["records_corrupt"] == 0


def test_memory_store_is_refused_where_ranks_live_apart(make_host):
    with pytest.raises(ConfigError, match="memory"):
        make_host(store="memory://x", groups=groups(), world_size=2)


def test_groups_that_replicate_differently_are_stored_whole(make_host, url: str):
    both = (
        *make_groups(num_layers=2, num_kv_heads=2, block_size=4),
        *make_groups(num_layers=1, num_kv_heads=4, head_dim=8, block_size=8),
    )
    host = store_prompt(make_host, url, world_size=4, model=both)
    assert host.observer["put_stored"] == 5
    reader = make_host(store=url, groups=both, world_size=2)
    assert reader.run("reader", PROMPT).num_external_tokens == 40


def test_failures_of_one_rank_do_not_excuse_those_of_another(make_host, url: str):
    """What a step computed on a failed load must not be saved, whichever rank failed before."""
    host = promised(make_host, url)
    request = host.request
    request.num_scheduled_tokens = 1
    plan = host.scheduler.build_plan(HostStep([request], set(), set()))
    chunk = SlotChunk(host.pool.num_slots - 1, bytes(32), 0)
    save = Save(chunk, tuple(BlockSlice(0, tuple(t[:2])) for t in request.block_ids))
    plan = structs.replace(plan, failures_known=(1, 0), saves=(save,))
    for key in keys_of(host):
        lose_chunk(host, key, rank=1)
    with host.ranks[1].driver.step(plan, set()) as step:
        pass
    (report,) = step.output.meta.reports
    assert set(report.failed_keys) == set(keys_of(host))
    assert report.failed_requests == {"reader"}
    assert report.failures == 1
    assert report.filled == (Filled(chunk.slot, ReadFault.CANCELLED),)
    assert not report.saved
    assert plan.filled_blocks() == step.output.invalid_block_ids


def promised(make_host, url: str):
    """A host of two ranks that was promised all of the prompt; no plan has carried the load."""
    store_prompt(make_host, url, world_size=2)
    host = make_host(store=url, groups=groups(), world_size=2)
    host.request = host.add("reader", PROMPT)
    assert host.admit(host.request) == 40
    return host


def test_the_scheduler_remembers_failures_by_rank(make_host, url: str):
    host = promised(make_host, url)
    for rank in range(2):
        for key in keys_of(host):
            lose_chunk(host, key, rank=rank)
    host.prefill(host.request)
    assert host.scheduler.saves.failures_known == (1, 1)
    meta = CacheMeta(reports=(RankReport(rank=1, pool=host.pool.pool_id, failures=7),))
    host.scheduler.update_output(WorkerOutput(meta=meta))
    assert host.scheduler.saves.failures_known == (1, 7)


def test_what_was_copied_for_a_refused_record_is_held_and_not_written(
    make_host, url: str, tmp_path
):
    stores = (Refusing(FileStore(tmp_path / "store")), FileStore(tmp_path / "store"))
    host = make_host(store=url, groups=groups(), world_size=2, rank_stores=stores)
    host.run("writer", PROMPT)
    wait_for(lambda: (host.settle(), host.observer["put_no_space"] == 5)[1])
    assert_settles(host)
    assert host.observer["save_failed"] == 5
    assert host.observer["saved_bytes"] == 0
    assert host.run("again", PROMPT).num_external_tokens == 40


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_chunk_has_the_reason_of_its_own_write(make_host, url: str, tmp_path, world_size):
    """Writes run at once; the scheduler learns of them later."""

    class EachForAnother(WrapperStore):
        def put(self, key: bytes, buffers: object, deadline: float = 0.0) -> Put:
            kind = list(FaultKind)[key[0] % len(FaultKind)]
            return Put.failed(Fault(kind, f"reason of {key.hex()}"))

    stores = [EachForAnother(FileStore(tmp_path / "store")) for _ in range(world_size)]
    host = make_host(store=url, groups=groups(), world_size=world_size, rank_stores=stores)
    host.run("writer", PROMPT)
    refused = host.scheduler.requests.refused
    wait_for(lambda: (host.settle(), all(key in refused for key in keys_of(host)))[1])
    for key in keys_of(host):
        kind = list(FaultKind)[key[0] % len(FaultKind)]
        assert refused.why(key) == (LookupMiss.REFUSED, f"reason of {key.hex()}", kind)


class Refusing(WrapperStore):
    """Has no room for any record."""

    def put(self, key: bytes, buffers: object, deadline: float = 0.0) -> Put:
        return Put.failed(Fault(FaultKind.FULL, "full"))


@pytest.mark.parametrize("plans_between", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("putting_off", [0, 1])
def test_a_part_that_was_put_off_is_asked_for_again_in_any_order_of_reports(
    make_host, url: str, putting_off: int, order: tuple[int, int], plans_between: bool
):
    host = make_host(store=url, groups=groups(), world_size=2)
    request = host.admitted("writer", PROMPT)
    request.num_scheduled_tokens = len(PROMPT)
    plan = host.scheduler.build_plan(HostStep([request], set(), set()))
    key, slot = plan.saves[0].chunk.key, plan.saves[0].chunk.slot
    for rank in order:
        ended = Filled(slot, ReadFault.CANCELLED if rank == putting_off else None)
        report = RankReport(rank=rank, pool=host.pool.pool_id, filled=(ended,))
        host.scheduler.update_output(WorkerOutput(meta=CacheMeta(reports=(report,))))
        check_pool(host.pool)
        if plans_between or rank == order[-1]:
            plan = host.scheduler.build_plan(HostStep([request], set(), set()))
    assert [save.chunk.key for save in plan.saves] == [key]
