"""Attention over paged KV, as one function of Transformers' attention interface.

Transformers calls the registered function in every layer with what the layer computed for the
tokens of this step; which requests these tokens belong to, and where their KV lives, comes along
as the keyword argument `kvferry_context` of the model's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvferry.contract.abilities import SupportsLayerwise
from kvferry.engine.kv_pool import KVCodec
from kvferry.errors import ConfigError


class Scores(NamedTuple):
    """How a layer makes weights of its scores."""

    scaling: float | None = None
    """Factor; None for `head_dim ** -0.5`."""
    softcap: float | None = None
    """Scores stay between this and its negative."""
    sinks: torch.Tensor | None = None
    """`[num_heads]` scores of a key without a value, which every query sees."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.softcap is None and self.sinks is None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    mask: torch.Tensor | None = None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Attention: `[1, num_heads, num_queries, value_dim]`.

    Args:
        query: `[1, num_heads, num_queries, head_dim]`.
        key: `[1, num_kv_heads, num_keys, head_dim]`.
        value: `[1, num_kv_heads, num_keys, value_dim]`.
        scores: what is special about the layer.
        mask: `[num_queries, num_keys]`, added to the scores.
        is_causal: instead of a mask: query i sees keys 0 to i.
    """
    if scores.is_plain:
        return scaled_dot_product_attention(
            *(query, key, value, mask),
            is_causal=is_causal,
            scale=scores.scaling,
            enable_gqa=True,
        )
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    weights = query @ key.transpose(2, 3) * scaling
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    if is_causal:
        hidden = torch.full(weights.shape[2:], float("-inf"), device=weights.device)
        mask = hidden.triu(1)
    if mask is not None:
        weights = weights + mask
    weights = weights.float()
    if scores.sinks is not None:
        sinks = scores.sinks.float().reshape(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat((weights, sinks), dim=-1)
    weights = weights.softmax(dim=-1).to(value.dtype)
    return weights[..., : value.shape[2]] @ value


ATTENTION_NAME = "kvferry_paged"

MAX_MASK_ELEMENTS = 1 << 24
"""Long chunks over long prefixes are worked off in tiles whose mask stays below this (64 MiB)."""


class AttentionContext(Protocol):
    """What stands behind the attention calls of one forward."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scores: Scores,
        window: int | None,
        rest: dict[str, object],
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            layer_index: the layer's own number.
            query: `[1, num_heads, num_tokens, head_dim]`.
            key: `[1, num_key_heads, num_tokens, head_dim]`.
            value: `[1, num_key_heads, num_tokens, value_dim]`.
            scores: how weights are made of scores.
            window: how many keys a query sees, itself included; None for all.
            rest: every other argument the layer passed.

        Returns:
            `[1, num_tokens, num_heads, value_dim]`.
        """


class Span(NamedTuple):
    """Tokens `[start, stop)` of a flattened step that belong to one request."""

    start: int
    stop: int
    num_computed_tokens: int
    """Tokens of the request before `start`, whose KV is in its blocks."""
    block_table: torch.Tensor
    """`[num_blocks]` int64: its blocks, in token order, those of this step included."""


class _Reach(NamedTuple):
    """Which keys the queries of a call see, and what is made of their scores."""

    first_query: int
    """Position of the first query."""
    first_key: int
    """Position of the first key."""
    scores: Scores
    window: int | None


class _Gathered(NamedTuple):
    """What a span's queries see: tokens from `first_key` on, `[1, heads, tokens, size]` each."""

    key: torch.Tensor
    value: torch.Tensor
    first_key: int
    window: int | None


class GatherBuffer:
    """Memory for the gathered KV of one request and layer, kept between calls: fresh memory of this
    size would be page-faulted in on every call."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def gather(self, kv_cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        """Copy blocks together: `[num_kv_heads, len(block_table) * block_size, content]`, valid
        until the next call."""
        _, num_heads, block_size, content = kv_cache.shape
        num_blocks = block_table.numel()
        if kv_cache.device.type != "cpu":
            blocks = kv_cache.index_select(0, block_table)
            return blocks.transpose(0, 1).reshape(num_heads, -1, content)
        size = num_heads * num_blocks * block_size * content
        if self._memory is None or self._memory.numel() < size:
            self._memory = torch.empty(size * 5 // 4, dtype=kv_cache.dtype)
        out = self._memory[:size].view(num_heads, num_blocks, block_size, content)
        # Head by head, each block is one run of memory on both sides: measured twice as fast as
        # indexing whole blocks and transposing the result.
        for head in range(num_heads):
            torch.index_select(kv_cache[:, head], 0, block_table, out=out[head])
        return out.view(num_heads, num_blocks * block_size, content)


class PagedStep:
    """The attention context of one step: writes new KV into blocks, reads what came before."""

    def __init__(
        self,
        kv_caches: Sequence[tuple[str, torch.Tensor]],
        spans: Sequence[Span],
        slots: tuple[torch.Tensor, torch.Tensor],
        buffer: GatherBuffer,
        codec: KVCodec,
        layerwise: SupportsLayerwise | None = None,
        *,
        max_mask_elements: int = MAX_MASK_ELEMENTS,
    ) -> None:
        """Prepare a forward.

        Args:
            kv_caches: name and KV of each layer, `[num_blocks, num_kv_heads, block_size,
                content]`, in any order in memory.
            spans: the requests, in the order of the flattened tokens.
            slots: block id and offset in the block of every flattened token, int64.
            buffer: memory to gather into.
            codec: what the content is.
            layerwise: the connector's layer hooks.
            max_mask_elements: size of the masks that are made, and of those kept.
        """
        self._kv_caches = kv_caches
        self._spans = spans
        self._slots = slots
        self._buffer = buffer
        self._codec = codec
        self._layerwise = layerwise
        self._max_mask_elements = max_mask_elements
        self._masks: dict[tuple[int, int, int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scores: Scores,
        window: int | None,
        rest: dict[str, object],
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        del rest  # judged once, when the model was loaded
        name, kv_cache = self._kv_caches[layer_index]
        if self._layerwise is not None:
            self._layerwise.wait_for_layer_load(name)
        block_ids, offsets = self._slots
        rows = self._codec.encode(layer_index, key, value)
        kv_cache[block_ids, :, offsets] = rows[0].transpose(0, 1)
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        for span in self._spans:
            part = query[:, :, span.start : span.stop]
            if span.num_computed_tokens == 0:
                new = slice(span.start, span.stop)
                reach = _Reach(0, 0, scores, window)
                attended = self._attend_tiled(part, key[:, :, new], value[:, :, new], reach)
            else:
                attended = self._attend_gathered(
                    part, self._gather(layer_index, span, window, query.shape[-1]), span, scores
                )
            output[:, span.start : span.stop] = attended.transpose(1, 2)
        if self._layerwise is not None:
            self._layerwise.save_layer(name, kv_cache, self._spans)
        return output

    def _gather(self, layer_index: int, span: Span, window: int | None, key_size: int) -> _Gathered:
        """What the queries of a decode step or a later chunk see, out of the blocks."""
        kv_cache = self._kv_caches[layer_index][1]
        block_size = kv_cache.shape[2]
        num_tokens = span.num_computed_tokens + span.stop - span.start
        first_key = 0 if window is None else max(0, span.num_computed_tokens - window + 1)
        first_block = first_key // block_size
        blocks = span.block_table[first_block : -(-num_tokens // block_size)]
        gathered = self._buffer.gather(kv_cache, blocks)
        base = first_block * block_size
        rows = gathered[None, :, first_key - base : num_tokens - base]
        key, value = self._codec.decode(layer_index, rows, key_size)
        return _Gathered(key, value, first_key, window)

    def _attend_gathered(
        self, query: torch.Tensor, seen: _Gathered, span: Span, scores: Scores
    ) -> torch.Tensor:
        if span.stop - span.start > 1 or not scores.is_plain:
            reach = _Reach(span.num_computed_tokens, seen.first_key, scores, seen.window)
            return self._attend_tiled(query, seen.key, seen.value, reach)
        # One query sees every key: the heads that share a kv head stand in for its query axis.
        grouped = query.reshape(1, seen.key.shape[1], -1, query.shape[-1])
        attended = attention(grouped, seen.key, seen.value, scores)
        return attended.reshape(*query.shape[:3], -1)

    def _attend_tiled(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, reach: _Reach
    ) -> torch.Tensor:
        """Causal attention of a run of queries over a run of keys."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        offset, window = reach.first_query - reach.first_key, reach.window
        if offset == 0 and (window is None or num_keys <= window) and reach.scores.is_plain:
            return attention(query, key, value, reach.scores, is_causal=True)
        tile = max(1, self._max_mask_elements // num_keys)
        parts = []
        for start in range(0, num_queries, tile):
            part = query[:, :, start : start + tile]
            mask = self._mask(offset + start, part.shape[2], num_keys, window, part)
            parts.append(attention(part, key, value, reach.scores, mask))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _mask(
        self, offset: int, num_queries: int, num_keys: int, window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Additive mask `[num_queries, num_keys]`; query i stands at key `offset + i`. All layers
        of a step ask for the same few, so small sets of them are kept."""
        wanted = (offset, num_queries, num_keys, window)
        mask = self._masks.get(wanted)
        if mask is not None:
            return mask
        distance = (
            torch.arange(num_queries, device=like.device)[:, None]
            + offset
            - torch.arange(num_keys, device=like.device)[None, :]
        )
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        mask = torch.zeros(num_queries, num_keys, dtype=like.dtype, device=like.device)
        mask.masked_fill_(hidden, float("-inf"))
        if (
            sum(kept.numel() for kept in self._masks.values()) + mask.numel()
            <= self._max_mask_elements
        ):
            self._masks[wanted] = mask
        return mask


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kvferry_context: AttentionContext | None = None,
    **rest: object,
) -> tuple[torch.Tensor, None]:
    """The function Transformers calls. Tensors as in `AttentionContext.attend`."""
    if kvferry_context is None:
        raise ConfigError(
            f"attention {ATTENTION_NAME!r} ran without its context: the model calls it from a "
            "place that drops keyword arguments, or was called outside the engine"
        )
    layer_index = getattr(module, "layer_idx", None)
    if not isinstance(layer_index, int):
        raise ConfigError(
            f"{type(module).__name__} has no layer_idx; the engine cannot page its KV"
        )
    is_causal = rest.get("is_causal")
    if is_causal is None:
        rest["is_causal"] = getattr(module, "is_causal", True)
    output = kvferry_context.attend(
        layer_index,
        query,
        key,
        value,
        scores=Scores(scaling, softcap, s_aux),
        window=sliding_window,
        rest={**rest, "attention_mask": attention_mask},
    )
    return output, None


def register_attention() -> None:
    """Make `paged_attention` known to Transformers. Idempotent.

    No mask function is registered beside it on purpose: for an implementation without one,
    Transformers builds no mask at all, which is what a flattened batch needs.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
