"""A lender of records in a dict, connections by hand, and a relay that breaks connections."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kvferry.transfer.auth import SharedKey
from kvferry.transfer.base import KeyState
from kvferry.transfer.messages import (
    GREETINGS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    REPLIES,
    VERSION,
    Frames,
    Hello,
)

SPACE = b"n" * 32
KEY = SharedKey(b"k" * 32)
PATIENCE_SECONDS = 30.0
"""How long anything may take before it counts as hung."""


def soon(seconds: float = PATIENCE_SECONDS) -> float:
    return time.monotonic() + seconds


class DictLoan(NamedTuple):
    buffers: tuple[memoryview, ...]


class DictLender:
    """Lends records of a dict to peers, each in several pieces.

    Attributes:
        records: bytes or `KeyState.PENDING`, by key.
        num_lent: number of loans that were not released.
        gate: event that loans wait for.
    """

    def __init__(self, records=None):
        self.records = {} if records is None else records
        self.num_lent = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def lend(self, key, seconds):
        record = self.records.get(key)
        if record is None or record is KeyState.PENDING:
            return record
        with self._lock:
            self.num_lent += 1
        self.gate.wait(PATIENCE_SECONDS)
        view, third = memoryview(record), len(record) // 3
        return DictLoan((view[:third], view[third:third], view[third:]))

    def release(self, loan):
        with self._lock:
            self.num_lent -= 1


class Raw:
    """A connection to a server whose messages a test sends by hand."""

    def __init__(self, server):
        self.socket = socket.create_connection(server.address, PATIENCE_SECONDS)
        self.stream = Frames(self.socket)
        self.challenge = self.stream.receive(GREETINGS, MAX_GREETING_BYTES, soon())

    def hello(self, key=KEY, namespace=SPACE, version=VERSION, nonce=b"c" * 32, **changes):
        said = {"incarnation": self.challenge.incarnation, "nonce": self.challenge.nonce} | changes
        proof = key.proof("client", said["incarnation"], said["nonce"], nonce, namespace)
        self.stream.send(Hello(version, namespace, nonce, proof), soon())
        return self.stream.receive(GREETINGS, MAX_GREETING_BYTES, soon())

    def ask(self, question):
        self.stream.send(question, soon())
        return self.stream.receive(REPLIES, MAX_FRAME_BYTES, soon())

    def is_ended(self):
        """Wait until the server closes the connection, whatever it still sends; whether it did."""
        self.socket.settimeout(PATIENCE_SECONDS)
        try:
            while self.socket.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close(self):
        self.socket.close()


class Relay:
    """A relay between two peers, which passes bytes on and breaks each connection once.

    Attributes:
        port: port of the relay, which leads to the server.
        fault: number of bytes, both ways together, after which a new connection is "cut", becomes
            "silent", has a bit "flipped", or is "held" until `resume`; None for no fault.
        reached: number of connections that had their fault.
        watch: function that gets all bytes that pass.
    """

    def __init__(self, port: int) -> None:
        self.fault: tuple[int, str] | None = None
        self.reached = 0
        self.resume = threading.Event()
        self.watch: Callable[[bytes], None] = lambda _: None
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._ends.is_set():
                near.close()
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            self._open += [near, far]
            self._threads.append(threading.Thread(target=self._pass_on, args=(near, far)))
            self._threads[-1].start()

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        other, fault = {near: far, far: near}, self.fault
        with near, far, suppress(OSError):
            passed = 0
            while True:
                for source in select.select([near, far], [], [], PATIENCE_SECONDS)[0]:
                    left = fault[0] - passed if fault and fault[0] > passed else 1 << 16
                    content = bytearray(source.recv(min(left, 1 << 16)))
                    if not content:
                        return
                    passed += len(content)
                    self.watch(content)
                    if fault and passed == fault[0]:
                        self.reached += 1
                        if fault[1] == "cut":
                            return
                        if fault[1] == "silent":
                            self._ends.wait(PATIENCE_SECONDS)
                        if fault[1] == "held":
                            self.resume.wait(PATIENCE_SECONDS)
                        if fault[1] == "flipped":
                            content[-1] ^= 4
                    other[source].sendall(content)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ends.set()
        self.resume.set()
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._threads[0].join(PATIENCE_SECONDS)  # first, as it opens more
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)
            assert not thread.is_alive()
        self._listener.close()
