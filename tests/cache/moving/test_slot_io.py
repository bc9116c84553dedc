"""The memory of slots: apart, aligned, and there when it is first used."""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path

import pytest

from kvferry.cache import memory as memory_module
from kvferry.cache.memory import READY_BYTES, SlotMemory
from kvferry.errors import ConfigError
from kvferry.record.schema import ALIGN

READY = pytest.mark.skipif(
    sys.platform != "linux" or tuple(map(int, platform.release().split(".")[:2])) < (5, 14),
    reason="memory is not made ready here",
)


def test_slots_do_not_overlap_and_are_aligned():
    memory = SlotMemory(5, ALIGN - 7)
    slots = [memory.slot(index) for index in range(5)]
    assert memory.slot_bytes == ALIGN
    for index, slot in enumerate(slots):
        slot[:] = bytes([index]) * ALIGN
    assert [set(slot) for slot in slots] == [{index} for index in range(5)]
    assert len(memory.view) == 5 * ALIGN
    for slot in slots:
        assert ctypes.addressof(ctypes.c_char.from_buffer(slot)) % ALIGN == 0


def test_more_than_a_process_may_reserve_is_refused():
    with pytest.raises(ConfigError, match="set memory_bytes lower") as refused:
        SlotMemory(1 << 49, 4096)
    assert "\n" not in str(refused.value)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@READY
def test_the_first_slots_are_there_before_they_are_used_and_keep_what_they_hold():
    memory = SlotMemory(4, READY_BYTES)
    before = resident_bytes()
    memory.slot(0)[:8] = b"contents"
    memory.make_ready()
    assert READY_BYTES * 0.9 < resident_bytes() - before < READY_BYTES * 1.5
    assert memory.slot(0)[:8] == b"contents"


def test_little_memory_is_made_ready_as_a_whole():
    memory = SlotMemory(2, ALIGN)
    memory.make_ready()
    memory.slot(1)[-1:] = b"x"
    assert memory.slot(1)[-1:] == b"x"


@READY
def test_a_system_that_cannot_make_memory_ready_is_no_fault(monkeypatch):
    monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", 9999)
    memory = SlotMemory(4, ALIGN)
    memory.make_ready()
    memory.slot(3)[:] = bytes(ALIGN)
