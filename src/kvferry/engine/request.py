"""Requests on their way through the embedded engine, and the steps that compute their tokens."""

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
    """The text ended with an end-of-text or stop token."""
    LENGTH = "length"
    """The limit of `max_tokens`, of the context or of the KV pool was reached."""
    ABORT = "abort"
    ERROR = "error"
    """The KV pool has become too small: blocks that were lent to a connector never came back."""


class Hit(NamedTuple):
    """The tokens whose KV a request did not compute when it began."""

    num_local_tokens: int
    """Tokens from the engine's own prefix cache."""
    num_external_tokens: int
    """Tokens that the connector promised, less those that failed to load."""


class Outcome(NamedTuple):
    """How a request ended."""

    reason: FinishReason
    params: Mapping[str, Any] | None
    """The connector's message to the client."""


@dataclass(slots=True)
class RequestBlocks:
    """The KV blocks of one request. Only `KVCache` changes them.

    Intervals of `ids`:
        [0, num_cached)     offered to the local prefix cache
        [num_cached, len)   the request's alone

    Attributes:
        keys: keys of the leading full blocks, as many as the prefix cache has needed.
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
        stop_token_ids: tokens that end the request.
        max_total_tokens: number of tokens, prompt included, at which the request ends.
        num_failed_loads: loads that did not bring all that was promised; after a missed deadline
            `MAX_FAILED_LOADS`.
        hit: hit of the first admission; None before, and again after an async load that failed
            whole or was overdue.
        outcome: how the request ended; None until then.
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
        """Add a generated token. Return the reason if the request ends with it, else None."""
        self.all_token_ids.append(token_id)
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None

    def limit_hit(self) -> None:
        """After a failed load, lower the hit's external tokens to those that are still computed."""
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

    `block_ids` is the live table, not a copy; valid until the next `schedule`.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int

    @property
    def block_ids(self) -> BlockTable:
        return (self.request.block_ids,)

    @property
    def wants_logits(self) -> bool:
        """Whether this part ends with the request's last token, so that a new one is sampled."""
        return self.num_computed_tokens + self.num_scheduled_tokens == self.request.num_tokens


@dataclass(slots=True)
class EngineStep:
    """One step, as the scheduler fills it. Satisfies `kvferry.types.StepView`.

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
        """Copy what the ranks need to run the step."""
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
