"""A process of the demonstrations: answers over a pipe, and ends with the one that started it."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Self

from kvferry.errors import KVError, StoreError

_ANSWER_SECONDS = 1800
_END_SECONDS = 60


class DemoProcess:
    """A new process. A context manager.

    Args:
        name: of the process, in errors.
        run: what runs there; its last argument is the other end of the pipe.
    """

    def __init__(self, name: str, run: Callable[..., None], *arguments: object) -> None:
        self._name = name
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        # A daemon is killed when this process exits, if an interrupt left `__exit__` out.
        self._process = context.Process(target=run, args=(*arguments, theirs), daemon=True)
        try:
            with _interrupts_held():
                self._process.start()
        except BaseException:  # an interrupt that was held: no caller has this object yet
            if self._process.pid is not None:
                self._process.kill()
                self._process.join()
            raise
        theirs.close()

    def send(self, question: object) -> None:
        self._ours.send(question)

    def receive(self, seconds: float = _ANSWER_SECONDS) -> Any:  # noqa: ANN401 - what `run` sent
        """Its next answer.

        Raises:
            KVError: it sent one instead: of the same type, with the name of the process in front.
            StoreError: it died, or gave no answer in time.
        """
        try:
            if not self._ours.poll(seconds):
                raise StoreError(f"{self._name} gave no answer in {seconds:.0f} s")
            answer = self._ours.recv()
        except EOFError:
            self._process.join(_END_SECONDS)
            status = self._process.exitcode
            raise StoreError(f"{self._name} died (exit status {status})") from None
        if isinstance(answer, KVError):
            raise type(answer)(f"{self._name} failed: {answer}")
        return answer

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
    """Ctrl-C waits until the block ends. A process that is started in it never sees one, from
    its first moment on: it inherits that the signal is blocked."""
    resource_tracker.ensure_running()  # by the first process otherwise, and it would end the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
