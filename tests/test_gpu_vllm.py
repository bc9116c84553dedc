"""`scripts/gpu-vllm` without a GPU: it joins what was split, and an environment knows kvferry."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.real_vllm.harness import device_of

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu-vllm"
NAME = "vllm-0.0.1-py3-none-any.whl"


@pytest.fixture
def script():
    spec = spec_from_loader("gpu_vllm", SourceFileLoader("gpu_vllm", str(SCRIPT)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parts(tmp_path):
    """A folder with a wheel in four parts."""
    whole = tmp_path / NAME
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("vllm/__init__.py", "where = 'joined'")
        wheel.writestr(
            "vllm-0.0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n"
        )
        wheel.writestr(
            "vllm-0.0.1.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("vllm-0.0.1.dist-info/RECORD", "")
    data = whole.read_bytes()
    size = -(-len(data) // 4)
    for index, letter in enumerate("abcd"):
        part = data[index * size : (index + 1) * size]
        (tmp_path / f"{NAME}.a{letter}").write_bytes(part)
    whole.unlink()
    return tmp_path, data


def test_parts_are_joined_in_their_order(script, parts):
    folder, data = parts
    for _ in range(2):  # the whole from before is no part
        assert script.join(folder) == [folder / NAME]
        assert (folder / NAME).read_bytes() == data


def test_a_part_that_is_missing_is_seen(script, parts):
    folder, _ = parts
    (folder / f"{NAME}.ad").unlink()
    with pytest.raises(SystemExit, match=r"vllm-.*: its 3 parts are not all of it"):
        script.join(folder)
    assert not (folder / NAME).exists()


def test_a_folder_without_vllm_is_refused(script, tmp_path):
    with pytest.raises(SystemExit, match="holds no wheel of vLLM"):
        script.join(tmp_path)


SEEN = """
import vllm, kvferry
from importlib.metadata import entry_points
[plugin] = [each for each in entry_points(group="vllm.general_plugins") if each.name == "kvferry"]
print(vllm.where, kvferry.__file__, plugin.value)
"""


@pytest.mark.slow
def test_its_environment_has_the_wheel_and_finds_kvferry(script, parts):
    folder, _ = parts
    python = script.install(script.join(folder), folder / "venv")
    seen = subprocess.run(
        [python, "-c", SEEN], capture_output=True, text=True, timeout=120, check=True
    ).stdout.split()
    source = SCRIPT.parents[1] / "src" / "kvferry" / "__init__.py"
    assert seen == ["joined", str(source), "kvferry.adapters.vllm:register"]


@pytest.mark.slow
def test_without_a_device_it_says_so_in_one_line(parts):
    folder, _ = parts
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(folder / "venv")],
        capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.endswith("python: AssertionError: no CUDA device\n")
    assert len(done.stderr.splitlines()) == 1


def test_what_depends_on_the_device_is_in_one_place():
    assert "VLLM_CPU_OMP_THREADS_BIND" in device_of("cpu").env
    assert not any("CPU" in name for name in device_of("cuda").env)
    assert device_of("cuda", graphs=True).engine["enforce_eager"] is False
    assert "TORCHDYNAMO_DISABLE" not in device_of("cuda", graphs=True).env
    with pytest.raises(ValueError, match="KVFERRY_TEST_DEVICE is 'gpu'"):
        device_of("gpu")
