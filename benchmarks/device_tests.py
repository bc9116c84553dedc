"""The parts `tests` and `sanitizer` of the benchmark `device`: this repository's tests, counted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks import Options
from benchmarks.report import Row

ROOT = Path(__file__).parents[1]
MARKED = ("tests/layout", "tests/cache/moving", "tests/engine/test_gpu.py")
"""Where tests have the mark `gpu`."""
KERNELS = "tests/layout/test_kernels.py"
"""Runs the kernels on a device if there is one."""

TESTS_SECONDS = 150
TOOL_SECONDS = 90

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# Another torch or Triton may warn of other things, and a bare machine lacks some plug-ins.
ANY_RELEASE = ("--override-ini=filterwarnings=default", "--override-ini=addopts=")


def tests(options: Options) -> Sequence[Row]:
    """Run all tests that need a device, and those whose kernels run on one."""
    marked = _counted("marked gpu", [*MARKED, "-m", "gpu"], options)
    if options.quick:  # the interpreter takes minutes for the others
        return [marked]
    return [marked, _counted("kernels", [KERNELS, "tests/cache/moving/test_device.py"], options)]


def _counted(case: str, arguments: Sequence[str], options: Options) -> Row:
    report = options.directory / f"{case}.xml"
    code = run_pytest([sys.executable], [*arguments, f"--junitxml={report}"], timeout=TESTS_SECONDS)
    if not report.exists():
        why = f"not done in {TESTS_SECONDS} s" if code < 0 else f"exit code {code}"
        return {"case": case, "failed": 1, "note": why}
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    total, skipped, failed, errors = (
        int(suite.attrib[name]) for name in ("tests", "skipped", "failures", "errors")
    )
    bad = [
        each for each in suite if each.find("failure") is not None or each.find("error") is not None
    ]
    row: dict[str, str | int | float | None] = {
        "case": case,
        "passed": total - skipped - failed - errors,
        "skipped": skipped,
        "failed": failed + errors,
    }
    if bad:
        row["note"] = ", ".join(each.attrib["name"] for each in bad[:5])
    return row


def sanitizer(options: Options) -> Sequence[Row]:
    """Run the kernels' tests under each tool of compute-sanitizer."""
    path = os.environ.get("PATH", "") + ":/usr/local/cuda/bin"
    program = shutil.which("compute-sanitizer", path=path)
    rows: list[Row] = []
    for tool in ("memcheck", "racecheck"):
        if program is None or not torch.cuda.is_available():
            what = "compute-sanitizer" if program is None else "device"
            rows.append({"case": tool, "failed": 0, "note": f"not run, there is no {what}"})
            continue
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable]
        selected = [KERNELS, "-k", "agree or reference or memory"]
        # Else freed tensors stay in torch's memory, where no tool sees that they are used.
        more = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        code = run_pytest(command, selected, timeout=TOOL_SECONDS, more=more)
        note = {0: "no error", -1: f"not done in {TOOL_SECONDS} s"}.get(code, f"exit code {code}")
        rows.append({"case": tool, "failed": int(code != 0), "note": note})
    return rows


def run_pytest(
    python: Sequence[str],
    arguments: Sequence[str],
    *,
    timeout: float,
    more: Mapping[str, str] | None = None,
) -> int:
    """Return the exit code of pytest, whose output goes to stderr; -1 if it took too long."""
    command = [*python, *PYTEST, *ANY_RELEASE, *arguments]
    environment = {**os.environ, **(more or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=sys.stderr, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return -1
    return done.returncode
