"""Eyes on look-ups: what they call, what they wait for, and what they compute.

Calls are facts. Times are judged over several rounds, since any one of them may fall into a stall
of the machine: a wait counts if the thread gave up its processor, in most rounds; time to compute
is the processor time of the thread, which a stall does not lengthen.
"""

# ruff: noqa: ANN401 - frames and functions of any kind

from __future__ import annotations

import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median_low
from typing import Any

MOST_SECONDS = 0.02
"""A look-up that waits or computes for longer is slow."""

_SLOW_FILE_SECONDS = 5 * MOST_SECONDS
_FUNCTIONS = {
    "time": {"sleep"},
    "select": {"select", "poll"},
    "fcntl": {"flock", "lockf"},
    "io": {"open"},
    "_io": {"open"},
    "posix": {
        "open", "stat", "lstat", "fstat", "statvfs", "listdir", "scandir", "access", "readlink",
        "read", "pread", "readv", "preadv", "write", "pwrite", "writev", "sendfile", "fsync",
        "fdatasync", "truncate", "ftruncate", "utime", "chmod", "mkdir", "rename", "replace",
        "link", "symlink", "unlink", "remove", "rmdir", "waitpid", "system", "posix_spawn",
    },
    "_posixsubprocess": {"fork_exec"},
}  # fmt: skip
_METHODS = {
    "_io": {"read", "read1", "readall", "readinto", "readline", "readlines"},
    "_socket": {"connect", "connect_ex", "accept", "recv", "recv_into", "recvfrom", "recvmsg",
                "send", "sendall", "sendto", "sendmsg"},
    "_ssl": {"read", "write", "do_handshake"},
    "select": {"poll", "control"},
    "sqlite3": {"execute", "executemany", "executescript", "commit"},
}  # fmt: skip
_OF_MEMORY = ("BytesIO", "StringIO")


def _call_name(called: Any) -> str | None:
    """How a built-in function is said, if it may wait for something; None for others."""
    owner, name = getattr(called, "__self__", None), called.__name__
    if isinstance(owner, type(sys)):
        return f"{name}()" if name in _FUNCTIONS.get(owner.__name__, ()) else None
    for base in type(owner).__mro__:
        if name in _METHODS.get(base.__module__, ()) and base.__name__ not in _OF_MEMORY:
            return f"{base.__name__}.{name}()"
    return None


class LookUpWatch:
    """What look-ups of this thread do. Make one for each process at most: what slows files down for
    other threads cannot be taken back.

    Attributes:
        calls: names of the functions that look-ups within `noted` called and that may wait.
    """

    def __init__(self) -> None:
        self.calls: set[str] = set()
        self._rounds: list[tuple[float, float]] = []  # seconds: the longest wait, most computed
        self._thread = threading.get_ident()
        self._slows_files = False
        sys.addaudithook(self._slow_down)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the calls of a look-up."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and (name := _call_name(called)):
            self.calls.add(name)
        is_wait = event == "call" and frame.f_code is threading.Condition.wait.__code__
        if is_wait and frame.f_locals.get("timeout") != 0:
            self.calls.add("Condition.wait()")

    def begin_round(self) -> None:
        """Begin a round. Until its first look-up has ended, files that other threads open take a
        while: a lock that is held meanwhile makes look-ups wait."""
        self._rounds.append((0.0, 0.0))
        self._slows_files = True

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time a look-up of a round."""
        switches, start, computed = _switches(), time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            computed = time.thread_time() - computed
            waited = time.monotonic() - start - computed if _switches() > switches else 0.0
            longest, most = self._rounds[-1]
            self._rounds[-1] = max(longest, waited), max(most, computed)
            self._slows_files = False

    @property
    def waits(self) -> bool:
        """Whether look-ups wait for long in most rounds."""
        return median_low(waited for waited, _ in self._rounds) > MOST_SECONDS

    @property
    def computes(self) -> bool:
        """Whether look-ups compute for long in most rounds."""
        return median_low(computed for _, computed in self._rounds) > MOST_SECONDS

    def _slow_down(self, event: str, _arguments: object) -> None:
        if self._slows_files and event == "open" and threading.get_ident() != self._thread:
            time.sleep(_SLOW_FILE_SECONDS)


def _switches() -> int:
    """How often this thread gave up its processor, where the system counts that."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return time.monotonic_ns()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
