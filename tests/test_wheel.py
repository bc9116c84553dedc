"""One wheel serves every Python of a platform, and holds what the docs send operators to."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "kvferry/record/hash_leaves.so"
BUILT = ("src", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")
ENOUGH_SECONDS = 240


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: the library lies beside its source, where an editable one is in use."""
    copy = tmp_path_factory.mktemp("copy")
    for name in BUILT:
        taken = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        taken(ROOT / name, copy / name)
    for leftover in copy.rglob("*.so"):
        leftover.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "made"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=ENOUGH_SECONDS)
    (made,) = (copy / "made").iterdir()
    return made


def test_any_python_and_any_c_library_can_use_the_wheel(wheel):
    """The tag promises it: the library may need no other, for the C libraries differ."""
    tag = wheel.stem.partition("-py3-none-")[2]
    processor = platform.machine()
    if sys.platform == "linux" and processor in ("x86_64", "aarch64"):
        assert tag == f"manylinux_2_17_{processor}.musllinux_1_1_{processor}"
        with zipfile.ZipFile(wheel) as files:
            assert b"libc" not in files.read(LIBRARY)
    else:
        assert tag
        assert not tag.startswith("any")


def test_the_wheel_holds_the_dashboard_and_the_alerts(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    folder = "kvferry/dashboards"
    assert {f"{folder}/kvferry.json", f"{folder}/alerts.yml", LIBRARY, "kvferry/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests/")]
