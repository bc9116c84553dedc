"""Many records at a time: every one ends once, and no call that hangs touches a caller's memory."""

from __future__ import annotations

import time

import pytest

from kvferry.observe import Counters
from kvferry.record.check import ReadFault
from kvferry.store.base import PutResult, Where
from kvferry.store.file import FileStore
from kvferry.store.memory import MemoryStore
from kvferry.store.record_client import Batch, RecordClient
from kvferry.testing.faults import CorruptingStore, FailingStore, Gate, StallingStore, flip_bit
from tests.record.samples import schema_of

SCHEMA = schema_of([(1, 3, 8, "float32", None)], 7)
KEYS = [bytes([number]) * 32 for number in range(5)]
TOKENS = [number * 7 for number in range(5)]
SECONDS = 60.0


def payload_of(number: int) -> bytes:
    return bytes([number + 1]) * SCHEMA.payload_bytes


class Caller:
    """A client on a store, and memory of its caller for each of `KEYS`."""

    def __init__(self, store) -> None:
        self.counts = Counters()
        self.client = RecordClient(store, SCHEMA, self.counts, 2)
        self.rows = [bytearray(SCHEMA.payload_bytes) for _ in KEYS]

    def put(self):
        def fill(place, image):
            image[SCHEMA.head_bytes :] = payload_of(place)

        return self.client.put(KEYS, TOKENS, fill, time.monotonic() + SECONDS)

    def get(self):
        def land(place, image):
            self.rows[place][:] = image[SCHEMA.head_bytes :]
            return False

        return self.client.get(KEYS, TOKENS, land, time.monotonic() + SECONDS)

    def filled(self):
        return [number for number, row in enumerate(self.rows) if row == payload_of(number)]


@pytest.fixture
def caller():
    made = []

    def make(store):
        made.append(Caller(store))
        return made[-1]

    yield make
    for each in made:
        assert each.client.close(SECONDS)


def test_what_was_put_is_brought(caller):
    store = MemoryStore()
    one = caller(store)
    batch = one.put()
    assert batch.wait(SECONDS)
    assert batch.results == [PutResult.STORED] * 5
    assert all(store.where(each) is Where.HERE for each in KEYS)
    batch = one.get()
    assert batch.wait(SECONDS)
    assert batch.results == [None] * 5
    assert one.filled() == [0, 1, 2, 3, 4]


def test_threads_write_as_many_at_a_time_as_share_a_cost(caller, tmp_path):
    with FileStore(tmp_path / "store", max_bytes=1 << 20) as store:
        assert store.wait_indexed(SECONDS)
        one = caller(store)
        assert one.put().wait(SECONDS)
        assert one.get().wait(SECONDS)
        assert one.filled() == [0, 1, 2, 3, 4]
        assert one.put().wait(SECONDS)
        assert one.counts.snapshot()["put_stored"] == one.counts.snapshot()["put_exists"] == 5
        assert one.client.close(SECONDS)


def test_only_what_is_there_and_right_lands(caller):
    store = MemoryStore()
    assert caller(store).put().wait(SECONDS)
    store.delete(KEYS[1])
    one = caller(CorruptingStore(store, damage=flip_bit(-1), keys=KEYS[3:4]))
    batch = one.get()
    assert batch.wait(SECONDS)
    assert batch.results == [None, ReadFault.ABSENT, None, ReadFault.BAD_CHECKSUM, None]
    assert one.filled() == [0, 2, 4]
    assert not any(one.rows[3])


def test_a_batch_given_up_has_ended_and_its_memory_is_left_alone(caller):
    store, gate = MemoryStore(), Gate()
    assert caller(store).put().wait(SECONDS)
    one = caller(StallingStore(store, gate=gate, operations=["read"]))
    batch = one.get()
    assert gate.wait_for_arrival()
    assert not batch.poll()
    batch.give_up(ReadFault.DEADLINE)
    assert batch.poll()
    assert batch.results == [ReadFault.DEADLINE] * 5
    gate.release()
    assert one.client.close(SECONDS)
    assert one.filled() == []


def test_a_write_that_hangs_has_a_copy_of_what_it_writes(caller):
    store, gate = MemoryStore(), Gate()
    one = caller(StallingStore(store, gate=gate, operations=["put"]))
    source = bytearray(payload_of(0))

    def fill(_place, image):
        image[SCHEMA.head_bytes :] = source

    batch = one.client.put(KEYS[:1], TOKENS[:1], fill, time.monotonic() + SECONDS)
    assert gate.wait_for_arrival()
    batch.give_up(PutResult.FAILED)
    assert batch.poll()
    source[:] = bytes(len(source))  # its owner uses the memory again
    gate.release()
    assert one.client.close(SECONDS)
    two = caller(store)
    assert two.get().wait(SECONDS)
    assert two.filled() == [0]


def test_giving_up_does_not_end_what_is_being_copied():
    batch: Batch[ReadFault] = Batch(2)
    during = []

    def copy():
        batch.give_up(ReadFault.DEADLINE)
        during.append(batch.poll())

    assert batch.copy(0, copy)
    assert during == [False]
    assert batch.poll()
    assert not batch.copy(1, copy)
    batch.end(1, None)
    assert batch.results == [ReadFault.DEADLINE] * 2


def test_a_failing_store_ends_every_record(caller):
    one = caller(FailingStore(MemoryStore(), operations=["read", "put"]))
    batch = one.put()
    assert batch.wait(SECONDS)
    assert batch.results == [PutResult.FAILED] * 5
    reads = one.get()
    assert reads.wait(SECONDS)
    assert reads.results == [ReadFault.IO_ERROR] * 5


def test_a_closed_client_ends_every_record(caller):
    one = caller(MemoryStore())
    one.client.close(SECONDS)
    assert one.put().results == [PutResult.FAILED] * 5
    assert one.get().results == [ReadFault.IO_ERROR] * 5


def test_an_error_of_the_caller_ends_its_record(caller):
    store = MemoryStore()
    one = caller(store)
    assert one.put().wait(SECONDS)

    def land(place, _image):
        raise BufferError(place)

    batch = one.client.get(KEYS, TOKENS, land, time.monotonic() + SECONDS)
    assert batch.wait(SECONDS)
    assert batch.results == [ReadFault.IO_ERROR] * 5
    assert one.counts["load_failed"] == 5


def test_an_error_of_the_caller_leaves_the_records_written_with_it(caller, tmp_path):
    with FileStore(tmp_path / "store") as store:
        one = caller(store)

        def fill(place, image):
            if place == 1:
                raise BufferError(place)
            image[SCHEMA.head_bytes :] = payload_of(place)

        batch = one.client.put(KEYS, TOKENS, fill, time.monotonic() + SECONDS)
        assert batch.wait(SECONDS)
        expected = [PutResult.STORED] * 5
        expected[1] = PutResult.FAILED
        assert batch.results == expected
        assert one.counts["save_failed"] == 1
        assert one.client.close(SECONDS)
