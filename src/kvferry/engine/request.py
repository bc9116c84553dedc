"""One request on its way through the engine."""

from __future__ import annotations

from enum import StrEnum

from kvferry.engine.sampling import SamplingParams
from kvferry.types import NO_EXTRA_KEYS, ExtraKeys


class RequestStatus(StrEnum):
    """Where a request stands. Block ownership follows it.

    WAITING and PREEMPTED own no blocks. WAITING_FOR_REMOTE_KV owns the blocks an async load writes
    into; LOADED owns them after it and waits for tokens. RUNNING owns blocks for every computed
    token. A finished request owns none: what a connector still needs is held by the scheduler.
    """

    WAITING = "waiting"
    PREEMPTED = "preempted"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    LOADED = "loaded"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-text or stop token."""
    LENGTH = "length"
    """`max_tokens`, the context or the KV pool."""
    ABORT = "abort"
    ERROR = "error"
    """The KV pool has become too small for it: blocks lent to a connector never came back."""


class Request:
    """Tokens and blocks of one request. Satisfies `kvferry.types.RequestView`.

    Intervals of `all_token_ids`, which holds prompt and generated tokens and only grows:
        [0, num_computed_tokens)            KV is in the blocks (or is being loaded into them)
        [num_computed_tokens, num_tokens)   to be computed; one token when decoding
    and of `block_ids`:
        [0, num_cached_blocks)              full, shareable: known to the local prefix cache
        [num_cached_blocks, len)            ours alone

    Attributes:
        max_total_tokens: the request ends when it has this many tokens.
        num_cached_tokens: local hit of the first admission.
        num_external_tokens: hit from the connector at the first admission.
    """

    __slots__ = (
        "all_token_ids",
        "block_ids",
        "extra_keys",
        "finish_reason",
        "max_total_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_prompt_tokens",
        "params",
        "request_id",
        "status",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_total_tokens: int,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> None:
        self.request_id = request_id
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.params = params
        self.extra_keys = extra_keys
        self.max_total_tokens = max_total_tokens
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0
        self.block_ids: list[int] = []
        self.num_cached_blocks = 0
        self.num_cached_tokens: int | None = None
        self.num_external_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status}, {self.num_computed_tokens}/"
            f"{self.num_tokens} tokens, {len(self.block_ids)} blocks)"
        )
