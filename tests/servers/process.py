"""Runs a server as a child process that ends with the tests, however they end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvferry.testing.stores.hooks import wait_until

LOCALHOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Return distinct ports of loopback that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((LOCALHOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def accepts(port: int) -> bool:
    """Whether something listens on `port` of loopback."""
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex((LOCALHOST, port)) == 0


def let_run(seconds: float) -> None:
    """Let processes and threads work on for a random time that a test has drawn. The kill or cut
    that follows may find them in any state, so there is no state to wait for."""
    time.sleep(seconds)


def _dying_with_tests(command: list[str]) -> list[str]:
    """Wrap a command so that the kernel kills it with the tests, if the tool for that exists."""
    setpriv = shutil.which("setpriv")
    return command if setpriv is None else [setpriv, "--pdeathsig", "KILL", *command]


class ServerProcess:
    """One run of a server. Its output goes to `log`, whose end the error of a failed start shows.
    With `stream`, a socket, standard input and output are that socket."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        env: dict[str, str] | None = None,
        stream: int | None = None,
    ) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                _dying_with_tests(command),
                stdin=subprocess.DEVNULL if stream is None else stream,
                stdout=output if stream is None else stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    def wait_ready(self, is_ready: Callable[[], bool], seconds: float = 60.0) -> None:
        """Wait until the server answers. If it does not, the error has the end of its log."""
        end = time.monotonic() + seconds
        while not is_ready():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.1)
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                tail = self._log.read_text(errors="replace")[-3000:]
                raise AssertionError(f"the server did not start:\n{tail}")

    def pause(self) -> None:
        """Stop the server with SIGSTOP; its sockets stay open and answer nothing."""
        self._process.send_signal(signal.SIGSTOP)
        # The signal takes a moment to reach threads that run.
        wait_until(self._is_stopped, "the stop of the server")

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the server and wait for its end. Idempotent."""
        self._process.kill()
        self._process.wait()
