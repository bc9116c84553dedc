"""Copies that go on while the forward runs: each layer's are there when its hook returns."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.connectors.shared_storage import loads
from kvferry.connectors.shared_storage.layer_copies import LayerHooks
from kvferry.connectors.shared_storage.messages import SharedStoragePlan
from kvferry.connectors.shared_storage.rank_rows import RankRows
from kvferry.contract.guard import GuardedWorker
from kvferry.runner.lifecycle import StepLifecycle
from kvferry.store.memory import MemoryStore
from tests.connectors.shared_storage.device_host import (
    CHUNK,
    CHUNKS,
    LOADED,
    SAVED,
    DeviceHost,
    saves,
)

LAYERS = ["0.0", "0.1", "1.0"]
BLOCKS = {block for table in LOADED for block in table}


class Host(DeviceHost):
    """Steps with a forward whose layers see what their blocks hold at that moment."""

    def forward(self, layers=LAYERS):
        """By layer name, the bytes of its tokens when its hook returned."""
        seen = {}
        for name in layers:
            self.worker.wait_for_layer_load(name)
            group, layer = map(int, name.split("."))
            seen[name] = self.rows(LOADED)[group][layer].tobytes()
        return seen

    def learn(self, layers=LAYERS):
        """A step that shows which hooks there are."""
        self.begin()
        self.forward(layers)
        self.end()

    def load_step(self, ticket=1, **plan):
        self.prefetched.clear()
        self.prefetch(ticket)
        self.begin(loads=(self.load(ticket),), has_forward=True, **plan)


@pytest.fixture(autouse=True)
def spare_core(monkeypatch):
    monkeypatch.setattr(loads, "process_cpus", lambda: range(64))
    monkeypatch.setattr(loads, "SPREAD_BYTES", 0)
    monkeypatch.setattr(RankRows, "can_fail_by_block", True)  # though there are two tables


@pytest.fixture
def stored():
    """A store that holds all chunks; and by layer name, the bytes of its tokens."""
    store = MemoryStore("layers")
    writer = DeviceHost("NHD", store)
    writer.fill()
    rows = writer.rows(SAVED)
    writer.begin(saves=saves())
    writer.end()
    writer.settle(saved=3)
    writer.close()
    layers = {}
    for name in LAYERS:
        group, layer = map(int, name.split("."))
        layers[name] = rows[group][layer].tobytes()
    return store, layers


@pytest.fixture
def host(stored):
    host = Host("HND", stored[0])
    yield host
    host.close()
    assert host.parts.staging.num_free == host.parts.staging.num_slots


class Gate:
    """Holds up copies of threads that are not the test's, from a group on."""

    def __init__(self, monkeypatch):
        self.first_group = 0
        self.open = threading.Event()
        self.waiting = threading.Event()
        self.others = 0
        test = threading.current_thread()
        scatter = RankRows.scatter_layer

        def slow(rows, *args):
            if threading.current_thread() is not test and args[1].group >= self.first_group:
                self.others += 1
                self.waiting.set()
                assert self.open.wait(20)
            scatter(rows, *args)

        monkeypatch.setattr(RankRows, "scatter_layer", slow)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()


def test_the_first_hit_is_complete_before_the_forward(host, stored):
    host.load_step()
    assert_rows_by_layer(host, stored[1])
    host.end()
    assert host.observer["loads_beside_forward"] == 0


@pytest.mark.parametrize("delay", [0, 0.002], ids=["fast", "slow"])
def test_each_layer_is_there_when_its_hook_returns(host, stored, monkeypatch, delay):
    scatter, copying = RankRows.scatter_layer, set()

    def slow(rows, *args):
        copying.add(threading.current_thread().name)
        time.sleep(delay)
        scatter(rows, *args)

    monkeypatch.setattr(RankRows, "scatter_layer", slow)
    host.learn()
    for ticket in range(1, 6):
        for cache in host.caches:
            cache.whole.zero_()
        host.load_step(ticket)
        assert host.forward() == stored[1]
        host.end()
        assert not host.invalid
    assert host.observer["loads_beside_forward"] == 5
    assert host.observer["loaded_tokens"] == 5 * 3 * CHUNK
    if delay:
        assert len(copying) > 1, "nothing was copied beside the forward"


def test_a_layer_waits_for_its_own_copies_and_for_no_others(host, stored, gate):
    host.learn()
    gate.first_group = 1
    host.load_step()
    assert gate.waiting.wait(10)  # a thread has begun to copy the last layer, and hangs
    for name in LAYERS[:2]:
        assert host.forward([name])[name] == stored[1][name]
    assert not gate.open.is_set()
    threading.Timer(0.05, gate.open.set).start()
    assert host.forward(["1.0"])["1.0"] == stored[1]["1.0"]
    assert gate.open.is_set()
    host.end()
    assert not host.invalid


def test_threads_that_hang_in_the_store_hold_up_no_layer(host, stored):
    host.learn()
    host.prefetch(1)
    gate = threading.Event()
    pool = host.worker._load_pool
    hanging = [pool.submit(lambda _job: gate.wait(20)) for _ in range(pool.num_threads)]
    try:
        host.begin(loads=(host.load(1),), has_forward=True)
        assert host.forward() == stored[1]
        host.end()
        assert not host.invalid
        assert not any(job.poll() for job in hanging)
    finally:
        gate.set()


def test_hooks_are_asked_for_until_known_and_while_copies_are_under_way(host):
    lifecycle = StepLifecycle(GuardedWorker(host.worker))
    for plan, needed in (({}, True), ({}, False), ({"loads": (host.load(1),)}, True), ({}, False)):
        if plan:
            host.prefetch(1)
        with lifecycle.step(SharedStoragePlan(**plan, has_forward=True), ()) as step:
            hooks = lifecycle.layerwise
            assert (hooks is not None) == needed
            for name in LAYERS if hooks is not None else ():
                hooks.wait_for_layer_load(name)
                hooks.save_layer(name, None, None)
        assert not step.output.invalid_block_ids
    assert host.observer["loads_beside_forward"] == 1


@pytest.mark.parametrize("beside_forward", [False, True])
def test_a_forward_that_uses_hits_is_given_way_to_until_its_end(host, beside_forward):
    if beside_forward:
        host.learn()
    assert not host.worker._uses_hits()
    host.load_step()
    assert host.worker._uses_hits()
    host.forward()
    assert host.worker._uses_hits()
    host.end()
    assert not host.worker._uses_hits()
    assert host.observer["loads_beside_forward"] == beside_forward


def test_a_layer_without_a_hook_is_copied_before_the_forward(host, stored):
    host.learn(["0.1"])
    host.load_step()
    rows = host.rows(LOADED)
    assert rows[0][0].tobytes() == stored[1]["0.0"]
    assert rows[1][0].tobytes() == stored[1]["1.0"]
    assert host.forward(["0.1"])["0.1"] == stored[1]["0.1"]
    host.end()
    assert not host.invalid


def test_a_hook_that_stays_out_fails_the_hits_and_is_not_relied_on_again(host, stored):
    host.learn()
    host.load_step(saves=saves())
    host.forward(["0.0", "1.0"])
    host.end()
    assert host.invalid == BLOCKS
    assert host.observer["layer_hooks_missed"] == 1
    assert [saved.retry for saved in host.saved] == [True] * 3, "saved what may be wrong"
    host.invalid.clear()
    host.learn()
    for cache in host.caches:
        cache.whole.zero_()
    host.load_step(2)
    assert_rows_by_layer(host, stored[1])  # before any hook
    host.end()
    assert not host.invalid
    assert host.observer["loads_beside_forward"] == 1


def test_nothing_is_written_once_a_forward_has_failed(host, gate):
    host.learn()
    host.load_step()
    assert gate.waiting.wait(10)
    threading.Timer(0.05, gate.open.set).start()
    host.worker.end_step()
    assert gate.others <= 2 * host.worker._load_pool.num_threads
    after = host.snapshot()
    time.sleep(0.05)
    for cache, whole in zip(host.caches, after, strict=True):
        assert cache.whole.equal(whole)


def test_a_copy_that_fails_fails_its_chunk(host, stored, monkeypatch):
    scatter = RankRows.scatter_layer

    def broken(rows, slot, place, runs, first_token):
        if first_token == CHUNKS[1].first_token and place.layer == 1:
            raise OSError("a bad day")
        scatter(rows, slot, place, runs, first_token)

    monkeypatch.setattr(RankRows, "scatter_layer", broken)
    host.learn()
    host.load_step()
    host.forward()
    host.end()
    assert host.invalid == {block for table in LOADED for block in table[2:4]}
    assert host.observer["layer_hooks_missed"] == 0


def test_results_may_be_asked_for_before_the_save(host, stored):
    host.learn()
    host.load_step(saves=saves(LOADED))
    assert host.forward() == stored[1]
    host._collect()
    host.worker.wait_for_layer_load("a layer of a model that drafts")
    host.end()
    assert not host.invalid
    host.load_step(2)
    assert host.forward() == stored[1]
    host.end()
    assert not host.invalid


def test_no_core_to_spare_means_no_copies_beside_the_forward(stored, monkeypatch):
    monkeypatch.setattr(loads, "process_cpus", lambda: range(loads.torch.get_num_threads()))
    host = Host("HND", stored[0])
    try:
        host.learn()
        host.load_step()
        assert_rows_by_layer(host, stored[1])
        host.end()
        assert host.observer["loads_beside_forward"] == 0
    finally:
        host.close()


def test_an_engine_that_does_not_survive_failed_blocks_is_not_asked_to(host, stored, monkeypatch):
    monkeypatch.setattr(RankRows, "can_fail_by_block", False)
    host.learn()
    host.load_step()
    assert_rows_by_layer(host, stored[1])
    host.end()
    assert host.observer["loads_beside_forward"] == 0


def test_a_step_that_was_never_ended_leaves_no_copies_and_no_staging(host, gate, stored):
    host.learn()
    host.load_step()
    assert gate.waiting.wait(10)
    threading.Timer(0.05, gate.open.set).start()
    host.begin()
    after = host.snapshot()
    time.sleep(0.05)
    assert all(c.whole.equal(whole) for c, whole in zip(host.caches, after, strict=True))
    host.end()
    assert host.parts.staging.num_free == host.parts.staging.num_slots


def test_staging_of_a_load_that_was_never_begun_goes_back(host):
    host.prefetch(1)
    host.worker.begin_step(SharedStoragePlan(loads=(host.load(1),)))
    host.worker.end_step()
    assert host.parts.staging.num_free == host.parts.staging.num_slots


def test_hooks_are_relied_on_in_their_order_while_all_forwards_call_them():
    hooks = LayerHooks()
    for seen in (["b", "a", "c"], [], ["a", "b", "c", "d"], ["c", "b"]):
        hooks.begin_step()
        for name in seen:
            hooks.saw(name)
        hooks.end_forward()
        hooks.saw("draft")
    assert hooks.relied_on == ("b", "c")
    hooks.give_up()
    hooks.begin_step()
    hooks.saw("b")
    hooks.end_forward()
    assert hooks.relied_on == ()


def assert_rows_by_layer(host, layers):
    expected = [(layers["0.0"], layers["0.1"]), (layers["1.0"],)]
    for rows, several in zip(host.rows(LOADED), expected, strict=True):
        assert tuple(layer.tobytes() for layer in rows) == several
