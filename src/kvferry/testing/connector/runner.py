"""Runs cases, each part in a process of its own that may hang, die or eat memory."""

from __future__ import annotations

import importlib
import importlib.util
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.testing.connector import RULES
from kvferry.testing.connector.faults import KILLED
from kvferry.testing.connector.host import CaseEnd, Verdict, describe
from kvferry.testing.connector.lab import MODEL, Lab, write_model, write_models
from kvferry.testing.connector.rules import Rule

_CLOCK_SECONDS = 0.1
"""Until processes that start are younger than the models, by clocks that count in hundredths."""

MEMORY_BYTES = 3 << 30
"""What a part may use beyond what it starts with."""


@dataclass(frozen=True)
class Target:
    """A connector class by name, and its options. `{dir}` in them stands for a fresh directory."""

    module: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def load(self) -> type[Any]:
        """Import the class. Raises CaseEnd ("refused") if that fails, or it is no V1 connector."""
        try:
            found = getattr(importlib.import_module(self.module), self.name)
        except AttributeError as error:
            raise CaseEnd("refused", f"{self.module} has no {self.name}") from error
        except Exception as error:
            said = f"cannot import {self.module}: {describe(error)}"
            raise CaseEnd("refused", said) from error
        if "KVConnectorBase_V1" not in [base.__name__ for base in getattr(found, "__mro__", ())]:
            said = "inherits neither from vLLM's KVConnectorBase_V1 nor from that of kvferry.v1"
            raise CaseEnd("refused", f"{self.name} is no V1 connector: it {said}")
        return found  # type: ignore[no-any-return]


class CaseOutcome(NamedTuple):
    """What a case, or a part of one, showed."""

    verdict: Verdict
    detail: str = ""
    notes: tuple[str, ...] = ()


class Limits(NamedTuple):
    """How long a case may take."""

    part: float = 80.0  # seconds after which a part hangs
    patience: float = 2.0  # seconds for which a look-up waits while nothing changes
    steps: int = 6_000  # after which an engine that waits for something steps for ever
    for_misses: float = math.inf  # most patience of rules that a miss keeps: no stall breaks them

    def after_a_hang(self, slowest: float) -> Limits:
        """The limits of later cases, of which the slowest that ended took so many seconds: what
        hangs once hangs often."""
        part = min(self.part, max(10.0, 8 * slowest))
        return self._replace(part=part, steps=min(self.steps, 1_500))


class _Job(NamedTuple):
    """A part of a case."""

    target: Target
    rule: str
    part: int
    seed: int
    directory: Path
    models: Path
    limits: Limits


def _child(job: _Job, pipe: Connection) -> None:
    pipe.send("started")  # what was imported before is no time of the case
    os.setsid()
    os.umask(0o022)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    torch.set_num_threads(1)
    notes: list[str] = []
    try:
        _run(job, notes)
        outcome = CaseOutcome("right", "", tuple(notes))
    except (CaseEnd, MemoryError) as error:
        verdict: Verdict = error.verdict if isinstance(error, CaseEnd) else "engine dead"
        outcome = CaseOutcome(verdict, str(error) or describe(error), tuple(notes))
    pipe.send((outcome, _host_of(job.target)))
    pipe.close()
    os._exit(0)  # whatever threads there are


def _run(job: _Job, notes: list[str]) -> None:
    rule = next(each for each in RULES if each.name == job.rule)
    connector, options = job.target.load(), job.target.options
    kind, host = ("VllmHost", "vllm_host") if _is_vllms(connector) else ("OwnHost", "own_host")
    make = getattr(importlib.import_module(f"kvferry.testing.connector.{host}"), kind)
    patience = job.limits.patience
    if "miss" in rule.may:
        patience = min(patience, job.limits.for_misses)
    lab = Lab(connector, options, make, job.directory, job.models, job.seed, job.part,
              patience, notes, job.limits.steps)  # fmt: skip
    if rule.chapter == "faults" and "{dir}" not in str(options):
        raise CaseEnd("not run", "the options name no directory: write {dir} where it belongs")
    rule.run(lab)
    lab.close()


def _is_vllms(connector: type[Any]) -> bool:
    return any(base.__module__.startswith("vllm.") for base in connector.__mro__)


def _host_of(target: Target) -> str:
    """The host that a class runs on, in words; "" if it cannot be loaded."""
    with suppress(CaseEnd):
        if not _is_vllms(target.load()):
            return f"kvferry.v1 (the embedded engine of kvferry {metadata.version('kvferry')})"
        return f"vLLM {sys.modules['vllm'].__version__}"
    return ""


class Runner:
    """Runs cases of one connector. A context manager.

    Attributes:
        host: the host that they run on, in words; "" before the first one has ended.
        seconds: how long each case took, by name, without imports.
    """

    def __init__(self, target: Target, seed: int = 0, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        self._target, self._seed, self._limits = target, seed, limits
        self.host, self.seconds = "", dict[str, float]()
        self._hung: set[str] = set()
        self._models = tempfile.TemporaryDirectory(prefix="kv-models-")
        # Before any process starts: a connector may refuse weights that change under it.
        write_models(Path(self._models.name))
        time.sleep(_CLOCK_SECONDS)
        self._context = multiprocessing.get_context("forkserver")
        modules = ["kvferry.testing.connector.own_host", __name__]
        if importlib.util.find_spec("vllm") is not None:
            modules += ["kvferry.testing.connector.vllm_host", "vllm.v1.executor.abstract"]
        self._context.set_forkserver_preload(modules)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._models.cleanup()

    def run(
        self, rules: Sequence[Rule], report: Callable[[Rule, CaseOutcome], None], jobs: int = 2
    ) -> None:
        """Run cases side by side; report them in order. Once one has hung, later ones get less
        time."""
        with ThreadPoolExecutor(jobs) as pool:
            for rule, outcome in zip(rules, pool.map(self._run_one, rules), strict=True):
                report(rule, outcome)

    def _run_one(self, rule: Rule) -> CaseOutcome:
        outcome = self.run_case(rule)
        if outcome.verdict == "hangs":
            self._hung.add(rule.name)
            ended = [self.seconds[name] for name in list(self.seconds) if name not in self._hung]
            self._limits = self._limits.after_a_hang(max(ended, default=0.0))
        return outcome

    def run_case(self, rule: Rule) -> CaseOutcome:
        """Run the parts of a case over one directory, until one shows something."""
        self.seconds[rule.name] = 0.0
        verdict, detail, notes = CaseOutcome("right")
        with tempfile.TemporaryDirectory(prefix="kv-", ignore_cleanup_errors=True) as path:
            for part in range(rule.parts):
                if rule.models:
                    write_model(Path(path, MODEL), rule.models[part])
                    time.sleep(_CLOCK_SECONDS)
                job = _Job(self._target, rule.name, part, self._seed, Path(path),
                           Path(self._models.name), self._limits)  # fmt: skip
                verdict, detail, more = self._run_part(job, rule)
                notes += more
                if verdict != "right":
                    break
        detail = detail.replace(path, "{case}").replace(self._models.name, "{models}")
        return CaseOutcome(verdict, re.sub(r"0x[0-9a-f]{6,}", "0x...", detail), notes)

    def _run_part(self, job: _Job, rule: Rule) -> CaseOutcome:
        is_fresh = rule.fresh and job.part > 0
        context = multiprocessing.get_context("spawn") if is_fresh else self._context
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(job, theirs))
        process.start()
        theirs.close()
        start = time.monotonic()
        try:
            mine.recv()
            start = time.monotonic()
            if mine.poll(job.limits.part):
                outcome, self.host = mine.recv()
                return outcome  # type: ignore[no-any-return]
            return CaseOutcome("hangs", f"no end after {job.limits.part:.0f} s")
        except (EOFError, OSError):
            process.join(10)
            status = process.exitcode
            if status == KILLED and rule.killed == job.part:
                return CaseOutcome("right")
            if status is not None and status < 0:
                said = f"the process died of {signal.Signals(-status).name}"
            else:
                said = f"the process ended with status {status} in the middle of a case"
            return CaseOutcome("engine dead", said)
        finally:
            self.seconds[rule.name] += time.monotonic() - start
            assert process.pid is not None, "it was started"
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            mine.close()
