"""Tests with SGLang's own classes on a CPU: `make test-sglang`. Without SGLang, pytest collects
nothing here; `scripts/test-sglang` fails if nothing was collected."""

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
    """Model directories: `plain`, and `other`, which differs from it only in the weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: make_tiny_model(root / name, seed=seed)
        for seed, name in enumerate(("plain", "other"), 1)
    }


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Make the process groups and ranks that SGLang's scheduler has when it makes its cache."""
    from examples.cpu.sglang_tiers import start_rank

    start_rank(tmp_path_factory.mktemp("rendezvous") / "file")


@pytest.fixture(autouse=True)
def as_started() -> None:
    """Each test is a process whose weights did not change yet."""
    from kvferry.adapters.sglang import identity

    identity.WEIGHTS.have_changed = identity.WEIGHTS.left_old_kv = False
