"""The values of the contract: answers of the scheduler role, the plan that it sends to the workers
in each step, the output that they send back, and events.

Plan and output are frozen, hold no tensors and no live objects, and survive pickle and msgpack.
Connectors subclass `Plan` and `WorkerMeta`; the host carries them without looking inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

import msgspec

from kvferry.types import ExtraKeys


class LookupMiss(StrEnum):
    """Why tokens of a prompt are computed although a cache was asked for them, or not stored: the
    words of counters, journals, commands and dashboards, and what they mean."""

    meaning: str
    """A sentence for users, as docs/operate.md has it."""

    def __new__(cls, word: str, meaning: str = "") -> Self:
        made = str.__new__(cls, word)
        made._value_ = word
        made.meaning = meaning
        return made

    ABSENT = "absent", "No store that answered has the chunk."
    AWAY = "away", "A store or tier that may have the chunk failed, or did not answer."
    EVICTED = "evicted", "It was removed to make room."
    DELETED = "deleted", "It was removed by a command or a program."
    DAMAGED = "damaged", "Its bytes were found wrong: it is not served, and is taken out."
    VANISHED = "vanished", "The store listed it, and it is gone: removed from outside."
    DEADLINE = "deadline", "The read did not end in time, so the engine computed instead."
    NO_STATE = "no_state", "Its KV is stored, but no recurrent state to go on from behind it."
    NO_MEMORY = "no_memory", "The host pool was full of chunks in use; a larger pool would help."
    SLOWER = "slower", "Computing was measured to be faster than loading."
    PARTIAL = (
        "partial",
        "The end of a prompt, less than a chunk or block, or inside an image, is always computed.",
    )
    AUDIT = "audit", "It was stored, but was computed too, to check the stored record."
    OTHER_NAMESPACE = "other_namespace", "These tokens are stored under another namespace."
    OTHER_KEYS = "other_keys", "These tokens are stored without this salt and LoRA adapter."
    BEHIND = "behind", "It is stored, but an earlier chunk or the state at its end is missing."
    OTHER_MODEL = "other_model", "An audit found records of another model; no more are read."
    NOT_PRODUCED = "not_produced", "Another engine had to compute it and did not store it in time."
    OTHER_PRODUCER = "other_producer", "The engine that prefilled it runs another version or model."
    OTHER_TOKENS = "other_tokens", "The engine that prefilled it computed other tokens."
    NOT_CACHEABLE = "not_cacheable", "kvferry cannot cache a request of this form."
    ADAPTER = "adapter", "It is not known, or not yet, which LoRA adapter was loaded."
    HASHING = "hashing", "The weights were not hashed yet, or could not be."
    NOT_LOADING = (
        "not_loading",
        "This engine only stores, or the request limits what is loaded or needs all computed.",
    )
    NOT_STORING = "not_storing", "This engine only loads, or the request asked to store nothing."
    REFUSED = "refused", "No store took it: full, read-only, or not answering."
    NOT_FINITE = "not_finite", "It has NaN or Inf, so it is neither stored nor served."


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
    """The scheduler role's message to the workers: one per step, also for steps without a token.

    Both guards ask a plan what it loads. If loads cannot be trusted (a hook raised, a report was
    malformed), all of their blocks are reported as invalid; a promise that no load of the plan
    keeps is reported as a failed load.
    """

    def filled_blocks(self) -> frozenset[int]:
        """Return the engine's blocks that this plan makes its worker fill, by loads of any kind. A
        plan with loads must override it, or the host counts on blocks that stay unfilled."""
        return frozenset()

    def started_loads(self) -> frozenset[str] | None:
        """Return the requests whose async load starts with this plan. Asked in every step.

        Each of them is in `finished_recving` exactly once, later. An id there that was not named
        here is dropped, because hosts die of it. A plan with async loads must override it. None,
        for opaque plans of foreign connectors: it cannot be known. Then only an ended request's
        second report is dropped.
        """
        return frozenset()


class RepairedPlan(Plan, frozen=True, kw_only=True):
    """A plan with the promises to the host that the roles may not know of. The scheduler role's
    guard makes it after a fault, the worker role's guard unpacks it.

    Attributes:
        plan: what the role built, or its empty plan.
        lost_block_ids: blocks that the host takes for loaded but that may stay unfilled.
        promised_block_ids: all blocks that loads of this plan may fill; None: not checked. Set from
            the first failed `build_plan` on, since the role may still plan the loads of that step
            later, when their blocks have other owners.
    """

    plan: Plan
    lost_block_ids: frozenset[int] = frozenset()
    promised_block_ids: frozenset[int] | None = None


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
