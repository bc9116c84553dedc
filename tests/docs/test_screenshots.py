"""The pictures of docs/operate.md are made by their script, out of a running engine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_pictures_are_made(tmp_path):
    subprocess.run(
        [sys.executable, ROOT / "scripts/screenshots", "--to", tmp_path, "--seconds", "12"],
        cwd=ROOT, check=True, capture_output=True, timeout=540,
    )  # fmt: skip
    made = {each.name for each in tmp_path.iterdir()}
    assert made == {each.name for each in (ROOT / "docs/images").iterdir()}
    assert made == set(re.findall(r"\(images/(\S+?)\)", (ROOT / "docs/operate.md").read_text()))
    for name in ("panels.png", "report.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20]) == 1100
        assert len(content) > 50_000  # an empty page has a tenth
    status = re.sub(r"<[^>]*>", " ", (tmp_path / "status.svg").read_text())
    for shown in ("tokens&#160;hit", "scheduler", "lookup", "slots&#160;held"):
        assert shown in status, shown
