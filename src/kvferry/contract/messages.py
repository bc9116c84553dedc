"""The values of the contract: answers of the scheduler role, the plan that it sends to the workers
in each step, the output that they send back, and events.

Plan and output are frozen, hold no tensors and no live objects, and survive pickle and msgpack.
Connectors subclass `Plan` and `WorkerMeta`; the host carries them without looking inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from kvferry.types import ExtraKeys


class LookupMiss(StrEnum):
    """Why tokens of a prompt are computed although a cache was asked for them."""

    ABSENT = "absent"
    """No store has the chunk, as far as this process knows."""
    UNREADABLE = "unreadable"
    """A store had the chunk, and it could not be read or was wrong a short while ago."""
    DEADLINE = "deadline"
    """The fetch did not end in time."""
    NO_MEMORY = "no_memory"
    """The host pool had no slot for the chunk."""
    SLOWER = "slower"
    """Computing was measured to be faster than loading."""
    PARTIAL = "partial"
    """The end of the prompt: less than a whole chunk or block, and the last token."""
    AUDIT = "audit"
    """The chunk is stored, but computed nevertheless to compare the result with its record."""
    OTHER_MODEL = "other_model"
    """An audit found KV of another model stored under this model's identity."""
    NOT_PRODUCED = "not_produced"
    """Another engine was said to compute the chunk, but did not store it in time."""
    OTHER_PRODUCER = "other_producer"
    """The producing engine differs in kind, version, model, configuration or tenant."""
    OTHER_TOKENS = "other_tokens"
    """The producing engine had other tokens: a chat template with a clock, an edited history."""
    NOT_CACHEABLE = "not_cacheable"
    """The request must not be cached."""
    ADAPTER = "adapter"
    """It is not known yet, or cannot be known, which LoRA adapter the engine loaded."""
    NOT_LOADING = "not_loading"
    """No load, or no further load, is allowed: this engine only stores, its host carries no reports
    from workers, the host did not ask for this request, or the request's options say so."""


class LookupResult(NamedTuple):
    """Answer to "how much of this prompt can you bring?"."""

    num_tokens: int | None
    """Tokens beyond the local hit: >= 0 and a multiple of the block size. None: ask again later."""
    is_async: bool = False
    """True: the load spans steps and its end is reported in `finished_recving`. Never with 0."""
    reason: str | None = None
    """Why the count is not larger, a `LookupMiss`; None if whole chunks cannot give more."""


class FinishResult(NamedTuple):
    """Answer to "this request is over"."""

    delay_free: bool = False
    """True: blocks stay allocated until the id arrives in `finished_sending`."""
    params: Mapping[str, Any] | None = None
    """What the client gets with the final output of a normally finished request."""


MISS = LookupResult(0, False)
ASK_AGAIN = LookupResult(None, False)
FREE_NOW = FinishResult(False, None)


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The scheduler role's message to the workers: one per step, also for steps without a token."""


class RepairedPlan(Plan, frozen=True, kw_only=True):
    """A plan with the promises to the host that the roles may not know of. The scheduler role's
    guard makes it after a fault, the worker role's guard unpacks it.

    Attributes:
        plan: what the role built, or its empty plan.
        lost_block_ids: blocks that the host takes for loaded but that may stay unfilled.
        promised_block_ids: all blocks that loads of this plan may fill; None: not checked. Set from
            the first failed `build_plan` on, since the role may still plan the loads of that step
            later, when their blocks have other owners.
        lost_request_ids: requests that wait for an async load which may never have been planned,
            or whose end was not reported in time.
        promised_request_ids: the async loads that fill `promised_block_ids`.
        freed_request_ids: ended requests whose blocks were freed because `request_finished` raised.
            A delayed free reported for one of them kills the host.
        overdue_sending: ended requests whose delayed free was not reported in time.
    """

    plan: Plan
    lost_block_ids: frozenset[int] = frozenset()
    promised_block_ids: frozenset[int] | None = None
    lost_request_ids: frozenset[str] = frozenset()
    promised_request_ids: frozenset[str] = frozenset()
    freed_request_ids: frozenset[str] = frozenset()
    overdue_sending: frozenset[str] = frozenset()


class WorkerMeta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker's report to its own scheduler role, beyond the common fields of `WorkerOutput`."""

    def aggregate(self, other: WorkerMeta) -> WorkerMeta:
        """Fold the meta of another rank (or step) into a new value. Mutates neither."""
        raise NotImplementedError


class WorkerOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The workers' report to the scheduler role, once per step.

    Attributes:
        finished_sending: requests whose delayed free may happen now; each id once per rank.
        finished_recving: requests whose async load is over, failed or not; each id once per rank.
        failed_recving: the subset of `finished_recving` that must be recomputed from the start.
        invalid_block_ids: blocks whose load failed; the host recomputes from the first of them.
        stats: counters since the last step (JSON-able), or None.
        events: KV events since the last step.
        meta: connector-specific, or None.
    """

    finished_sending: frozenset[str] = frozenset()
    finished_recving: frozenset[str] = frozenset()
    failed_recving: frozenset[str] = frozenset()
    invalid_block_ids: frozenset[int] = frozenset()
    stats: Any = None
    events: Any = None
    meta: Any = None

    def is_empty(self) -> bool:
        """True if it reports nothing."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.failed_recving
            or self.invalid_block_ids
            or self.stats
            or self.events
            or self.meta
        )


EMPTY_OUTPUT = WorkerOutput()


# Events of `SchedulerRole.take_events`, for hosts that publish them to cache-aware routers.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkStored:
    """A chunk can be read by every engine that shares the store.

    Attributes:
        key: identity of the chunk.
        parent: key of the chunk before it in the prompt; None for the first.
        token_ids: tokens of the chunk.
        extra_keys: what else decides its content.
    """

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    extra_keys: ExtraKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksRemoved:
    """Chunks that were announced are gone."""

    keys: tuple[bytes, ...]
    """In no particular order."""
