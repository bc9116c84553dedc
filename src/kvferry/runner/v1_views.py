"""What a connector of the one-class shape reads of a host: requests, steps, forward context.

The attributes are those that hosts of vLLM 0.10 to 0.32 have in common, plus, for steps, both
spellings of "resumed". Runs in: scheduler (requests and steps), worker (forward context).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.types import BlockTable, RequestView, StepView

if TYPE_CHECKING:
    import torch


class HostRequest:
    """A `RequestView` with the attributes of a vLLM request. One object per request, for its life.

    What the embedded hosts have no notion of is there with its neutral value.
    """

    kv_transfer_params: dict[str, Any] | None = None
    lora_request: Any = None
    prompt_embeds: Any = None
    skip_reading_prefix_cache = False
    mm_features: Sequence[Any] = ()

    def __init__(self, view: RequestView) -> None:
        self.view = view
        self.request_id = view.request_id
        self.num_prompt_tokens = view.num_prompt_tokens
        self.prompt_token_ids = list(view.all_token_ids[: view.num_prompt_tokens])
        self.cache_salt = view.extra_keys.cache_salt
        self.num_computed_tokens = 0

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.view.all_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.view.all_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.view.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens


class HostBlocks:
    """The blocks of one request."""

    def __init__(self, block_ids: BlockTable) -> None:
        self._block_ids = block_ids

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per KV group, in token order; fresh lists."""
        return tuple(list(group) for group in self._block_ids)


@dataclass(kw_only=True)
class NewRequestData:
    """A request in its first step."""

    req_id: str
    prompt_token_ids: list[int]
    prefill_token_ids: list[int]
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    mm_features: Sequence[Any] = ()
    lora_request: Any = None
    prompt_embeds: Any = None


@dataclass(kw_only=True)
class CachedRequestData:
    """Requests that run on or were resumed; parallel lists."""

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    resumed_from_preemption: list[bool] = field(default_factory=list)
    new_token_ids: list[list[int]] = field(default_factory=list)
    all_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    num_output_tokens: list[int] = field(default_factory=list)

    @property
    def num_reqs(self) -> int:
        return len(self.req_ids)


@dataclass(kw_only=True)
class SchedulerOutput:
    """One step as vLLM's scheduler describes it."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    total_num_scheduled_tokens: int = 0
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    has_sync_kv_loads: bool = False
    kv_connector_metadata: Any = None


class StepHistory:
    """Turns steps with full block tables into vLLM's increments.

    Remembers, per running request, how many blocks of each group the connector was shown.
    """

    def __init__(self) -> None:
        self._shown: dict[str, tuple[int, ...]] = {}
        self._preempted: set[str] = set()

    def describe(self, step: StepView, requests: Mapping[str, HostRequest]) -> SchedulerOutput:
        """The step in vLLM's words. Call once per step, in order.

        Args:
            step: the step.
            requests: every scheduled request by id.
        """
        output = SchedulerOutput(
            finished_req_ids=set(step.finished_request_ids),
            preempted_req_ids=set(step.preempted_request_ids),
        )
        self._preempted |= output.preempted_req_ids
        for scheduled in step.scheduled:
            request = requests[scheduled.request.request_id]
            request.num_computed_tokens = scheduled.num_computed_tokens
            self._describe_request(output, request, scheduled.block_ids)
            output.num_scheduled_tokens[request.request_id] = scheduled.num_scheduled_tokens
            output.total_num_scheduled_tokens += scheduled.num_scheduled_tokens
        return output

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._shown.pop(request_id, None)
        self._preempted.discard(request_id)

    def _describe_request(
        self, output: SchedulerOutput, request: HostRequest, block_ids: BlockTable
    ) -> None:
        request_id = request.request_id
        shown = self._shown.get(request_id)
        self._shown[request_id] = tuple(len(group) for group in block_ids)
        if shown is None:
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    prefill_token_ids=list(request.all_token_ids),
                    block_ids=tuple(list(group) for group in block_ids),
                    num_computed_tokens=request.num_computed_tokens,
                )
            )
            return
        cached = output.scheduled_cached_reqs
        resumed = request_id in self._preempted
        if resumed:
            self._preempted.discard(request_id)
            cached.resumed_req_ids.add(request_id)
            cached.all_token_ids[request_id] = list(request.all_token_ids)
            shown = (0,) * len(block_ids)
        added = tuple(list(group[n:]) for group, n in zip(block_ids, shown, strict=True))
        cached.req_ids.append(request_id)
        cached.resumed_from_preemption.append(resumed)
        cached.new_token_ids.append([])
        cached.new_block_ids.append(added if any(added) else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_output_tokens)


class AttentionLayer:
    """A layer in `no_compile_layers`: its KV tensor, by virtual engine."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = [kv_cache]


class ForwardContext:
    """What a forward runs in.

    Attributes:
        attn_metadata: layer name to what the host's attention gets, None in steps without tokens.
        no_compile_layers: the attention layers by name.
        virtual_engine: index into `AttentionLayer.kv_cache`.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self.attn_metadata: dict[str, object] | None = None
        self.no_compile_layers = {name: AttentionLayer(kv) for name, kv in kv_caches.items()}
        self.virtual_engine = 0
