"""Copies beside the engine's work: right in every order that a device may choose, and on one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace
from itertools import count

import pytest
import torch

from kvferry.blocks import copies
from kvferry.blocks.copies import DeviceSetup, staging_bytes
from kvferry.blocks.paged import PagedTables
from kvferry.cache.config import CacheBounds
from kvferry.cache.messages import Fetch, Filled, SlotChunk
from kvferry.cache.moving.slot_io import SlotIO
from kvferry.cache.moving.worker import CacheWorker
from kvferry.errors import TransferError
from kvferry.layout.device import TorchCopies
from kvferry.layout.streams import Streams
from kvferry.record.check import ReadFault
from kvferry.store.base import PutResult
from kvferry.store.io_pool import IOPool
from kvferry.store.memory import MemoryStore
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from tests.cache.hosts import make_shared_storage_host
from tests.cache.moving.device_host import (
    CHUNK,
    FETCH_SLOTS,
    LOADED,
    SAVE_SLOTS,
    SAVED,
    DeviceHost,
    assert_rows,
    chunks,
    saves,
)
from tests.cache.moving.simulated_device import STREAMS, SimulatedDevice, job_without_a_thread

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
KERNELS_ON = "cuda" if torch.cuda.is_available() else "cpu"
"""Where Triton's kernels run; on a CPU, in its interpreter (`tests/conftest.py`)."""
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
ORDERS = pytest.mark.parametrize("first", STREAMS)


class NotesReads(WrapperStore):
    """Remembers which records were opened."""

    def __init__(self, inner):
        super().__init__(inner)
        self.opened = []

    def read(self, key, *args):
        self.opened.append(key)
        return super().read(key, *args)


def is_stored(host) -> bool:
    return {saved.result for saved in host.saved} == {PutResult.STORED}


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
    writer.step(saves=saves())
    writer.settle(saved=3)
    assert store.stat().num_records == 3
    return store, expected


def fetched(make, **options):
    """A simulated device, a host on it whose slots hold all chunks, and what their rows are."""
    store, expected = stored(make)
    device = SimulatedDevice()
    host = make(store=store, setup=device.setup(**options))
    host.fetch()
    return device, host, expected


def long_work(device: str) -> None:
    """Work of the engine that a copy would overtake if nothing held it back."""
    if device == "cuda":
        large = torch.ones(4096, 4096, device=device)
        for _ in range(20):
            large = large @ large


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("layout", "other"), [("NHD", "HND"), ("2BNHD", "NHD")])
def test_what_one_layout_saved_another_loads(make, device, layout, other):
    store = MemoryStore("device")
    writer = make(layout, store, device=device)
    long_work(device)
    writer.fill()
    writer.step(saves=saves())
    expected = writer.rows(SAVED)
    for cache in writer.caches:  # the next step, right behind
        cache.whole.zero_()
    writer.settle(saved=3)
    assert is_stored(writer)
    reader = make(other, store, device=device)
    reader.fetch()
    long_work(device)
    for cache in reader.caches:  # the step before reads and writes the blocks
        cache.whole.fill_(3)
    reader.begin(loads=(reader.load(),))
    forward = reader.snapshot()
    reader.end()
    assert not reader.invalid
    reader.restore(forward)
    assert_rows(reader.rows(LOADED), expected)


def test_a_copy_is_reported_when_the_device_has_made_it(make):
    """Not before: from then on the slot may be another chunk's."""
    device = SimulatedDevice()
    host = make(setup=device.setup())
    host.step(saves=saves())
    for _step in range(3):
        host.step()
    assert host.held == []
    device.drain()
    host.settle(held=3)
    assert sorted(held.slot for held in host.held) == sorted(SAVE_SLOTS)


@pytest.mark.parametrize("device", ["simulated", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("bad", [-1, 10, 10**9])
def test_a_wrong_block_id_reaches_no_stream(make, device, bad):
    store, _expected = stored(make)
    simulated = SimulatedDevice()
    options = {"setup": simulated.setup()} if device == "simulated" else {"device": device}
    host = make(store=store, **options)
    host.fetch()
    before = host.snapshot()
    tables = (LOADED[0], [*LOADED[1][:4], bad, 5])
    save = saves(tables)[2]
    never_fetched = host.load(tables, slots=(5, 6, 7))
    host.step(saves=(save,), loads=(host.load(tables), never_fetched))
    simulated.drain()
    # What a step computed on failed loads is not saved, whatever its blocks.
    assert host.missed == [Filled(save.chunk.slot, ReadFault.CANCELLED)]
    assert bad in host.invalid
    # The last chunk of the first load, and all of the second, whose slots hold nothing.
    assert host.observer["load_failed_chunks"] == 4
    host.step(saves=(save,), failures_known=(1,))
    simulated.drain()
    assert host.missed[1:] == [Filled(save.chunk.slot, ReadFault.IO_ERROR)]
    found = host.rows(LOADED)
    host.restore(before)
    for ours, old in zip(found, host.rows(LOADED), strict=True):
        assert ours[:, :, 2 * CHUNK :].tobytes() == old[:, :, 2 * CHUNK :].tobytes()


def run_all(device, *streams):
    """Run what these streams can do while the others stand still. Return which have work left."""
    while any(device.advance(stream) for stream in streams):
        pass
    return [stream for stream in streams if device.queues[stream]]


def test_loads_and_saves_wait_for_nothing_but_what_they_need(make):
    device, host, expected = fetched(make)
    device.compute(host.fill)
    for several in (saves()[:1], saves()[1:]):
        host.step(saves=several)
    # The copies of a load begin while the step before still runs; only the scatter waits for it.
    host.begin(loads=(host.load(),))
    assert run_all(device, "inward") == []
    # The engine waits for no copy to a slot.
    seen = []
    device.compute(lambda: seen.extend(host.rows(LOADED)))
    assert run_all(device, "engine") == []
    assert_rows(seen, expected)
    host.end()
    # No copy to a slot waits for a hash.
    assert run_all(device, "outward") == []
    assert device.queues["hashing"]
    device.drain()
    host.settle(saved=3)


def test_saves_that_find_no_device_memory_free_are_offered_again(make):
    store, device = MemoryStore("device"), SimulatedDevice()
    host = make(store=store, setup=device.setup(num_pieces=2))  # one for loads
    host.fill()
    expected = host.rows(SAVED)
    left = saves()
    while left:
        host.missed.clear()
        for _step in range(2):  # in the second, the first one's copy has not ended
            host.step(saves=left)
            assert run_all(device, "engine") == []
            left = left[1:] if _step == 0 else left
        assert host.missed == [
            Filled(save.chunk.slot, ReadFault.CANCELLED) for save in [*left, *left]
        ]
        device.drain()
        host.settle(saved=3 - len(left))
    assert is_stored(host)
    reader = make("HND", store)
    reader.fetch()
    reader.begin(loads=(reader.load(),))
    assert_rows(reader.rows(LOADED), expected)


def test_saves_without_device_memory_are_put_off(make):
    device = SimulatedDevice()
    host = make(setup=device.setup())
    host.begin(saves=saves())
    device.compute(host.fill)
    device.memory_left = 3  # gather, copy and hash of one chunk
    host.end()
    assert host.missed == [Filled(slot, ReadFault.CANCELLED) for slot in SAVE_SLOTS[1:]]
    assert host.observer["save_no_device_memory"] == 1
    device.drain()
    host.settle(saved=1)
    assert is_stored(host)
    assert [saved.slot for saved in host.saved] == [SAVE_SLOTS[0]]


def test_a_slot_whose_copy_was_given_up_is_not_read_into_while_the_device_may_write_it(make):
    store, _expected = stored(make)
    notes = NotesReads(store)
    device = SimulatedDevice()
    host = make(store=notes, setup=device.setup())
    host.begin(saves=saves())
    device.compute(host.fill)
    device.memory_left = 2  # gather and copy of one chunk, and not its hash
    host.end()
    assert host.missed == [Filled(slot, ReadFault.CANCELLED) for slot in SAVE_SLOTS]
    device.memory_left = 10**9
    (chunk, *_others) = chunks(SAVE_SLOTS)
    host.step(fetches=(Fetch(chunk, (0, 1)),))
    device.wait_until_waited_for()
    assert notes.opened == []
    device.drain()
    host.settle(held=1)
    assert notes.opened == [chunk.key]


@pytest.mark.parametrize("which", ["NHD", "simulated"])
def test_what_no_thread_can_write_is_held_all_the_same(make, monkeypatch, which):
    device = SimulatedDevice()
    host = make(setup=device.setup()) if which == "simulated" else make()
    submit, refused = IOPool.submit, [True, False, True]

    def sometimes(pool, run, **options):
        if pool.name == "kvferry-seal" and refused and refused.pop(0):
            return job_without_a_thread()
        return submit(pool, run, **options)

    monkeypatch.setattr(IOPool, "submit", sometimes)
    host.begin(saves=saves())
    host.fill()
    host.end()
    device.drain()
    host.settle(saved=1, held=3)
    assert [(saved.slot, saved.result) for saved in host.saved] == [
        (SAVE_SLOTS[1], PutResult.STORED)
    ]
    assert {one.slot: one.leaf_digests for one in host.sealed} == dict(
        zip(SAVE_SLOTS, (None, b"", None), strict=True)
    )
    expected = host.rows(SAVED)
    host.fill(start=10**6)
    host.step(loads=(host.load(slots=SAVE_SLOTS),))
    device.drain()
    assert_rows(host.rows(LOADED), expected)


def test_a_fetch_without_a_thread_is_a_miss(make, monkeypatch):
    store, _expected = stored(make)
    host = make(store=store)
    monkeypatch.setattr(IOPool, "submit", lambda *_: job_without_a_thread())
    host.step(fetches=tuple(Fetch(chunk, (0, 1)) for chunk in chunks(FETCH_SLOTS)))
    assert host.missed == [Filled(slot, "io_error") for slot in FETCH_SLOTS]
    assert host.worker.io.is_idle


def test_what_follows_a_copy_waits_for_the_others_of_its_step(make, monkeypatch):
    """Hashing and writing take memory bandwidth from the copies, which the engine waits for."""
    host = make()
    done = []

    def noting(kind, name, word):
        original = getattr(kind, name)

        def call(*args, **options):
            done.append(word)
            return original(*args, **options)

        monkeypatch.setattr(kind, name, call)

    noting(PagedTables, "gather", "copy")
    noting(SlotIO, "save", "write")
    host.begin(saves=saves())
    host.fill()
    host.end()
    assert done == ["copy"] * 6 + ["write"] * 3  # two groups of three chunks
    host.settle(saved=3)


def test_loads_without_device_memory_fail_and_name_their_blocks(make):
    device, host, _expected = fetched(make)
    device.memory_left = 0
    host.step(loads=(host.load(),))
    assert host.observer["load_failed_chunks"] == 3
    assert host.invalid == {block for table in LOADED for block in table}
    device.drain()


def test_a_load_that_fails_halfway_comes_before_what_the_engine_computes_instead(make):
    device, host, _expected = fetched(make)
    device.memory_left = 3  # one chunk, and the next one's copy to the device
    host.begin(loads=(host.load(),))
    device.compute(lambda: host.fill(start=50))
    host.end()
    device.drain("engine")
    wanted = make()
    wanted.fill(start=50)
    assert_rows(host.rows(LOADED), wanted.rows(LOADED))


def test_a_device_that_hangs_holds_up_close_for_a_while_and_keeps_slots_pinned(make):
    device = SimulatedDevice()
    bounds = CacheBounds(writes_close_seconds=0.05, device_close_seconds=0.05)
    host = make(setup=device.setup(), bounds=bounds)
    host.step(saves=saves())
    started = time.monotonic()
    host.close()
    assert time.monotonic() - started < 30
    assert device.pinned == 1
    device.drain()
    host.settle(saved=3)


def test_slots_that_cannot_be_pinned_is_a_warning(make, caplog):
    device = SimulatedDevice()

    def refuse(_memory, _device):
        raise TransferError("not so many pages")

    host = make(setup=device.setup(pin=refuse))
    assert "not so many pages" in caplog.text
    host.step(saves=saves())
    device.drain()
    host.settle(saved=3)
    assert is_stored(host)


def test_a_read_that_never_began_leaves_the_slot_to_the_device_that_reads_it(make, monkeypatch):
    store, expected = stored(make)
    notes = NotesReads(store)
    device = SimulatedDevice()
    host = make(store=notes, setup=device.setup())
    host.fetch()
    host.step(loads=(host.load(),))
    first, second, _third = chunks(FETCH_SLOTS)
    fetch = Fetch(SlotChunk(first.slot, second.key, second.first_token), (0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(IOPool, "submit", lambda *_: job_without_a_thread())
        host.step(fetches=(fetch,))
    assert [missed.slot for missed in host.missed] == [first.slot]
    notes.opened.clear()
    host.step(fetches=(fetch,))
    device.wait_until_waited_for()
    assert notes.opened == []
    device.drain()
    host.settle(held=4)
    assert_rows(host.rows(LOADED), expected)


class Memory(bytearray):
    """Memory of a tensor, that can be seen to go away."""


@pytest.mark.parametrize("copies", [None, TorchCopies])
def test_a_sleeping_engine_has_its_memory_back(make, copies):
    device = SimulatedDevice()
    host = make(setup=device.setup(copies=copies))
    for _ in range(2):
        host.worker.unregister_kv_caches()
        device.drain()
    memory = {n: Memory(tensor.untyped_storage().nbytes()) for n, tensor in host.tensors.items()}
    host.worker.register_kv_caches(
        {
            name: torch.frombuffer(memory[name], dtype=tensor.dtype).as_strided(
                tensor.shape, tensor.stride()
            )
            for name, tensor in host.tensors.items()
        }
    )
    host.step(saves=saves())
    device.drain()
    host.settle(saved=3)
    assert is_stored(host)
    left = [weakref.ref(each) for each in memory.values()]
    del memory
    gc.collect()
    assert all(each() is not None for each in left)
    device.drain()
    host.worker.unregister_kv_caches()
    gc.collect()
    assert [each() for each in left] == [None] * len(left)


def test_memory_goes_after_the_copies_out_of_it_and_serves_again_when_it_is_back(make):
    device, host, expected = fetched(make)
    host.begin(saves=saves())
    device.compute(host.fill)
    host.end()
    asleep = threading.Thread(target=host.worker.unregister_kv_caches, name="asleep")
    asleep.start()
    wait_until(lambda: "asleep" in device.askers, "it asks for the end of the copies")
    assert asleep.is_alive()
    device.drain()
    asleep.join(60)
    assert not asleep.is_alive()
    host.settle(saved=3)

    before = host.snapshot()
    host.step(loads=(host.load(),))
    host.step(saves=saves(slots=(6, 7, 0)), failures_known=(1,))
    device.drain()
    assert host.invalid == {block for table in LOADED for block in table}
    assert host.missed == [Filled(slot, ReadFault.IO_ERROR) for slot in (6, 7, 0)]
    for cache, old in zip(host.caches, before, strict=True):
        assert torch.equal(cache.whole, old)

    host.worker.register_kv_caches(host.tensors)
    assert device.pinned == 1
    host.invalid.clear()
    host.step(loads=(host.load(),))
    device.drain()
    assert not host.invalid
    assert_rows(host.rows(LOADED), expected)


def test_memory_that_is_still_copied_does_not_go(make):
    device = SimulatedDevice()
    host = make(setup=device.setup())
    host.worker._bounds = CacheBounds(device_seconds=0.05)  # I/O threads go on waiting
    host.step(saves=saves())
    with pytest.raises(TransferError, match="keep it"):
        host.worker.unregister_kv_caches()
    device.drain()
    host.settle(saved=3)
    assert is_stored(host)


def broken(_device):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def out_of_memory_after(monkeypatch, num_pieces):
    real, taken = PagedTables.new_rows, []

    def new_rows(paged):
        if len(taken) == num_pieces:
            raise torch.cuda.OutOfMemoryError
        taken.append(None)
        return real(paged)

    monkeypatch.setattr(PagedTables, "new_rows", new_rows)


@pytest.mark.parametrize(
    "why", ["no memory", "memory for one", "little left", "another kind", "broken driver"]
)
def test_a_device_that_cannot_be_used_at_the_start_ends_no_engine(make, monkeypatch, caplog, why):
    store, _expected = stored(make)
    device = SimulatedDevice()
    setup = device.setup(num_pieces=1 if why == "little left" else 5)
    if why == "another kind":
        setup = replace(setup, streams=lambda _device: Streams.of(torch.device("xpu")))
    elif why == "broken driver":
        setup = replace(setup, streams=broken)
    else:
        out_of_memory_after(monkeypatch, {"no memory": 0, "memory for one": 1}.get(why, 5))
    host = make(store=store, setup=setup)
    assert caplog.text.count("kvferry is off") == 1
    host.step(pool=7, fetches=tuple(Fetch(chunk, (0, 1)) for chunk in chunks(FETCH_SLOTS)))
    assert host.off
    assert host.missed == [Filled(slot, ReadFault.IO_ERROR) for slot in FETCH_SLOTS]
    host.step(pool=7, saves=saves())
    assert host.missed[3:] == [Filled(slot, ReadFault.IO_ERROR) for slot in SAVE_SLOTS]
    assert host.worker.is_idle
    device.drain()
    host.worker.unregister_kv_caches()
    host.worker.register_kv_caches(host.tensors)


@pytest.mark.parametrize("bad", [0, 1])
def test_an_engine_whose_device_cannot_be_used_serves_without_the_cache(bad, caplog, tmp_path):
    """One rank's outage has one text in each process: rank 0 is in that of the scheduler."""
    ranks = count()

    def refuse(device):
        if next(ranks) == bad:
            raise TransferError("no such device")
        return Streams.of(device)

    host = make_shared_storage_host(
        {"store": f"file://{tmp_path}", "chunk_tokens": 8, "memory_bytes": 1 << 20},
        setup=DeviceSetup(streams=refuse),
        world_size=bad + 1,
    )
    part = host.parts[0]
    for number in range(3):
        assert host.run(f"r{number}", range(40)).num_external_tokens == 0
        host.settle()
    assert part.store.stat().num_records == 0
    assert caplog.text.count("no such device") == 1 + bad
    assert caplog.text.count("rank 1: no such device. Nothing is loaded or saved") == bad
    assert part.observer["save_refused"] == 0
    host.stop()


class Wrong(TorchCopies):
    """Copies on a device that is not right."""

    what = ""

    def scatter(self, rows, layer, runs, first_token):
        if self.what == "brings in nothing":
            return
        if self.what == "brings in a wrong byte":
            rows = rows.clone()
            rows.view(-1)[0] ^= 1
        if self.what == "writes another block":
            runs = [run._replace(blocks=(run.blocks[0] + 1,)) for run in runs]
        if self.what == "has no compiler":
            raise RuntimeError("Failed to find C compiler")
        super().scatter(rows, layer, runs, first_token)

    def gather(self, rows, layer, runs, first_token):
        super().gather(rows, layer, runs, first_token)
        if self.what == "takes out a wrong byte":
            rows.view(-1)[0] = 5

    def digests_later(self, rows, _leaf_bytes, _kernel, _exponent, _lowest):
        return (lambda: (b"other digests", True)) if self.what == "hashes wrongly" else None


@pytest.mark.parametrize(
    "what",
    [
        "is right",
        "brings in nothing",
        "brings in a wrong byte",
        "writes another block",
        "takes out a wrong byte",
        "hashes wrongly",
        "has no compiler",
        "hangs",
    ],
)
def test_a_device_is_tried_on_the_null_block_before_it_is_used(make, monkeypatch, caplog, what):
    monkeypatch.setattr(copies, "_PROOF_SECONDS", 0.01)
    monkeypatch.setattr(Wrong, "what", what)
    device = SimulatedDevice()
    device.is_eager = what != "hangs"
    before = make().snapshot()
    host = make(setup=device.setup(copies=Wrong))
    assert ("kvferry is off" in caplog.text) == (what != "is right")
    if what == "is right":
        for ours, theirs in zip(host.snapshot(), before, strict=True):
            assert torch.equal(ours, theirs)
    device.drain()


def test_the_kernels_that_requests_need_are_compiled_at_the_start(make, monkeypatch):
    """As far as the interpreter shows: with the arguments of later calls."""
    from kvferry.layout import kernels

    seen = []

    def noting(kernel):
        class Noting:
            def __getitem__(self, grid):
                def launch(*args, **options):
                    # What Triton makes variants by: constants, numbers of 1, and multiples of 16.
                    found = [arg.data_ptr() % 16 if torch.is_tensor(arg) else arg for arg in args]
                    seen.append((grid, *found, *options.items()))
                    return kernel[grid](*args, **options)

                return launch

        return Noting()

    for name in ("_copy_kernel", "_hash_kernel"):
        monkeypatch.setattr(kernels, name, noting(getattr(kernels, name)))
    device = SimulatedDevice()
    host = make(device=KERNELS_ON, setup=device.setup(copies=kernels.TritonCopies))
    at_start = set(seen)
    seen.clear()
    host.step(saves=saves())
    device.drain()
    host.settle(saved=3)
    host.step(loads=(host.load(slots=SAVE_SLOTS),))
    device.drain()
    assert not host.invalid
    assert seen
    assert set(seen) <= at_start


def test_memory_taken_in_inference_mode_serves_outside_of_it(make, monkeypatch):
    """A host may register in one mode and step in the other."""
    from kvferry.layout.kernels import TritonCopies

    register = torch.inference_mode()(CacheWorker.register_kv_caches)
    monkeypatch.setattr(CacheWorker, "register_kv_caches", register)
    device, host, expected = fetched(make, copies=TritonCopies)
    host.step(loads=(host.load(),))
    host.step(saves=saves(LOADED))
    device.drain()
    assert not host.invalid
    assert_rows(host.rows(LOADED), expected)
    host.settle(saved=3)


def test_a_smaller_piece_of_memory_does_and_no_copy_takes_more(make, monkeypatch):
    from kvferry.layout.kernels import TritonCopies

    out_of_memory_after(monkeypatch, 3)
    store, expected = stored(make)
    device = SimulatedDevice()
    host = make("HND", store, device=KERNELS_ON, setup=device.setup(copies=TritonCopies))
    host.fetch()
    taken = []
    empty = torch.empty

    def counted(*shape, **options):
        found = empty(*shape, **options)
        taken.append(found.nbytes)
        return found

    def load():
        host.step(loads=(host.load(),))
        device.drain()

    load()
    monkeypatch.setattr(torch, "empty", counted)
    load()
    assert taken == []
    assert_rows(host.rows(LOADED), expected)
    host.step(saves=saves(LOADED))
    device.drain()
    host.settle(saved=2)
    assert host.missed == [Filled(SAVE_SLOTS[2], ReadFault.CANCELLED)]
    assert sum(taken) < 4096  # checksums


@pytest.mark.parametrize(
    ("free", "total", "step", "expected"),
    [
        (8 << 30, 80 << 30, 1 << 30, 1 << 30),
        (8 << 30, 80 << 30, 510 << 20, 680 << 20),
        (1 << 30, 80 << 30, 1 << 30, 128 << 20),
        (8 << 30, 16 << 30, 1 << 30, 256 << 20),
    ],
)
def test_copies_take_what_a_step_saves_and_small_shares(monkeypatch, free, total, step, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, total))
    assert staging_bytes(torch.device("cuda", 0), step) == expected
