"""The other end of child.py: start a process with an engine, tell it what to do, end it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

Json = dict[str, Any]

PROCESS_SECONDS = 600.0
"""How long an answer may take, and the end of a process."""

COMMAND = (sys.executable, "-m", "kvferry.bench.vllm.child")

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # `Engine.unplugged` knows where this one has its connector
}


class ChildFailedError(Exception):
    """A process with an engine ended badly; the message is the end of its log, as one line."""


class Child:
    """A process that obeys: a JSON line each for a command and for its answer.

    Between two commands it is stopped: threads of an idle engine (13 of gloo) wake 1300 times a
    second and take 19 ms of CPU in it, which the process that is measured would feel.

    It leads a process group of its own, which ends with it. An interrupt of the terminal does not
    reach it, so whoever starts one must `kill` it in the end. Should we be killed ourselves, it
    goes too: it finds its stdin at an end or, while it is stopped, gets the SIGHUP that the system
    sends to stopped groups of its session that nobody is left to continue.
    """

    def __init__(
        self, log: Path, command: Sequence[str] = COMMAND, seconds: float = PROCESS_SECONDS
    ) -> None:
        """Start it; `log` gets what it prints, `seconds` bounds each wait for it."""
        self._log = log
        self._seconds = seconds
        self._killed = False
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=os.environ | ENVIRONMENT,
                process_group=0,
            )

    def ask(self, command: Json) -> Json:
        """Tell it what to do and wait for the answer; it runs no longer than that.

        Raises:
            ChildFailedError: it died or took too long. It is killed then.
        """
        assert self._process.stdin is not None  # both are pipes
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._fail()
        # One answer per command: nothing can lie in the reader's buffer where select is blind.
        ready, _, _ = select.select([self._process.stdout], [], [], self._seconds)
        if not ready:
            self._fail(f"no answer within {self._seconds:.0f} s")
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            self._fail()
        self._signal(signal.SIGSTOP)
        answer: Json = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it shut its engine down, and wait for its end.

        Raises:
            ChildFailedError: it ended badly, or not in time. It is killed then.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            status = self._process.wait(self._seconds)
        except subprocess.TimeoutExpired:
            self._fail(f"no end within {self._seconds:.0f} s")
        if status != 0:
            self._fail()
        self.kill()

    def kill(self) -> None:
        """End it and all that it started, at once. May be called again."""
        if self._killed:
            return
        self._killed = True
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # a command that it did not take
                if pipe is not None:
                    pipe.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _fail(self, reason: str | None = None) -> NoReturn:
        self.kill()
        raise ChildFailedError(reason or last_error(self._log))


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line] or ["no output"]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Exception:" in line]
    return (errors or lines)[-1][:200]
