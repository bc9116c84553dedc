"""The byte account of one writer: a small file that only its owner writes.

Usage of a store is the sum over all ledgers of added minus removed: a counter that needs no lock. A
ledger file holds two copies of 4096 bytes. The owner writes them in turn, each in one call, so a
torn write, by a kill or a power loss, leaves the copy before it. A reader takes the newest copy
whose checksum is right.

One copy, little endian:

    offset  size  field
         0     8  magic "KVFLEDGR"
         8     4  version (1)
        12     4  flags: 1 = closed cleanly
        16     8  sequence number of this write
        24    16  host: digest of boot id and pid namespace
        40     8  pid
        48     8  start time of the process, clock ticks since boot (0: unknown)
        56     8  heartbeat, seconds since the epoch (f64)
        64    32  added bytes, removed bytes, added records, removed records (4 x i64)
        96    32  last finished trash batch, intended batch (0: none), its bytes, its records
       128   128  ids of up to 16 absorbed writers whose counts are already in this ledger
       256  2048  up to 128 pending writes: sequence number of the temporary file, bytes (2 x i64)
      4088     8  XXH3-64 of everything before it
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from kvferry.store.file.fileio import FileIO, read_up_to

COPY_BYTES = 4096
LEDGER_BYTES = 2 * COPY_BYTES
MAX_PENDING = 128
MAX_ABSORBED = 16
_MAGIC = b"KVFLEDGR"
_VERSION = 1
_CLOSED = 1
_FIXED = struct.Struct("<8sIIQ16sQQd4q4q")
_ABSORBED_AT = 128
_PENDING_AT = 256
_CHECKSUM_AT = COPY_BYTES - 8
_MAX_COUNT = 2**56
"""No honest count is larger, and sums of many such still fit into 64 bits."""
_MAX_PID = 2**31 - 1
_NO_FILE = frozenset({errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.ENOTDIR})


class Net(NamedTuple):
    """Bytes and records that went in and out; both only grow."""

    added_bytes: int = 0
    removed_bytes: int = 0
    added_records: int = 0
    removed_records: int = 0

    def plus(self, other: Net) -> Net:
        return Net(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def num_bytes(self) -> int:
        return self.added_bytes - self.removed_bytes

    @property
    def num_records(self) -> int:
        return self.added_records - self.removed_records


class Mark(NamedTuple):
    """Counts of one writer when they were read."""

    writer_id: str
    net: Net


class Owner(NamedTuple):
    """The process a ledger belongs to."""

    host: bytes
    pid: int
    start: int


class Intent(NamedTuple):
    """A trash batch whose files may be unlinked; its bytes count as removed once they are."""

    batch: int
    num_bytes: int
    num_records: int


NOTHING = Net()


@dataclass(slots=True)
class Ledger:
    """Contents of one copy.

    Attributes:
        owner: the process that writes it. net: what went in and out, pending writes included in
        `added`. pending: reserved writes, sequence number of their temporary file to bytes.
        finished_batch: all trash batches up to this one are counted in `net`. intent: the batch
        being unlinked. absorbed: writers whose counts are folded into `net`, their directories
        perhaps not yet gone.
    """

    owner: Owner
    sequence: int = 0
    heartbeat: float = 0.0
    closed: bool = False
    net: Net = NOTHING
    finished_batch: int = 0
    intent: Intent | None = None
    absorbed: set[str] = field(default_factory=set)
    pending: dict[int, int] = field(default_factory=dict)


def encode(ledger: Ledger) -> bytes:
    """One copy of the file. The owner keeps `pending` and `absorbed` within their bounds."""
    copy = bytearray(COPY_BYTES)
    _FIXED.pack_into(
        copy,
        0,
        _MAGIC,
        _VERSION,
        _CLOSED if ledger.closed else 0,
        ledger.sequence,
        *ledger.owner,
        ledger.heartbeat,
        *ledger.net,
        ledger.finished_batch,
        *(ledger.intent or (0, 0, 0)),
    )
    ids = b"".join(bytes.fromhex(name) for name in sorted(ledger.absorbed))
    copy[_ABSORBED_AT : _ABSORBED_AT + len(ids)] = ids
    flat = [number for slot in ledger.pending.items() for number in slot]
    struct.pack_into(f"<{len(flat)}q", copy, _PENDING_AT, *flat)
    copy[_CHECKSUM_AT:] = _checksum(copy)
    return bytes(copy)


def decode(copy: bytes) -> Ledger | None:
    """The ledger in one copy, None if it is torn, foreign, of another version, or says what no
    writer says."""
    if len(copy) != COPY_BYTES or copy[_CHECKSUM_AT:] != _checksum(copy):
        return None
    magic, version, flags, sequence, host, pid, start, heartbeat, *rest = _FIXED.unpack_from(copy)
    if magic != _MAGIC or version != _VERSION or not 0 < pid <= _MAX_PID:
        return None
    if not all(0 <= count <= _MAX_COUNT for count in rest):
        return None
    ids = _filled(copy[_ABSORBED_AT:_PENDING_AT], 8)
    slots = _filled(copy[_PENDING_AT:_CHECKSUM_AT], 16)
    numbers = struct.unpack(f"<{len(slots) // 8}q", slots)
    return Ledger(
        owner=Owner(host, pid, start),
        sequence=sequence,
        heartbeat=heartbeat,
        closed=bool(flags & _CLOSED),
        net=Net(*rest[:4]),
        finished_batch=rest[4],
        intent=Intent(*rest[5:]) if rest[5] else None,
        absorbed={ids[i : i + 8].hex() for i in range(0, len(ids), 8)},
        pending=dict(zip(numbers[::2], numbers[1::2], strict=True)),
    )


def _filled(table: bytes, step: int) -> bytes:
    """The entries in front of the empty rest of a table."""
    length = len(table.rstrip(b"\0"))
    return table[: -(-length // step) * step]


def _claimed_sequence(copy: bytes) -> bytes:
    return copy[23:15:-1]


def _checksum(copy: bytes | bytearray) -> bytes:
    return xxhash.xxh3_64_digest(memoryview(copy)[:_CHECKSUM_AT])


def read_ledger(io: FileIO, writer_path: str) -> Ledger | None:
    """The current ledger in a writer directory; None if no copy of it is whole, or if something
    else than a file stands there.

    Raises:
        FileNotFoundError: the directory or its ledger is gone (absorbed, or being deleted).
        OSError: the medium failed.
    """
    for _ in range(5):
        try:
            both = read_up_to(io, f"{writer_path}/ledger", LEDGER_BYTES)
        except OSError as error:
            if error.errno in _NO_FILE:
                return None
            raise
        # The newer one as far as its own word goes; if it is torn, the one before it.
        copies = sorted((both[:COPY_BYTES], both[COPY_BYTES:]), key=_claimed_sequence)
        ledger = decode(copies[1]) or decode(copies[0])
        if ledger is not None:
            return ledger
        # Both torn at once: the owner wrote twice while we read. Unless the file really is broken,
        # the next look succeeds.
    return None


def find_ledger(io: FileIO, writer_path: str) -> Ledger | None:
    """The current ledger of a writer that nobody deletes at the moment; None if no copy is whole or
    the directory has lost its ledger (a power failure, a hand).

    Raises:
        FileNotFoundError: the directory itself is gone.
        OSError: the medium failed.
    """
    try:
        return read_ledger(io, writer_path)
    except FileNotFoundError:
        io.lstat(writer_path)
        return None


def this_process(pid: int) -> Owner:
    """Identity of this process, such that another one on the same host can tell if it lives."""
    return Owner(host_digest(), pid, process_start(pid))


def host_digest() -> bytes:
    """16 bytes, equal for processes that see each other's pids until the next boot.

    Containers that share a volume share the boot id but not the pid namespace: to each other they
    are other hosts.
    """
    parts = [os.uname().nodename]
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            parts = [file.read().strip()]
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        # No procfs (macOS): the host name must do; the heartbeat decides as well there.
        pass
    return xxhash.xxh3_128_digest("\0".join(parts).encode())


def process_start(pid: int) -> int:
    """Start time in clock ticks since boot, 0 if the system does not say."""
    fields = _process_fields(pid)
    return int(fields[19]) if fields else 0


def _process_fields(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command name may hold spaces and brackets: count from its last bracket.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(owner: Owner) -> bool:
    """Whether a process of this host still runs. In doubt, it does."""
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    fields = _process_fields(owner.pid)
    if not fields:
        return True
    if owner.start and int(fields[19]) != owner.start:
        return False
    if fields[0] not in ("Z", "X"):
        return True
    try:
        # The first thread of a killed process can be gone while others end their system calls.
        return len(os.listdir(f"/proc/{owner.pid}/task")) > 1
    except OSError:
        return False
