"""Tests with SGLang's own classes, on a CPU: `make test-sglang`. Where SGLang is not installed
nothing here is collected; `scripts/test-sglang` fails if nothing was."""

from __future__ import annotations

import importlib.metadata
import warnings
from pathlib import Path

import pytest

from kvferry.testing.models import make_tiny_model

try:
    importlib.metadata.version("sglang")
    HAS_SGLANG = True
except importlib.metadata.PackageNotFoundError:
    HAS_SGLANG = False

collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]


if HAS_SGLANG:
    with warnings.catch_warnings():
        import examples.cpu.sglang_tiers  # noqa: F401  # silences what SGLang warns of


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`plain`, and `other`, whose files differ from it in the weights alone."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(root / name, seed=seed)
        for seed, name in enumerate(("plain", "other"), 1)
    }


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The process groups and ranks that a scheduler of SGLang has when it makes its cache."""
    from examples.cpu.sglang_tiers import start_rank

    start_rank(tmp_path_factory.mktemp("rendezvous") / "file")
