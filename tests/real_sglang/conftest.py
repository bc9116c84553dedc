"""Tests with SGLang's own classes, on a CPU: `make test-sglang`. Where SGLang is not installed
nothing here is collected; `scripts/test-sglang` fails if nothing was."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.testing.models import make_tiny_model

try:
    importlib.metadata.version("sglang")
    HAS_SGLANG = True
except importlib.metadata.PackageNotFoundError:
    HAS_SGLANG = False

collect_ignore_glob = [] if HAS_SGLANG else ["test_*.py"]


class NoTorchvision:
    """Stands for torchvision, which no CPU build of torch here matches, and no test needs."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        def missing(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = missing


if HAS_SGLANG:
    # Transformers looks for torchvision as it is loaded, and must not find the stand-in.
    from transformers import AutoProcessor  # noqa: F401

    sys.meta_path.insert(0, NoTorchvision())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SGLang and torch, as they are imported
        import tests.real_sglang.engine  # noqa: F401


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
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_parallel

    place = tmp_path_factory.mktemp("rendezvous") / "file"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=place.as_uri(), rank=0, world_size=1)
    get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_dcp_rank=0)
