"""Warm from the page cache, cold past it, and the same bytes either way."""

from __future__ import annotations

import errno
import mmap
import os
import threading

import pytest

from kvferry.errors import StoreError
from kvferry.testing.stores import make_key, make_value

IS_LINUX = hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT")


def make_cold(path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def takes_direct(path) -> bool:
    """Whether the file system here can be read past the page cache."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.fixture
def page_cache(monkeypatch):
    """Says whether records are in it: the real one keeps and drops what it likes."""
    preadv, is_empty = os.preadv, threading.Event()

    def told(fd, buffers, offset, flags=0):
        if flags and is_empty.is_set():
            raise BlockingIOError
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", told)
    return is_empty


def aligned_buffer(num_bytes):
    return memoryview(mmap.mmap(-1, num_bytes))[:num_bytes]


@pytest.mark.parametrize("num_bytes", [1, 4095, 4096, 4097, 300_007, 1 << 20])
@pytest.mark.parametrize("is_cold", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_every_way_to_read_gives_the_same_bytes(bench, num_bytes, is_cold, shift):
    value = make_value(num_bytes)
    store = bench.open()
    store.put(make_key(), [value])
    if is_cold:
        make_cold(bench.path(make_key()))
    buffer = aligned_buffer(num_bytes + 8192)
    assert store.read(make_key(), [(0, buffer[shift:])]) == num_bytes
    assert buffer[shift : shift + num_bytes] == value


def test_a_partly_cached_record_is_read_right(bench):
    value = make_value(1 << 20)
    store = bench.open()
    store.put(make_key(), [value])
    make_cold(bench.path(make_key()))
    with open(bench.path(make_key()), "rb", buffering=0) as file:
        file.seek(400_000)
        file.read(5000)
    buffer = aligned_buffer(1 << 20)
    assert store.read(make_key(), [(4096, buffer[4096:]), (0, buffer[:4096])]) == len(value)
    assert buffer == value


@pytest.mark.skipif(not IS_LINUX, reason="not a Linux system")
@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_these_abilities_is_asked_once_per_record(
    bench, monkeypatch, refusal
):
    preadv, refused = os.preadv, []

    def plain(fd, buffers, offset, flags=0):
        if flags:
            refused.append(fd)
            raise OSError(refusal, "not here")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", plain)
    store = bench.open()
    value = make_value(300_007)
    for number in range(3):
        store.put(make_key(number), [value])
        buffer = aligned_buffer(len(value))
        store.read(make_key(number), [(offset, buffer[offset:]) for offset in (0, 4096)])
        assert buffer == value
    assert len(refused) == 3


@pytest.mark.skipif(not IS_LINUX, reason="not a Linux system")
def test_one_look_tells_for_all_reads_of_a_record(bench, monkeypatch):
    preadv, looks = os.preadv, []

    def looking(fd, buffers, offset, flags=0):
        looks.extend([fd] * (flags != 0 and len(buffers[0]) == 4096))
        return preadv(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", looking)
    store = bench.open()
    store.put(make_key(), [make_value(1 << 20)])
    store.read(
        make_key(), [(offset, aligned_buffer(1 << 17)) for offset in range(0, 1 << 20, 1 << 17)]
    )
    assert len(looks) == 1


@pytest.mark.skipif(not IS_LINUX, reason="not a Linux system")
def test_a_look_at_a_failing_medium_raises_nothing(bench):
    store = bench.open()
    store.put(make_key(), [make_value(300_007)])
    bench.io.fail["preadv"] = errno.EIO
    with pytest.raises(StoreError, match="cannot be read"):
        store.read(make_key(), [(0, aligned_buffer(300_007))])


def test_reading_does_not_leak_descriptors(bench):
    store = bench.open()
    store.put(make_key(), [make_value(10_000)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        make_cold(bench.path(make_key()))
        store.read(make_key(), [(0, aligned_buffer(12_288))])
        bench.io.fail["preadv"] = errno.EIO
        with pytest.raises(StoreError):
            store.read(make_key(), [(0, aligned_buffer(12_288))])
        bench.io.fail.clear()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not IS_LINUX, reason="not a Linux system")
@pytest.mark.parametrize(
    ("options", "is_cold", "is_direct"),
    [({}, True, True), ({}, False, False), ({"direct_io": "off"}, True, False)],
)
def test_only_cold_records_are_read_past_the_page_cache(
    bench, page_cache, monkeypatch, options, is_cold, is_direct
):
    store = bench.open(**options)
    store.put(make_key(), [make_value(1 << 20)])
    if is_cold:
        page_cache.set()
    really, opened = os.open, []

    def noting(path, flags, *rest, **named):
        opened.append(flags)
        return really(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", noting)
    # Longer than the record: what is beyond its end is neither cold nor warm.
    assert store.read(make_key(), [(0, aligned_buffer(4 << 20))]) == 1 << 20
    has_direct = any(flags & os.O_DIRECT for flags in opened)
    assert has_direct is (is_direct and takes_direct(bench.path(make_key())))
