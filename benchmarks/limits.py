"""Plain copies, writes and reads of the machine, timed as limits for the benchmarks."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple


class Seconds(NamedTuple):
    """Wall seconds and CPU seconds of the process."""

    wall: float
    cpu: float


def now() -> Seconds:
    return Seconds(time.perf_counter(), time.process_time())


def since(started: Seconds) -> Seconds:
    wall, cpu = now()
    return Seconds(wall - started.wall, cpu - started.cpu)


def timed(work: Callable[[], object]) -> Seconds:
    """The time of one call."""
    started = now()
    work()
    return since(started)


class PlainFiles:
    """New files of `file_bytes` each and `num_bytes` in total, all written from one buffer."""

    def __init__(self, directory: Path, file_bytes: int, num_bytes: int) -> None:
        self._directory = directory
        self._buffer = memoryview(mmap.mmap(-1, file_bytes))
        self._buffer[:] = os.urandom(file_bytes)
        self._count = num_bytes // file_bytes

    def write(self, threads: int) -> None:
        self._directory.mkdir()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._write_one, range(self._count)))

    def _write_one(self, index: int) -> None:
        fd = os.open(self._directory / str(index), os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            done = 0
            while done < len(self._buffer):
                done += os.pwritev(fd, [self._buffer[done:]], done)
        finally:
            os.close(fd)

    def remove(self) -> None:
        shutil.rmtree(self._directory)


class DirectRead:
    """Plain O_DIRECT reads of whole files, or buffered ones where O_DIRECT does not work."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        size = max(file.stat().st_size for file in files)
        self._buffers = threading.local()
        self._size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.works = True
        try:
            self._read_one(files[0])
        except OSError:
            self.works = False

    def read(self, threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._read_one, self._files))

    def _read_one(self, file: Path) -> None:
        if not hasattr(self._buffers, "view"):
            self._buffers.view = memoryview(mmap.mmap(-1, self._size))
        flags = os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if self.works else 0)
        fd = os.open(file, flags)
        try:
            done = 0
            while got := os.preadv(fd, [self._buffers.view[done:]], done):
                done += got
                if done % mmap.PAGESIZE:
                    break
        finally:
            os.close(fd)


def drop_from_cache(files: Sequence[Path]) -> None:
    """Write files back and drop them from the page cache, where the system can."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def bring_into_cache(files: Sequence[Path]) -> None:
    """Read files, so that they are in the page cache, where they stay as long as there is room."""
    for file in files:
        file.read_bytes()
