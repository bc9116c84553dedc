"""Runs code of pages and examples in the tests' process, which saves the imports of a new one."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """A function that runs code or a file as a script started in `cwd`, and returns its output."""

    def run(code: str | Path, *arguments: str, cwd: Path) -> str:
        script = code if isinstance(code, Path) else tmp_path / "script.py"
        if isinstance(code, str):
            script.write_text(code)
        monkeypatch.chdir(cwd)
        monkeypatch.setenv("HOME", str(cwd))
        monkeypatch.syspath_prepend(cwd)
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        capfd.readouterr()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", category=DeprecationWarning, module="kvferry")
            runpy.run_path(str(script), run_name="__main__")
        return capfd.readouterr().out

    return run
