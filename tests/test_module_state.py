"""Modules keep no state, but what belongs to the process as a whole. Here each has its reason."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
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
    "testing/world/kv.py _mix": "numbers that are the same in every world",
    "v1/late_weights.py _begin": "vLLM asks several times before it makes a connector",
}

CONTAINERS = {
    *("Condition", "Counter", "Event", "Lock", "OrderedDict", "RLock", "WeakKeyDictionary"),
    *("WeakSet", "WeakValueDictionary", "defaultdict", "deque", "local"),
}
CACHES = {"cache", "lru_cache"}


def last_name(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).rpartition(".")[2]


def changing_classes(source: str) -> set[str]:
    """Names of the classes of a module that set attributes of themselves."""
    return {
        each.name
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.ClassDef)
        and any(isinstance(part, ast.FunctionDef) and part.name == "__init__" for part in each.body)
    }


def assigned(node: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Names and values of an assignment, each for itself if there are several."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return
    for target in getattr(node, "targets", None) or [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(map(ast.unparse, target.elts), node.value.elts, strict=True)
        else:
            yield ast.unparse(target), node.value


def state_of(source: str, changing: Collection[str]) -> Iterator[str]:
    """Names of a module that may change: containers that begin empty, objects of `changing`
    classes, caches of functions, and what `global` names."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Global):
            yield from node.names
        marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
        if CACHES & {last_name(each) for each in marks}:
            yield node.name
    kinds = CONTAINERS | CACHES | set(changing)
    for name, value in (each for node in module.body for each in assigned(node)):
        is_call = isinstance(value, ast.Call)
        is_empty = is_call and not value.args and last_name(value) in {"dict", "list", "set"}
        is_empty |= isinstance(value, ast.Dict) and not value.keys
        is_empty |= isinstance(value, ast.List) and not value.elts
        if is_empty or (is_call and last_name(value) in kinds):
            yield name


def test_what_a_module_keeps_belongs_to_the_process() -> None:
    sources = {path: path.read_text("utf-8") for path in sorted(SRC.rglob("*.py"))}
    changing = set().union(*map(changing_classes, sources.values()))
    found = [
        f"{path.relative_to(SRC).as_posix()} {name}"
        for path, source in sources.items()
        for name in state_of(source, changing)
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
    assert sorted(state_of(source, changing_classes(source))) == [
        *("KEPT", "asked", "by_name", "kept", "load", "lock", "number", "seen", "size")
    ]
