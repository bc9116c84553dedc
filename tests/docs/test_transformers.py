"""The Transformers page: its code runs, its tables say what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.adapters.transformers import StoredKVConfig
from kvferry.testing.models import make_tiny_model
from tests.tokenizers import save_tiny_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_code_runs_and_its_second_run_reads(tmp_path, run_here):
    make_tiny_model(tmp_path / "path/to/model", max_position_embeddings=4096)
    save_tiny_tokenizer(tmp_path / "path/to/model")
    (tmp_path / "report.txt").write_text("The clause was executed. " * 40)
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    code = code.replace("/var/cache/kvferry", str(tmp_path / "store"))
    first = run_here(code, cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = [int(re.search(r"(\d+) tokens read", out)[1]) for out in (first, done.stdout)]
    assert read[0] == 0
    assert read[1] >= 128


def test_the_option_table_lists_every_option():
    (table,) = re.findall(r"\| option \|.*?\n\n", PAGE, re.DOTALL)
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == {
        *(field.name for field in fields(StoredKVConfig)),
        "model_dir",
        "observer",
    }
