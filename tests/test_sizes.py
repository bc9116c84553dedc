"""No function is too long to be read at once, and no constructor takes too much."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 60
"""Of a function."""

MAX_PARAMETERS = 6
"""Of an `__init__`."""

SRC = Path(__file__).parents[1] / "src"


def too_large(path: Path, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{path}:{node.lineno} {node.name}"
        if (lines := node.end_lineno - node.lineno + 1) > MAX_LINES:
            yield f"{where}: {lines} lines"
        parameters = len(node.args.args) - 1 + len(node.args.kwonlyargs)
        if node.name == "__init__" and parameters > MAX_PARAMETERS:
            yield f"{where}: {parameters} parameters"


def test_functions_are_small():
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 100
    found = [
        each for path in files for each in too_large(path.relative_to(SRC), path.read_text("utf-8"))
    ]
    assert found == []


def test_what_is_too_large_is_found():
    body = "    pass\n" * MAX_LINES
    source = (
        f"def long():\n{body}\nclass Wide:\n    def __init__(self, a, b, c, d, *, e, f, g): ..."
    )
    assert list(too_large(Path("a.py"), source)) == [
        "a.py:1 long: 61 lines",
        "a.py:64 __init__: 7 parameters",
    ]
