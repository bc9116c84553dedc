"""Requests of a simulated host, and the steps that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from kvferry.contract.messages import Plan, WorkerOutput
from kvferry.keys import ChunkKeys
from kvferry.testing.world.kv import RightKV
from kvferry.types import (
    DEFAULT_OPTIONS,
    NO_EXTRA_KEYS,
    BlockTable,
    ChunkKey,
    ExtraKeys,
    Handover,
    RequestOptions,
)

UNREAD = ExtraKeys(cacheable=False, reason="adapter", why="being read")
"""Of a request whose adapter is still being read: nothing says yet what decides its KV."""


@dataclass(eq=False)
class HostRequest:
    """A request of the host; satisfies `RequestView`.

    Attributes:
        num_computed_tokens: tokens whose KV is in the blocks once the steps so far have run.
        turn: how often it lost what was computed; output of an earlier turn does not count.
        loaded: its blocks that the connector was to fill, by their place.
        admitted: tokens in all, local ones, and those from the connector, at its first admission.
        outcome: how it ended: "done", "abort" or "lost"; empty till then.
        params: what the connector says to the client.
        extra_keys: as the connector sees them; `UNREAD` until they are known.
        true_keys: what decides its KV.
        noted: keys of its chunks that a world knows, and how many of them.
        read: what its host had copied, and the turn, when a forward found all of its KV right.
        was_off: why the cache was off when it was first admitted.
        is_spoilt: whether the device wrote NaN for it: what it computes on that is NaN, too.
        blip: places of its tokens for which the device wrote NaN without harm to what followed.
        is_tainted: whether it computed on a load that failed, and goes on.
        is_lost: whether a load failed that it cannot compute again, as a window has dropped what is
            needed for that: it begins anew.
        on_end: called once it has ended.
    """

    request_id: str
    all_token_ids: list[int]
    max_tokens: int
    _: KW_ONLY
    extra_keys: ExtraKeys = NO_EXTRA_KEYS
    handover: Handover | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    num_computed_tokens: int = 0
    block_ids: tuple[list[int], ...] = ([],)
    seeds: list[int] = field(default_factory=list)
    turn: int = 0
    loaded: range = range(0)
    admitted: tuple[int, int, int] | None = None
    asks_since: float | None = None
    is_spoilt: bool = False
    blip: range = range(0)
    is_tainted: bool = False
    is_lost: bool = False
    outcome: str = ""
    params: Mapping[str, Any] | None = None
    noted: tuple[ChunkKeys | None, int] = (None, 0)
    read: tuple[int, int] | None = None
    was_off: str = ""
    on_end: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.right = RightKV()
        self.true_keys = self.extra_keys

    @property
    def has_blocks(self) -> bool:
        return bool(self.block_ids[0])

    @property
    def chunk_keys(self) -> Sequence[ChunkKey]:
        """The keys of its whole chunks, as far as its world knows them."""
        keys, number = self.noted
        return () if keys is None else keys.keys[:number]

    def __repr__(self) -> str:
        return f"<{self.request_id}: {self.num_computed_tokens} of {len(self.all_token_ids)}>"


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request's part of a step."""

    request: HostRequest
    num_computed_tokens: int
    num_scheduled_tokens: int
    turn: int

    @property
    def block_ids(self) -> BlockTable:
        return self.request.block_ids

    @property
    def stop(self) -> int:
        return self.num_computed_tokens + self.num_scheduled_tokens


@dataclass(slots=True)
class HostStep:
    """One step; satisfies `StepView`."""

    finished_request_ids: frozenset[str]
    preempted_request_ids: set[str]
    scheduled: list[Scheduled] = field(default_factory=list)
    plan: Plan = field(default_factory=Plan)
    output: WorkerOutput | None = None
