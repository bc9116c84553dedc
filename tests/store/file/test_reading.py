"""Warm from the page cache, cold past it, and the same bytes either way."""

from __future__ import annotations

import errno
import mmap
import os

import pytest

from kvferry.store.base import PutResult
from kvferry.store.file.fileio import O_DIRECT, RWF_NOWAIT
from kvferry.testing.stores import make_key, make_value, read_value


def make_cold(path) -> None:
    """Take a file out of the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def can_be_cold(path) -> bool:
    """Whether the file system here has a page cache that can be empty, and tells (tmpfs: no)."""
    path.write_bytes(make_value(1 << 20))
    make_cold(path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.preadv(fd, [bytearray(4096)], 0, RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(fd)


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
    with store.open_read(make_key()) as source:
        assert source.read_into(buffer[shift:], 0) == num_bytes
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
    with store.open_read(make_key()) as source:
        assert source.read_into(buffer[4096:], 4096) == len(value) - 4096
        assert source.read_into(buffer[:4096], 0) == 4096
    assert buffer == value


@pytest.mark.skipif(not (O_DIRECT and RWF_NOWAIT), reason="not a Linux system")
@pytest.mark.parametrize("refusal", [errno.EOPNOTSUPP, errno.EINVAL])
def test_a_file_system_without_these_abilities_is_asked_once(bench, refusal):
    class Plain(type(bench.io)):
        refused = 0

        def preadv(self, fd, buffers, offset, flags=0):
            if flags:
                self.refused += 1
                raise OSError(refusal, "not here")
            return super().preadv(fd, buffers, offset)

    io = Plain()
    store = bench.open(io=io)
    value = make_value(300_007)
    for number in range(3):
        store.put(make_key(number), [value])
        buffer = aligned_buffer(len(value))
        with store.open_read(make_key(number)) as source:
            assert source.read_into(buffer, 0) == len(value)
        assert buffer == value
    assert io.refused == 1


def test_reading_does_not_leak_descriptors(bench):
    store = bench.open()
    store.put(make_key(), [make_value(10_000)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        make_cold(bench.path(make_key()))
        source = store.open_read(make_key())
        source.read_into(aligned_buffer(12_288), 0)
        source.close()
        source.close()
        store.open_read(make_key())  # dropped, not closed
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("num_bytes", [1, 4096, 8192, 12_289, 3 << 20])
def test_direct_writes_give_the_same_bytes(bench, num_bytes):
    value = make_value(num_bytes)
    store = bench.open(direct_io="on")
    buffer = aligned_buffer(num_bytes)
    buffer[:] = value
    head = bytes(8192)
    store.put(make_key(1), [head, buffer])
    store.put(make_key(2), [buffer, head])
    for key, expected in ((make_key(1), head + value), (make_key(2), value + head)):
        assert bench.path(key).read_bytes() == expected
    assert store.stat().used_bytes == 2 * (num_bytes + 8192)


@pytest.mark.skipif(not (O_DIRECT and RWF_NOWAIT), reason="not a Linux system")
@pytest.mark.parametrize(
    ("options", "is_cold", "is_direct"),
    [({}, True, True), ({}, False, False), ({"direct_io": "off"}, True, False)],
)
def test_only_cold_records_are_read_past_the_page_cache(bench, options, is_cold, is_direct):
    store = bench.open(**options)
    store.put(make_key(), [make_value(1 << 20)])
    if is_cold:
        make_cold(bench.path(make_key()))
    with store.open_read(make_key()) as source:
        # Longer than the record: what is beyond its end is neither cold nor warm.
        assert source.read_into(aligned_buffer(4 << 20), 0) == 1 << 20
        has_direct = source._direct_fd >= 0
    assert has_direct is (is_direct and can_be_cold(bench.root / "other"))


@pytest.mark.parametrize("head_bytes", [1, 100, 4096, 5000])
def test_a_head_written_directly_leaves_what_ranks_wrote_behind_it(bench, head_bytes):
    value = make_value(20_000)
    store = bench.open(direct_io="on")
    session = store.begin(make_key(), len(value))
    assert store.write_at(session, head_bytes, [value[head_bytes:]])
    assert store.commit(session, value[:head_bytes]) is PutResult.STORED
    assert read_value(store, make_key()) == value
