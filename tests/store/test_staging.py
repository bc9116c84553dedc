"""Slots of staging memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.record.schema import ALIGN
from kvferry.store.staging import Staging


def test_every_slot_is_given_out_once_and_none_overlaps():
    staging = Staging(5 * ALIGN + 1, ALIGN - 7)
    slots = [staging.acquire() for _ in range(5)]
    assert sorted(slots) == [0, 1, 2, 3, 4]
    assert staging.acquire() is None
    for slot in slots:
        staging.view(slot)[:] = bytes([slot]) * ALIGN
    assert [set(staging.view(slot)) for slot in slots] == [{slot} for slot in slots]


def test_the_last_slot_returned_is_the_next_one_used():
    staging = Staging(4 * ALIGN, ALIGN)
    first, second = staging.acquire(), staging.acquire()
    staging.release(first)
    staging.release(second)
    assert staging.num_free == 4
    assert [staging.acquire(), staging.acquire()] == [second, first]


def test_what_is_kept_free_for_others_is_not_given():
    staging = Staging(4 * ALIGN, ALIGN)
    assert staging.acquire(keep_free=3) is not None
    assert staging.acquire(keep_free=3) is None
    assert staging.num_free == 3


def test_too_little_and_too_much_are_refused():
    with pytest.raises(ConfigError, match="staging_bytes=4096"):
        Staging(4096, 4096)
    with pytest.raises(ConfigError, match="set it lower"):
        Staging(1 << 61, 4096)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(sys.platform != "linux", reason="memory is not prepared elsewhere")
def test_prepared_memory_is_there_before_it_is_used_and_keeps_what_it_holds():
    size = 64 << 20
    staging = Staging(4 * size, size)
    before = resident_bytes()
    view = staging.view(staging.acquire())
    view[:8] = b"contents"
    staging.prepare(size)
    assert size * 0.9 < resident_bytes() - before < size * 1.5
    assert view[:8] == b"contents"
    staging.prepare(100 * size)  # more than there is


@pytest.mark.skipif(sys.platform != "linux", reason="memory is not prepared elsewhere")
def test_a_system_that_cannot_prepare_memory_is_no_fault(monkeypatch):
    monkeypatch.setattr("kvferry.store.staging._MADV_POPULATE_WRITE", 9999)
    staging = Staging(4 * ALIGN, ALIGN)
    staging.prepare(ALIGN)
    assert staging.num_free == 4
