"""Embedded engines in processes of their own, for tests of prefill and decode apart. The processes
start fast, as forks of a server that has imported everything."""

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import transformers.models.auto.modeling_auto
import transformers.models.llama.modeling_llama  # noqa: F401 - engines import these when they load

from kvferry.engine import SamplingParams
from kvferry.observe import Counters
from kvferry.store import url
from kvferry.store.tiers.health import Patience
from tests.engine.rank_threads import ThreadedLLM

ANSWER_SECONDS = 120.0
"""How long an answer may take before the engine counts as hung."""

ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""The transfer parameters that a proxy sends to the engine that prefills."""

PAUSE_SECONDS = 0.5
"""The longest pause before a store that was away is tried again. A store that fails as often as
tests have it fail would be left alone for longer."""


class Answer(NamedTuple):
    """An engine's answer to one prompt. `logprobs` has the 20 most likely tokens of each place."""

    token_ids: tuple[int, ...]
    logits: Any
    logprobs: tuple[dict[int, float], ...]
    num_external: int
    params: dict[str, Any] | None


class Log(logging.Handler):
    """A handler that keeps all messages."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


class EngineProcess:
    """An embedded engine in its own process; ranks beyond the first are threads there. A context
    manager, which ends the engine within bounded time.

    Args:
        namespace: Id of a process whose user and network namespaces the engine joins.
        config: Arguments of `LLM`.
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
        """Send a question, which `receive` gets the answer to."""
        self.wait_ready()
        self._ours.send((what, *arguments))

    def receive(self) -> Any:
        """Return the answer to what was sent. Raises EOFError or an OSError if the process died."""
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
        """Have prompts answered in one batch; `params` is a list for each, or one for all."""
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
    """Join the user and network namespaces of a process. Only for a process with one thread."""
    assert threading.active_count() == 1
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        with open(f"/proc/{pid}/ns/{kind}") as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"setns {kind}")


class _Engine:
    """The engine and what the tests call on it. Runs in: the process of an engine."""

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
        """Start a request and abort it after some steps, as if its client left. Return whether it
        still ran then."""
        wanted = SamplingParams(max_tokens=50, ignore_eos=True, kv_transfer_params=params)
        events = self.llm.stream(prompt, wanted)
        step, left = self.llm.step, num_steps

        def counted() -> None:
            nonlocal left
            if not left:
                raise GoneError
            left -= 1
            step()

        self.llm.step = counted
        try:
            for _ in events:
                pass
        except GoneError:
            return True
        finally:
            del self.llm.step
            events.close()
        return False

    def counts(self) -> dict[str, float]:
        return self.counters.snapshot()

    def settled(self, seconds: float) -> tuple[int, int, int]:
        """Step until no block is in use, no slot pinned and none lent to a peer, or until the time
        is over; return the three counts."""
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


class GoneError(Exception):
    """A client went away."""


def _run(model_dir: Path, namespace: int | None, config: dict[str, Any], asked: Any) -> None:
    """Answer until the other end closes. Between questions the engine goes on stepping while it has
    work, since the last chunks of a prefill are sealed after its answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the tests end this process
    url.Patience = partial(Patience, longest_pause_seconds=PAUSE_SECONDS)
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
                except Exception as error:  # the tests raise it, too
                    answer = error
                asked.send(answer)
