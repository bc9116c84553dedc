"""Requests on their way through the engine, and the steps that compute their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from kvferry.contract.messages import Plan
from kvferry.keys import ChunkKeys
from kvferry.types import DEFAULT_OPTIONS, NO_EXTRA_KEYS, BlockTable, Handover, RequestOptions


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-text or stop token."""
    LENGTH = "length"
    """`max_tokens`, the context or the KV pool."""
    ABORT = "abort"
    ERROR = "error"
    """The KV pool has become too small for it: blocks lent to a connector never came back."""


class Hit(NamedTuple):
    """How a request began."""

    num_local_tokens: int
    """From the engine's own prefix cache."""
    num_external_tokens: int
    """From the connector: promised, and less what then failed."""


class Outcome(NamedTuple):
    """How a request ended."""

    reason: FinishReason
    params: Mapping[str, Any] | None
    """What the connector has for the client."""


@dataclass(slots=True)
class RequestBlocks:
    """The KV blocks of one request; `KVCache` alone changes them.

    Intervals of `ids`:
        [0, num_cached)     offered to the local prefix cache
        [num_cached, len)   ours alone

    Attributes:
        keys: of the leading full blocks, as many as the prefix cache has needed.
    """

    ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    keys: ChunkKeys | None = None


@dataclass(eq=False)
class Request:
    """Tokens and blocks of one request. Satisfies `kvferry.types.RequestView`.

    Intervals of `all_token_ids`, which holds prompt and generated tokens and only grows:
        [0, num_computed_tokens)            KV is in the blocks, or is being loaded into them
        [num_computed_tokens, num_tokens)   to be computed; one token when decoding

    Attributes:
        stop_token_ids: tokens that end it.
        max_total_tokens: it ends when it has this many tokens.
        num_failed_loads: loads that did not bring all that was promised.
        hit: of the first admission whose load brought anything; None before.
        outcome: None until it is finished.
    """

    extra_keys = NO_EXTRA_KEYS  # the engine serves text alone

    request_id: str
    all_token_ids: list[int]
    _: KW_ONLY
    max_total_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    handover: Handover | None = None
    options: RequestOptions = DEFAULT_OPTIONS
    num_computed_tokens: int = 0
    blocks: RequestBlocks = field(default_factory=RequestBlocks)
    num_failed_loads: int = 0
    hit: Hit | None = None
    outcome: Outcome | None = None

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)

    @property
    def block_ids(self) -> list[int]:
        return self.blocks.ids

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Add a generated token; the reason if the request ends with it."""
        self.all_token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def limit_hit(self) -> None:
        """A load failed: count no more external tokens than are left of it."""
        if self.hit is not None:
            left = max(0, self.num_computed_tokens - self.hit.num_local_tokens)
            brought = min(self.hit.num_external_tokens, left)
            self.hit = self.hit._replace(num_external_tokens=brought)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.num_computed_tokens}/{self.num_tokens} tokens, "
            f"{len(self.block_ids)} blocks)"
        )


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """One request's part of a step. Satisfies `kvferry.types.ScheduledRequest`.

    `block_ids` is the live table, not a copy of it: valid until the next schedule.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int

    @property
    def block_ids(self) -> BlockTable:
        return (self.request.block_ids,)

    @property
    def wants_logits(self) -> bool:
        """True if the last token of this part is the last the request has: a new one follows."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.request.num_tokens


@dataclass(slots=True)
class EngineStep:
    """One step, while it is being filled and after. Satisfies `kvferry.types.StepView`.

    Attributes:
        budget: tokens that may still be added.
        finished_request_ids: every request that ended since the last step.
    """

    budget: int
    finished_request_ids: frozenset[str]
    scheduled: list[ScheduledTokens] = field(default_factory=list)
    preempted_request_ids: set[str] = field(default_factory=set)
    plan: Plan = field(default_factory=Plan)

    def add(self, request: Request, num_tokens: int) -> None:
        """Give a request its next `num_tokens` tokens."""
        self.scheduled.append(ScheduledTokens(request, request.num_computed_tokens, num_tokens))
        self.budget -= num_tokens

    def run_step(self) -> RunStep:
        """A copy of what the ranks need."""
        batch = tuple(
            BatchEntry(
                entry.request.all_token_ids[
                    entry.num_computed_tokens : entry.num_computed_tokens
                    + entry.num_scheduled_tokens
                ],
                entry.num_computed_tokens,
                list(entry.request.block_ids),
                entry.wants_logits,
            )
            for entry in self.scheduled
        )
        return RunStep(self.plan, self.finished_request_ids, batch)


class BatchEntry(NamedTuple):
    """One request's part of a forward."""

    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    wants_logits: bool


class RunStep(NamedTuple):
    """A step as every rank runs it."""

    plan: Plan
    finished_request_ids: frozenset[str]
    batch: tuple[BatchEntry, ...]
    """In the order of `EngineStep.scheduled`; empty in a step without tokens."""
