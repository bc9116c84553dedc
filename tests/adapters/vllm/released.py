"""Stand-ins for released vLLM packages, built from the snapshots in `interfaces`.

`scripts/host-interfaces` writes the snapshots. A stand-in has the classes, methods, fields and
signatures of a release and nothing else. So a connector that reads an attribute that the release
lacks gets an `AttributeError`, as in the release.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent / "interfaces"

PLUG_IN = "kvferry.adapters.vllm"

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_MODULES = {
    f"{_V1}.base": (
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorMetadata",
        "KVConnectorWorkerMetadata",
        "KVConnectorHandshakeMetadata",
        "KVConnectorTransferResults",
        "KVConnectorRole",
    ),
    f"{_V1}.metrics": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "vllm.v1.outputs": ("KVConnectorOutput",),
    "vllm.v1.core.sched.output": ("SchedulerOutput", "NewRequestData", "CachedRequestData"),
    "vllm.v1.metrics.cache_hit_source": ("CacheHitSource",),
    "vllm.distributed.kv_events": ("BlockStored", "BlockRemoved", "AllBlocksCleared"),
}
"""The modules in which releases keep the types that a connector imports."""


def versions() -> list[str]:
    """Return all releases with a snapshot, oldest first."""
    return sorted((path.stem for path in FOLDER.glob("*.json")), key=number)


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


class Release:
    """A release of vLLM, known by its snapshot."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.cpu_kernels: str | None = None
        """Instruction set of the CPU kernels; None on other devices."""
        self.facts: dict[str, Any] = json.loads((FOLDER / f"{version}.json").read_text())

    @property
    def methods(self) -> dict[str, dict[str, Any]]:
        """The methods of the connectors' base class."""
        return self.facts["connector"]["methods"]

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.facts["calls"]

    def has(self, method: str) -> bool:
        return method in self.methods

    def fields(self, name: str) -> list[str]:
        """Return the names of a type's fields; empty if the release has no such type."""
        return [f.rstrip("=") for f in self.facts["types"].get(name, {"fields": []})["fields"]]

    @cached_property
    def types(self) -> dict[str, type[Any]]:
        """The release's types by name, made once."""
        made = {name: self._make_type(name) for name in self.facts["types"]}
        made["KVConnectorRole"] = _Role
        made["KVConnectorBase_V1"] = self._make_base(made)
        hma = self.facts["supports_hma"]
        if hma is not None:
            made["SupportsHMA"] = _abstract_class("SupportsHMA", hma["methods"], (ABC,))
        for type_ in made.values():
            type_.__module__ = next(
                (name for name, held in _MODULES.items() if type_.__name__ in held), "vllm"
            )
            type_.__qualname__ = type_.__name__
        return made

    def make(self, name: str, **values: Any) -> Any:
        """Make an instance of a type of this release, without values for fields that it lacks."""
        fields = self.fields(name)
        return self.types[name](**{key: value for key, value in values.items() if key in fields})

    def record(self, name: str, **values: Any) -> Any:
        """Make a plain object with those of the values for which the release's type has fields."""
        return _Record(name, {k: v for k, v in values.items() if k in self.fields(name)})

    def _make_type(self, name: str) -> type[Any]:
        facts = self.facts["types"][name]
        if name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata"):
            return type(name, (ABC,), {})
        if name == "KVConnectorPromMetrics":
            return _PromMetrics
        if name == "CacheHitSource":
            return enum.Enum(name, {field: field for field in facts["fields"]})
        fields = [
            (f.rstrip("="), Any, _default(f.rstrip("="))) if f.endswith("=") else (f, Any)
            for f in facts["fields"]
        ]
        fields.sort(key=len)
        methods = {m: _unwritten(m) for m in facts.get("methods", ()) if m != "is_empty"}
        if name == "KVConnectorStats":
            methods["is_empty"] = _unwritten("is_empty")
        return dataclasses.make_dataclass(name, fields, namespace=methods)

    def _make_base(self, types: dict[str, type[Any]]) -> type[Any]:
        base = _abstract_class("KVConnectorBase_V1", self.methods, (ABC,))
        takes_groups = "kv_cache_config" in self.methods["__init__"]["signature"]
        for name, function in _BASE_BEHAVIOUR.items():
            if name in self.methods:
                setattr(base, name, function)
        if takes_groups:
            base.__init__ = _init_with_groups if self._groups_optional else _init_needing_groups
        else:
            base.__init__ = _init_without_groups
        for name in self.facts["connector"]["properties"]:
            setattr(base, name, property(_BASE_PROPERTIES[name]))
        for name in self.facts["connector"]["attributes"]:
            setattr(base, name, False)
        if self.has("get_transfer_results"):
            results = types["KVConnectorTransferResults"]

            def get_transfer_results(connector: Any, finished_req_ids: set[str]) -> Any:
                sending, recving = connector.get_finished(finished_req_ids)
                return results(finished_sending=sending or set(), finished_recving=recving or set())

            base.get_transfer_results = get_transfer_results
        return base

    @property
    def _groups_optional(self) -> bool:
        return "kv_cache_config=" in self.methods["__init__"]["signature"]

    def construction(self, kv_cache_config: Any) -> list[tuple[Any, ...]]:
        """Return, for each way in which the host builds a connector, the arguments that follow
        `vllm_config, role`."""
        return [
            (kv_cache_config,) if call["positional"] == 3 else ()
            for call in self.facts["construction"]
        ]

    @contextmanager
    def installed(self, *, without: str | None = None) -> Iterator[ModuleType]:
        """Install the stand-in as vLLM, and import our plug-in again on it. `cpu_kernels` says on
        which device this vLLM runs.

        Args:
            without: name of a module that this vLLM lacks.

        Yields:
            `kvferry.adapters.vllm.plugin`.
        """
        import importlib

        hidden = {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if name.split(".")[0] == "vllm" or name == f"{PLUG_IN}.plugin"
        }
        try:
            for name, module in self._modules().items():
                if name != without:
                    sys.modules[name] = module
            yield importlib.import_module(f"{PLUG_IN}.plugin")
        finally:
            for name in list(sys.modules):
                if name.split(".")[0] == "vllm" or name == f"{PLUG_IN}.plugin":
                    del sys.modules[name]
            sys.modules.update(hidden)

    def _modules(self) -> dict[str, ModuleType]:
        modules: dict[str, ModuleType] = {}
        for name, held in _MODULES.items():
            present = [type_name for type_name in held if type_name in self.types]
            if not present:
                continue
            module = _module(modules, name)
            for type_name in present:
                setattr(module, type_name, self.types[type_name])
        _module(modules, "vllm.version").__version__ = self.version
        modules["vllm"].__version__ = self.version
        _module(modules, "vllm.transformers_utils.config").get_config = _get_config
        platform = SimpleNamespace(is_cpu=lambda: self.cpu_kernels is not None)
        _module(modules, "vllm.platforms").current_platform = platform
        attention = _module(modules, "vllm.v1.attention.backends.cpu_attn")
        attention._get_attn_isa = lambda dtype, block_size, head_size=None: self.cpu_kernels
        return modules


class _Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


_Role.__name__ = "KVConnectorRole"


class _Record:
    """An object of given attributes, whose error for any other attribute names the type."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.__dict__.update(values)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"{self.__dict__.get('_name')} of this release has no {attribute!r}")


class _PromMetrics:
    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        from prometheus_client import Counter

        self._counter_cls = metric_types[Counter]


_PromMetrics.__name__ = "KVConnectorPromMetrics"


def _default(field: str) -> Any:
    if field in ("invalid_block_ids", "failed_recving", "finished_sending", "finished_recving"):
        if field in ("invalid_block_ids", "failed_recving"):
            return dataclasses.field(default_factory=set)
        return None
    if field == "data":
        return dataclasses.field(default_factory=dict)
    return None


def _module(modules: dict[str, ModuleType], name: str) -> ModuleType:
    parent, _, child = name.rpartition(".")
    if name not in modules:
        modules[name] = ModuleType(name)
        modules[name].__path__ = []
        if parent:
            setattr(_module(modules, parent), child, modules[name])
    return modules[name]


def _get_config(path: str, **_options: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def _abstract_class(
    name: str, methods: dict[str, dict[str, Any]], bases: tuple[type[Any], ...]
) -> type[Any]:
    """Make a class with these signatures, whose methods do nothing."""
    namespace: dict[str, Any] = {}
    for method, facts in methods.items():
        scope: dict[str, Any] = {}
        exec(f"def {method}{facts['signature']}: return None", scope)
        function = scope[method]
        if facts.get("abstract"):
            function = abstractmethod(function)
        namespace[method] = classmethod(function) if facts.get("of_class") else function
    return type(bases[0])(name, bases, namespace)


def _unwritten(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(name)

    method.__name__ = name
    return method


# Below is the base class's behaviour on which a step depends, the same in every release.


def _init_with_groups(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
    _init_without_groups(self, vllm_config, role)
    self._kv_cache_config = kv_cache_config


def _init_needing_groups(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
    _init_with_groups(self, vllm_config, role, kv_cache_config)


def _init_without_groups(self: Any, vllm_config: Any, role: Any) -> None:
    if vllm_config.kv_transfer_config is None:
        raise ValueError("kv_transfer_config must be set")
    self._connector_metadata = None
    self._vllm_config = vllm_config
    self._kv_transfer_config = vllm_config.kv_transfer_config
    self._role = role


def _bind(self: Any, connector_metadata: Any) -> None:
    self._connector_metadata = connector_metadata


def _clear(self: Any) -> None:
    self._connector_metadata = None


_BASE_BEHAVIOUR = {
    "bind_connector_metadata": _bind,
    "clear_connector_metadata": _clear,
    "has_connector_metadata": lambda self: self._connector_metadata is not None,
    "get_finished": lambda self, finished_req_ids: (None, None),
    "get_block_ids_with_load_errors": lambda self: set(),
    "request_finished": lambda self, request, block_ids: (False, None),
    "take_events": lambda self: (),
    "set_xfer_handshake_metadata_pp_aware": lambda self, metadata: self.set_xfer_handshake_metadata(
        {rank: each for (_, rank), each in metadata.items()}
    ),
}

_BASE_PROPERTIES = {
    "role": lambda self: self._role,
    "prefer_cross_layer_blocks": lambda self: False,
    "requires_kv_delivery": lambda self: True,
    "supports_divergent_local_hybrid_hits": lambda self: False,
}


@dataclass(frozen=True)
class Call:
    """One call that a host makes on a connector."""

    method: str
    positional: int
    keywords: tuple[str, ...]

    def binds_to(self, connector_class: type[Any]) -> None:
        """Raise TypeError if the class's method cannot be called like this."""
        function = inspect.getattr_static(connector_class, self.method)
        signature = inspect.signature(getattr(connector_class, self.method))
        bound_first = () if isinstance(function, classmethod | staticmethod) else (None,)
        signature.bind(*bound_first, *[None] * self.positional, **dict.fromkeys(self.keywords))


def calls_of(release: Release) -> list[Call]:
    return [
        Call(call["method"], call["positional"], tuple(call.get("keywords", ())))
        for call in release.calls
    ]
