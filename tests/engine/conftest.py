"""Model directories, made once per session, and the servers of remote stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.testing.models import make_tiny_model
from tests.servers.patience import make_engines_patient


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    make_engines_patient(monkeypatch)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory):
    """Factory: `model_dir("llama", seed=1, num_hidden_layers=2)` is a model directory."""
    made: dict[str, Path] = {}

    def factory(arch: str = "llama", seed: int = 0, **overrides) -> Path:
        name = f"{arch}-{seed}-{sorted(overrides.items())}"
        if name not in made:
            path = tmp_path_factory.mktemp(arch)
            made[name] = make_tiny_model(path, arch, seed, **overrides)
        return made[name]

    return factory
