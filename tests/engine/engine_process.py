"""Embedded engines in processes of their own, which begin within a moment: forks of one that has
imported everything."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401 - engines import these when they load

from kvferry.engine import SamplingParams
from kvferry.observe import Counters
from tests.engine.rank_threads import ThreadedLLM

ANSWER_SECONDS = 120.0
"""Tells late from for ever."""

ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""What a proxy says to the engine that prefills."""


class Answer(NamedTuple):
    """What an engine says to one prompt. `logprobs` are of the 20 most likely tokens."""

    token_ids: tuple[int, ...]
    logits: Any
    logprobs: tuple[dict[int, float], ...]
    num_external: int
    params: dict[str, Any] | None


class Log(logging.Handler):
    """Keeps messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class EngineProcess:
    """An embedded engine; ranks beyond the first are threads of its process. A context manager,
    whose end is the engine's, in bounded time.

    Args:
        namespace: id of a process whose user and network namespaces the engine joins.
        config: arguments of `LLM`.
    """

    def __init__(self, model_dir: Path, *, namespace: int | None = None, **config: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._ours, theirs = context.Pipe()
        self.process = context.Process(
            target=_run, args=(model_dir, namespace, config, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self._is_ready = False

    def wait_ready(self) -> EngineProcess:
        if not self._is_ready:
            self.receive()
            self._is_ready = True
        return self

    def send(self, what: str, *arguments: Any) -> None:
        """Begin what `receive` ends."""
        self.wait_ready()
        self._ours.send((what, *arguments))

    def receive(self) -> Any:
        """The answer to what was sent. EOFError, or another OSError, if the process died."""
        assert self._ours.poll(ANSWER_SECONDS), "the engine hangs"
        answer = self._ours.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, what: str, *arguments: Any) -> Any:
        self.send(what, *arguments)
        return self.receive()

    def ask(
        self, prompts: Sequence[Sequence[int]], params: Any = None, max_tokens: int = 1
    ) -> list[Answer]:
        """Have prompts answered in one batch; `params` for each, or for all."""
        return self.call("ask", prompts, params, max_tokens)

    def signal(self, kind: signal.Signals) -> None:
        os.kill(self.process.pid, kind)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        self._ours.close()
        self.process.join(ANSWER_SECONDS)
        is_ended = self.process.exitcode is not None
        self.kill()
        assert is_ended or exc[0] is not None, "the engine does not end"


def join_namespaces(pid: int) -> None:
    """Be in the user and network namespaces of a process. In a process of one thread."""
    assert threading.active_count() == 1
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        with open(f"/proc/{pid}/ns/{kind}") as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")


class _Engine:
    """Runs in: the process of an engine."""

    def __init__(self, model_dir: Path, config: dict[str, Any], log: Log) -> None:
        self.counters = Counters()
        self.llm = ThreadedLLM(model_dir, observer=self.counters, **config)
        self._log = log

    def ask(self, prompts: list[list[int]], params: Any, max_tokens: int) -> list[Answer]:
        if not isinstance(params, list):
            params = [params] * len(prompts)
        wanted = [
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                return_logits=True,
                logprobs=20,
                kv_transfer_params=each,
            )
            for each in params
        ]
        return [
            Answer(
                done.token_ids,
                done.first_logits,
                tuple(each.top for each in done.logprobs),
                done.num_external_tokens,
                done.params,
            )
            for done in self.llm.generate(prompts, wanted)
        ]

    def abort(self, prompt: list[int], params: Any, num_steps: int) -> bool:
        """Begin a request and end it after some steps, as its client goes; whether it still ran."""
        wanted = SamplingParams(max_tokens=50, ignore_eos=True, kv_transfer_params=params)
        events = self.llm.stream(prompt, wanted)
        step, left = self.llm.step, num_steps

        def counted() -> None:
            nonlocal left
            if not left:
                raise _GoneError
            left -= 1
            step()

        self.llm.step = counted
        try:
            for _ in events:
                pass
        except _GoneError:
            return True
        finally:
            del self.llm.step
            events.close()
        return False

    def counts(self) -> dict[str, float]:
        return self.counters.snapshot()

    def settled(self, seconds: float) -> tuple[int, int, int]:
        """Blocks that are in use, slots that are pinned, and loans, as soon as there are none."""
        until = time.monotonic() + seconds
        assert self.llm.drain(seconds), "work is left"
        pool = self.llm.scheduler.pool
        while True:
            blocks, slots = pool.num_usable - pool.num_free, self.counters.gauges()
            taken = (blocks, int(slots["pool_slots/in_use"]), int(slots["pool_slots/lent"]))
            if not any(taken) or time.monotonic() > until:
                return taken
            self.llm.step()

    def log(self) -> list[str]:
        return self._log.messages


class _GoneError(Exception):
    """A client went away."""


def _run(model_dir: Path, namespace: int | None, config: dict[str, Any], asked: Any) -> None:
    """Answer until the other end closes. Between questions the engine steps on while it has work:
    the last chunks of a prefill are sealed behind its answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end this process
    log = Log()
    logging.getLogger("kvferry").addHandler(log)
    logging.getLogger("kvferry").setLevel(logging.INFO)
    with closing(asked), suppress(EOFError, ConnectionError):
        try:
            if namespace is not None:
                join_namespaces(namespace)
            engine = _Engine(model_dir, config, log)
        except Exception as error:  # the tests raise it
            asked.send(error)
            return
        with engine.llm as llm:
            asked.send(None)
            while True:
                while not asked.poll(0 if llm.scheduler.has_work() else None):
                    llm.step()
                what, *arguments = asked.recv()
                try:
                    answer = getattr(engine, what)(*arguments)
                except Exception as error:  # likewise
                    answer = error
                asked.send(answer)
