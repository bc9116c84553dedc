"""No function is too long to be read at once, and no class too wide to be held in the head."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

MAX_LINES = 60
"""Of a function."""

MAX_PARAMETERS = 6
"""Of an `__init__`."""

MAX_ATTRIBUTES = 12
"""That an `__init__` sets."""

SRC = Path(__file__).parents[1] / "src"


def too_large(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{path.relative_to(SRC)}:{node.lineno} {node.name}"
        if (lines := node.end_lineno - node.lineno + 1) > MAX_LINES:
            yield f"{where}: {lines} lines"
        if node.name != "__init__":
            continue
        if (count := len(node.args.args) - 1 + len(node.args.kwonlyargs)) > MAX_PARAMETERS:
            yield f"{where}: {count} parameters"
        set_here = {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        }
        if len(set_here) > MAX_ATTRIBUTES:
            yield f"{where}: {len(set_here)} attributes"


def test_functions_and_classes_are_small():
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 100
    assert [each for path in files for each in too_large(path)] == []
