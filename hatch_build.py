"""Compiles `record/hash_leaves.c` when kvferry is installed, if the machine has a C compiler.

The library hashes without the interpreter's lock. Without it kvferry hashes in Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src/kvferry/record/hash_leaves.c")
COMPILE_SECONDS = 120


class LeavesHook(BuildHookInterface):
    """Adds the compiled library to a wheel, or leaves it beside its source if editable."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = compile_leaves(Path(self.root))
        if library is None:
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        if version != "editable":
            build_data["force_include"][str(library)] = "kvferry/record/hash_leaves.so"


def compile_leaves(root: Path) -> Path | None:
    """Compile and return the library; None if that fails, with a line that says why."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("kvferry: no C compiler, so checksums are computed in Python", file=sys.stderr)
        return None
    source = root / SOURCE
    library = source.with_suffix(".so")
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"kvferry: checksums are computed in Python: {error}", file=sys.stderr)
        return None
    return library
