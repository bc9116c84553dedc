"""Runs cases, each part in a process of its own that may hang, die or eat memory."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.errors import ConfigError
from kvferry.testing.connector import RULES
from kvferry.testing.connector.host import (
    KILLED,
    EngineDeadError,
    MissedError,
    NotHereError,
    RefusedError,
    RuleBrokenError,
    describe,
)
from kvferry.testing.connector.lab import Lab, write_models
from kvferry.testing.connector.rules import Rule, Verdict

_CLOCK_SECONDS = 0.1
"""Until processes that start are younger than the models, by clocks that count in hundredths."""

MEMORY_BYTES = 3 << 30
"""What a part may use beyond what it starts with."""

_VERDICTS: dict[type[Exception], Verdict] = {
    RuleBrokenError: "wrong",
    MissedError: "miss",
    EngineDeadError: "engine dead",
    MemoryError: "engine dead",
    RefusedError: "refused",
    NotHereError: "not run",
    ConfigError: "refused",
}


@dataclass(frozen=True)
class Target:
    """A connector class by name, and its options. `{dir}` in them stands for a fresh directory."""

    module: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def load(self) -> type[Any]:
        """Import the class.

        Raises:
            ConfigError: it cannot be imported, or is no V1 connector.
        """
        try:
            found = getattr(importlib.import_module(self.module), self.name)
        except AttributeError as error:
            raise ConfigError(f"{self.module} has no {self.name}") from error
        except Exception as error:
            raise ConfigError(f"cannot import {self.module}: {describe(error)}") from error
        if "KVConnectorBase_V1" not in [base.__name__ for base in getattr(found, "__mro__", ())]:
            raise ConfigError(
                f"{self.name} is no V1 connector: it inherits neither from vLLM's "
                "KVConnectorBase_V1 nor from that of kvferry.v1"
            )
        return found  # type: ignore[no-any-return]


class CaseOutcome(NamedTuple):
    """What a case, or a part of one, showed."""

    verdict: Verdict
    detail: str = ""
    notes: tuple[str, ...] = ()


class Places(NamedTuple):
    """Directories of a case, and of the models that all cases run."""

    case: Path
    models: Path


class Limits(NamedTuple):
    """Seconds: after which a part hangs; and for which a look-up waits while nothing changes."""

    part: float = 40.0
    patience: float = 2.0


_LIMITS = Limits()


# --- in the child ---------------------------------------------------------------------------------


def _child(
    target: Target, case: tuple[str, int, int], places: Places, limits: Limits, pipe: Connection
) -> None:
    os.setsid()
    os.umask(0o022)
    log = os.open(places.case / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    torch.set_num_threads(1)
    notes: list[str] = []
    try:
        _run(target, case, places, limits.patience, notes)
        outcome = CaseOutcome("right", "", tuple(notes))
    except tuple(_VERDICTS) as error:
        with suppress(OSError):  # in a case of a full disk, the log's is full, too
            traceback.print_exc()
        verdict = next(v for kind, v in _VERDICTS.items() if isinstance(error, kind))
        outcome = CaseOutcome(verdict, str(error) or describe(error), tuple(notes))
    pipe.send(outcome)
    pipe.close()
    os._exit(0)  # whatever threads there are


def _run(
    target: Target, case: tuple[str, int, int], places: Places, patience: float, notes: list[str]
) -> None:
    name, part, seed = case
    rule = next(each for each in RULES if each.name == name)
    connector = target.load()
    is_vllms = any(base.__module__.startswith("vllm.") for base in connector.__mro__)
    kind, host = ("VllmHost", "vllm_host") if is_vllms else ("OwnHost", "own_host")
    module = importlib.import_module(f"kvferry.testing.connector.{host}")
    make, options = getattr(module, kind), target.options
    lab = Lab(connector, options, make, places.case, places.models, seed, part, patience, notes)
    if rule.needs_files and not lab.keeps_files:
        raise NotHereError("the options name no directory: write {dir} where it belongs")
    rule.run(lab)
    lab.close()


# --- in the parent --------------------------------------------------------------------------------


class Runner:
    """Runs cases of one connector. A context manager."""

    def __init__(self, target: Target, seed: int = 0, limits: Limits = _LIMITS) -> None:
        self._target, self._seed, self._limits = target, seed, limits
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

    def run(self, rules: Sequence[Rule], report: Callable[[Rule, CaseOutcome], None]) -> None:
        """Run cases, two at a time; report them in order."""
        with ThreadPoolExecutor(2) as pool:
            for rule, outcome in zip(rules, pool.map(self.run_case, rules), strict=True):
                report(rule, outcome)

    def run_case(self, rule: Rule) -> CaseOutcome:
        """Run the parts of a case over one directory, until one shows something."""
        outcome, notes = CaseOutcome("right"), list[str]()
        with tempfile.TemporaryDirectory(prefix="kv-", ignore_cleanup_errors=True) as path:
            for part in range(rule.parts):
                outcome = self._run_part(rule, part, Path(path))
                notes += outcome.notes
                if outcome.verdict != "right":
                    break
        detail = outcome.detail.replace(path, "{case}").replace(self._models.name, "{models}")
        return CaseOutcome(
            outcome.verdict, re.sub(r"0x[0-9a-f]{6,}", "0x...", detail), tuple(notes)
        )

    def _run_part(self, rule: Rule, part: int, directory: Path) -> CaseOutcome:
        places = Places(directory, Path(self._models.name))
        mine, theirs = self._context.Pipe(duplex=False)
        case = rule.name, part, self._seed
        process = self._context.Process(
            target=_child, args=(self._target, case, places, self._limits, theirs)
        )
        process.start()
        theirs.close()
        outcome = CaseOutcome("hangs", f"no end after {self._limits.part:.0f} s")
        try:
            if mine.poll(self._limits.part):
                outcome = mine.recv()
        except (EOFError, OSError):
            process.join(10)
            status = process.exitcode
            outcome = CaseOutcome("engine dead", _how_it_ended(status))
            if status == KILLED and part == rule.killed:
                outcome = CaseOutcome("right")
        finally:
            assert process.pid is not None, "it was started"
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            mine.close()
        return outcome


def _how_it_ended(status: int | None) -> str:
    if status is not None and status < 0:
        return f"the process died of {signal.Signals(-status).name}"
    return f"the process ended with status {status} in the middle of a case"
