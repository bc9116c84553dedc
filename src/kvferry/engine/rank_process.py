"""A tensor-parallel rank other than the first: `python -m kvferry.engine.rank_process FD`.

`kvferry.engine.ranks` starts this process, and sends it messages over the socket `FD`. The process
ends when anything fails, and when the first rank closes its end of the socket or dies.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch

from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import WorkerOutput
from kvferry.engine.connector import open_roles
from kvferry.engine.model import PagedModel
from kvferry.engine.model_config import ModelConfig, first_line
from kvferry.engine.ranks import Channel, Connect, Failed, Ready, Start, StepDone
from kvferry.engine.request import RunStep
from kvferry.engine.runner import ModelRunner
from kvferry.engine.tensor_parallel import RankGroup, device_of_rank
from kvferry.errors import ContractError, RankError
from kvferry.observe import Observer

_Message = TypeVar("_Message")


class RankObserver(Observer):
    """Keeps the counts of this rank until the next report of a step carries them. Thread-safe."""

    def __init__(self) -> None:
        self._counts: deque[tuple[str, int]] = deque()
        self._durations: deque[tuple[str, float]] = deque()

    def count(self, name: str, amount: int = 1) -> None:
        self._counts.append((name, amount))

    def observe(self, name: str, seconds: float) -> None:
        self._durations.append((name, seconds))

    def done(self, output: WorkerOutput) -> StepDone:
        """Make the report of a step, with all counts since the last report."""
        counts = tuple(self._counts.popleft() for _ in range(len(self._counts)))
        durations = tuple(self._durations.popleft() for _ in range(len(self._durations)))
        return StepDone(output, counts, durations)


def run_rank(channel: Channel) -> None:
    """Load, connect to the other ranks, and run steps until an error ends it.

    Raises:
        RankError: the first rank closed the channel, as it does in the end, or a rank is gone.
    """
    observer = RankObserver()
    start = _expect(channel, Start)
    engine, size = start.engine, start.engine.tensor_parallel_size
    # Ranks on one machine share its cores.
    torch.set_num_threads(engine.num_threads or max(1, (os.cpu_count() or 1) // size))
    device = device_of_rank(engine.device, start.rank)
    model = PagedModel(ModelConfig(start.model_dir, engine), device)
    roles = open_roles(start.cache, observer, start.rank)
    try:
        channel.send(Ready())
        _expect(channel, Connect)
        model.split(RankGroup(start.rank, size, start.rendezvous, model.device))
        driver = StepDriver(roles.worker, observer)
        runner = ModelRunner(model, driver, engine, num_blocks=start.num_blocks)
        channel.send(Ready())
        while True:
            runner.run(_expect(channel, RunStep))
            channel.send(observer.done(runner.output))
    finally:
        roles.worker.close()
        roles.close_last()


def _expect(channel: Channel, kind: type[_Message]) -> _Message:
    message = channel.receive(None)
    if not isinstance(message, kind):
        raise ContractError(f"{message!r} came instead of {kind.__name__}")
    return message


def report_failure(channel: Channel, run: Callable[[Channel], None]) -> int:
    """Call `run`, and send its error to the first rank if that listens. Return the exit status."""
    try:
        run(channel)
    except Exception as error:  # the outermost frame of this process
        with contextlib.suppress(RankError):  # the first rank is gone, or has closed the channel
            channel.send(Failed(first_line(error), type(error).__name__))
        return 1
    return 0


def main() -> None:
    """Run one rank and exit. Runs in: a child process of the first rank."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    status = report_failure(channel, run_rank)
    sys.stdout.flush()
    # Threads of a stalled store, or of a process group that lost its peers, must not delay the end.
    os._exit(status)


if __name__ == "__main__":
    main()
