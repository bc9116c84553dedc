"""What the first rank's process and the others send each other, and the socket pair between them.

In this order: `Start` down, `Loaded` up, `Connect` down, `Ready` up; then `RunStep` down and
`StepDone` up, step by step, until `Close`. A rank that cannot go on sends `Failed` instead, and
ends.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.contract.spec import EngineSpec
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import Batch
from kvferry.errors import RankError

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end. Not thread-safe; after any error it is of no more use."""

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
        try:
            self._socket.settimeout(timeout_seconds)
            first = self._socket.recv(1)
        except TimeoutError:
            raise
        except OSError as error:
            raise RankError(f"the other process is gone: {error}") from error
        try:
            (length,) = _LENGTH.unpack(first + self._exactly(_LENGTH.size - 1, first))
            return pickle.loads(self._exactly(length, first))
        except (OSError, EOFError) as error:
            raise RankError(f"the other process is gone: {error or 'it closed'}") from error

    def _exactly(self, count: int, first: bytes) -> bytes:
        if not first:
            raise EOFError
        parts = []
        while count:
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Idempotent. The other end sees it."""
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorChoice:
    """Which connector a rank's worker role belongs to.

    Attributes:
        name: of the connector.
        spec: of rank 0.
        options: the connector's own.
    """

    name: str
    spec: EngineSpec
    options: Mapping[str, Any]


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


class RunStep(NamedTuple):
    """One step; satisfies `kvferry.engine.runner.StepPlan`."""

    plan: Plan
    finished_request_ids: frozenset[str]
    batch: Batch
    """Empty in a step without tokens."""


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
