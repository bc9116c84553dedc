"""Fixtures for tests inside real vLLM: `make test-vllm`. Without vLLM, pytest collects nothing
here; `scripts/test-vllm` fails if nothing was collected."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from kvferry.testing.models import make_tiny_model
from tests.real_vllm.harness import Oracle, Process

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

MakePrompt = Callable[..., list[int]]
Explain = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def environment_as_found() -> Iterator[None]:
    """Engines inherit this process's variables. vLLM sets some when a test imports it, so that
    later engines would run otherwise than the same tests alone."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random Llamas: `plain`, and `other`, which differs from it only in the weights."""
    root = tmp_path_factory.mktemp("models")
    shape = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 384,
        "max_position_embeddings": 4096,
    }
    return {
        "plain": make_tiny_model(root / "plain", seed=1, **shape),
        "other": make_tiny_model(root / "other", seed=2, **shape),
    }


@pytest.fixture(scope="session")
def vllm_config(models: dict[str, Path]) -> Any:
    """The configuration of an engine that runs `plain`, in this process."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=str(models["plain"]), skip_tokenizer_init=True).create_engine_config()


@pytest.fixture
def make_prompt(request: pytest.FixtureRequest) -> MakePrompt:
    """A factory of random prompts, which differ between tests and are the same in each run."""
    source = random.Random(request.node.nodeid)

    def make(num_tokens: int = 300, start: list[int] | None = None) -> list[int]:
        start = start or []
        return start + [source.randrange(3, 320) for _ in range(num_tokens - len(start))]

    return make


@pytest.fixture
def explain(tmp_path: Path) -> Explain:
    """`kvferry explain`, which answers for some stores and a prompt."""

    def call(urls: list[str], prompt: list[int] | None, *options: str) -> dict[str, Any]:
        command = ["explain", *urls, *options]
        if prompt is not None:
            tokens = tmp_path / "tokens.json"
            tokens.write_text(json.dumps(prompt))
            command += ["--tokens", str(tokens)]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            assert main([*command, "--json", "-"]) == 0
        value: dict[str, Any] = json.loads(out.getvalue())
        return value

    return call


class Pool:
    """Processes by name, which live through the session since an import of vLLM takes longer than
    the start of an engine. Each test starts engines of its own in them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, Process] = {}

    def get(self, name: str, **env: str) -> Process:
        """Return the process of that name, or a new one if there is none or it is unusable.

        Args:
            env: environment of a new process.
        """
        process = self._processes.get(name)
        if process is not None and process.usable:
            return process
        self.discard(name)
        self._processes[name] = Process(self._folder / f"{name}.log", env).__enter__()
        return self._processes[name]

    def discard(self, name: str) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            process.__exit__(None, None, None)

    def close(self) -> None:
        for name in list(self._processes):
            self.discard(name)


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("logs"))
    yield pool
    pool.close()


@pytest.fixture
def first(pool: Pool) -> Process:
    """The process in which tests write to a store."""
    return pool.get("first")


@pytest.fixture
def second(pool: Pool) -> Process:
    """The process in which tests read what the first one wrote."""
    return pool.get("second")


@pytest.fixture(scope="session")
def oracle(models: dict[str, Path], pool: Pool) -> Iterator[Oracle]:
    """The engine without a connector, for reference answers."""
    oracle = Oracle(models["plain"], pool.get("oracle"))
    yield oracle
    oracle.close()
