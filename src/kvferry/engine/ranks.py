"""Starts, drives and ends the other ranks of a tensor-parallel engine, and defines the messages
between the processes.

`LLM` makes `Ranks` and `ParallelRunner` when `tensor_parallel_size` > 1, in the first rank's
process. `engine.rank_process` is the other end.

The first rank sends `Start`, then `Connect`, and the others answer each with `Ready`. Then it sends
`RunStep` for each step, and they answer `StepDone`. A rank that cannot go on answers `Failed`, and
ends. It also ends when the first rank closes the socket.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from kvferry.contract.fold import WorkerOutputFold
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerOutput
from kvferry.engine.config import EngineConfig
from kvferry.engine.connector import CacheArguments
from kvferry.engine.request import RunStep
from kvferry.engine.runner import ModelRunner
from kvferry.engine.tensor_parallel import RANK_TIMEOUT_SECONDS, RankGroup
from kvferry.errors import ConfigError, KVError, RankError
from kvferry.observe import Observer

LOAD_SECONDS = 1800.0
"""How long a rank may take to read its weights."""

CLOSE_SECONDS = 15.0
"""How long a rank may take to close its worker role; then it is killed."""

_POLL_SECONDS = 0.5
"""How often to check whether a process that owes an answer still runs."""

_DYING_SECONDS = 2.0
"""How long a process that closed its socket may take to end."""

_Message = TypeVar("_Message")


class Channel:
    """One end of the socket pair between the first rank's process and one of its children.

    Messages are pickled, which is safe here: both ends are processes of this package, and no other
    process has the socket. Data from a network or a file is never unpickled here.

    Not thread-safe. Do not use it again after a `RankError`.
    """

    def __init__(self, end: socket.socket, *, send_seconds: float = RANK_TIMEOUT_SECONDS) -> None:
        """Take over `end`; `send_seconds` limits how long `send` waits for a reader."""
        seconds, rest = divmod(send_seconds, 1.0)
        limit = struct.pack("ll", int(seconds), int(rest * 1e6))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._connection = Connection(end.detach())

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            RankError: the other end is gone, or does not read.
        """
        try:
            self._connection.send(message)
        except OSError as error:
            raise RankError(f"cannot reach the other process: {error}") from error

    def receive(self, timeout_seconds: float | None) -> Any:  # noqa: ANN401 - whatever was sent
        """Return the next message. With None, wait until the other end sends or closes.

        Raises:
            TimeoutError: nothing has come yet; may be called again.
            RankError: the other end is gone, or closed in the middle of a message.
        """
        try:
            if self._connection.poll(timeout_seconds):
                return self._connection.recv()
        except (OSError, EOFError) as error:
            raise RankError(f"the other process is gone: {str(error) or 'it closed'}") from error
        raise TimeoutError

    def close(self) -> None:
        """Close this end, which the other end notices. Idempotent."""
        self._connection.close()


class Start(NamedTuple):
    """Message: load this model. All fields but `rank` are the same for all ranks."""

    model_dir: Path
    engine: EngineConfig
    num_blocks: int
    """Blocks of the KV pool."""
    cache: CacheArguments | None
    """None for an engine without a store."""
    rank: int = 0
    rendezvous: Path = Path()
    """File by which the ranks meet. `Ranks` sets this and `rank`."""


class Connect(NamedTuple):
    """Message: all ranks have loaded; meet them at `rendezvous`, then split the model."""


class Ready(NamedTuple):
    """Message: `Start` or `Connect` is done."""


class StepDone(NamedTuple):
    """Message: the step is done. Holds the worker role's report and what the rank counted."""

    output: WorkerOutput
    counts: tuple[tuple[str, int], ...]
    durations: tuple[tuple[str, float], ...]


class Failed(NamedTuple):
    """Message: this rank ends. `reason` is one line."""

    reason: str
    kind: str
    """Class name of the error."""


Launch = Callable[[socket.socket], "subprocess.Popen[bytes]"]
"""Starts the process of a rank, which gets the given end of a socket pair."""


def launch_process(end: socket.socket) -> subprocess.Popen[bytes]:
    """Start `kvferry.engine.rank_process` in a new interpreter. Threads and devices of this process
    do not survive a fork, and children of `multiprocessing` run the caller's script again."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kvferry.engine.rank_process", str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C is for the first rank, which decides what it means
    )


class _Child(NamedTuple):
    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel


class Ranks:
    """The child processes of ranks 1 and up.

    If one of them fails, dies or does not answer, all are ended, because the state of the others is
    unknown. The call raises the error from `explain`; later calls raise a `RankError` that repeats
    its text.

    Runs in: the first rank's process.
    """

    def __init__(
        self, start: Start, observer: Observer, *, launch: Launch = launch_process
    ) -> None:
        """Start the processes; they begin to load."""
        self._observer = observer
        self.size = start.engine.tensor_parallel_size
        self._children: list[_Child] = []
        self._failed: dict[int, Failed] = {}
        self._failure: KVError | None = None
        self._rendezvous = Path(tempfile.mkdtemp(prefix="kvferry-ranks-")) / "rendezvous"
        try:
            for rank in range(1, self.size):
                ours, theirs = socket.socketpair()
                with theirs:
                    self._children.append(_Child(rank, launch(theirs), Channel(ours)))
                order = start._replace(rank=rank, rendezvous=self._rendezvous)
                self._send_to(self._children[-1], order)
        except BaseException:
            self._end(RankError("the engine could not start"))
            raise

    def connect(self, device: torch.device) -> RankGroup:
        """Wait until all ranks have loaded, then meet them. The caller must split its own model
        next, since the other ranks wait for that.

        Raises:
            ConfigError, RankError: a rank could not be set up, died or did not answer.
        """
        self.wait_ready(LOAD_SECONDS)
        self._send(Connect())
        return RankGroup(0, self.size, self._rendezvous, device)

    def wait_ready(self, timeout_seconds: float = RANK_TIMEOUT_SECONDS) -> None:
        """Wait until all ranks have loaded or, after `connect`, until they can run steps. Raises as
        `connect`."""
        for child in self._children:
            self._expect(child, Ready, timeout_seconds)

    def start_step(self, step: RunStep) -> None:
        """Let every rank begin a step."""
        self._check_alive()
        self._send(step)

    def finish_step(self) -> list[WorkerOutput]:
        """Wait for ranks 1 and up to end the started step, and return their reports."""
        outputs = []
        for child in self._children:
            done = self._expect(child, StepDone, RANK_TIMEOUT_SECONDS)
            for name, amount in done.counts:
                self._observer.count(name, amount)
            for name, seconds in done.durations:
                self._observer.observe(name, seconds)
            outputs.append(done.output)
        return outputs

    def explain(self, reason: str, *, patience_seconds: float = 0.0) -> KVError:
        """End all ranks after a failure; return the error to raise. The error names the rank to
        blame if that rank ends within `patience_seconds`, else it says `reason`. It is a
        `ConfigError` if that rank ended with one, else a `RankError`."""
        deadline = time.monotonic() + patience_seconds
        while self._failure is None:
            blame = self._blame()
            if blame is not None or time.monotonic() >= deadline:
                self._end(blame or RankError(reason))
            else:
                time.sleep(0.01)
        return self._failure

    def close(self) -> None:
        """Let every rank close its worker role, and end them all. Idempotent; leaves no process."""
        if self._failure is None:
            for child in self._children:
                child.channel.close()
            deadline = time.monotonic() + CLOSE_SECONDS
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, deadline - time.monotonic()))
        self._end(RankError("the engine is closed"))

    def _end(self, failure: KVError) -> None:
        """End all ranks at once. Idempotent; the first failure is kept."""
        if self._failure is None:
            self._failure = failure
        for child in self._children:
            child.channel.close()
            child.process.kill()
            child.process.wait()
        shutil.rmtree(self._rendezvous.parent, ignore_errors=True)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RankError(f"{self._failure}; close this engine and open a new one")

    def _send(self, message: object) -> None:
        for child in self._children:
            self._send_to(child, message)

    def _send_to(self, child: _Child, message: object) -> None:
        try:
            child.channel.send(message)
        except RankError as error:
            reason = f"rank {child.rank}: {error}"
            raise self.explain(reason, patience_seconds=_DYING_SECONDS) from error

    def _expect(self, child: _Child, kind: type[_Message], timeout_seconds: float) -> _Message:
        self._check_alive()
        deadline = time.monotonic() + timeout_seconds
        message = None
        while message is None:
            try:
                message = child.channel.receive(_POLL_SECONDS)
            except TimeoutError:
                # Look at all ranks, so that the error names the one that died and not its peer.
                if self._blame() is not None or time.monotonic() > deadline:
                    reason = f"rank {child.rank}: no answer in time"
                    raise self.explain(reason, patience_seconds=_DYING_SECONDS) from None
            except RankError as error:
                reason = f"rank {child.rank}: {error}"
                raise self.explain(reason, patience_seconds=_DYING_SECONDS) from error
        if isinstance(message, kind):
            return message
        if not isinstance(message, Failed):
            raise self.explain(f"rank {child.rank} said {message!r} instead of {kind.__name__}")
        self._failed[child.rank] = message
        raise self.explain(message.reason, patience_seconds=_DYING_SECONDS)

    def _blame(self) -> KVError | None:
        """Return the error of a rank that ended; None if all run. A rank that died without a
        message is named before those that gave a reason: they may only have lost that rank."""
        failures: list[tuple[bool, int, Failed]] = []
        for child in self._children:
            status = child.process.poll()
            if status is None:
                continue
            said = self._failed.get(child.rank) or _last_words(child.channel)
            if said is None:
                return RankError(f"rank {child.rank} died (exit status {status})")
            self._failed[child.rank] = said
            failures.append((said.kind == RankError.__name__, child.rank, said))
        if not failures:
            return None
        _, rank, first = min(failures)
        kind = ConfigError if first.kind == ConfigError.__name__ else RankError
        return kind(f"rank {rank} failed: {first.reason}")


def _last_words(channel: Channel) -> Failed | None:
    """Return the failure that an ended process sent, None if none. Skips answers before it."""
    while True:
        try:
            message = channel.receive(0.01)
        except (RankError, TimeoutError):
            return None
        if isinstance(message, Failed):
            return message


class ParallelRunner:
    """Runs each step on all ranks, as `ModelRunner` does on one.

    Attributes:
        output: the folded reports of all ranks on the last step. If a rank failed, the first rank's
            report alone; if the step did not begin, the empty report.
    """

    def __init__(self, first: ModelRunner, ranks: Ranks, observer: Observer) -> None:
        """Run `first` here and the rest on `ranks`, which are ready."""
        self.output: WorkerOutput = EMPTY_OUTPUT
        self.first = first
        self._ranks = ranks
        self._fold = WorkerOutputFold(ranks.size, observer=observer)

    def run(self, step: RunStep) -> torch.Tensor:
        """See `ModelRunner.run`.

        Raises:
            RankError: a rank failed.
        """
        self.output = EMPTY_OUTPUT
        self._ranks.start_step(step)
        try:
            logits = self.first.run(step)
        except RankError as error:
            # The error names no peer; the processes show which one is gone, and why.
            raise self._ranks.explain(str(error), patience_seconds=_DYING_SECONDS) from error
        except BaseException as error:
            # The other ranks wait in the middle of a layer for a sum that never comes.
            self._ranks.explain(f"a step failed: {error!r}")
            raise
        finally:
            self.output = self.first.output
        self.output = self._fold.fold([self.output, *self._ranks.finish_step()])
        return logits
