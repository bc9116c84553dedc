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
"""Of a class: its fields, and what its methods set. Those of a base stand in the base."""

SRC = Path(__file__).parents[1] / "src"


def too_large(path: Path, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        where = f"{path}:{node.lineno} {node.name}"
        if isinstance(node, ast.ClassDef):
            if (count := len(attributes_of(node))) > MAX_ATTRIBUTES:
                yield f"{where}: {count} attributes"
            continue
        if (lines := node.end_lineno - node.lineno + 1) > MAX_LINES:
            yield f"{where}: {lines} lines"
        parameters = len(node.args.args) - 1 + len(node.args.kwonlyargs)
        if node.name == "__init__" and parameters > MAX_PARAMETERS:
            yield f"{where}: {parameters} parameters"


def attributes_of(node: ast.ClassDef) -> set[str]:
    found = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not ast.unparse(each.annotation).endswith("KW_ONLY")
        and "ClassVar" not in ast.unparse(each.annotation)
    }
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) or not method.args.args:
            continue
        me = method.args.args[0].arg
        for each in ast.walk(method):
            if (
                isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and isinstance(each.value, ast.Name)
                and each.value.id == me
            ):
                found.add(each.attr)
    return found


def test_functions_and_classes_are_small():
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 100
    found = [
        each for path in files for each in too_large(path.relative_to(SRC), path.read_text("utf-8"))
    ]
    assert found == []


def test_attributes_count_wherever_they_come_from():
    fields = "".join(f"    field_{number}: int\n" for number in range(9))
    source = f"""
class Wide:
{fields}
    shared: ClassVar[int]
    _: KW_ONLY

    def __post_init__(self):
        self.late: int = 1
        self.one = self.field_1 = 1

    def grow(self):
        self.two, self.three = 2, 3
        self.one.inner = other.four = 4
"""
    assert list(too_large(Path("wide.py"), source)) == ["wide.py:2 Wide: 13 attributes"]
