"""The parent's side of a client whose library runs in a child process (`mooncake_child.py`). So the
library holds up no thread of the engine's process and cannot crash it.

I/O threads hand commands to the child over its lanes, and wait for the answers until a deadline. A
lane (a socket and shared memory) whose answer is overdue is not used again until it has come: a
late transfer writes to the lane's memory, not to the caller's. Later calls look for late answers.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from kvferry.errors import FaultKind, StoreError
from kvferry.store.backoff import Backoff
from kvferry.store.servers.remote import RemoteClient

LONGEST_SECONDS = 60.0
"""Longest time of a call, also of one without a deadline."""

# A child that answers on no lane for so long is replaced.
_OVERDUE_SECONDS = 30.0
_RESTART_SECONDS = 1.0
_ENDED = "its process ended: it crashed or was killed"


class _Gone(Exception):
    """The child ended, could not begin or answers nonsense; the text says why."""


class LaneEnd:
    """The parent's end of a lane: sends one command at a time, and moves bytes through the `memory`
    shared with the child. `waits_since` is when the command without an answer was sent, or None."""

    def __init__(self, end: socket.socket, whole: mmap.mmap, start: int, num_bytes: int) -> None:
        self.socket = end
        self.memory = memoryview(whole)[start : start + num_bytes]
        self.waits_since: float | None = time.monotonic()  # for the first answer: the lane is ready
        self._received = bytearray()

    def ask(self, command: Sequence[object], deadline: float) -> Any:  # noqa: ANN401
        """Send a command and return the answer. Raises StoreError at the deadline, _Gone if the
        child is gone."""
        now = time.monotonic()
        if now >= deadline:
            raise StoreError(FaultKind.LATE, "the deadline passed")
        self.waits_since = now
        try:
            self.socket.settimeout(max(0.001, deadline - now))
            self.socket.sendall(json.dumps(command).encode() + b"\n")
        except TimeoutError as error:  # after a part of a command, the child can take no other
            raise _Gone("it did not take a command in time") from error
        except OSError as error:
            raise _Gone(_ENDED) from error
        answer = self.answer(deadline)
        if answer is None:
            raise StoreError(FaultKind.LATE, "the deadline passed")
        return answer

    def answer(self, deadline: float) -> Any:  # noqa: ANN401
        """Wait for the answer to the last command; None if it does not come in time."""
        while b"\n" not in self._received:
            # At least a moment: 0 would mean not to look at all.
            self.socket.settimeout(max(0.000001, deadline - time.monotonic()))
            try:
                part = self.socket.recv(1 << 20)
            except TimeoutError:
                return None
            except OSError as error:
                raise _Gone(_ENDED) from error
            if not part:
                raise _Gone(_ENDED)
            self._received += part
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _Gone("its answer cannot be read") from error
        self.waits_since = None
        return answer


class _ChildProcess:
    """A running child process with its lanes. Only `kill` is thread-safe."""

    def __init__(
        self,
        script: str,
        options: dict[str, object],
        num_lanes: int,
        lane_bytes: int,
    ) -> None:
        pairs = [socket.socketpair() for _ in range(num_lanes)]
        num_bytes = num_lanes * lane_bytes
        memory = os.memfd_create("kvferry")  # its pages are taken only once written
        os.ftruncate(memory, num_bytes)
        theirs = [end.fileno() for _, end in pairs]
        given = {**options, "sockets": theirs, "memory": memory, "lane_bytes": lane_bytes}
        try:
            # -P: the files beside the script must not become top-level modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[*theirs, memory],
            )
            if self._process.stdin is not None:
                # Not as an argument, which `ps` shows: the options may hold a password.
                with suppress(OSError), self._process.stdin as options_pipe:
                    options_pipe.write(json.dumps(given).encode())
            whole = mmap.mmap(memory, num_bytes)
        finally:
            os.close(memory)
            for _, end in pairs:
                end.close()
        self.owner = os.getpid()
        self.lanes = [
            LaneEnd(end, whole, number * lane_bytes, lane_bytes)
            for number, (end, _) in enumerate(pairs)
        ]

    def kill(self, seconds: float) -> None:
        """Ask the child to end; kill it after `seconds`. Calls that wait for it fail at once."""
        if self.owner != os.getpid():
            return  # this is a fork: the child belongs to the process before it
        for lane in self.lanes:
            with suppress(OSError):
                lane.socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class ChildClient(RemoteClient):
    """A client whose commands a child process carries out. Starts the child, and another one when
    it is gone. Raises StoreError if it cannot start the first one.

    Args:
        where: name of the server in messages, without a credential.
        options: options for the script.
    """

    script: ClassVar[str]
    """Path of the script that is the child; see `mooncake_child.py`."""
    num_lanes: ClassVar[int]
    lane_bytes: ClassVar[int]
    close_seconds: float = 0.0
    """How long the child may take to end."""

    def __init__(self, where: str, options: dict[str, object]) -> None:
        self._where = where
        self._options = options
        # Notified when a lane is free. Held for moments only, except by `close`.
        self._changed = threading.Condition()
        self._idle: list[LaneEnd] = []
        self._late: list[LaneEnd] = []
        self._child: _ChildProcess | None = None
        self._closed = False
        self._starts = Backoff(time.monotonic, _RESTART_SECONDS)
        self._reason = ""
        with self._changed:
            self._start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._drop(self.close_seconds)
            self._changed.notify_all()

    def _lane(self, what: str, deadline: float) -> Call:
        return Call(self, what, min(deadline, time.monotonic() + LONGEST_SECONDS))

    def get_lane(self, deadline: float) -> LaneEnd:
        """Take a lane for one call. Raises StoreError if none is free by `deadline`, the client is
        closed, or there is no child."""
        with self._changed:
            while True:
                self._ensure_child()
                self._collect_late()
                if self._idle:
                    return self._idle.pop()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreError(FaultKind.LATE, f"{self._where}: it does not answer")
                # A late answer notifies no one: late lanes are looked at now and then.
                self._changed.wait(min(left, 0.005) if self._late else left)

    def give_back(self, lane: LaneEnd) -> None:
        """Take back the lane of a call that ended: it is free, or still waits for an answer."""
        with self._changed:
            if self._child is None or lane not in self._child.lanes:
                lane.socket.close()
                return
            (self._idle if lane.waits_since is None else self._late).append(lane)
            self._changed.notify()

    def lost(self, lane: LaneEnd, what: str, reason: str) -> StoreError:
        """Drop the child that `lane` belongs to: it is gone, and a later call starts another.
        Returns the error for the call that was under way."""
        with self._changed:
            if self._closed:
                return StoreError(FaultKind.CLOSED, f"{self._where}: closed")
            if self._child is not None and lane in self._child.lanes:
                self._replace(reason)
        return StoreError(FaultKind.AWAY, f"{self._where}: {what} failed: {reason}")

    def _start(self) -> None:
        try:
            self._child = _ChildProcess(self.script, self._options, self.num_lanes, self.lane_bytes)
        except OSError as error:  # no more processes, descriptors or memory
            self._replace(f"its process did not start: {error.strerror}")
            raise StoreError(FaultKind.AWAY, f"{self._where}: {self._reason}") from error
        self._late = list(self._child.lanes)

    def _ensure_child(self) -> None:
        if self._closed:
            raise StoreError(FaultKind.CLOSED, f"{self._where}: closed")
        if self._child is not None and self._child.owner != os.getpid():
            self._drop(0.0)
        if self._child is None:
            if not self._starts.is_over:
                raise StoreError(FaultKind.AWAY, f"{self._where}: {self._reason}")
            self._start()

    def _collect_late(self) -> None:
        """Free late lanes whose answers have come. Drop a child that is gone or answers on no lane,
        and raise StoreError."""
        if not self._late:
            return
        # Not `select`, which takes no descriptor above 1023.
        poll = select.poll()
        for lane in self._late:
            poll.register(lane.socket, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        for lane in [lane for lane in self._late if lane.socket.fileno() in ready]:
            try:
                answer = lane.answer(0)
                if isinstance(answer, str):
                    raise _Gone(answer)
                if answer is not None:
                    self._late.remove(lane)
                    self._idle.append(lane)
            except _Gone as error:
                self._replace(str(error))
                raise StoreError(FaultKind.AWAY, f"{self._where}: {error}") from None
        oldest = min((lane.waits_since or math.inf for lane in self._late), default=math.inf)
        if len(self._late) == self.num_lanes and time.monotonic() - oldest > _OVERDUE_SECONDS:
            self._replace("it took too long to answer")
            raise StoreError(FaultKind.AWAY, f"{self._where}: {self._reason}")

    def _replace(self, reason: str) -> None:
        self._reason = reason
        self._starts.failed()
        self._drop(0.0)

    def _drop(self, seconds: float) -> None:
        """End the child. Lanes in use are closed when their calls have ended."""
        child, self._child = self._child, None
        unused = self._idle + self._late
        self._idle, self._late = [], []
        if child is not None:
            child.kill(seconds)
        for lane in unused:
            lane.socket.close()


class Call:
    """A context in which one call sends commands on a lane; at its end, the lane is given back.
    Messages say `what` the call does."""

    def __init__(self, client: ChildClient, what: str, deadline: float) -> None:
        self.what = what
        self.lane: LaneEnd
        self._client = client
        self._deadline = deadline
        self._started = time.monotonic()

    def __enter__(self) -> Call:
        self.lane = self._client.get_lane(self._deadline)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.give_back(self.lane)

    def ask(self, command: Sequence[object]) -> Any:  # noqa: ANN401
        """Return the child's answer to a command. Raises StoreError if none comes by the deadline,
        or the child is gone."""
        try:
            return self.lane.ask(command, self._deadline)
        except _Gone as error:
            raise self._client.lost(self.lane, self.what, str(error)) from None
        except StoreError:
            seconds = max(0.0, self._deadline - self._started)
            raise self.failed(FaultKind.LATE, f"did not end within {seconds:.1f} s") from None

    def failed(self, kind: FaultKind, why: str) -> StoreError:
        return StoreError(kind, f"{self._client._where}: {self.what} {why}")
