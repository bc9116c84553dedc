"""The process that holds a connection to Mooncake; `kvferry.store.servers.mooncake` starts it as a
script. Imports nothing of kvferry.

Mooncake's client keeps Python's global lock while it connects and closes: up to 90 seconds where
its master is dead. In a process of its own, that stops no thread of ours; nor does its crash.

Each lane is a socket and a part of shared memory, registered with Mooncake. A lane reads one
command, works, and sends one answer: lines of JSON. The first answer says that the lane is ready.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
from typing import Any

ABSENT = -704
PENDING = -703
EXISTS = -705
# A put of the same name is under way in this process.
EXISTS_HERE = -600

# A writer that waits longer than this between two pieces of a value gave up.
_PIECE_SECONDS = 2.0

# The default action of the alarm ends the process.
_CLOSE_SECONDS = 10


class Lane:
    """Answers the commands of one socket, one after the other.

    Args:
        mooncake: a `MooncakeDistributedStore`, shared by all lanes.
        end: of the socket.
        address: of the lane's memory.
    """

    def __init__(self, mooncake: Any, end: socket.socket, address: int) -> None:  # noqa: ANN401
        self._mooncake = mooncake
        self._socket = end
        self._address = address
        self._unfinished: str | None = None

    def serve(self) -> None:
        """Until the other end closes."""
        say(self._socket, 0)
        commands = {
            "read": self.read,
            "put": self.put,
            "exists": self._mooncake.batch_is_exist,
            "sizes": self.sizes,
            "delete": self.delete,
        }
        lines = self._socket.makefile("rb")
        # Not `select`, which takes no descriptor above 1023; it is the parent's.
        coming = select.poll()
        coming.register(self._socket, select.POLLIN)
        while True:
            if self._unfinished is not None and not coming.poll(1000 * _PIECE_SECONDS):
                self._revoke()
            line = lines.readline()
            if not line:
                break
            name, *arguments = json.loads(line)
            if (name, arguments[0]) != ("put", self._unfinished):
                self._revoke()
            say(self._socket, commands[name](*arguments))
        self._revoke()

    def _revoke(self) -> None:
        """Take back a value whose writer gave up in its middle, so that another can store it."""
        if self._unfinished is not None:
            self._mooncake.batch_put_session_revoke([self._unfinished])
            self._unfinished = None

    def read(self, name: str, pieces: list[tuple[int, int]]) -> int:
        """Put the pieces (offset, length) into the memory, one after the other, each up to the end
        of the value. Returns the size of the value, or a negative code."""
        size = int(self._mooncake.get_size(name))
        sources, targets, lengths, used = [], [], [], 0
        for offset, length in pieces:
            if size > offset:
                sources.append(offset)
                targets.append(used)
                lengths.append(min(length, size - offset))
                used += lengths[-1]
        if sources:
            [[done]] = self._mooncake.get_into_ranges(
                [self._address], [[name]], [[targets]], [[sources]], [[lengths]]
            )
            failed = [code for code, length in zip(done, lengths, strict=False) if code != length]
            if failed or len(done) != len(lengths):
                return int(failed[0]) if failed and failed[0] < 0 else -1
        return size

    def put(self, name: str, size: int, offset: int, length: int) -> int:
        """Write one piece of a value from the memory; the first begins it, the last makes it
        visible. Returns 0 or a negative code, after which nothing is left of it."""
        if offset == 0:
            [code] = self._mooncake.batch_put_session_start([name], [size])
            if code != 0:
                return int(code)
            self._unfinished = name
        [code] = self._mooncake.batch_put_from_multi_buffer_ranges(
            [name], [[self._address]], [[length]], [[offset]]
        )
        if code == length:
            if offset + length < size:
                return 0
            [code] = self._mooncake.batch_put_session_end([name])
        if code != 0:
            self._mooncake.batch_put_session_revoke([name])
        self._unfinished = None
        return int(code)

    def sizes(self, names: list[str]) -> list[int]:
        return [int(self._mooncake.get_size(name)) for name in names]

    def delete(self, name: str) -> int:
        # Forced, or the lease of the reader that found a value wrong would keep it. Another reader
        # may get bytes of a later value, which its checks find.
        return int(self._mooncake.remove(name, True))


def say(end: socket.socket, answer: object) -> None:
    end.sendall(json.dumps(answer).encode() + b"\n")


def connect(options: dict[str, Any]) -> tuple[Any, str | None]:
    """A client of the master, or the reason why there is none."""
    host, _, port = options["master"].rpartition(":")
    try:
        # Mooncake itself would try for 90 seconds.
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        return None, f"no connection to the master: {error.strerror or error}"
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        hint = "; run apt-get install libibverbs1" if "libibverbs" in str(error) else ""
        return None, f"{error}{hint}"
    mooncake = MooncakeDistributedStore()
    code = mooncake.setup(
        options["host"],
        options["metadata"],
        options["segment_bytes"],
        0,
        options["protocol"],
        options["device"],
        options["master"],
    )
    return mooncake, None if code == 0 else f"Mooncake's set-up answers {code}"


def main(options: dict[str, Any]) -> None:
    """Serve until the parent closes the sockets, or is gone."""
    ends = [socket.socket(fileno=fd) for fd in options["sockets"]]
    mooncake, reason = connect(options)
    if reason is not None:
        for end in ends:
            say(end, reason)
        return
    num_bytes = options["lane_bytes"]
    memory = mmap.mmap(options["memory"], num_bytes * len(ends))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mooncake.register_buffer(address, len(memory))
    lanes = [Lane(mooncake, end, address + number * num_bytes) for number, end in enumerate(ends)]
    over = threading.Event()

    def serve(lane: Lane) -> None:
        try:
            lane.serve()
        finally:
            over.set()

    for lane in lanes:
        threading.Thread(target=serve, args=[lane], daemon=True).start()
    # The first lane that ends says that the parent closes, or is gone: another may hang for long.
    over.wait()
    signal.alarm(_CLOSE_SECONDS)
    mooncake.close()


if __name__ == "__main__":
    try:
        main(json.load(sys.stdin))
    finally:
        # Mooncake's own threads may not end.
        os._exit(0)
