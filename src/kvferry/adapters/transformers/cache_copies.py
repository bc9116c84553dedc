"""Copies KV between a Transformers cache and record images. An image is a record in memory.

A cache form is one way in which caches and records correspond:

`PlainForm`: keys and values (or latents) of one shape in all layers. Its records are those of the
embedded engine and of vLLM. A cache layer holds keys and values `[rows, heads, tokens, size]`,
padding included. A row is one sequence of the batch (but `CacheLayer.row` is a layer's index in its
group). A group of a record holds `[layers, heads, tokens, K|V]`, without padding. For latent
attention (MLA), the cache keeps latents as keys and rotated keys as values.

`TreeForm`: any other cache, as a tree of leaves (cache_tree.py). Its records are of their own
namespace, which describes the tree. What no chunk holds, its states, is stored in records of their
own (states.py).

Callers: `StoredKV`, audit.py, proof.py.
"""

# ruff: noqa: ANN401 - cache layers share no typed surface.

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.arguments import StoredKVConfig
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.identity import code_of
from kvferry.adapters.transformers.plain_kv import PlainKV
from kvferry.adapters.transformers.running_code import refuse_edited
from kvferry.adapters.transformers.states import num_parts
from kvferry.blocks.audit import tensors_of
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import TOLERANCE_WITH_EXPERTS, Tolerance, Tolerances
from kvferry.engine.kv_pool import pairs_apart, pairs_together
from kvferry.keys import Namespace
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.record.schema import SAFETENSORS_DTYPE, RecordSchema, default_chunk_tokens
from kvferry.types import KVGroup

_AS_BYTES = Tolerance(float("inf"), float("inf"))
"""Of components that hold other types as bytes: no audit compares them."""


class StoredRow(NamedTuple):
    """The stored chunks of one row of a batch."""

    num_padding: int
    images: list[memoryview]
    """Images of the row's leading chunks, behind the padding. They must cover all tokens to fill;
    only the last chunk may go past their end."""
    state: bytes | None = None
    """What a `CacheTree` keeps beside rows after these chunks."""


class CacheForm(ABC):
    """How the caches of a model and its records correspond.

    Attributes:
        namespace: of the records.
        rows: where the layers or leaves lie in a record.
        tolerances: tolerances for comparisons of rows.
        goes_on_anywhere: whether a model can go on behind any stored chunk.
    """

    goes_on_anywhere: bool
    namespace: Namespace
    rows: RankRows
    tolerances: Tolerances

    @abstractmethod
    def cache_of(self, stored: Sequence[StoredRow], num_tokens: int) -> Any:
        """Make a cache with `num_tokens` of each row, padding included: zeros, then the chunks.
        Its windows keep all tokens. Without tokens, an empty cache; None: the model makes one."""

    @abstractmethod
    def gather(self, cache: Any, row: int, first_token: int) -> memoryview:
        """Make the image of one chunk from one row of a cache: `head | component 0 | ...` as in the
        record file, with an empty head. `first_token` counts from the row's first token, padding
        included."""

    @abstractmethod
    def compute(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        num_cached: int,
        inputs: Mapping[str, torch.Tensor],
    ) -> Any:
        """Append tokens to a cache of one row and return it. `inputs` are their other arguments, of
        which plain KV has none."""

    @abstractmethod
    def repeat(self, cache: Any, num_copies: int) -> None:
        """Repeat each row of a cache."""

    def _new_image(self) -> tuple[memoryview, list[torch.Tensor]]:
        image = memoryview(mmap.mmap(-1, self.rows.slot_bytes))
        return image, tensors_of(self.rows, image)


class PlainForm(CacheForm):
    """Keys and values of one shape in all layers."""

    goes_on_anywhere = True

    def __init__(self, host: HostModel, plain: PlainKV, config: StoredKVConfig) -> None:
        chunk_tokens = config.chunk_tokens or default_chunk_tokens(plain.groups)
        self.namespace = Namespace.of(host.identity, plain.groups, chunk_tokens, config.tenant)
        schema = RecordSchema.for_groups(
            namespace=self.namespace.digest, chunk_tokens=chunk_tokens, groups=plain.groups
        )
        self.rows = RankRows(plain.groups, tensor_parallel_shard(plain.groups, 0, 1), schema)
        self.tolerances = host.tolerances
        self._host = host
        self._plain = plain

    def gather(self, cache: Any, row: int, first_token: int) -> memoryview:
        """See `CacheForm.gather`."""
        image, into = self._new_image()
        for layer, place in zip(cache.layers, self._plain.layers, strict=True):
            target = into[place.group][place.row]
            tokens = slice(first_token, first_token + target.shape[-2])
            keys, values = (each[row, :, tokens].detach() for each in (layer.keys, layer.values))
            if place.has_pairs_apart:
                values = pairs_together(values)
            target.copy_(torch.cat((keys, values), dim=-1))
        return image

    def cache_of(self, stored: Sequence[StoredRow], num_tokens: int) -> Any:
        """See `CacheForm.cache_of`."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        tensors = [[tensors_of(self.rows, image) for image in each.images] for each in stored]
        size = self.rows.schema.chunk_tokens
        for number, place in enumerate(self._plain.layers if num_tokens else ()):
            shape = (len(stored), place.num_kv_heads, num_tokens, place.key_size + place.value_size)
            both = torch.empty(shape, dtype=place.dtype)
            for row, (num_padding, *_) in enumerate(stored):
                both[row, :, :num_padding] = 0
                for chunk, groups in enumerate(tensors[row]):
                    start = num_padding + chunk * size
                    kept = groups[place.group][place.row][:, : num_tokens - start]
                    both[row, :, start : start + size] = kept
            both = both.to(self._plain.layer_devices[number])
            keys, values = both[..., : place.key_size], both[..., place.key_size :]
            if place.has_pairs_apart:
                values = pairs_apart(values)
            cache.update(keys, values, number)
        return cache

    def compute(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        num_cached: int,
        inputs: Mapping[str, torch.Tensor],
    ) -> Any:
        """See `CacheForm.compute`."""
        self._host.compute(input_ids, cache)
        return cache

    def repeat(self, cache: Any, num_copies: int) -> None:
        """See `CacheForm.repeat`."""
        cache.batch_repeat_interleave(num_copies)


class TreeForm(CacheForm):
    """Any cache, as a tree of leaves that was learnt from the model.

    Attributes:
        tree: the tree.
        state_parts: records of one state; 0 without states.

    Raises:
        ConfigError: a cache without laws, or of foreign code.
    """

    def __init__(self, host: HostModel, config: StoredKVConfig) -> None:
        self._host = host
        self.tree = host.learn_tree(config.chunk_tokens)
        self.goes_on_anywhere = not self.tree.stops_at_chunks
        size = self.tree.chunk_tokens
        schema = RecordSchema(
            namespace=bytes(32), chunk_tokens=size, components=self.tree.components
        )
        refuse_edited({*map(type, host.model.modules()), *self.tree.kinds})
        self.state_parts = num_parts(schema, self.tree.state_bytes)
        described = {
            **self.tree.describe(),
            "state_parts": self.state_parts,
            "code": code_of(host.model, self.tree.kinds),
        }
        self.namespace = Namespace.of_cache(host.identity, described, size, config.tenant)
        schema = schema.with_namespace(self.namespace.digest)
        names = {short: name for name, short in SAFETENSORS_DTYPE.items()}
        groups = tuple(
            KVGroup(
                num_layers=layers,
                num_kv_heads=heads,
                content_size=content,
                dtype=names[each.dtype],
                block_size=each.shape[2],
            )
            for each in self.tree.components
            for layers, heads, _, content in [each.shape]
        )
        self.rows = RankRows(groups, tensor_parallel_shard(groups, 0, 1), schema)
        # Which tokens an indexer chooses is as discontinuous as which experts a router chooses.
        chooses = any("index" in part for law in self.tree.rows for part in law.path)
        known = TOLERANCE_WITH_EXPERTS if chooses and host.tolerances else host.tolerances
        self.tolerances = {**known, "uint8": _AS_BYTES} if known else {}

    def gather(self, cache: Any, row: int, first_token: int) -> memoryview:
        """See `CacheForm.gather`."""
        image, into = self._new_image()
        self.tree.fill(into, cache, row, first_token)
        return image

    def cache_of(self, stored: Sequence[StoredRow], num_tokens: int) -> Any:
        """See `CacheForm.cache_of`."""
        if not num_tokens:
            return self._host.new_cache()
        chunks = [
            (each.num_padding, [tensors_of(self.rows, image) for image in each.images])
            for each in stored
        ]
        states = [each.state for each in stored if each.state is not None]
        return self.tree.restore(chunks, num_tokens, states)

    def compute(
        self,
        input_ids: torch.Tensor,
        cache: Any,
        num_cached: int,
        inputs: Mapping[str, torch.Tensor],
    ) -> Any:
        """See `CacheForm.compute`."""
        return self._host.run(input_ids, cache, num_cached, inputs=inputs)[0]

    def repeat(self, cache: Any, num_copies: int) -> None:
        """See `CacheForm.repeat`."""
        self.tree.repeat(cache, num_copies)


def form_of(host: HostModel, config: StoredKVConfig) -> PlainForm | TreeForm:
    """Return the form of a model's cache.

    Raises:
        ConfigError: it has none.
    """
    if host.plain is not None:
        return PlainForm(host, host.plain, config)
    return TreeForm(host, config)
