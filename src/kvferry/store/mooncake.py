"""Values in Mooncake Store: the memory of many machines as one pool, over TCP or RDMA.

A child process holds Mooncake's client (`mooncake_child` says why). This side hands commands to it
and waits until its deadline. A lane whose answer is overdue is not used again before it came: its
memory, not the caller's, is what a late transfer writes to. No thread is needed for that.
"""

from __future__ import annotations

import importlib.util
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
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError, StoreError
from kvferry.store import mooncake_child
from kvferry.store.base import Buffer, PutResult
from kvferry.store.mooncake_child import ABSENT, EXISTS, EXISTS_HERE, PENDING
from kvferry.store.remote import RemoteClient

_NUM_LANES = 4
_LANE_BYTES = 8 << 20
_LONGEST_SECONDS = 60.0
# A child that answers nothing for so long is replaced.
_OVERDUE_SECONDS = 30.0
_RESTART_SECONDS = 1.0
_CLOSE_SECONDS = 3.0
_SIZES_AT_ONCE = 1000
_NO_SPACE = -200


class _Gone(Exception):
    """The child ended, or could not begin; the text says why."""


class _LaneEnd:
    """One command at a time, and the memory that it moves bytes through.

    Attributes:
        memory: `_LANE_BYTES`, shared with the child.
        waits_since: when the command was sent whose answer has not come; None if there is none.
    """

    def __init__(self, end: socket.socket, memory: memoryview) -> None:
        self.socket = end
        self.memory = memory
        self.waits_since: float | None = time.monotonic()  # for the answer that it is ready
        self._received = bytearray()

    def ask(self, command: Sequence[object], deadline: float) -> Any:  # noqa: ANN401
        """The answer; StoreError at the deadline, _Gone if there is no child any more."""
        now = time.monotonic()
        if now >= deadline:
            raise StoreError("the deadline passed")
        self.waits_since = now
        try:
            self.socket.settimeout(max(0.001, deadline - now))
            self.socket.sendall(json.dumps(command).encode() + b"\n")
        except OSError as error:
            raise _Gone("its process ended") from error
        answer = self.answer(deadline)
        if answer is None:
            raise StoreError("the deadline passed")
        return answer

    def answer(self, deadline: float) -> Any:  # noqa: ANN401
        """The answer to the command; None if it does not come in time."""
        while b"\n" not in self._received:
            # At least a moment: 0 would mean not to look at all.
            self.socket.settimeout(max(0.000001, deadline - time.monotonic()))
            try:
                part = self.socket.recv(1 << 20)
            except TimeoutError:
                return None
            except OSError as error:
                raise _Gone("its process ended") from error
            if not part:
                raise _Gone("its process ended")
            self._received += part
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        self.waits_since = None
        return json.loads(line)


class _MooncakeProcess:
    """A running child process with its lanes. Not thread-safe, but for `kill`."""

    def __init__(self, options: dict[str, object]) -> None:
        pairs = [socket.socketpair() for _ in range(_NUM_LANES)]
        memory = os.memfd_create("kvferry-mooncake")
        os.ftruncate(memory, _NUM_LANES * _LANE_BYTES)
        theirs = [end.fileno() for _, end in pairs]
        given = {**options, "sockets": theirs, "memory": memory, "lane_bytes": _LANE_BYTES}
        try:
            # -P: the files beside the script are no top-level modules.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(mooncake_child.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[*theirs, memory],
            )
            if self._process.stdin is not None:
                # Not as an argument, which `ps` shows: a URL may hold a password.
                with suppress(OSError), self._process.stdin as options_pipe:
                    options_pipe.write(json.dumps(given).encode())
            whole = memoryview(mmap.mmap(memory, _NUM_LANES * _LANE_BYTES))
        finally:
            os.close(memory)
            for _, end in pairs:
                end.close()
        self.started = time.monotonic()
        self.lanes = [
            _LaneEnd(end, whole[number * _LANE_BYTES : (number + 1) * _LANE_BYTES])
            for number, (end, _) in enumerate(pairs)
        ]

    def kill(self, seconds: float) -> None:
        """Ask it to end, and end it after `seconds`. Who waits for an answer learns it at once."""
        for lane in self.lanes:
            with suppress(OSError):
                lane.socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class MooncakeClient(RemoteClient):
    """Values in the memory that Mooncake's clients lend to its master. They go when the process
    that lends the memory ends, and when the master does.

    Mooncake has no authentication and no encryption: for trusted networks only.

    Args:
        master: `host:port` of the master.
        metadata: URL of its metadata server; P2PHANDSHAKE where there is none.
        segment_bytes: memory that this client lends; 0 to use that of others.
        protocol: tcp or rdma.
        device: names of RDMA devices, separated by commas; empty for all.
        admin: URL of the master's metrics port, which lists names; without it `scan` fails.

    Raises:
        ConfigError: Mooncake is not installed, or `master` is not host:port.
    """

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        segment_bytes: int = 0,
        protocol: str = "tcp",
        device: str = "",
        admin: str | None = None,
    ) -> None:
        self._where = f"mooncake://{master}"
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(
                "mooncake:// stores need Mooncake: run pip install 'kvferry[mooncake]' "
                "and apt-get install libibverbs1"
            )
        host, _, port = master.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{self._where}: the master is host:port, such as 10.0.0.1:50051")
        self._options: dict[str, object] = {
            "master": master,
            "host": own_address(host),
            "metadata": metadata,
            "segment_bytes": segment_bytes,
            "protocol": protocol,
            "device": device,
        }
        self._admin = admin
        # Notified when a lane is free. Held for moments only, but by `close`.
        self._changed = threading.Condition()
        self._idle: list[_LaneEnd] = []
        self._late: list[_LaneEnd] = []
        self._child: _MooncakeProcess | None = None
        self._closed = False
        self._next_start = 0.0
        self._reason = ""
        with self._changed:
            self._start()

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        size = 0
        for pieces in _batches(ranges) or [[]]:
            wanted = [(offset, len(buffer)) for offset, buffer in pieces]
            with self._lane("read", deadline) as call:
                size = call.ask(["read", name, wanted])
                if size in (ABSENT, PENDING):
                    return None
                call.check(size)
                used = 0
                for offset, buffer in pieces:
                    length = max(0, min(len(buffer), size - offset))
                    buffer[:length] = call.lane.memory[used : used + length]
                    used += length
        return size

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        if replaces:  # the master overwrites nothing
            self.delete(name, deadline)
        parts = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(map(len, parts))
        offset = 0
        with self._lane("put", deadline) as call:
            while offset < size:
                length = 0
                while parts and length < _LANE_BYTES:
                    part = parts[0][: _LANE_BYTES - length]
                    call.lane.memory[length : length + len(part)] = part
                    length += len(part)
                    parts[0] = parts[0][len(part) :]
                    if not parts[0]:
                        del parts[0]
                code = call.ask(["put", name, size, offset, length])
                if code == EXISTS or (code == EXISTS_HERE and offset == 0):
                    return PutResult.EXISTS
                if code == _NO_SPACE:
                    return PutResult.NO_SPACE
                call.check(code)
                offset += length
        return PutResult.STORED

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        if not names:
            return []
        with self._lane("look up", deadline) as call:
            answers = call.ask(["exists", list(names)])
            call.check(min(answers))
        return [answer == 1 for answer in answers]

    def delete(self, name: str, deadline: float) -> bool:
        with self._lane("delete", deadline) as call:
            code = call.ask(["delete", name])
            if code == ABSENT:
                return False
            call.check(code)
        return True

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """When values were used, Mooncake does not say."""
        names = [name for name in self._list(deadline) if name.startswith(prefix)]
        for first in range(0, len(names), _SIZES_AT_ONCE):
            some = names[first : first + _SIZES_AT_ONCE]
            with self._lane("list", deadline) as call:
                sizes = call.ask(["sizes", some])
            yield from (
                (name, size, 0.0) for name, size in zip(some, sizes, strict=True) if size >= 0
            )

    def close(self) -> None:
        with self._changed:
            self._closed = True
            # Only who lends memory has something to tell the master.
            self._drop(_CLOSE_SECONDS if self._options["segment_bytes"] else 0.0)
            self._changed.notify_all()

    def _list(self, deadline: float) -> list[str]:
        if self._admin is None:
            raise StoreError(
                f"{self._where}: Mooncake lists names on its metrics port only: "
                "add admin=http://host:9003 to the URL"
            )
        seconds = max(0.001, min(deadline - time.monotonic(), _LONGEST_SECONDS))
        content = bytearray()
        try:
            with urllib.request.urlopen(f"{self._admin}/get_all_keys", timeout=seconds) as response:
                while part := response.read1(1 << 20):
                    content += part
                    if time.monotonic() > deadline:
                        raise StoreError(f"{self._where}: the list of names took too long")
        except OSError as error:
            raise StoreError(f"{self._where}: no list of names: {error}") from error
        except (ValueError, HTTPException):
            # Not chained: its text can quote more of the URL than may be shown.
            raise StoreError(
                f"{self._where}: no list of names: admin is no URL of a metrics port, such as "
                "http://10.0.0.1:9003"
            ) from None
        return content.decode(errors="replace").split()

    def _lane(self, what: str, deadline: float) -> _Call:
        return _Call(self, what, min(deadline, time.monotonic() + _LONGEST_SECONDS))

    def take(self, deadline: float) -> _LaneEnd:
        """A lane for one call; wait for one until `deadline`.

        Raises:
            StoreError: none came free, or there is no connection.
        """
        with self._changed:
            while True:
                self._ensure_child()
                self._collect_late()
                if self._idle:
                    return self._idle.pop()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreError(f"{self._where}: it does not answer")
                # No lane that is late gives notice; it is looked at now and then.
                self._changed.wait(min(left, 0.005) if self._late else left)

    def give_back(self, lane: _LaneEnd) -> None:
        """A call has ended; its lane is free, or still waits for the answer."""
        with self._changed:
            if self._child is None or lane not in self._child.lanes:
                lane.socket.close()
                return
            (self._idle if lane.waits_since is None else self._late).append(lane)
            self._changed.notify()

    def lost(self, lane: _LaneEnd, reason: str) -> None:
        """The child of `lane` is gone: after a moment, a call starts another."""
        with self._changed:
            if self._child is not None and lane in self._child.lanes:
                self._replace(reason)

    def _start(self) -> None:
        self._child = _MooncakeProcess(self._options)
        self._late = list(self._child.lanes)

    def _ensure_child(self) -> None:
        if self._closed:
            raise StoreError(f"{self._where}: closed")
        if self._child is None:
            if time.monotonic() < self._next_start:
                raise StoreError(f"{self._where}: {self._reason}")
            self._start()

    def _collect_late(self) -> None:
        """Find lanes whose answers have come, and a child that gives none."""
        if not self._late:
            return
        ready, _, _ = select.select([lane.socket for lane in self._late], [], [], 0)
        for lane in [lane for lane in self._late if lane.socket in ready]:
            try:
                answer = lane.answer(0)
                if isinstance(answer, str):
                    raise _Gone(answer)
                if answer is not None:
                    self._late.remove(lane)
                    self._idle.append(lane)
            except _Gone as error:
                self._replace(str(error))
                raise StoreError(f"{self._where}: {error}") from None
        oldest = min((lane.waits_since or math.inf for lane in self._late), default=math.inf)
        if len(self._late) == _NUM_LANES and time.monotonic() - oldest > _OVERDUE_SECONDS:
            self._replace("it did not answer for long")
            raise StoreError(f"{self._where}: {self._reason}")

    def _replace(self, reason: str) -> None:
        self._reason = reason
        self._next_start = time.monotonic() + _RESTART_SECONDS
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


class _Call:
    """One command after another on one lane, which goes back at the end."""

    def __init__(self, client: MooncakeClient, what: str, deadline: float) -> None:
        self._client = client
        self._what = what
        self._deadline = deadline
        self.lane: _LaneEnd

    def __enter__(self) -> _Call:
        self.lane = self._client.take(self._deadline)
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.give_back(self.lane)

    def ask(self, command: Sequence[object]) -> Any:  # noqa: ANN401
        where = f"{self._client._where}: {self._what}"
        try:
            return self.lane.ask(command, self._deadline)
        except _Gone as error:
            self._client.lost(self.lane, str(error))
            raise StoreError(f"{where} failed: {error}") from None
        except StoreError as error:
            raise StoreError(f"{where} did not end: {error}") from None

    def check(self, code: int) -> None:
        """StoreError for the negative codes that no answer is made of."""
        if code < 0:
            raise StoreError(f"{self._client._where}: {self._what} failed: Mooncake says {code}")


def _batches(
    ranges: Sequence[tuple[int, memoryview]],
) -> list[list[tuple[int, memoryview]]]:
    """`ranges`, cut so that each batch fits into the memory of a lane."""
    batches: list[list[tuple[int, memoryview]]] = []
    free = 0
    for offset, buffer in ranges:
        rest, at = buffer.cast("B"), offset
        while rest:
            if not free:
                batches.append([])
                free = _LANE_BYTES
            part = rest[:free]
            batches[-1].append((at, part))
            free -= len(part)
            at += len(part)
            rest = rest[len(part) :]
    return batches


def own_address(host: str) -> str:
    """The address under which the machine `host` reaches this one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
