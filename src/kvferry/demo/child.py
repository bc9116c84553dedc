"""A process of the demonstrations: answers over a pipe, and ends with the process that made it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Self

from kvferry.errors import KVError

_ANSWER_SECONDS = 1800
_END_SECONDS = 60


class DemoProcess:
    """A process that runs a function; a context manager that ends it.

    Args:
        name: name of the process in errors.
        run: function to run; its last argument is the other end of the pipe.
    """

    def __init__(self, name: str, run: Callable[..., None], *arguments: object) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        # A daemon ends when this process exits, even if an interrupt kept `__exit__` from running.
        self._process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
        try:
            with _interrupts_held():
                self._process.start()
        except BaseException:  # the held interrupt, too: no caller can end it yet
            if self._process.pid is not None:
                self._process.kill()
                self._process.join()
            raise
        theirs.close()

    def send(self, question: object) -> None:
        """Send a question. Raises KVError if the process has died."""
        try:
            self._ours.send(question)
        except OSError:
            raise self._death() from None

    def receive(self, seconds: float = _ANSWER_SECONDS) -> Any:  # noqa: ANN401 - what `run` sent
        """Return the next answer of the process.

        Raises:
            KVError: it sent an error, which is raised with the same type and the process's name.
            KVError: it died, or gave no answer in time.
        """
        try:
            if not self._ours.poll(seconds):
                raise KVError(f"{self._name} gave no answer in {seconds:.0f} s")
            answer = self._ours.recv()
        except (EOFError, ConnectionError):
            raise self._death() from None
        if isinstance(answer, KVError):
            raise type(answer)(f"{self._name} failed: {answer}")
        return answer

    def _death(self) -> KVError:
        self._process.join(_END_SECONDS)
        return KVError(f"{self._name} died (exit status {self._process.exitcode})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        self._ours.close()
        if kind is not None:  # it may be in the middle of a long load or answer
            self._process.terminate()
        self._process.join(_END_SECONDS)  # it closes its store
        self._process.kill()  # does nothing if it ended
        self._process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back until the block ends. A process that is started in the block inherits the
    blocked signal, so it never sees Ctrl-C."""
    resource_tracker.ensure_running()  # not in the block: its start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
