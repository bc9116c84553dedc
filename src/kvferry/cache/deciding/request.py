"""What the scheduler role knows of one live request."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.cache.deciding.lookup import NO_HANDOVER, HandoverPlan, Search
from kvferry.journal import JournalAnswer
from kvferry.keys import ChunkKeys
from kvferry.types import ExtraKeys, RequestView


@dataclass(slots=True)
class Request:
    """One live request."""

    keys: ChunkKeys  # of its whole chunks
    inputs: tuple[ExtraKeys, int]  # extra keys and prompt tokens for which these keys stand
    arrived_at: float  # seconds since 1970
    search: Search | None = None  # from its first look-up until it is admitted
    probed_at: float | None = None  # when the store was last asked what it has of the prompt
    saves_blocked: bool = False  # a load failed on blocks that it may share, and it still has them
    next_save: int = 0  # chunks before it are stored, on their way, or not to be saved
    is_erased: bool = False  # by a command, while it ran: nothing more of it is stored
    lacks_slot: bool = False  # the host pool has no slot for the next chunk to save
    handover: HandoverPlan = NO_HANDOVER
    answer: JournalAnswer | None = None  # what its tokens got at its first admission

    def is_of(self, view: RequestView) -> bool:
        """Whether the keys stand for what the request is now."""
        return self.inputs == (view.extra_keys, view.num_prompt_tokens)
