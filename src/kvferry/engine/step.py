"""What one schedule decided: which requests get how many tokens, and the connector's plan; and the
part of it that a forward needs, for ranks in other processes too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.contract.messages import Plan
from kvferry.engine.request import Request
from kvferry.types import BlockTable


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
class Step:
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

    @property
    def has_tokens(self) -> bool:
        return bool(self.scheduled)

    def batch(self) -> Batch:
        """A copy of what the forward needs."""
        return tuple(
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


class BatchEntry(NamedTuple):
    """One request's part of a forward."""

    token_ids: list[int]
    num_computed_tokens: int
    block_ids: list[int]
    wants_logits: bool


Batch = tuple[BatchEntry, ...]
"""In the order of `Step.scheduled`."""
