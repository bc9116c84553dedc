"""A file whose reads do not return, as on a mount that hangs. The kernel's own FUSE serves it.

    with stalled(path) as file:
        ...           # whoever reads `path` waits
        file.release()  # now the readers get the file's content

Needs the right to mount. At the end of the block every waiting read fails.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_LIBC = ctypes.CDLL(None, use_errno=True)
_FORCE, _DETACH = 1, 2
_IN_HEADER = struct.Struct("<IIQQIIIHH")
_OUT_HEADER = struct.Struct("<IiQ")
_FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT = 2, 3, 14, 15, 18, 25, 26
_INTERRUPT, _DESTROY, _BATCH_FORGET = 36, 38, 42
_NO_REPLY = {_FORGET, _INTERRUPT, _BATCH_FORGET}
_DIRECT_IO = 1
_ROOT = 1


class StalledFile:
    """Answers the kernel's requests for one file on a thread; reads wait until `release`."""

    def __init__(self, fd: int, content: bytes) -> None:
        self._fd = fd
        self._content = content
        self._lock = threading.Lock()
        self._held: list[tuple[int, int, int]] | None = []
        self.asked = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Answer the reads that wait, and all later ones at once."""
        with self._lock:
            held, self._held = self._held or [], None
        for unique, offset, size in held:
            self._reply(unique, self._content[offset : offset + size])

    def _serve(self) -> None:
        with suppress(OSError):  # unmounted
            while True:
                self._answer(os.read(self._fd, 1 << 20))

    def _answer(self, message: bytes) -> None:
        _, opcode, unique, *_ = _IN_HEADER.unpack_from(message)
        body = message[_IN_HEADER.size :]
        if opcode == _INTERRUPT:  # the waiting reader is being killed
            self._let_go(struct.unpack_from("<Q", body)[0])
        if opcode in _NO_REPLY:
            return
        if opcode == _READ:
            self._read(unique, body)
        elif opcode == _INIT:
            _, minor, readahead, _ = struct.unpack_from("<IIII", body)
            self._reply(unique, struct.pack("<IIIIHHII36x", 7, minor, readahead, 0, 8, 8, 4096, 1))
        elif opcode == _GETATTR:
            self._reply(unique, struct.pack("<QII", 1, 0, 0) + self._attributes())
        elif opcode == _OPEN:
            self._reply(unique, struct.pack("<QII", 1, _DIRECT_IO, 0))
        elif opcode in (_RELEASE, _FLUSH, _DESTROY):
            self._reply(unique, b"")
        else:
            self._reply(unique, b"", errno.ENOSYS)

    def _read(self, unique: int, body: bytes) -> None:
        _, offset, size = struct.unpack_from("<QQI", body)
        self.asked.set()
        with self._lock:
            if self._held is not None:
                self._held.append((unique, offset, size))
                return
        self._reply(unique, self._content[offset : offset + size])

    def _let_go(self, unique: int) -> None:
        with self._lock:
            if self._held is None:
                return
            self._held = [read for read in self._held if read[0] != unique]
        self._reply(unique, b"", errno.EINTR)

    def _attributes(self) -> bytes:
        size = len(self._content)
        mode = 0o100600
        times = (0, 0, 0)
        return struct.pack(
            "<6Q10I", _ROOT, size, size // 512, *times, *times, mode, 1, 0, 0, 0, 4096, 0
        )

    def _reply(self, unique: int, body: bytes, error: int = 0) -> None:
        with suppress(OSError):  # the reader is gone
            os.write(
                self._fd, _OUT_HEADER.pack(_OUT_HEADER.size + len(body), -error, unique) + body
            )


@contextmanager
def stalled(path: Path) -> Iterator[StalledFile]:
    """Mount a stalled file with the same content over the file `path`."""
    try:
        fd = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no file systems of users' own here: {error}")
    options = f"fd={fd},rootmode=100000,user_id=0,group_id=0,allow_other".encode()
    target = os.fsencode(path)
    content = path.read_bytes()
    if _LIBC.mount(b"stalled", target, b"fuse", 0, options):
        number = ctypes.get_errno()
        os.close(fd)
        if number == errno.EPERM:
            pytest.skip("no right to mount a file system here: run as root")
        raise OSError(number, f"cannot mount on {path}: {os.strerror(number)}")
    try:
        yield StalledFile(fd, content)
    finally:
        _LIBC.umount2(target, _FORCE | _DETACH)  # forced, so that waiting reads fail
        os.close(fd)
