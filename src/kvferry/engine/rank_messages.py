"""What the first rank's process and the others say to each other, in this order.

`Start` down, `Loaded` up, `Connect` down, `Ready` up; then `RunStep` down and `StepDone` up, step
by step, until `Close`. A rank that cannot go on says `Failed` instead, and ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.contract.spec import EngineSpec
from kvferry.engine.config import EngineConfig
from kvferry.engine.step import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorChoice:
    """Which connector a rank's worker role belongs to.

    Attributes:
        name: of the connector.
        spec: of rank 0.
        options: the connector's own.
    """

    name: str
    spec: EngineSpec
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Load this model.

    Attributes:
        rank: of the process that reads this.
        model_dir: of the model.
        engine: options, the same for all ranks.
        num_blocks: of the KV pool, the same for all ranks.
        connector: None for an engine without a store.
        rendezvous: where the ranks meet.
    """

    rank: int
    model_dir: Path
    engine: EngineConfig
    num_blocks: int
    connector: ConnectorChoice | None
    rendezvous: Path


class Loaded(NamedTuple):
    """Weights are read, nothing is connected yet."""


class Connect(NamedTuple):
    """All have loaded: meet, and split the model."""


class Ready(NamedTuple):
    """Steps may come."""


class RunStep(NamedTuple):
    """One step; satisfies `kvferry.engine.runner.StepPlan`."""

    plan: Plan
    finished_request_ids: frozenset[str]
    batch: Batch
    """Empty in a step without tokens."""


class StepDone(NamedTuple):
    """The worker role's report, and what it counted."""

    output: WorkerOutput
    counts: tuple[tuple[str, int], ...]
    durations: tuple[tuple[str, float], ...]


class Close(NamedTuple):
    """Close the worker role, then end."""


class Failed(NamedTuple):
    """The rank ends, and why, in one line."""

    reason: str
    kind: str
    """Name of the error's class."""
