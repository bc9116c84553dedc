"""The connectors that are compared, and what their processes measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One connector, or none.

    Attributes:
        name: in the table.
        connector: from the directory it may store in to vLLM's `kv_transfer_config`; None for none.
        required: whether the benchmark means nothing without it.
        stores: whether a second process can find anything.
        note: what must be known to read its figures.
    """

    name: str
    connector: Callable[[Path], Json] | None
    required: bool = False
    stores: bool = True
    note: str | None = None


@dataclass(slots=True)
class Measured:
    """The results of one case, as its processes print them.

    Attributes:
        case: which.
        cold: results of its storing processes, one per round, with `bytes_per_token` in the store.
        warm: results of its reading processes; empty if it stores nothing.
        failure: why the case was given up, if it was.
    """

    case: Case
    cold: list[Json] = field(default_factory=list)
    warm: list[Json] = field(default_factory=list)
    failure: str | None = None


def cases() -> Sequence[Case]:
    """All cases; the first is vLLM alone."""
    return (
        Case(name="none", connector=None, required=True, stores=False),
        Case(
            name="no-op",
            connector=_no_op,
            stores=False,
            note="a connector that does nothing: the cost of having one",
        ),
        Case(name="kvferry", connector=_kvferry, required=True),
        Case(name="example", connector=_example, note="vLLM's ExampleConnector"),
        Case(
            name="fs-tier",
            connector=_fs_tier,
            note="vLLM's OffloadingConnector with its fs tier, device copies replaced by memmove",
        ),
    )


def _no_op(directory: Path) -> Json:
    return {
        "kv_connector": "NoOpConnector",
        "kv_connector_module_path": "kvferry.bench.vllm.stand_ins",
        "kv_role": "kv_both",
    }


def _kvferry(directory: Path) -> Json:
    return {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": f"file://{directory}/store?max_bytes=8GiB"},
    }


def _example(directory: Path) -> Json:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory)},
    }


def _fs_tier(directory: Path) -> Json:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "kvferry.bench.vllm.stand_ins",
            "cpu_bytes_to_use": 1 << 30,
            "secondary_tiers": [{"type": "fs", "root_dir": str(directory)}],
        },
    }
