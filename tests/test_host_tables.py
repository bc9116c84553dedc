"""The simulated host sees what a connector does wrong in its blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.host import HostRequest
from kvferry.contract.messages import EMPTY_OUTPUT, MISS, Plan
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.spec import EngineSpec
from kvferry.contract.worker import WorkerRole
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import KVGroup
from tests.host_tables import HostBlockPool, HostTable, parts_of_tables
from tests.simulated_host import SimulatedHost

TABLES = (
    HostTable(block_size=4, layers=((0, (0, 1)),)),
    HostTable(block_size=2, window=5, layers=((1, (0,)),)),
)


class Idle(SchedulerRole):
    """Finds nothing."""

    def lookup(self, request, num_local_tokens):
        return MISS

    def update_after_alloc(self, request, block_ids, num_external_tokens):
        pass

    def build_plan(self, step):
        return Plan()

    def update_output(self, output):
        pass


class Meddler(WorkerRole):
    """Does something to the tensors in every step."""

    def __init__(self, meddle=None) -> None:
        self.meddle = meddle

    def register_kv_caches(self, kv_caches):
        self.kv_caches = kv_caches

    def begin_step(self, plan):
        pass

    def start_load(self):
        pass

    def save(self):
        if self.meddle is not None:
            self.meddle(self.kv_caches)

    def collect(self, finished_request_ids):
        return EMPTY_OUTPUT

    def end_step(self):
        pass

    def close(self):
        pass


def host_with(meddle=None) -> SimulatedHost:
    groups = tuple(
        KVGroup(
            num_layers=layers,
            num_kv_heads=1,
            content_size=2,
            dtype="float32",
            block_size=4,
            window=window,
        )
        for layers, window in ((2, None), (1, 5))
    )
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
        tables=parts_of_tables(TABLES),
    )
    return SimulatedHost(Idle(), [(spec, Meddler(meddle))], num_blocks=200, tables=TABLES)


def test_a_host_alone_computes_what_it_checks():
    host = host_with()
    host.run("r", list(range(40)), budget=7, generate=[1, 2, 3])


def change(name: str, block: int):
    def meddle(kv_caches):
        kv_caches[name][block, 0, 0, 0] += 1

    return meddle


def overwrite(name: str, block: int):
    def meddle(kv_caches):
        kv_caches[name][block] = 1.0

    return meddle


@pytest.mark.parametrize(
    ("meddle", "message"),
    [
        pytest.param(change("0.1", 2), "hold wrong KV", id="a byte of the full table"),
        # Blocks of the second table begin at 27: 26 are those of 40 + 64 tokens in the first.
        pytest.param(change("1.0", 27 + 19), "hold wrong KV", id="a byte within the window"),
        pytest.param(overwrite("0.0", 27 + 19), "hold wrong KV", id="a block of the other table"),
        pytest.param(overwrite("0.0", 0), "null block", id="the null block"),
    ],
)
def test_what_was_meddled_with_is_seen(meddle, message: str):
    host = host_with(meddle)
    with pytest.raises(AssertionError, match=message):
        host.run("r", list(range(40)))


def test_what_was_dropped_may_be_written_by_others():
    """A block that left the window is somebody else's."""
    host = host_with(overwrite("1.0", 27 + 2))
    request = host.add("r", list(range(40)))
    host.admit(request)
    host.step([request], tokens=20)
    with pytest.raises(AssertionError, match="hold wrong KV"):
        host.check(request)
    host.step([request], tokens=20)
    host.check(request)


def test_an_attended_token_without_a_block_is_seen():
    host = host_with()
    request = host.add("r", list(range(40)))
    host.admit(request)
    host.step([request], tokens=20)
    request.block_ids[1][9] = 0
    with pytest.raises(AssertionError, match="without a block"):
        host.step([request], tokens=1)


@given(
    steps=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    block_size=st.integers(1, 5),
    window=st.none() | st.integers(1, 12),
)
def test_tables_hold_what_is_attended_to_and_drop_whole_blocks(
    steps: list[int], block_size: int, window: int | None
):
    pool = HostBlockPool(
        (HostTable(block_size=block_size, window=window, layers=((0, (0,)),)),), 80
    )
    request = HostRequest("r", [], 0)
    for tokens in steps:
        computed = request.num_computed_tokens
        pool.grow(request, computed + tokens)
        pool.check_integrity([request])
        (blocks,) = request.block_ids
        attended = 0 if window is None else max(0, computed - window + 1)
        held = [i for i, block in enumerate(blocks) if block]
        assert held == list(range(attended // block_size, -(-(computed + tokens) // block_size)))
        assert pool.num_missing(request) == 0
        request.num_computed_tokens += tokens
    pool.release(request)
    pool.check_integrity([])
