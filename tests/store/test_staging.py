"""Slots of staging memory."""

from __future__ import annotations

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
