"""Fixtures that attach the storage back end as a process of SGLang does, without SGLang."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.sglang import host
from tests.adapters.vllm import fakes

with host.installed():
    from kvferry.adapters.sglang import KVFerryStorage, identity


Attach = Callable[..., host.Controller]
SECONDS = 60.0


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories: `plain`, and `other`, which differs from it only in the weights."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: fakes.write_model(root / name, fill=fill)
        for name, fill in (("plain", 1.0), ("other", 2.0))
    }


@pytest.fixture(autouse=True)
def as_started() -> None:
    """Each test is a process whose weights did not change yet."""
    identity.WEIGHTS.have_changed = identity.WEIGHTS.left_old_kv = False


@pytest.fixture
def attach(models: dict[str, Path], tmp_path: Path) -> Any:
    """A factory of back ends that the controller of a running model has attached."""
    stack = ExitStack()

    def make(
        pool: Any = None,
        *,
        store: str | list[str] | None = None,
        model: str | Path = "plain",
        arguments: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        **extra: Any,
    ) -> host.Controller:
        host.RUNNING.arguments = {
            "model_path": str(models.get(str(model), model)),
            "load_format": "auto",
            "overrides": {},
            **(arguments or {}),
        }
        given = {
            "store": store or (tmp_path / "store").as_uri(),
            "load_timeout_seconds": SECONDS,  # a machine may stall
            **extra,
        }
        backend = KVFerryStorage(host.storage_config(given, **(config or {})), {})
        stack.enter_context(closing(backend))
        return host.Controller(backend, host.HostPool() if pool is None else pool)

    with stack:
        yield make
    host.RUNNING.arguments = None
