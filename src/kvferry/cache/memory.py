"""The memory of one rank's slots, and how other processes of the machine reach it.

The worker role of each rank makes a `SlotMemory`; the scheduler role opens it (`open_slots`). If
one process has both roles and the only rank, the slots are private memory, in large pages on Linux.
Else they are an anonymous file in memory, which the rank reports by process and descriptor. The
file has no name in any file system and no limit of `/dev/shm`, and goes with the last of its users.
Its size is sealed: no process can make it smaller under a reader.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import ConfigError, TransferError
from kvferry.record.schema import ALIGN

if sys.platform == "linux":
    from fcntl import F_ADD_SEALS, F_GET_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl

READY_BYTES = 256 << 20
"""How much of private memory is backed by pages when an engine starts."""

NOT_SHARED = -1
"""Stands for a descriptor if only the process that made the memory reaches it."""

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14; Python has no name for it."""


def slot_size(num_bytes: int) -> int:
    """Bytes from one slot to the next: `num_bytes`, rounded up to the alignment of O_DIRECT."""
    return -(-num_bytes // ALIGN) * ALIGN


def free_bytes() -> int:
    """Bytes that this process can still get from the machine and within its control group, as far
    as these are known."""
    free = [sys.maxsize]
    with contextlib.suppress(OSError, KeyError, ValueError):
        free.append(_table(Path("/proc/meminfo"))["MemAvailable:"] << 10)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, KeyError, ValueError):
        kinds = _table(group / "memory.stat")
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        # Pages of files count as used, but are dropped when memory is short.
        free.append(limit - used + kinds["file"] - kinds["shmem"])
    return min(free)


def machine_bytes() -> int:
    """The memory of this machine, or of this container if that is less."""
    total = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        total.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(total)


def _table(file: Path) -> dict[str, int]:
    """The numbers of a file of the system, by the word that begins their line."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


class SlotMemory:
    """The slots: equal parts of one page-aligned region.

    Args:
        slot_bytes: bytes that one slot must hold.
        is_shared: whether other processes read the slots. If so, all memory is taken now, since a
            page that is missing later would kill the process; else each page at its first use.
        free: returns the bytes that this process can still get.

    Attributes:
        view: all slots.
        name, process, fd: what `open_slots` needs besides the size.

    Raises:
        ConfigError: this machine does not let a process have so much memory.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        is_shared: bool = False,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self.slot_bytes = slot_size(slot_bytes)
        self.name = f"kvferry-{secrets.token_hex(16)}"
        self.process, self.fd = os.getpid(), NOT_SHARED
        num_bytes = num_slots * self.slot_bytes
        try:
            if is_shared:
                if num_bytes > free():
                    raise OSError("there is less free memory")
                self.fd = _anonymous_file(self.name, num_bytes)
                weakref.finalize(self, os.close, self.fd)
                self._region = mmap.mmap(self.fd, num_bytes)
            else:
                self._region = _private(num_bytes)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"{num_slots} slots of {self.slot_bytes} bytes are more than this machine lets a "
                f"process reserve ({error}); set memory_bytes lower"
            ) from error
        self.view = memoryview(self._region)
        _MADE_HERE[self.name] = self

    @classmethod
    def of(cls, name: str, process: int, fd: int, num_slots: int, slot_bytes: int) -> SlotMemory:
        """The slots that a rank of this machine has made. Raises TransferError as `open_slots`."""
        memory = cls.__new__(cls)
        memory.slot_bytes = slot_size(slot_bytes)
        memory.name, memory.process, memory.fd = name, process, fd
        memory.view = open_slots(name, process, fd, num_slots * memory.slot_bytes)
        return memory

    def slot(self, index: int) -> memoryview:
        """The bytes of a slot, writable."""
        start = index * self.slot_bytes
        return self.view[start : start + self.slot_bytes]

    def make_ready(self) -> None:
        """Back the first `READY_BYTES` with pages now, so that the first hits do not wait for them.
        Does nothing if the system cannot do this."""
        if sys.platform == "linux":
            address = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
            length = min(READY_BYTES, len(self.view))
            # `mmap.madvise` would hold the interpreter's lock.
            madvise = ctypes.CDLL(None).madvise
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)


_MADE_HERE: weakref.WeakValueDictionary[str, SlotMemory] = weakref.WeakValueDictionary()
"""The memory that workers of this process made, by name. Private memory is only found here."""


def open_slots(name: str, process: int, fd: int, num_bytes: int) -> memoryview:
    """Open the memory of all slots of a rank, writable, as the rank reported it.

    Raises:
        TransferError: they cannot be reached from this process.
    """
    if (made := _MADE_HERE.get(name)) is not None:
        return made.view
    if fd == NOT_SHARED:
        raise TransferError(f"process {process} does not share its memory")
    if sys.platform != "linux":
        raise TransferError("only Linux shows the memory of another process")
    path = f"/proc/{process}/fd/{fd}"
    try:
        # On another machine, or in another container, the numbers mean something else.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise TransferError(f"process {process} of this machine is not that rank")
        opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            is_sealed = fcntl(opened, F_GET_SEALS) & F_SEAL_SHRINK
            if not is_sealed or os.fstat(opened).st_size != num_bytes:
                raise TransferError(f"the memory of process {process} is of another version")
            return memoryview(mmap.mmap(opened, num_bytes))
        finally:
            os.close(opened)
    except OSError as error:
        raise TransferError(
            f"the memory of process {process} cannot be opened: {error.strerror}"
        ) from error


def _private(num_bytes: int) -> mmap.mmap:
    region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without it; only speed is lost
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def _anonymous_file(name: str, num_bytes: int) -> int:
    """Make a file in memory that has all its pages and keeps its size; return its descriptor.
    Raises OSError."""
    if sys.platform != "linux":
        raise OSError("several ranks need Linux")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
