"""The layers of the package, as imports show them, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvferry

ROOT = Path(kvferry.__file__).parent

# A room is a module or package right under kvferry. Imports go down only; within a room, freely.
LAYERS = [
    {"errors", "types", "observe", "config", "filesystem", "network", "processors"},
    {"keys", "layout", "record"},
    {"identity"},
    {"contract", "store", "transfer"},
    {"blocks", "journal"},
    {"cache"},
    # Every name of vLLM's, and the hosts that know them.
    {"v1"},
    {"adapters", "exporters", "engine", "testing"},
    {"cli", "demo", "doctor", "explain", "readings", "report", "simulate", "survey"},
]

# Rooms of one layer do not know each other, but for these.
SIDEWAYS = {
    # Their errors are ours.
    ("config", "errors"),
    ("filesystem", "errors"),
    ("network", "errors"),
    # A peer is a store.
    ("store", "transfer"),
    # Tiny models for tests are models of the engine; Transformers' identity is that of the engine.
    ("testing", "engine"),
    ("adapters", "engine"),
    # A command runs what is beside it.
    ("cli", "demo"),
    ("cli", "doctor"),
    ("cli", "explain"),
    ("cli", "readings"),
    ("cli", "report"),
    ("cli", "simulate"),
    # Whatever looks at namespaces does it alike.
    ("cli", "survey"),
    ("doctor", "survey"),
    ("explain", "survey"),
    ("report", "survey"),
}

# Downward, and still not for everyone: target -> files that may import it (besides its own room).
ONLY_FROM = {
    # An engine opens the cache by `cache.build` and sees no half of it.
    "cache.deciding": [],
    "cache.moving": [],
    # Only hosts know the names of the seeds.
    "v1": ["adapters", "testing/connector"],
    # A store moves opaque bytes. Only these know what a record is, and how it is aligned.
    "record": [
        "store/recordio.py",
        "store/record_client.py",
        # `verify` names what is wrong; the index knows how much each model has stored.
        "store/maintenance.py",
        # What was erased is told by the marks of records.
        "store/erasures.py",
        "store/file/index.py",
        "blocks",
        "cache",
        "engine",
        # Transformers has no step and no blocks for a connector's roles to work on.
        "adapters/transformers",
        # Storage behind another host's cache keeps its rows without our roles.
        "adapters/rows.py",
        "adapters/row_cache.py",
        "adapters/vllm/tier_rows.py",
        "adapters/sglang",
        "cli",
        "demo",
        "doctor",
        "explain.py",
        # Shards, whose keys do not follow from those of a prompt.
        "survey.py",
        "testing/world/records.py",
    ],
    # One reading of a model's config makes one identity.
    "engine": [
        "adapters/transformers",
        "testing",
        "cli",
        "demo",
    ],
    "keys": [
        # An engine says which model it runs.
        "contract/spec.py",
        # The name of a shard follows from what its record says, which `verify` checks.
        "store/maintenance.py",
        "cache",
        "identity",
        "v1",
        "engine",
        "adapters",
        "cli",
        "demo",
        "doctor",
        "explain.py",
        "survey.py",
        "testing/world",
    ],
    # Hosts and engines alone run models; one command asks which one a directory holds.
    "identity": ["v1", "engine", "adapters", "cli/prompts.py"],
    "layout": [
        "blocks",
        "cache",
        "v1",
        "engine",
        "adapters",
        "testing/world/shapes.py",
    ],
    # Records between processes, without a word of stores.
    "transfer": ["store/servers/peer.py", "cache", "engine", "adapters", "testing", "cli"],
    # Where a chunk lies is the same for every connector; how it is stored is not its business.
    "store": [
        # Pieces of a record that are read and verified one by one.
        "blocks/rows.py",
        # The thread that writes, and the wait for it.
        "journal.py",
        "cache",
        "engine",
        "testing",
        "adapters",
        "cli",
        "demo",
        "doctor",
        "explain.py",
        "report",
        "survey.py",
    ],
    "testing": [],
}

# Halves of one room: neither imports the other, so that each is read, and runs, without it.
OTHER_HALF = {"cache/deciding": "cache.moving", "cache/moving": "cache.deciding"}

# Third parties that cost time or may be absent: where they may be imported at run time.
THIRD_PARTIES = {
    "torch": [
        "layout/ops.py",
        "layout/device.py",
        "layout/kernels.py",
        "layout/streams.py",
        "blocks/audit.py",
        "blocks/paged.py",
        "blocks/copies.py",
        "cache/moving",
        "v1/kv_allocation.py",
        "v1/block_copies.py",
        "v1/shared_storage.py",
        "engine",
        "testing",
        "adapters",
        "demo",
    ],
    "transformers": ["engine", "testing", "adapters", "demo"],
    "triton": ["layout/kernels.py"],
    "numpy": [
        "record/leaves.py",
        "layout/ops.py",
        "layout/kernels.py",
        "engine",
        "testing",
        "adapters",
        "demo",
        "simulate",
    ],
    # They stand beside src, and no wheel has them.
    "benchmarks": [],
    "tests": [],
    "pytest": ["testing"],
    "hypothesis": ["testing"],
    "prometheus_client": [
        "exporters.py",
        "readings.py",
        "adapters/vllm/metrics.py",
        "adapters/sglang/metrics.py",
    ],
    "typer": ["cli"],
    "rich": ["cli", "demo"],
    "matplotlib": ["simulate"],
    "plotly": ["report"],
    "gguf": ["demo"],
    "obstore": ["store/servers/objects.py"],
    "mooncake": ["store/servers/mooncake_child.py"],
}

# Imports inside functions: each loads something heavy or optional, where it is used.
LAZY = {
    # Where nothing was compiled.
    "record/leaves.py": {"numpy"},
    "layout/ops.py": {"kvferry.layout.kernels"},
    # After the check that its master is there, which takes less time.
    "store/servers/mooncake_child.py": {"mooncake"},
    "engine": {"transformers", "jinja2"},
    # The host itself, and the hub that it loads models with.
    "adapters/transformers": {"transformers"},
    "adapters/vllm": {"vllm", "kvferry.adapters.vllm.plugin"},
    # Its time, in every process, for the few that ask a web server.
    "network.py": {"urllib"},
    # The hub whose snapshot a host runs.
    "identity/running.py": {"huggingface_hub"},
    "testing": {"transformers"},
    "demo": {"torch", "transformers", "gguf", "pydoc_data"},
    "simulate": {"matplotlib"},
    "report": {"plotly"},
    # A command loads what it runs, so that `--help` does not wait for torch.
    "cli": {"kvferry"},
}


class Import(NamedTuple):
    module: str
    line: int
    in_function: bool
    for_types_only: bool
    names: tuple[str, ...] = ()
    """Of `from module import names`."""


def imports_of(source: str, path: str) -> Iterator[Import]:
    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            in_function = True
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from walk(child, in_function, True)
            for child in node.orelse:
                yield from walk(child, in_function, for_types)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, in_function, for_types)
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = tuple(alias.name for alias in node.names)
            if module == "kvferry":
                for name in names:
                    yield Import(f"kvferry.{name}", node.lineno, in_function, for_types)
            else:
                yield Import(module, node.lineno, in_function, for_types, names)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            (name, *_) = node.args
            if isinstance(name, ast.Constant):
                yield Import(name.value, node.lineno, in_function, for_types)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, in_function, for_types)

    return walk(ast.parse(source, path), False, False)


def is_in(name: str, places: list[str] | set[str], separator: str) -> bool:
    return any(name == place or name.startswith(place + separator) for place in places)


def layer_of(room: str) -> int | None:
    return next((number for number, rooms in enumerate(LAYERS) if room in rooms), None)


def faults_of(path: str, source: str) -> list[str]:
    """What is wrong with the imports of one module; `path` is relative to the package."""
    if path == "__init__.py":
        # It names things of higher layers and loads none: the subprocess tests hold that.
        return []
    room = path.removesuffix(".py").split("/")[0]
    faults = []
    if layer_of(room) is None:
        faults.append(f"{path}: room {room!r} stands in no layer of this test")
    for found in imports_of(source, path):
        for fault in faults_of_import(path, room, found):
            faults.append(f"{path}:{found.line}: {fault}")
    return faults


def faults_of_import(path: str, room: str, found: Import) -> Iterator[str]:
    if found.module.startswith("."):
        yield "relative import; name the module in full"
        return
    if found.in_function:
        allowed = {module for place in LAZY if is_in(path, [place], "/") for module in LAZY[place]}
        if not is_in(found.module, allowed, "."):
            yield f"import of {found.module} inside a function"
    package, _, target = found.module.partition(".")
    if package != "kvferry":
        places = None if found.for_types_only else THIRD_PARTIES.get(package)
        if places is not None and not is_in(path, places, "/"):
            yield f"{package} is not for {room}"
        return
    yield from faults_of_layers(path, room, target)


def faults_of_layers(path: str, room: str, target: str) -> Iterator[str]:
    target_room = target.split(".", maxsplit=1)[0]
    if target_room == room:
        for half, other in OTHER_HALF.items():
            if is_in(path, [half], "/") and is_in(target, [other], "."):
                yield f"kvferry.{target} is the other half of {room}"
        return
    if not target or target_room in kvferry.__all__:
        # The package itself names things of every layer: only those on top of all may use it.
        if room not in LAYERS[-1]:
            yield f"the public names are above {room}"
        return
    own, other = layer_of(room), layer_of(target_room)
    if own is None or other is None:
        yield f"kvferry.{target} stands in no layer of this test"
    elif other > own:
        yield f"kvferry.{target} is above {room}"
    elif other == own and (room, target_room) not in SIDEWAYS:
        yield f"kvferry.{target} is beside {room}"
    for narrow, places in ONLY_FROM.items():
        if is_in(target, [narrow], ".") and not is_in(path, places, "/"):
            yield f"kvferry.{target} is not for {path}"


def test_imports_go_down_the_layers():
    paths = sorted(ROOT.rglob("*.py"))
    assert len(paths) > 30
    faults = [
        fault
        for path in paths
        for fault in faults_of(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "source", "part"),
    [
        ("store/base.py", "import kvferry.cache.config", "above store"),
        ("store/base.py", "from kvferry.contract import messages", "beside store"),
        ("store/base.py", "from kvferry import engine", "above store"),
        ("store/memory.py", "from kvferry.record.schema import digest", "not for store/memory.py"),
        (
            "contract/driver.py",
            "from kvferry.cache.build import PrefixCache",
            "above contract",
        ),
        ("cache/x.py", "from kvferry.v1 import types", "above cache"),
        ("engine/llm.py", "from kvferry.v1 import types", "not for engine/llm.py"),
        ("cli/main.py", "import kvferry.cache.moving.worker", "not for cli/main.py"),
        (
            "cache/deciding/lookup.py",
            "from kvferry.cache.moving.slot_io import SlotIO",
            "the other half",
        ),
        (
            "cache/moving/worker.py",
            "if TYPE_CHECKING:\n  from kvferry.cache.deciding import host_pool",
            "the other half",
        ),
        ("blocks/copies.py", "import kvferry.cache.config", "above blocks"),
        ("blocks/copies.py", "import kvferry.store.base", "not for blocks/copies.py"),
        ("blocks/tables.py", "import torch", "torch is not for blocks"),
        ("contract/spec.py", "import kvferry.blocks.tables", "above contract"),
        ("engine/llm.py", "import kvferry.testing.clock", "not for engine/llm.py"),
        ("errors.py", "import kvferry.types", "beside errors"),
        ("store/base.py", "import torch.nn", "torch is not for store"),
        ("keys/chain.py", "from torch import nn", "torch is not for keys"),
        ("engine/llm.py", "import typer", "typer is not for engine"),
        ("store/base.py", "import kvferry", "public names are above store"),
        ("store/base.py", "from kvferry import KVError", "public names are above store"),
        ("store/base.py", "from . import memory", "relative"),
        ("store/base.py", "def f():\n  from kvferry.types import X", "inside a function"),
        ("journal.py", "def f():\n  import_module('kvferry.store.url')", "inside a function"),
        ("store/base.py", "importlib.import_module('kvferry.engine')", "above store"),
        ("cli/copy.py", "from benchmarks import BENCHMARKS", "benchmarks is not for cli"),
        ("store/base.py", "if TYPE_CHECKING:\n  import kvferry.engine", "above store"),
        ("attic/x.py", "", "room 'attic' stands in no layer"),
        ("store/base.py", "import kvferry.attic", "kvferry.attic stands in no layer"),
    ],
)
def test_a_wrong_import_is_found(path, source, part):
    assert any(part in fault for fault in faults_of(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("store/recordio.py", "from kvferry.record.schema import digest"),
        ("contract/worker.py", "if TYPE_CHECKING:\n  import torch"),
        ("blocks/rows.py", "from kvferry.store.recordio import pieces"),
        ("cache/moving/worker.py", "import kvferry.blocks.copies"),
        ("cache/deciding/lookup.py", "from kvferry.cache.messages import SlotChunk"),
        ("cli/main.py", "import kvferry.simulate\nfrom kvferry import KVError, __version__"),
        ("engine/model.py", "import torch\ndef f():\n  import transformers.utils"),
    ],
)
def test_a_right_import_passes(path, source):
    assert faults_of(path, source) == []


def circle_among(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, whether at run time, in a function or for types;
    empty if no modules do. `sources` is the text of each module by its full name."""
    imports: dict[str, set[str]] = {}
    for module, source in sources.items():
        targets: set[str] = set()
        for found in imports_of(source, module):
            inner = {f"{found.module}.{name}" for name in found.names}
            targets |= inner & sources.keys() or {found.module} & sources.keys()
        imports[module] = targets
    done: set[str] = set()

    def walk(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        if module in done:
            return []
        for target in sorted(imports[module]):
            if circle := walk(target, [*way, module]):
                return circle
        done.add(module)
        return []

    return next((circle for module in sorted(sources) if (circle := walk(module, []))), [])


def test_no_files_import_each_other_in_a_circle():
    sources = {
        ".".join(("kvferry", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path.read_text("utf-8")
        for path in ROOT.rglob("*.py")
    }
    assert circle_among(sources) == []


@pytest.mark.parametrize(
    "back",
    [
        "import kvferry.a",
        "from kvferry import a",
        "from kvferry.a import X",
        "def f():\n  from kvferry.a import X",
        "if TYPE_CHECKING:\n  import kvferry.a",
    ],
)
def test_a_circle_is_found(back):
    sources = {
        "kvferry.a": "from kvferry.b import c",
        "kvferry.b": "",
        "kvferry.b.c": "import kvferry.d",
        "kvferry.d": back,
    }
    assert circle_among(sources) == ["kvferry.a", "kvferry.b.c", "kvferry.d", "kvferry.a"]
    assert circle_among(sources | {"kvferry.d": ""}) == []


HEAVY = "('torch', 'numpy', 'transformers')"


def run_fresh(code: str) -> str:
    """Standard output of `code` in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import kvferry",
        "import kvferry; kvferry.open_store('memory://x').close(); kvferry.KVError",
        "import kvferry.keys, kvferry.identity, kvferry.record.check, kvferry.store.recordio",
        "import kvferry.contract.guard_scheduler, kvferry.contract.driver, kvferry.cache.config",
        "import kvferry.v1, kvferry.v1.utilities",
        "import kvferry.contract.fold, kvferry.layout.shards",
        "import kvferry.layout.spec, kvferry.layout.plan",
        "import kvferry.cache.deciding.scheduler",
    ],
)
def test_cheap_modules_load_no_torch(code):
    assert run_fresh(f"{code}; import sys; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_import_takes_at_most_100_ms():
    code = (
        "import time; start = time.perf_counter(); import kvferry; "
        "print(time.perf_counter() - start)"
    )
    # The best of several: the others measure what else the machine does.
    assert min(float(run_fresh(code)) for _ in range(5)) <= 0.1


@pytest.mark.parametrize("name", ["kvferry", "kvferry.v1"])
def test_every_public_name_is_there(name):
    package = importlib.import_module(name)
    assert len(package.__all__) == len(set(package.__all__))
    for public in package.__all__:
        assert getattr(package, public) is not None
        assert public in dir(package)
    with pytest.raises(AttributeError, match="no attribute 'open_stor'"):
        package.open_stor  # noqa: B018  # the access is the test


@pytest.mark.parametrize("name", ["kvferry", "kvferry.v1"])
def test_type_checkers_and_python_see_the_same_names(name):
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__).read_text("utf-8"))
    typed = {
        (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry.")
        for alias in node.names
    }
    lazy = {(module, public) for public, module in package._MODULES.items()}
    assert lazy <= typed
    computed = {"__version__"} & set(package.__all__)
    assert {public for _, public in typed} | computed == set(package.__all__)


def test_every_error_is_public():
    from kvferry import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type)} - {
        "StrEnum"
    }
    assert defined <= set(kvferry.__all__)
