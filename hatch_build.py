"""Compiles `record/hash_leaves.c` when kvferry is installed, if the machine has a C compiler.

The library hashes, and looks for values that are not finite, without the interpreter's lock.
Without it kvferry does both in Python.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import sysconfig
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
        build_data["tag"] = f"py3-none-{platform_tag()}"
        if version != "editable":
            build_data["force_include"][str(library)] = "kvferry/record/hash_leaves.so"


def platform_tag() -> str:
    """Return where the library runs: `ctypes` loads it, so any Python will do. On Linux it needs no
    other library (`-nostdlib`), so it runs with any C library of its processor.
    """
    processor = platform.machine()
    if sys.platform == "linux" and processor in {"x86_64", "aarch64"}:
        return f"manylinux_2_17_{processor}.musllinux_1_1_{processor}"
    return re.sub(r"[-.]", "_", sysconfig.get_platform())


def compile_leaves(root: Path) -> Path | None:
    """Compile and return the library; None if that fails, with a line that says why."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        print("kvferry: no C compiler, so checksums are computed in Python", file=sys.stderr)
        return None
    source = root / SOURCE
    library = source.with_suffix(".so")
    alone = ["-nostdlib"] if sys.platform == "linux" else []
    command = [compiler, "-O3", "-shared", "-fPIC", *alone, "-o", str(library), str(source)]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"kvferry: checksums are computed in Python: {error}", file=sys.stderr)
        return None
    return library
