"""Sealed slots are lent, and are the stored record byte for byte, also to another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest

from kvferry.blocks.rows import RankRows
from kvferry.cache.build import records_of
from kvferry.cache.deciding import rank_slots
from kvferry.cache.deciding.loans import Loans, SlotLoan
from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.cache.memory import NOT_SHARED, SlotMemory, open_slots, slot_size
from kvferry.errors import ConfigError, TransferError
from kvferry.record.schema import ALIGN
from kvferry.store.file.directory import record_path
from kvferry.store.file.store import FileStore
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import FailingStore, Gate, StallingStore
from kvferry.transfer.base import KeyState
from tests.cache.hosts import make_groups
from tests.cache.moving.device_host import SAVE_SLOTS, DeviceHost, chunks, saves

from .keeping import PROMPT, assert_settles, keys_of, wait_for

READER = """
import sys
from kvferry.cache.memory import open_slots
name, process, fd, num_bytes, start, stop = sys.argv[1:]
memory = open_slots(name, int(process), int(fd), int(num_bytes))
sys.stdout.buffer.write(memory[int(start):int(stop)])
"""

FULL = make_groups(num_layers=3, num_kv_heads=4)
SECOND = make_groups(num_layers=2, num_kv_heads=2, head_dim=8, block_size=8)
WINDOW = (replace(SECOND[0], window=16, block_size=4),)
MODELS = {"one group": FULL, "two": (*FULL, *SECOND), "window": (*FULL, *WINDOW)}


def lent(host, key) -> bytes:
    """The bytes of a chunk, once it is sealed."""
    loans: list[object] = []

    def is_lent() -> bool:
        host.step([])
        loans.append(host.pool.loans.lend(key, 30.0))
        return loans[-1] is not KeyState.PENDING

    wait_for(is_lent)
    loan = loans[-1]
    assert isinstance(loan, SlotLoan)
    assert all(buffer.readonly for buffer in loan.buffers)
    content = b"".join(loan.buffers)
    host.pool.loans.release(loan)
    return content


def stored(root: Path, host, key) -> bytes:
    wait_for(lambda: (host.step([]), Path(record_path(str(root), key)).exists())[1])
    return Path(record_path(str(root), key)).read_bytes()


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_what_is_lent_is_the_record_as_it_is_stored(make_host, tmp_path, model, world_size):
    root, groups = tmp_path / "store", MODELS[model]
    made = {"store": f"file://{root}", "groups": groups, "world_size": world_size}
    writer = make_host(**made)
    request = writer.admitted("writer", PROMPT)
    writer.prefill(request, budget=8)
    keys = keys_of(writer)
    records = [stored(root, writer, key) for key in keys]
    assert [lent(writer, key) for key in keys] == records
    writer.finish(request)
    reader = make_host(**made)
    assert reader.run("reader", PROMPT).num_external_tokens == 40
    whole = [key for key in keys if reader.pool.loans.offers(key)]
    assert whole == (keys[-2:] if model == "window" else keys)
    assert [lent(reader, key) for key in whole] == records[-len(whole) :]


def test_a_chunk_of_two_dtypes_is_lent_as_it_is_stored():
    store = MemoryStore()
    host = DeviceHost("NHD", store)
    host.step(saves=saves())
    host.settle(saved=3)
    cache = host.cache
    records = partial(records_of, cache.context.spec.groups, cache.schema, cache._parts)
    shard = cache.spec.shard
    ranks = RankSlots(records, (cache.schema,), cache.num_slots, shard, cache.identity)
    ranks.learn(host.region)
    for chunk in chunks(SAVE_SLOTS):
        record = bytearray(host.cache.schema.record_bytes)
        store.read(chunk.key, [(0, memoryview(record))])
        parts = ranks.whole_record(chunk.slot)
        assert b"".join(parts) == record
    # The rank has other memory now, which cannot be opened: nothing is lent of what it had.
    ranks.learn(msgspec.structs.replace(host.region, name="other", fd=NOT_SHARED))
    assert ranks.whole_record(chunk.slot) is None
    host.worker.close()


@pytest.fixture
def opened(monkeypatch):
    """Arguments of `open_slots`, for the memory of each rank that the scheduler role opens."""
    calls = []

    def note(*given):
        calls.append(given)
        return open_slots(*given)

    monkeypatch.setattr(rank_slots, "open_slots", note)
    return calls


def slots_of(part) -> tuple[RankRows, int]:
    """Which bytes of a record a slot of a rank holds, and the size of one."""
    rows = RankRows(part.spec.groups, part.spec.shard, part.schema)
    return rows, slot_size(rows.slot_bytes)


def read_elsewhere(memory, start: int, stop: int) -> bytes:
    given = map(str, (*memory, start, stop))
    return subprocess.run(
        [sys.executable, "-c", READER, *given], check=True, capture_output=True
    ).stdout


@pytest.mark.parametrize("world_size", [1, 2])
def test_another_process_reads_the_record_in_the_ranks_memory(
    make_host, tmp_path, opened, world_size
):
    root = tmp_path / "store"
    host = make_host(store=f"file://{root}", groups=FULL, world_size=world_size, multi_process=True)
    host.run("writer", PROMPT)
    key = keys_of(host)[1]
    record = stored(root, host, key)
    slot = host.pool.find(key).index
    content = bytearray(len(record))
    for part, memory in zip(host.parts, opened, strict=True):
        rows, slot_bytes = slots_of(part)
        first = slot * slot_bytes
        image = read_elsewhere(memory, first, first + rows.slot_bytes)
        content[: rows.schema.head_bytes] = image[: rows.schema.head_bytes]
        for ranges, start, stop in rows.spans():
            at = rows.schema.offset_of(ranges)
            content[at : at + stop - start] = image[start:stop]
    assert bytes(content) == record


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("fault", ["refuses", "stalls"])
def test_a_chunk_is_sealed_whatever_its_store_does(make_host, tmp_path, world_size, fault):
    gate = Gate()
    inner = [FileStore(tmp_path / "store") for _ in range(world_size)]
    stores = [
        FailingStore(each, operations={"put"})
        if fault == "refuses"
        else StallingStore(each, gate=gate, operations={"put"})
        for each in inner
    ]
    host = make_host(store=stores[0].url, rank_stores=stores, groups=FULL, world_size=world_size)
    host.run("writer", PROMPT)
    content = lent(host, keys_of(host)[0])
    assert not list(tmp_path.rglob("*.safetensors"))
    gate.release()
    assert_settles(host)
    other = make_host(store=f"file://{tmp_path}/other", groups=FULL)
    other.run("writer", PROMPT)
    assert stored(tmp_path / "other", other, keys_of(other)[0]) == content


def test_a_lent_slot_keeps_its_chunk_until_it_is_given_back_or_its_time_is_over(make_host):
    clock = FakeClock()
    host = make_host(num_slots=5, clock=clock)
    host.run("writer", PROMPT)
    assert_settles(host)
    first, second = keys_of(host)[:2]
    loans = [host.pool.loans.lend(key, 10.0) for key in (first, second)]
    before = [b"".join(loan.buffers) for loan in loans]
    assert host.observer.gauges()["pool_slots/lent"] == 2
    others = range(100, 141)
    host.run("other", others)
    assert_settles(host)
    assert [b"".join(loan.buffers) for loan in loans] == before
    host.pool.clear()
    assert host.pool.loans.lend(first, 30.0) is None
    host.run("after a reset", others)
    assert_settles(host)
    assert [b"".join(loan.buffers) for loan in loans] == before
    host.pool.loans.release(loans[0])
    assert host.observer.gauges()["pool_slots/lent"] == 1
    clock.advance(11.0)
    host.pool.clear()
    for number in range(2):
        host.run(f"later {number}", range(200 + 50 * number, 241 + 50 * number))
        assert_settles(host)
    assert [b"".join(loan.buffers) for loan in loans] != before


def test_groups_of_two_records_are_not_lent(make_host, tmp_path):
    """A chunk whose groups were fetched in two goes may have come from two stored versions."""
    groups = MODELS["window"]
    host = make_host(store=f"file://{tmp_path}/store", groups=groups)
    host.run("writer", PROMPT)
    assert_settles(host)
    reader = make_host(store=f"file://{tmp_path}/store", groups=groups)
    key = keys_of(host)[0]
    for wanted in (frozenset({0}), frozenset({0, 1})):
        reader.pool.fetch(key, 0, wanted)
        wait_for(lambda w=wanted: (reader.step([]), reader.pool.holds(key, w))[1])
    assert reader.pool.loans.lend(key, 30.0) is None


def test_what_two_ranks_read_of_two_versions_is_not_lent(make_host, tmp_path, opened):
    host = make_host(store=f"file://{tmp_path}/store", groups=FULL, world_size=2)
    host.run("writer", PROMPT)
    key = keys_of(host)[0]
    assert lent(host, key)
    slot = host.pool.find(key).index
    _rows, slot_bytes = slots_of(host.parts[1])
    open_slots(*opened[1])[slot * slot_bytes] ^= 1
    assert host.pool.loans.lend(key, 30.0) is None
    assert not host.pool.loans.is_lent(slot)


def test_a_pool_that_does_not_know_its_ranks_lends_nothing():
    loans = Loans()
    loans.expect(b"k" * 32)
    assert loans.lend(b"k" * 32, 30.0) is KeyState.PENDING
    loans.offer(b"k" * 32, 3)
    assert loans.lend(b"k" * 32, 30.0) is None
    assert not loans.is_lent(3)


# -- the memory ---------------------------------------------------------------------------------

OWNER = """
import json, os, sys
from kvferry.cache.memory import SlotMemory
memory = SlotMemory(4, 4096, is_shared=True)
memory.slot(2)[:4] = b"kept"
print(json.dumps([memory.name, os.getpid(), memory.fd, len(memory.view)]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner():
    """A process that owns the memory of a rank, and what it reports."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.communicate()


def test_memory_of_a_killed_rank_stays_for_its_readers_and_leaves_nothing_behind(owner):
    process, (name, pid, fd, num_bytes) = owner
    before = set(os.listdir("/dev/shm"))
    memory = open_slots(name, pid, fd, num_bytes)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert bytes(memory[2 * 4096 : 2 * 4096 + 4]) == b"kept"  # no SIGBUS
    with pytest.raises(TransferError, match="cannot be opened"):
        open_slots(name, pid, fd, num_bytes)
    assert not [each for each in set(os.listdir("/dev/shm")) - before if "kvferry" in each]


def test_no_process_can_take_the_memory_from_under_its_readers(owner):
    _, (_, pid, fd, _) = owner
    with open(f"/proc/{pid}/fd/{fd}", "r+b") as file, pytest.raises(PermissionError):
        file.truncate(0)


@pytest.mark.parametrize("what", ["name", "descriptor", "size"])
def test_memory_that_is_not_the_one_meant_is_refused(owner, what):
    _, (name, pid, fd, num_bytes) = owner
    wrong = {"name": (name + "0", pid, fd, num_bytes), "descriptor": (name, pid, 0, num_bytes)}
    wrong["size"] = (name, pid, fd, num_bytes + ALIGN)
    with pytest.raises(TransferError) as refused:
        open_slots(*wrong[what])
    assert "\n" not in str(refused.value)


def test_too_little_memory_is_one_line_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match=r"less free memory.*set memory_bytes lower"):
        SlotMemory(2, ALIGN, is_shared=True, free=lambda: ALIGN)
    limited = (
        "import resource; from kvferry.cache.memory import SlotMemory\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "SlotMemory(2, 4096, is_shared=True)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", limited], check=False, capture_output=True, text=True
    )
    assert ended.stderr.splitlines()[-1].endswith("File too large); set memory_bytes lower")
    assert ended.returncode == 1


def test_ranks_out_of_reach_lend_nothing_and_say_once_that_they_are_apart(
    make_host, tmp_path, caplog, monkeypatch
):
    names = []

    def open_first(name, *where):
        names.append(name)
        return open_slots(name if name == names[0] else "kvferry-elsewhere", *where)

    monkeypatch.setattr(rank_slots, "open_slots", open_first)
    host = make_host(store=f"file://{tmp_path}/store", groups=FULL, world_size=2)
    host.run("writer", PROMPT)  # ends before the first report
    assert_settles(host)
    assert len([line for line in caplog.messages if "slots of rank 1" in line]) == 1
    assert not list(tmp_path.rglob("*.safetensors"))
    host.run("writer again", PROMPT)
    assert_settles(host)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 10
    assert host.observer["save_failed"] == 0
    assert host.pool.loans.lend(keys_of(host)[0], 30.0) is None
    assert host.run("of memory", PROMPT).num_external_tokens == 40
