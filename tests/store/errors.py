"""Errors that a medium or a client raises, what each means to an operator, and stand-ins that raise
them: for the tests of stores, tiers and commands alike."""

from __future__ import annotations

import errno
import sqlite3
import threading

import pytest

from kvferry.errors import FaultKind, StoreError
from kvferry.store.file import directory, fileio, store, writing
from tests.store.file.conftest import FaultyOS
from tests.store.servers.remote_client import DictClient

OF_FILES = {
    "EACCES": FaultKind.RIGHTS,
    "EIO": FaultKind.REFUSED,
    "ELOOP": FaultKind.REFUSED,
    "ENAMETOOLONG": FaultKind.REFUSED,
    "EPERM": FaultKind.RIGHTS,
    "ESTALE": FaultKind.AWAY,
}
"""Errors of the system, by name, of one file or of all."""

OF_WRITES = {
    "EDQUOT": FaultKind.FULL,
    "EIO": FaultKind.REFUSED,
    "ENOSPC": FaultKind.FULL,
    "EROFS": FaultKind.READ_ONLY,
    "EACCES": FaultKind.RIGHTS,
}

UNFORESEEN: dict[str, tuple[Exception, FaultKind]] = {
    "EIO": (OSError(errno.EIO, "Input/output error"), FaultKind.REFUSED),
    "EACCES": (PermissionError(errno.EACCES, "Permission denied"), FaultKind.RIGHTS),
    "sqlite3": (sqlite3.OperationalError("disk I/O error"), FaultKind.REFUSED),
    "MemoryError": (MemoryError(), FaultKind.REFUSED),
    "ValueError": (ValueError("[digital envelope routines] unsupported"), FaultKind.BUG),
    "TypeError": (TypeError("an integer is required"), FaultKind.BUG),
    "KeyError": (KeyError("missing"), FaultKind.BUG),
    "RuntimeError": (RuntimeError("can't start new thread"), FaultKind.BUG),
}
"""As a full or broken machine raises them, a host in FIPS mode, and a bug; and their kind where a
directory meets them. Of a client, all are bugs: it raises StoreError."""


@pytest.fixture(params=UNFORESEEN)
def error(request):
    return UNFORESEEN[request.param][0]


@pytest.fixture
def io(monkeypatch):
    """The system of directory stores, whose calls fail as a test says."""
    made = FaultyOS()
    for module in (directory, fileio, store, writing):
        monkeypatch.setattr(module, "os", made)
    yield made
    made.fail.clear()


class Odd(DictClient):
    """Its `method` does `before`, then raises `error`, or returns `answer`: of names that hold
    `only_in`."""

    method, error, answer, only_in = "", None, None, ""

    def before(self):
        pass

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name != object.__getattribute__(self, "method"):
            return found

        def call(*arguments, **named):
            if self.only_in not in str(arguments):
                return found(*arguments, **named)
            self.before()
            if self.error is not None:
                raise type(self.error)(*self.error.args)
            return self.answer

        return call


METHODS = {"close", "delete", "exists", "facts", "put", "read", "scan"}
"""Of a client."""


class Stuck(DictClient):
    """Its `method` waits for `ends`, whatever its deadline.

    Attributes:
        threads: that called it.
    """

    def __init__(self, method=""):
        super().__init__()
        self.method, self.threads = method, set()
        self.entered, self.ends = threading.Event(), threading.Event()

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name not in METHODS:
            return found
        self.threads.add(threading.get_ident())
        return self._hang if name == self.method else found

    def _hang(self, *_arguments, **_named):
        self.entered.set()
        self.ends.wait(120)
        raise StoreError(FaultKind.LATE, "it ended after all")
