"""What the first rank's process and the others send each other, and the socket pair between them.

In this order: `Start` down, `Loaded` up, `Connect` down, `Ready` up; then `RunStep` down and
`StepDone` up, step by step, until `Close`. A rank that cannot go on sends `Failed` instead, and
ends.
"""

from __future__ import annotations

import pickle
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.contract.messages import WorkerOutput
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import ConnectorChoice
from kvferry.errors import RankError

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end of the socket pair between the first rank's process and a child of it.

    Messages are pickled: both ends are this package in two processes of ours, and no other process
    has the socket. What comes from a network or a file never goes this way.

    Not thread-safe; after any error it is of no more use.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: object, timeout_seconds: float) -> None:
        """Hand over a message.

        Raises:
            RankError: the other end is gone, or does not read.
        """
        payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            self._socket.settimeout(timeout_seconds)
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:  # TimeoutError is one
            raise RankError(f"cannot reach the other process: {error}") from error

    def receive(self, timeout_seconds: float | None) -> Any:  # noqa: ANN401 - whatever was sent
        """The next message; None as timeout waits as long as the other end lives.

        Raises:
            TimeoutError: nothing has come yet; may be called again.
            RankError: the other end is gone, or stopped within a message.
        """
        self._socket.settimeout(timeout_seconds)
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, may_time_out=True))
        return pickle.loads(self._exactly(length))

    def _exactly(self, count: int, *, may_time_out: bool = False) -> bytes:
        received = bytearray()
        while len(received) < count:
            try:
                part = self._socket.recv(min(count - len(received), 1 << 20))
            except OSError as error:  # TimeoutError is one
                if isinstance(error, TimeoutError) and may_time_out and not received:
                    raise
                raise RankError(f"the other process is gone: {error}") from error
            if not part:
                raise RankError("the other process is gone: it closed")
            received += part
        return bytes(received)

    def close(self) -> None:
        """Idempotent. The other end sees it."""
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load this model.

    Attributes:
        rank: of the process that reads this.
        model_dir: of the model.
        engine: options, the same for all ranks.
        num_blocks: of the KV pool, the same for all ranks.
        connector: None for an engine without a store.
        rendezvous: where the ranks meet.
    """

    rank: int
    model_dir: Path
    engine: EngineConfig
    num_blocks: int
    connector: ConnectorChoice | None
    rendezvous: Path


class Loaded(NamedTuple):
    """Weights are read, nothing is connected yet."""


class Connect(NamedTuple):
    """All have loaded: meet, and split the model."""


class Ready(NamedTuple):
    """Steps may come."""


class StepDone(NamedTuple):
    """The worker role's report, and what it counted."""

    output: WorkerOutput
    counts: tuple[tuple[str, int], ...]
    durations: tuple[tuple[str, float], ...]


class Close(NamedTuple):
    """Close the worker role, then end."""


class Failed(NamedTuple):
    """The rank ends, and why, in one line."""

    reason: str
    kind: str
    """Name of the error's class."""
