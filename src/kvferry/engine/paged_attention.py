"""Attention over paged KV, written as a function for Transformers' attention interface.

`PagedModel` registers the function. Every layer calls it with the queries, keys and values of this
step's tokens. The keyword argument `kvferry_context` of the model's forward knows which requests
these tokens belong to and where their KV lies. In the engine, the model runner's thread runs this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvferry.contract.worker import SupportsLayerwise
from kvferry.engine.kv_pool import KVCodec
from kvferry.engine.request import BatchEntry
from kvferry.errors import ConfigError

ATTENTION_NAME = "kvferry_paged"

MAX_MASK_ELEMENTS = 1 << 24
"""Largest mask, in elements: 64 MiB in float32, plus 128 MiB of distances while it is built. If the
mask would be larger, attention runs over a few queries at a time. The weights of a layer with a
soft cap or sinks take `num_heads` times as much."""


class Scores(NamedTuple):
    """Settings of a layer's attention: how scores become weights, and which keys a query sees."""

    scaling: float | None = None
    """Factor; None for `head_dim ** -0.5`."""
    softcap: float | None = None
    """A tanh limits scores to `[-softcap, softcap]`; None for no limit."""
    sinks: torch.Tensor | None = None
    """`[num_heads]`: score of an extra key that every query sees and that has no value."""
    window: int | None = None
    """How many keys a query sees, its own included; None for all."""

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention can compute this: no soft cap, no sinks."""
        return self.softcap is None and self.sinks is None


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores
) -> torch.Tensor:
    """Attention of the last tokens of a request: `[1, num_heads, num_queries, value_dim]`.

    Args:
        query: `[1, num_heads, num_queries, head_dim]`.
        key: `[1, num_kv_heads, num_keys, head_dim]`: from the first key that any query sees to the
            last query's own.
        value: `[1, num_kv_heads, num_keys, value_dim]`.
        scores: settings of the layer.
    """
    num_queries, num_keys, window = query.shape[2], key.shape[2], scores.window
    offset = num_keys - num_queries
    if scores.is_plain and offset == 0 and (window is None or num_keys <= window):
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scores.scaling, enable_gqa=True
        )
    if scores.is_plain and num_queries == 1:
        # The caller has cut the keys to the window, so the one query sees all of them: no mask.
        # Query heads that share a kv head become the query axis.
        grouped = query.reshape(1, key.shape[1], -1, query.shape[-1])
        output = scaled_dot_product_attention(grouped, key, value, scale=scores.scaling)
        return output.reshape(*query.shape[:3], -1)
    tile = max(1, MAX_MASK_ELEMENTS // num_keys)
    parts = []
    for start in range(0, num_queries, tile):
        part = query[:, :, start : start + tile]
        mask = _mask(offset + start, num_keys, window, part)
        parts.append(_masked_attention(part, key, value, scores, mask))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _mask(offset: int, num_keys: int, window: int | None, query: torch.Tensor) -> torch.Tensor:
    """Additive mask `[num_queries, num_keys]`; query i has the position of key `offset + i`."""
    position = torch.arange(offset, offset + query.shape[2], device=query.device)
    distance = position[:, None] - torch.arange(num_keys, device=query.device)[None, :]
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    mask = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, mask: torch.Tensor
) -> torch.Tensor:
    if scores.is_plain:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scores.scaling, enable_gqa=True
        )
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    weights = query @ key.transpose(2, 3) * scaling
    if scores.softcap is not None:
        weights = torch.tanh(weights / scores.softcap) * scores.softcap
    weights = (weights + mask).float()
    if scores.sinks is not None:
        sinks = scores.sinks.float().reshape(1, -1, 1, 1).expand(*weights.shape[:3], 1)
        weights = torch.cat((weights, sinks), dim=-1)
    weights = weights.softmax(dim=-1).to(value.dtype)
    return weights[..., : value.shape[2]] @ value


class AttentionCall(NamedTuple):
    """The arguments with which a layer calls attention, for all tokens of a step."""

    layer_index: int
    """The layer's number in the model (`layer_idx`)."""
    query: torch.Tensor
    """`[1, num_heads, num_tokens, head_dim]`."""
    key: torch.Tensor
    """`[1, num_key_heads, num_tokens, head_dim]`: kv heads, or all heads of expanded latents."""
    value: torch.Tensor
    """`[1, num_key_heads, num_tokens, value_dim]`."""
    scores: Scores
    rest: dict[str, object]
    """Every other argument that the layer passed."""


class AttentionContext(Protocol):
    """Answers the attention calls of a forward: `PagedAttention`, or a probe that records them."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Attention of one layer: `[1, num_tokens, num_heads, value_dim]`."""


class _Span(NamedTuple):
    """Tokens `[start, stop)` of one request in a flattened step: all requests' tokens in a row."""

    start: int
    stop: int
    num_computed_tokens: int
    """Tokens of the request before this step; their KV is in its blocks."""
    block_table: torch.Tensor
    """`[num_blocks]` int64: the request's blocks in token order, this step's included."""


class PagedAttention:
    """The attention context of one rank: writes new KV into blocks and reads earlier KV from them.

    `ModelRunner` calls `begin_step` before each forward; then each layer calls `attend` once.
    """

    def __init__(
        self,
        kv_caches: Sequence[tuple[str, torch.Tensor]],
        codec: KVCodec,
        layerwise: SupportsLayerwise | None = None,
    ) -> None:
        """`kv_caches` holds name and KV of each layer, in layer order: `[num_blocks, num_kv_heads,
        block_size, content]` with any strides. `layerwise` holds the connector's layer hooks."""
        self._kv_caches = kv_caches
        self._codec = codec
        self._layerwise = layerwise
        self._spans: list[_Span] = []
        self._written = (torch.empty(0), torch.empty(0))  # block id and offset of each new token
        self._gathered = torch.empty(0)

    def begin_step(self, batch: Sequence[BatchEntry]) -> torch.Tensor:
        """Note which tokens of the next forward belong to which request, and where their KV goes.

        Returns:
            `[num_tokens]` int64: the position of each token in its own request.
        """
        kv_cache = self._kv_caches[0][1]
        self._spans = []
        positions, block_ids, start = [], [], 0
        for entry in batch:
            first, stop = entry.num_computed_tokens, start + len(entry.token_ids)
            table = torch.tensor(entry.block_ids, dtype=torch.int64)
            self._spans.append(_Span(start, stop, first, table.to(kv_cache.device)))
            positions.append(torch.arange(first, first + stop - start))
            block_ids.append(table[positions[-1] // kv_cache.shape[2]])
            start = stop
        position = torch.cat(positions)
        self._written = (
            torch.cat(block_ids).to(kv_cache.device),
            (position % kv_cache.shape[2]).to(kv_cache.device),
        )
        return position

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        # `rest` was checked once, at load (`engine.model.Probe`).
        layer_index, query, key, value, scores, _ = call
        name, kv_cache = self._kv_caches[layer_index]
        if self._layerwise is not None:
            self._layerwise.wait_for_layer_load(name)
        block_ids, offsets = self._written
        rows = self._codec.encode(layer_index, key, value)
        kv_cache[block_ids, :, offsets] = rows[0].transpose(0, 1)
        output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        for span in self._spans:
            new = slice(span.start, span.stop)
            seen = key[:, :, new], value[:, :, new]
            if span.num_computed_tokens > 0:
                rows = self._gather(kv_cache, span, scores.window)
                seen = self._codec.decode(layer_index, rows, query.shape[-1])
            output[:, new] = causal_attention(query[:, :, new], *seen, scores).transpose(1, 2)
        if self._layerwise is not None:
            self._layerwise.save_layer(name, kv_cache, self._spans)
        return output

    def _gather(self, kv_cache: torch.Tensor, span: _Span, window: int | None) -> torch.Tensor:
        """Read the rows of all tokens that a span's queries see: `[1, num_kv_heads, num_seen,
        content]`, valid until the next call."""
        block_size = kv_cache.shape[2]
        num_tokens = span.num_computed_tokens + span.stop - span.start
        first_key = 0 if window is None else max(0, span.num_computed_tokens - window + 1)
        first_block = first_key // block_size
        blocks = span.block_table[first_block : -(-num_tokens // block_size)]
        base = first_block * block_size
        return self._gather_blocks(kv_cache, blocks)[None, :, first_key - base : num_tokens - base]

    def _gather_blocks(self, kv_cache: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        """`[num_kv_heads, len(block_table) * block_size, content]`, valid until the next call."""
        _, num_heads, block_size, content = kv_cache.shape
        num_blocks = block_table.numel()
        if kv_cache.device.type != "cpu":
            blocks = kv_cache.index_select(0, block_table)
            return blocks.transpose(0, 1).reshape(num_heads, -1, content)
        size = num_heads * num_blocks * block_size * content
        # Kept, since page faults of new memory would double the time. All layers have one dtype.
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size * 5 // 4, dtype=kv_cache.dtype)
        out = self._gathered[:size].view(num_heads, num_blocks, block_size, content)
        # Head by head, each block is one run of memory on both sides. That is faster than copying
        # whole blocks and transposing the result.
        for head in range(num_heads):
            torch.index_select(kv_cache[:, head], 0, block_table, out=out[head])
        return out.view(num_heads, num_blocks * block_size, content)


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
    """Pass a layer's call on to its context. Transformers calls this; tensors as in
    `AttentionCall`."""
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
    scores = Scores(scaling, softcap, s_aux, sliding_window)
    rest["attention_mask"] = attention_mask
    call = AttentionCall(layer_index, query, key, value, scores, rest)
    return kvferry_context.attend(call), None


def register_attention() -> None:
    """Make `paged_attention` known to Transformers. Idempotent.

    It registers no mask function, on purpose: Transformers then builds no mask, as a flattened
    batch needs.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
