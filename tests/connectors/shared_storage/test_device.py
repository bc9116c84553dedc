"""Copies beside the engine's work: right in every order that a device may choose, and on one."""

from __future__ import annotations

import time

import pytest
import torch

from kvferry.connectors.shared_storage import saves as saves_module
from kvferry.connectors.shared_storage import worker as worker_module
from kvferry.connectors.shared_storage.messages import Save, Session
from kvferry.connectors.shared_storage.rank_device import DeviceSetup
from kvferry.connectors.shared_storage.rank_rows import RankRows
from kvferry.errors import TransferError
from kvferry.store.io_pool import IOPool
from kvferry.store.memory import MemoryStore
from tests.connectors.shared_storage.device_host import (
    CHUNK,
    CHUNKS,
    LOADED,
    SAVED,
    DeviceHost,
    assert_rows,
    saves,
)
from tests.connectors.shared_storage.simulated_device import SimulatedDevice

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ORDERS = pytest.mark.parametrize("first", ["engine", "side"])
WAVES = pytest.mark.parametrize("num_bytes", [1, 256 << 20], ids=["waves of one", "one wave"])
PATHS = pytest.mark.parametrize("ticket", [1, None], ids=["from staging", "from the store"])


@pytest.fixture
def make():
    hosts = []

    def make_host(layout="NHD", store=None, **options):
        hosts.append(DeviceHost(layout, store or MemoryStore("device"), **options))
        return hosts[-1]

    yield make_host
    for host in hosts:
        host.close()


def stored(make):
    """A store that holds all chunks, and what their rows are."""
    store = MemoryStore("device")
    writer = make(store=store)
    writer.fill()
    expected = writer.rows(SAVED)
    writer.begin(saves=saves())
    writer.end()
    writer.settle(saved=3)
    assert store.stat().num_records == 3
    return store, expected


def long_work(device: str) -> None:
    """Work of the engine that a copy would overtake if nothing held it back."""
    if device == "cuda":
        torch.cuda._sleep(50_000_000)


@PATHS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "other"), [("NHD", "HND"), ("2BNHD", "NHD")])
def test_what_one_layout_saved_another_loads(make, device, layout, other, ticket):
    store = MemoryStore("device")
    writer = make(layout, store, device=device)
    long_work(device)
    writer.fill()
    writer.begin(saves=saves())
    writer.end()
    expected = writer.rows(SAVED)
    for cache in writer.caches:  # the next step, right behind
        cache.whole.zero_()
    writer.settle(saved=3)
    assert all(saved.stored for saved in writer.saved)
    reader = make(other, store, device=device)
    if ticket is not None:
        reader.prefetch(ticket)
    long_work(device)
    for cache in reader.caches:  # the step before reads and writes the blocks
        cache.whole.fill_(3)
    reader.begin(loads=(reader.load(ticket),))
    forward = reader.snapshot()
    reader.end()
    assert not reader.invalid
    reader.restore(forward)
    assert_rows(reader.rows(LOADED), expected)


@ORDERS
@WAVES
def test_a_save_takes_what_the_step_computed_before_the_next_step_overwrites_it(
    make, first, num_bytes
):
    device, store = SimulatedDevice(), MemoryStore("device")
    host = make(store=store, setup=device.setup(num_bytes=num_bytes))
    host.begin(saves=saves())
    expected = []
    device.compute(lambda: (host.fill(), expected.extend(host.rows(SAVED))))
    host.end()
    device.compute(lambda: host.fill(start=10**6))
    time.sleep(0.01)
    assert store.stat().num_records == 0, "written before the device was there"
    device.drain(first)
    host.settle(saved=3)
    assert all(saved.stored for saved in host.saved)
    reader = make("HND", store)
    reader.prefetch()
    reader.begin(loads=(reader.load(1),))
    assert_rows(reader.rows(LOADED), expected)


@ORDERS
@PATHS
def test_a_load_waits_for_the_step_before_and_the_forward_for_the_load(make, first, ticket):
    store, expected = stored(make)
    device = SimulatedDevice()
    host = make("HND", store, setup=device.setup())
    if ticket is not None:
        host.prefetch(ticket)
    device.compute(lambda: host.fill(start=77))  # still uses the blocks
    host.begin(loads=(host.load(ticket),))
    seen = []
    device.compute(lambda: seen.extend(host.rows(LOADED)))
    host.end()
    assert not host.invalid
    device.drain(first)
    assert_rows(seen, expected)


@PATHS
def test_staging_is_taken_until_the_device_has_read_it(make, ticket):
    store, _expected = stored(make)
    device = SimulatedDevice()
    host = make(store=store, setup=device.setup())
    if ticket is not None:
        host.prefetch(ticket)
    host.begin(loads=(host.load(ticket),))
    host.end()
    staging = host.parts.staging
    assert staging.num_free == staging.num_slots - 3
    device.drain()
    assert staging.num_free == staging.num_slots


def test_a_refused_part_of_a_shared_record_keeps_its_staging_until_it_was_copied(make):
    device = SimulatedDevice()
    host = make(setup=device.setup())
    save = saves()[0]
    host.begin(saves=(Save(save.chunk, save.blocks, shared=True),))
    host.end()
    host.begin(sessions=(Session(save.chunk.key, None),))
    host.end()
    staging = host.parts.staging
    assert staging.num_free == staging.num_slots - 1
    device.drain()
    assert staging.num_free == staging.num_slots


@pytest.mark.parametrize("device", ["simulated", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("bad", [-1, 10, 10**9])
def test_a_wrong_block_id_reaches_no_stream(make, device, bad):
    store, _expected = stored(make)
    simulated = SimulatedDevice()
    options = {"setup": simulated.setup()} if device == "simulated" else {"device": device}
    host = make(store=store, **options)
    host.prefetch()
    before = host.snapshot()
    tables = (LOADED[0], [*LOADED[1][:4], bad, 5])
    host.begin(saves=saves(tables)[2:], loads=(host.load(1, tables), host.load(None, tables)))
    host.end()
    simulated.drain()
    assert [saved.stored for saved in host.saved] == [False]
    assert bad in host.invalid
    # The last chunk of the first load, and all of the second, whose reads were never started.
    assert host.observer["load_failed_chunks"] == 4
    found = host.rows(LOADED)
    host.restore(before)
    for ours, old in zip(found, host.rows(LOADED), strict=True):
        assert ours[:, :, 2 * CHUNK :].tobytes() == old[:, :, 2 * CHUNK :].tobytes()


def test_saves_without_device_memory_are_put_off(make):
    device = SimulatedDevice()
    host = make(setup=device.setup(num_bytes=1))
    host.begin(saves=saves())
    device.compute(host.fill)
    device.memory_left = 3  # gather and copy of one chunk, gather of the next
    host.end()
    assert [(saved.key, saved.retry) for saved in host.saved] == [
        (chunk.key, True) for chunk in CHUNKS[1:]
    ]
    assert host.observer["save_no_device_memory"] == 1
    device.drain()
    host.settle(saved=3)
    assert host.saved[-1].stored
    staging = host.parts.staging
    assert staging.num_free == staging.num_slots


@pytest.mark.parametrize("which", ["NHD", "simulated"])
def test_saves_without_a_thread_are_put_off(make, monkeypatch, which):
    device = SimulatedDevice()
    host = make(setup=device.setup()) if which == "simulated" else make()
    submit, refused = IOPool.submit, [True, False, True]

    def sometimes(pool, run):
        if refused.pop(0):
            raise RuntimeError("can't start new thread")
        return submit(pool, run)

    monkeypatch.setattr(IOPool, "submit", sometimes)
    host.begin(saves=saves())
    host.fill()
    host.end()
    device.drain()
    host.settle(saved=3)
    assert {saved.key: (saved.stored, saved.retry) for saved in host.saved} == {
        CHUNKS[0].key: (False, True),
        CHUNKS[1].key: (True, False),
        CHUNKS[2].key: (False, True),
    }
    assert host.observer["save_no_thread"] == 2
    staging = host.parts.staging
    assert staging.num_free == staging.num_slots


@pytest.mark.parametrize(
    ("held_slots", "expected"),
    [(4, "copy copy copy submit submit submit"), (2, "copy copy submit submit copy submit")],
)
def test_what_follows_a_copy_waits_for_the_others_of_its_step(
    make, monkeypatch, held_slots, expected
):
    host = make()
    monkeypatch.setattr(saves_module, "HELD_BYTES", held_slots * host.parts.staging.slot_bytes)
    done = []

    def noting(kind, name, word):
        original = getattr(kind, name)

        def call(*args):
            done.append(word)
            return original(*args)

        monkeypatch.setattr(kind, name, call)

    noting(RankRows, "gather_chunk", "copy")
    noting(IOPool, "submit", "submit")
    host.begin(saves=saves())
    host.fill()
    host.end()
    assert " ".join(done) == expected
    host.settle(saved=3)


@PATHS
def test_loads_without_device_memory_fail_and_name_their_blocks(make, ticket):
    store, _expected = stored(make)
    device = SimulatedDevice()
    host = make(store=store, setup=device.setup())
    if ticket is not None:
        host.prefetch(ticket)
    device.memory_left = 0
    host.begin(loads=(host.load(ticket),))
    host.end()
    assert host.observer["load_failed_chunks"] == 3
    assert host.invalid == {block for table in LOADED for block in table}
    device.drain()
    staging = host.parts.staging
    assert staging.num_free == staging.num_slots


def test_a_load_that_fails_halfway_comes_before_what_the_engine_computes_instead(make):
    store, expected = stored(make)
    device = SimulatedDevice()
    host = make(store=store, setup=device.setup())
    host.prefetch()
    device.memory_left = 1
    host.begin(loads=(host.load(1),))
    device.compute(lambda: host.fill(start=50))
    host.end()
    device.drain("engine")
    wanted = make()
    wanted.fill(start=50)
    assert_rows(host.rows(LOADED), wanted.rows(LOADED))
    assert expected


def test_staging_is_pinned_from_registration_to_close(make):
    device = SimulatedDevice()
    host = make(setup=device.setup())
    assert device.pinned == 1
    host.begin(saves=saves())
    host.end()
    device.drain()
    host.settle(saved=3)
    host.close()
    assert device.pinned == 0


def test_a_device_that_hangs_holds_up_close_for_a_while_and_keeps_staging_pinned(make, monkeypatch):
    monkeypatch.setattr(worker_module, "SAVES_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(worker_module, "DEVICE_CLOSE_SECONDS", 0.05)
    device = SimulatedDevice()
    host = make(setup=device.setup())
    host.begin(saves=saves())
    host.end()
    started = time.monotonic()
    host.close()
    assert time.monotonic() - started < 5
    assert device.pinned == 1
    device.drain()
    host.settle(saved=3)


def test_staging_that_cannot_be_pinned_is_a_warning(make, caplog):
    device = SimulatedDevice()

    def refuse(_memory, _device):
        raise TransferError("not so many pages")

    setup = DeviceSetup(stream=lambda _device: device, pin=refuse)
    host = make(setup=setup)
    assert "not so many pages" in caplog.text
    host.begin(saves=saves())
    host.end()
    device.drain()
    host.settle(saved=3)
    assert all(saved.stored for saved in host.saved)
