"""Modules keep no state, but what belongs to the process as a whole. Here each has its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src/kvferry"

OF_THE_PROCESS = {
    "adapters/sglang/identity.py WEIGHTS": "SGLang's weights, which methods of its classes change",
    "adapters/vllm/connector.py _ANSWERING": "engines of this process, one connector answers each",
    "cache/memory.py _MADE_HERE": "private memory of workers, which only this process can open",
    "doctor/machine.py _distributions": "what is installed",
    "engine/model.py LOADING": "Transformers patches torch for the whole process while it loads",
    "record/leaves.py native_leaves": "a library is loaded once",
    "store/kinds.py _installed": "what is installed",
    "v1/late_weights.py _begin": "vLLM asks several times before it makes a connector",
}

CONTAINERS = {
    *("Condition", "Counter", "Event", "Lock", "OrderedDict", "RLock", "WeakKeyDictionary"),
    *("WeakSet", "WeakValueDictionary", "defaultdict", "deque", "local"),
}
CACHES = {"cache", "lru_cache"}


def last_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def state_of(source: str) -> Iterator[str]:
    """Names of a module that may change: containers that begin empty, objects of its own classes
    that set attributes of themselves, caches of functions, and what `global` names."""
    module = ast.parse(source)
    changing = {
        each.name
        for each in module.body
        if isinstance(each, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in each.body)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from node.names
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if CACHES & {last_name(each) for each in marks}:
            yield node.name
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        value, targets = node.value, getattr(node, "targets", None) or [node.target]
        is_call = isinstance(value, ast.Call)
        is_empty = is_call and not value.args and last_name(value) in {"dict", "list", "set"}
        is_empty |= isinstance(value, ast.Dict) and not value.keys
        is_empty |= isinstance(value, ast.List) and not value.elts
        if is_empty or (is_call and last_name(value) in CONTAINERS | CACHES | changing):
            yield from map(ast.unparse, targets)


def test_what_a_module_keeps_belongs_to_the_process() -> None:
    found = [
        f"{path.relative_to(SRC).as_posix()} {name}"
        for path in sorted(SRC.rglob("*.py"))
        for name in state_of(path.read_text("utf-8"))
    ]
    assert sorted(found) == sorted(OF_THE_PROCESS)


def test_each_form_of_state_is_found() -> None:
    source = """
class Kept:
    def __init__(self): ...
class Plain: ...
kept, plain = Kept(), 5
KEPT = Kept()
PLAIN = Plain()
seen: set[int] = set()
by_name = {}
constant = {1: 2}
lock = threading.Lock()
asked = cache(ask)
@functools.lru_cache(5)
def load(): ...
class Held:
    @cache
    def size(self): ...
def change():
    global number
"""
    assert sorted(state_of(source)) == [
        *("KEPT", "asked", "by_name", "load", "lock", "number", "seen", "size")
    ]
