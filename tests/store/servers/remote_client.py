"""A client whose server is a dict, for tests of what all remote stores share."""

from __future__ import annotations

import threading
import time

from kvferry.errors import FaultKind, StoreError
from kvferry.store.base import PutResult
from kvferry.store.memory import copy_ranges
from kvferry.store.servers.remote import RemoteClient


class DictClient(RemoteClient):
    """A client of values in a dict, which several clients may share.

    Attributes:
        gate: event that calls wait for, until their deadline.
        down: whether calls raise.
        asked: names that each `exists` asked for.
    """

    def __init__(self, values: dict[str, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.gate = threading.Event()
        self.gate.set()
        self.down = False
        self.asked: list[list[str]] = []
        self.is_closed = False

    def _enter(self, deadline: float) -> None:
        if not self.gate.wait(max(0.0, deadline - time.monotonic())):
            raise StoreError(FaultKind.LATE, "the server did not answer in time")
        if self.down:
            raise StoreError(FaultKind.AWAY, "the server is down")

    def read(self, name, ranges, deadline):
        self._enter(deadline)
        value = self.values.get(name)
        return None if value is None else copy_ranges(value, ranges)

    def put(self, name, buffers, deadline, *, replaces=False):
        self._enter(deadline)
        value = b"".join(buffers)
        if replaces:
            self.values.pop(name, None)
        stored = self.values.setdefault(name, value)
        return PutResult.STORED if stored is value else PutResult.EXISTS

    def exists(self, names, deadline):
        self.asked.append(list(names))
        self._enter(deadline)
        return [name in self.values for name in names]

    def delete(self, name, deadline):
        self._enter(deadline)
        return self.values.pop(name, None) is not None

    def scan(self, prefix, deadline):
        for name, value in list(self.values.items()):
            if name.startswith(prefix):
                yield name, len(value), time.time()

    def close(self):
        self.is_closed = True
