"""The front end: a cache for `model.generate`, filled from a store, and stored afterwards."""

# ruff: noqa: ANN401 - the models, caches and token ids of Transformers share no typed surface.

from __future__ import annotations

import logging
import random
import time
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kvferry.adapters.transformers.arguments import (
    StoredKVConfig,
    num_tokens_in,
    read_token_ids,
    refuse_padding,
)
from kvferry.adapters.transformers.host_model import HostModel, require_transformers
from kvferry.adapters.transformers.records import (
    RecordIO,
    fill,
    first_kept,
    gather,
    tensors_of,
)
from kvferry.blocks.audit import largest_difference
from kvferry.blocks.rows import RankRows
from kvferry.config import build_config
from kvferry.errors import ConfigError, ContractError
from kvferry.keys import ChunkKeys, Namespace
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Store, SupportsNamespaces, SupportsProbe
from kvferry.store.url import open_store, refuse_small_quota
from kvferry.topology import tensor_parallel_shard
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `close` waits for reads and writes under way."""

READY_SECONDS = 0.5
"""How long opening waits for the store to list its records. Only speed depends on it."""


class StoredKV:
    """The KV of one model in a store: read before `model.generate`, written after it.

    Guarantee: `load` returns only KV that this model computed for these tokens, verified byte by
    byte; the last chunk of the first hit is computed again and compared. A store that fails or
    stalls costs a bounded time, and is counted.

    A context manager. Not thread-safe: one thread at a time.

    Example:
        >>> with StoredKV(model, "file:///var/cache/kvferry") as kv:  # doctest: +SKIP
        ...     cache = kv.load(input_ids)
        ...     output = model.generate(input_ids, past_key_values=cache)
        ...     kv.save(output, cache)  # what generate returned: prompt and answer
    """

    def __init__(
        self,
        model: Any,
        store: str | Store,
        *,
        model_dir: str | Path | None = None,
        observer: Observer | None = None,
        **config: Any,
    ) -> None:
        """Check the model and open the store. Hashes the weights the first time.

        Args:
            model: a causal LM from `from_pretrained`, on its device and in eval mode.
            store: URL of a store, for example `file:///var/cache/kvferry?max_bytes=10GiB`, or an
                open one, which is closed with this.
            model_dir: with the model's config.json and weights, unless `name_or_path` leads there.
            observer: receives counts.
            config: fields of `StoredKVConfig`.

        Raises:
            ConfigError: a model, option or store that cannot be used, and why.
        """
        require_transformers()
        self._config = build_config(StoredKVConfig, config, where="StoredKV")
        self._observer = observer or Observer()
        directory = None if model_dir is None else Path(model_dir)
        self._model = HostModel(model, directory, self._config.weights_version)
        groups, chunk_tokens = self._model.groups, self._config.chunk_tokens
        namespace = Namespace.of(self._model.identity, groups, chunk_tokens, self._config.tenant)
        schema = RecordSchema.for_groups(
            namespace=namespace.digest, chunk_tokens=chunk_tokens, groups=groups
        )
        self._rows = RankRows(groups, tensor_parallel_shard(groups, 0, 1), schema)
        if isinstance(store, str):
            refuse_small_quota(store, schema.record_bytes)
            store = open_store(store, observer=self._observer)
        self._store = store
        if isinstance(self._store, SupportsNamespaces):
            self._store.describe(namespace.digest, namespace.as_text())
        if isinstance(self._store, SupportsProbe):
            self._store.wait_indexed(READY_SECONDS)
        self._records = RecordIO(self._store, self._rows, self._config, self._observer)
        self._loaded: WeakKeyDictionary[Any, list[ChunkKey]] = WeakKeyDictionary()
        self._warned_of_change = False
        self._is_audited = self._config.audit == "off"
        self._is_other = False
        self._closed = False

    # ---- loading

    def load(self, input_ids: Any, *, attention_mask: Any = None) -> Any:
        """A new cache with the longest prefix of `input_ids` that is stored, but never the last
        token, which `generate` needs. Empty if there is none.

        Layers with a sliding window keep all tokens, too, so that all of them can be stored.

        Args:
            input_ids: one prompt: `[1, num_tokens]`, `[num_tokens]` or a list of token ids.
            attention_mask: the mask for `generate`; refused if it hides tokens.

        Returns:
            A `DynamicCache` to pass to `generate` as `past_key_values`, with all of `input_ids`.
            `get_seq_length()` says how many tokens were read.

        Raises:
            ConfigError: several prompts, ids that are none, or padding.
        """
        from kvferry.adapters.transformers.loaded_cache import LoadedCache

        self._check_open()
        token_ids = read_token_ids(input_ids, self._model.vocab_size)
        refuse_padding(attention_mask)
        cache = LoadedCache(len(token_ids))
        if not self._serves():
            return cache
        keys = self._keys(token_ids)
        started = time.perf_counter()
        images = self._records.read(keys)
        num_tokens = min(len(images) * self._config.chunk_tokens, len(token_ids) - 1)
        if num_tokens < 1:
            self._observer.count("requests_missed")
            return cache
        if self._is_due() and not self._is_as_computed(images, token_ids):
            return cache
        fill(cache, images, self._rows, self._model, num_tokens)
        self._loaded[cache] = keys[: len(images)]
        self._store.touch(keys[: len(images)])
        self._observer.count("hits")
        self._observer.count("hit_tokens", num_tokens)
        self._observer.observe("load", time.perf_counter() - started)
        return cache

    # ---- saving

    def save(self, token_ids: Any, cache: Any, *, num_tokens: int | None = None) -> int:
        """Store the whole chunks of a cache that are not stored yet.

        Blocks until they are written, but not much longer than `save_timeout_seconds`.

        Args:
            token_ids: all tokens that the cache was computed from: the output of `generate`, or the
                prompt alone after a forward. The keys of the records are made of them.
            cache: a `DynamicCache`, from `load` or not. Where layers dropped tokens behind their
                sliding window, these are not stored.
            num_tokens: store only so many, for example those of the prompt and not the answer.

        Returns:
            Tokens newly stored.

        Raises:
            ConfigError: several sequences, or a cache of another kind, model, length or prompt.
        """
        self._check_open()
        ids = read_token_ids(token_ids, self._model.vocab_size)
        length = num_tokens_in(cache, self._model)
        if length == 0 or not self._serves():
            return 0
        # The last token that was sampled was not computed.
        if not 0 <= len(ids) - length <= 1:
            raise ConfigError(
                f"the cache holds {length} tokens and {len(ids)} ids are given; give all ids it "
                "was computed from, as generate returns them"
            )
        keys = self._keys(ids[: length if num_tokens is None else min(length, num_tokens)])
        loaded = self._loaded.get(cache, [])
        shared = min(len(loaded), len(keys))
        if loaded[:shared] != keys[:shared]:
            raise ConfigError(
                f"the cache was loaded for other tokens than the {len(ids)} given; save it with "
                "the ids it was computed from"
            )
        size = self._config.chunk_tokens
        first = -(-first_kept(cache) // size)
        if first:
            self._observer.count("save_windowed")
        wanted = [
            chunk for chunk in range(first, len(keys)) if not self._store.contains(keys[chunk])
        ]
        images = (
            (keys[chunk], chunk * size, gather(self._rows, cache, self._model, chunk * size))
            for chunk in wanted
        )
        num_stored = self._records.write(images)
        # After the writes, each of which counts as a use: prefixes must not be evicted first.
        self._store.touch(keys)
        return num_stored * size

    # ---- checks

    def _is_due(self) -> bool:
        rate = self._config.audit
        return not self._is_audited or (not isinstance(rate, str) and random.random() < rate)

    def _is_as_computed(self, images: list[memoryview], token_ids: list[int]) -> bool:
        """Compute the last of some chunks on top of the others, and compare it. A model that
        computes another one reads and writes nothing from then on."""
        from kvferry.adapters.transformers.loaded_cache import LoadedCache

        size = self._config.chunk_tokens
        first = (len(images) - 1) * size
        cache = LoadedCache(len(token_ids))
        if first:
            fill(cache, images[:-1], self._rows, self._model, first)
        try:
            self._model.compute(token_ids[first : first + size], cache)
        except RuntimeError:  # no memory, for example
            logger.exception("a stored chunk could not be computed again: nothing is loaded")
            self._observer.count("audit_failed")
            return False
        computed, stored = (
            tensors_of(image, self._rows, self._model)
            for image in (gather(self._rows, cache, self._model, first), images[-1])
        )
        found = largest_difference(computed, stored, self._model.tolerances)
        self._is_audited = True
        self._observer.count("audits")
        if found.excess <= 1:
            return True
        self._is_other = True
        self._observer.count("audit_mismatch")
        logger.warning(
            "the model computes other KV than is stored under its identity: %s. Nothing is loaded "
            "or saved; if it was changed in memory, give it a weights_version",
            self._rows.describe(found),
        )
        return False

    def _keys(self, token_ids: list[int]) -> list[ChunkKey]:
        """The keys of the chunks before any padding: behind it, KV depends on more than tokens."""
        num_visible = self._model.num_visible(token_ids)
        if num_visible < len(token_ids):
            self._observer.count("requests_padded")
        chain = ChunkKeys(self._rows.schema.namespace, self._config.chunk_tokens)
        chain.extend(token_ids[:num_visible])
        return chain.keys

    def _serves(self) -> bool:
        """Whether the model still is the one whose KV was to be kept."""
        if self._is_other:
            return False
        if self._model.is_unchanged:
            return True
        self._observer.count("model_changed")
        if not self._warned_of_change:
            self._warned_of_change = True
            logger.warning(
                "the model was moved, trained or changed since StoredKV was made: nothing is "
                "loaded or saved; make a new one, with a weights_version if its weights are new"
            )
        return False

    # ---- the end

    def close(self) -> None:
        """Wait at most `CLOSE_SECONDS` for reads and writes; close the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._records.close(CLOSE_SECONDS)
        finally:
            self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ContractError("StoredKV is closed")

    def __enter__(self) -> StoredKV:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
