"""vLLM's own example connector, as released, runs in the embedded engine with other imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.engine.generation import SamplingParams
from kvferry.engine.llm import LLM
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.v1 import v1_config, v1_roles

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [3 + 7 * i % 200 for i in range(150)]
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True, return_logits=True)

# Each name that a release imports from vLLM and `kvferry.v1` lacks, and its import here.
IMPORTS = dict(
    re.findall(
        r"^\| `(\w+)` \| `(from .* import .*)` \|$",
        (ROOT / "docs" / "v1-connectors.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
)


def released_source(version: str) -> str:
    path = ROOT / ".vllm-connectors" / version / "example_connector.py"
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "vllm-connectors"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"vLLM's example connector is not there: {done.stderr.strip()}"
    return path.read_text()


def with_our_imports(source: str) -> str:
    """The source with its imports of vLLM, and nothing else, replaced."""
    lines = source.splitlines()
    for node in reversed(list(ast.walk(ast.parse(source)))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            indent = " " * node.col_offset
            lines[node.lineno - 1 : node.end_lineno] = [
                indent + IMPORTS.get(alias.name, f"from kvferry.v1 import {alias.name}")
                for alias in node.names
            ]
    return "\n".join(lines)


@pytest.fixture(params=["0.14", "0.32"])
def release(request):
    return request.param


@pytest.fixture
def connector_class(release, monkeypatch):
    source = with_our_imports(released_source(f"{release}.0"))
    assert "vllm." not in "".join(line for line in source.splitlines() if "import" in line)
    module = ModuleType("example_connector")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look it up
    exec(compile(source, "example_connector.py", "exec"), vars(module))
    if release == "0.14" and not torch.cuda.is_available():
        # That release moves loaded tensors to the CUDA device, whichever device the KV is on.
        monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    return module.ExampleConnector


@pytest.fixture
def generate(model_dir, tmp_path, connector_class, release):
    def run(*, connector=True, release=release):
        config = v1_config(block_size=16, options={"shared_storage_path": str(tmp_path)})
        roles = v1_roles(connector_class, config, release=release) if connector else None
        observer = Counters()
        with LLM(
            model_dir("llama"), roles=roles, observer=observer, dtype="float32",
            block_size=16, num_blocks=32, num_threads=1,
        ) as llm:  # fmt: skip
            (completion,) = llm.generate([PROMPT], PARAMS)
        assert observer["hook_failed"] == observer["contract_violation"] == 0
        return completion

    return run


def test_a_second_engine_reads_the_files_of_the_first(generate, tmp_path):
    plain = generate(connector=False)
    cold = generate()
    assert len(list(tmp_path.glob("*/*.safetensors"))) > 1
    warm = generate()
    assert (cold.num_external_tokens, warm.num_external_tokens) == (0, 144)
    assert plain.token_ids == cold.token_ids == warm.token_ids
    assert np.abs(plain.first_logits - warm.first_logits).max() <= 1e-3


def test_other_kv_in_the_files_gives_other_logits(generate, tmp_path):
    plain = generate()
    for file in tmp_path.glob("*/*.safetensors"):
        save_file({name: kv * 1.5 for name, kv in load_file(file).items()}, file)
    wrong = generate()
    assert wrong.num_external_tokens == 144
    assert np.abs(plain.first_logits - wrong.first_logits).max() > 1e-3


def test_an_unknown_release_is_refused(generate):
    with pytest.raises(ConfigError, match=r"release is '0.20'; known: 0.14, 0.32"):
        generate(release="0.20")
