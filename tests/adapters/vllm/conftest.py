"""Fixtures: engines of a release of vLLM, which each test file chooses by its fixture `release`."""

from __future__ import annotations

import pytest

from .versioned_config import make_config, make_model, options
from .versioned_host import VersionedHost


@pytest.fixture
def plugin(release):
    with release.installed() as module:
        yield module


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def engine(release, plugin, model, tmp_path):
    """A factory of engines of the release over one store, like processes that follow each other."""
    made = []

    def make(
        backend="FlashAttentionBackend", *, world=1, stages=1, extra=None, kernels="vec", **given
    ):
        release.cpu_kernels = kernels if backend == "CPUAttentionBackend" else None
        extra = options(tmp_path, **(extra or {}))
        config = make_config(release, model, world=world, stages=stages, extra=extra)
        made.append(
            VersionedHost(release, plugin.KVFerryConnector, config, backend=backend, **given)
        )
        return made[-1]

    yield make
    for host in made:
        host.shutdown()
