"""The child process of `kvferry.store.servers.mooncake`: a script that holds Mooncake's client.

Mooncake's client keeps Python's global lock while it connects and closes: up to 90 seconds where
its master is dead. In a process of its own, it stops no thread of the engine, nor does its crash.

A lane is a socket and a part of shared memory, and has a thread. The thread reads one command,
works, and sends one answer; each is a line of JSON. The first answer is 0 if the lane is ready, or
says why it cannot be. The memory is registered with Mooncake, which copies values to and from it.

Imports nothing of kvferry, as the child may not find it where the parent did.
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
from collections.abc import Callable
from typing import Any

ABSENT = -704
PENDING = -703
EXISTS = -705
# A put of the same name is under way in this process.
EXISTS_HERE = -600

# A writer that waits longer than this between two pieces of a value gave up.
_PIECE_SECONDS = 2.0

# Limit of `close`: then the default action of the alarm ends the process.
_CLOSE_SECONDS = 10


class MooncakeLane:
    """Carries out the commands of one lane, one after the other.

    Args:
        mooncake: a `MooncakeDistributedStore`, shared by all lanes.
        address: address of the lane's memory.
    """

    def __init__(self, mooncake: Any, address: int) -> None:  # noqa: ANN401
        self._mooncake = mooncake
        self._address = address
        self._unfinished: str | None = None
        self._commands: dict[str, Callable[..., object]] = {
            "read": self.read,
            "put": self.put,
            "exists": mooncake.batch_is_exist,
            "sizes": self.sizes,
            "delete": self.delete,
        }

    def serve(self, end: socket.socket) -> None:
        """Answer commands until the other end closes. An exception ends the process."""
        lines = end.makefile("rb")
        # Not `select`, which takes no descriptor above 1023: the number is the parent's.
        coming = select.poll()
        coming.register(end, select.POLLIN)
        answer: object = 0
        while True:
            end.sendall(json.dumps(answer).encode() + b"\n")
            if self._unfinished is not None and not coming.poll(1000 * _PIECE_SECONDS):
                self.give_up()
            line = lines.readline()
            if not line:
                return self.give_up()
            answer = self._answer(*json.loads(line))

    def _answer(self, command: str, *arguments: Any) -> object:  # noqa: ANN401
        if (command, arguments[0]) != ("put", self._unfinished):
            self.give_up()
        return self._commands[command](*arguments)

    def give_up(self) -> None:
        """Revoke a value whose writer gave up halfway, so that another writer can store it."""
        name, self._unfinished = self._unfinished, None
        if name is not None:
            self._mooncake.batch_put_session_revoke([name])

    def read(self, name: str, pieces: list[tuple[int, int]]) -> int:
        """Copy pieces (offset, length) of a value into the lane's memory, one after the other, each
        up to the value's end. Returns the size of the value, or a negative code."""
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
        """Write one piece of a value from the lane's memory. The first piece begins the value, the
        last makes it visible. Returns 0, or a negative code: then nothing is left of the value."""
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
        else:
            code = min(code, -1)  # a short count is a failure, too
        if code != 0:
            self._mooncake.batch_put_session_revoke([name])
        self._unfinished = None
        return int(code)

    def sizes(self, names: list[str]) -> list[int]:
        return [int(self._mooncake.get_size(name)) for name in names]

    def delete(self, name: str) -> int:
        # Forced: else the lease of the reader that found the value wrong would keep it. Another
        # reader may then get bytes of a later value, but its checks find that.
        return int(self._mooncake.remove(name, True))


def connect(options: dict[str, Any]) -> tuple[Any, str | None]:
    """Return a client of the master, and None or the reason why it cannot be used."""
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
        options["segment"],
        0,
        options["protocol"],
        options["device"],
        options["master"],
    )
    return mooncake, None if code == 0 else f"Mooncake's setup failed: {code}"


def serve(options: dict[str, Any]) -> None:
    """Serve all lanes until the parent closes a socket, or is gone."""
    ends = [socket.socket(fileno=fd) for fd in options["sockets"]]
    num_bytes = options["lane_bytes"]
    memory = mmap.mmap(options["memory"], num_bytes * len(ends))
    mooncake, reason = connect(options)
    if reason is not None:
        for end in ends:
            end.sendall(json.dumps(reason).encode() + b"\n")
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mooncake.register_buffer(address, len(memory))
    over = threading.Event()

    def run(end: socket.socket, lane: MooncakeLane) -> None:
        try:
            lane.serve(end)
        finally:
            over.set()

    for number, end in enumerate(ends):
        lane = MooncakeLane(mooncake, address + number * num_bytes)
        threading.Thread(target=run, args=(end, lane), daemon=True).start()
    # One that ends is enough: the parent closes or is gone, or a lane raised. Others may hang.
    over.wait()
    # Tell the master that lent memory goes. Takes a bounded time, though a lane may hang.
    signal.alarm(_CLOSE_SECONDS)
    mooncake.close()


if __name__ == "__main__":
    # Ctrl-C is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(json.load(sys.stdin))
    finally:
        os._exit(0)  # at once: in an orderly exit, threads may panic or hang
