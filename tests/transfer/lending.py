"""A lender in a dict, and connections that say what a test wants."""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from kvferry.transfer.auth import SharedKey
from kvferry.transfer.base import PENDING
from kvferry.transfer.messages import (
    GREETINGS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    REPLIES,
    VERSION,
    Hello,
)
from kvferry.transfer.stream import Stream

SPACE = b"n" * 32
KEY = SharedKey(b"k" * 32)
PATIENCE_SECONDS = 30.0
"""Tells late from for ever."""


def soon(seconds: float = PATIENCE_SECONDS) -> float:
    return time.monotonic() + seconds


class DictLoan(NamedTuple):
    buffers: tuple[memoryview, ...]


class DictLender:
    """Records in a dict, each in several pieces.

    Attributes:
        records: bytes, or `PENDING`.
        num_lent: loans that were not released.
        gate: loans wait until it is set.
    """

    def __init__(self, records=None):
        self.records = {} if records is None else records
        self.num_lent = 0
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def lend(self, key, seconds):
        record = self.records.get(key)
        if record is None or record is PENDING:
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
    """A connection to a server, by hand."""

    def __init__(self, server):
        self.socket = socket.create_connection(server.address, PATIENCE_SECONDS)
        self.stream = Stream(self.socket)
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
        """Whether the server closes the connection, whatever it still sends."""
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
