"""How hosts and engines of a world are set up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.contract.spec import EngineSpec, Mode
from kvferry.keys import UNREAD, ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.store.kinds import is_peer
from kvferry.types import KVGroup, TablePart

NEAR = "memory://near"
"""How the URL of a tier in an engine's own memory begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShape:
    """How a host schedules.

    Attributes:
        late: whether a step is planned before the output of the last one has come.
        offers_early: whether other requests share blocks as soon as a step is planned that fills
            them.
        decode_tokens: how many tokens a request gets at once, as from drafts that are all right.
        spares_others: whether after a failed load only the requests that loaded are computed again.
            Others that share their blocks go on with wrong KV, as hosts may.
    """

    block_size: int = 4
    num_blocks: int = 96
    max_tokens: int = 64
    max_requests: int = 4
    prefix_caching: bool = True
    late: bool = False
    offers_early: bool = False
    decode_tokens: int = 1
    tokens_per_second: float = 5000.0
    spares_others: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """An engine, and the cache as its operator set it up.

    Attributes:
        tiers: URLs of its stores, nearest first.
        options: other options of the cache, but for the slots.
        num_slots: chunks that host memory holds.
        num_groups: KV groups of the model: engines that differ in this share nothing.
        window: tokens that the last group attends to, in a block table of its own; None: it has no
            such group.
        late_weights: so many seconds after its start the weights are hashed; 0: before it.
        names_weights: whether a file names the weights that run, so that a reset need not end the
            use of what is stored.
        strict: whether whatever a hook raises ends the scenario, as it should unless it is part of
            that.
    """

    name: str
    tiers: tuple[str, ...]
    host: HostShape = HostShape()
    options: Mapping[str, Any] = field(default_factory=dict)
    num_slots: int = 24
    world_size: int = 1
    num_groups: int = 1
    window: int | None = None
    chunk_tokens: int = 8
    mode: Mode = Mode.BOTH
    recomputes: bool = False
    strict: bool = True
    names_weights: bool = False
    late_weights: float = 0.0

    @property
    def hears_of_erasures(self) -> bool:
        """Whether it has a store with a notice. An engine with peers alone keeps what it holds."""
        return any(not (is_peer(url) or url.startswith(NEAR)) for url in self.tiers)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        own = () if self.window is None else (self.window,)
        return tuple(
            KVGroup(
                num_layers=1 + (index == 0),
                num_kv_heads=2,
                content_size=4 * (index + 1),
                dtype="float32",
                block_size=self.host.block_size,
                window=window,
            )
            for index, window in enumerate((*(None,) * self.num_groups, *own))
        )

    def has_room(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens can ever run."""
        size = self.host.block_size
        needed = -(-num_tokens // size)
        if self.window is not None:
            needed += min(needed, 2 + (self.window + self.host.max_tokens) // size)
        return needed < self.host.num_blocks

    def spec(self, rank: int, weights: int) -> EngineSpec:
        parts = tuple(
            TablePart(
                table=0 if group.window is None else 1,
                group=index,
                layers=tuple(range(group.num_layers)),
                layer_names=tuple(f"{index}.{layer}" for layer in range(group.num_layers)),
                block_size=self.host.block_size,
                window=group.window,
            )
            for index, group in enumerate(self.groups)
        )
        return EngineSpec(
            identity=ModelIdentity(
                weights=UNREAD if self.late_weights else weights.to_bytes(32),
                config={"model_type": "simulated"},
            ),
            groups=self.groups,
            shard=tensor_parallel_shard(self.groups, rank, self.world_size),
            multi_process=self.world_size > 1,
            mode=self.mode,
            step_tokens=self.host.max_tokens,
            host_recomputes=self.recomputes,
            tables=parts,
        )
