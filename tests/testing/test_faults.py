from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import StoreError
from kvferry.store.base import PutResult, Where
from kvferry.store.memory import MemoryStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import (
    CorruptingStore,
    FailingStore,
    Gate,
    StallingStore,
    flip_bit,
    zero,
)
from kvferry.testing.stores import make_key, read_value


def filled(*, values=(b"value",)):
    store = MemoryStore()
    for number, value in enumerate(values):
        store.put(make_key(number), [value])
    return store


def test_a_stalled_read_goes_on_when_released():
    gate = Gate()
    store = StallingStore(filled(), gate=gate, operations={"read"})
    found = []
    reader = threading.Thread(target=lambda: found.append(read_value(store, make_key())))
    reader.start()
    assert gate.wait_for_arrival()
    assert found == []
    gate.release()
    reader.join(10)
    assert found == [b"value"]


def test_a_forgotten_gate_opens_by_itself():
    store = StallingStore(filled(), gate=Gate(limit_seconds=0.0))
    assert read_value(store, make_key()) == b"value"


def test_no_arrival_is_no_arrival():
    gate = Gate()
    store = StallingStore(filled(), gate=gate, operations={"put"})
    assert read_value(store, make_key()) == b"value"
    assert not gate.wait_for_arrival(timeout=0.0)


def test_failing_reads_raise_store_error():
    with pytest.raises(StoreError, match="injected"):
        FailingStore(filled(), operations={"read"}).read(make_key(), ())


def test_failing_changes_answer_as_the_contract_says():
    inner = filled()
    store = FailingStore(inner, operations={"put", "delete", "discard"})
    assert store.put(make_key(1), [b"x"]).result is PutResult.FAILED
    assert store.delete(make_key()) is False
    store.discard(make_key(), "test")
    assert read_value(inner, make_key()) == b"value"
    assert inner.where(make_key(1)) is not Where.HERE
    assert store.num_failed == 3


def test_failures_stop_after_their_number():
    store = FailingStore(filled(), operations={"put"}, num_failures=2)
    results = [store.put(make_key(number), [b"x"]).result for number in range(1, 5)]
    assert results == ["failed", "failed", "stored", "stored"]


def test_damage_on_read_leaves_the_stored_value_alone():
    inner = filled(values=(bytes(9), bytes(9)))
    store = CorruptingStore(inner, damage=flip_bit(8), keys={make_key(0)})
    assert read_value(store, make_key(0)) == b"\0\1" + bytes(7)
    assert read_value(store, make_key(1)) == bytes(9)
    assert read_value(inner, make_key(0)) == bytes(9)
    assert store.read(make_key(2), ()) is None


@given(st.binary(min_size=1, max_size=50), st.integers(0, 1000))
def test_one_bit_differs_after_a_flip(content, index):
    changed = flip_bit(index)(content)
    difference = int.from_bytes(content, "big") ^ int.from_bytes(changed, "big")
    assert difference.bit_count() == 1
    assert flip_bit(index)(changed) == content


@given(st.binary(max_size=50), st.integers(-60, 60), st.integers(-60, 60))
def test_zeroing_keeps_the_size_and_what_is_outside(content, start, stop):
    changed = zero(start, stop)(content)
    assert len(changed) == len(content)
    assert not any(changed[start:stop])
    inside = range(len(content))[start:stop]
    assert all(changed[i] == content[i] for i in range(len(content)) if i not in inside)


def test_a_clock_moves_only_by_call_and_never_back():
    clock = FakeClock(start=5.0)
    assert clock() == clock() == 5.0
    clock.sleep(2)
    clock.sleep(-1)
    clock.advance(0.5)
    assert clock() == 7.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)
