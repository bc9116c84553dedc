"""A tensor-parallel engine whose ranks beyond the first are threads instead of processes."""

from __future__ import annotations

import socket
import threading

from kvferry.engine import LLM
from kvferry.engine.rank_process import report_failure, run_rank
from kvferry.engine.ranks import Channel


class RankThread:
    """A rank in a thread, with the interface of a process. It cannot be killed; it ends when its
    channel or a sum over ranks fails."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end.dup())
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._status = report_failure(self._channel, run_rank)
        self._channel.close()

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return self._status or 0

    def kill(self) -> None:
        pass


class ThreadedLLM(LLM):
    """`LLM` with ranks in threads."""

    _launch = RankThread
