"""`StoredKV`, the front end: loads a cache for `model.generate`, and saves it afterwards."""

# ruff: noqa: ANN401 - the models, caches and token ids of Transformers share no typed surface.

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.adapters.transformers.answers import explained_rows
from kvferry.adapters.transformers.arguments import (
    Prompt,
    StoredKVConfig,
    read_prompts,
    read_rows,
    shape_of,
)
from kvferry.adapters.transformers.audit import Auditor, StoredPrefix
from kvferry.adapters.transformers.cache_copies import (
    StoredRow,
    fill,
    first_kept,
    gather,
    record_layout,
)
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.provenance import Provenance
from kvferry.adapters.transformers.recompute import CachedChunk, Image, Recomputer
from kvferry.config import build_config
from kvferry.contract.handover import STAMP, read_options
from kvferry.contract.messages import LookupMiss
from kvferry.engine.model_config import require_transformers
from kvferry.errors import ContractError
from kvferry.keys import ChunkKeys
from kvferry.observe import Observer
from kvferry.store.base import Store
from kvferry.store.record_client import RecordClient
from kvferry.store.recordio import value_check
from kvferry.store.url import open_store
from kvferry.types import ChunkKey

if TYPE_CHECKING:
    from kvferry.adapters.transformers.loaded_cache import LoadedCache

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `close` waits for reads and writes under way."""

READY_SECONDS = 0.5
"""How long opening waits for the store to list its records. Only speed depends on it."""


def _num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Return how many chunks begin within the first `num_tokens`."""
    return max(0, -(-num_tokens // chunk_tokens))


def _is_of(known: Prompt | None, prompt: Prompt, num_tokens: int) -> bool:
    """Whether a row is known to be computed from the first tokens of a prompt."""
    return (
        known is not None
        and known.num_padding == prompt.num_padding
        and known.token_ids[:num_tokens] == prompt.token_ids[:num_tokens]
    )


class StoredKV:
    """The KV of one model in a store: read before `model.generate`, written after it.

    Guarantee: `load` verifies every byte that it returns against the checksums of its record. It
    also audits the first hit: it computes the first chunk and one other, and compares them with
    their records. The option `audit` sets whether more hits are audited, or none. A store that
    fails or stalls costs a bounded time, and is counted.

    A context manager. Not thread-safe: one thread at a time.

    Example:
        >>> with StoredKV(model, "file:///var/cache/kvferry") as kv:  # doctest: +SKIP
        ...     cache = kv.load(input_ids)
        ...     output = model.generate(input_ids, cache=cache)  # Transformers 5.24
        ...     kv.save(output, cache)  # what generate returned: prompt and answer
    """

    def __init__(
        self,
        model: Any,
        store: str | Sequence[str] | Store,
        *,
        model_dir: str | Path | None = None,
        observer: Observer | None = None,
        **config: Any,
    ) -> None:
        """Check the model and open the store. Hashes the weights the first time.

        Args:
            model: a causal LM from `from_pretrained`, on its device and in eval mode.
            store: URL of a store, for example `file:///var/cache/kvferry?max_bytes=10GiB`, URLs of
                several tiers, nearest first, or an open store, which `close` closes.
            model_dir: directory of config.json and weights; None: the model's `name_or_path`.
            observer: receives counts.
            config: fields of `StoredKVConfig`.

        Raises:
            ConfigError: a model, option or store that cannot be used, and why.
        """
        require_transformers("StoredKV")
        self._config = build_config(StoredKVConfig, config, where="StoredKV")
        self._observer = observer or Observer()
        directory = None if model_dir is None else Path(model_dir)
        self._model = HostModel(model, directory, self._config.weights_version)
        namespace, self._rows = record_layout(self._model, self._config)
        if not isinstance(store, Store):
            store = open_store(
                store,
                observer=self._observer,
                namespace=namespace.digest,
                check=value_check(self._rows.schema),
            )
        self._store = store
        self._store.describe(namespace.digest, namespace.as_text())
        self._store.wait_indexed(READY_SECONDS)
        self._records = RecordClient(
            self._store, self._rows.schema, self._observer, self._config.io_threads
        )
        self._warned_of_change = False
        self._auditor = Auditor(self._model, self._rows, store, self._config.audit, self._observer)
        self._recomputer = Recomputer(self._model, self._rows, self._observer)
        self._provenance = Provenance(self._model)
        self._closed = False
        logger.info("%s: namespace %s", self._model.identity.name, self.namespace)

    @property
    def namespace(self) -> str:
        """The namespace of all records read and written here, in hexadecimal as in `kvferry ls`."""
        return self._rows.schema.namespace.hex()

    # ---- loading

    def load(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        max_load_tokens: int | None = None,
        explain: bool = False,
    ) -> Any:
        """Return a new cache with the longest stored prefix of `input_ids`, but never the last
        token, which `generate` has to compute. Empty if nothing is stored, the model was changed,
        or an audit failed.

        All rows load equally many tokens: the row whose stored prefix ends first limits the others.
        Sliding-window layers of this cache keep all tokens, too, so that `save` can store them.

        Args:
            input_ids: one prompt: `[1, num_tokens]`, `[num_tokens]` or a list of token ids. A
                batch: `[rows, num_tokens]`, padded on the left.
            attention_mask: the mask for `generate`, of the same shape. Without one, padding is
                recognised by its id, and nothing is loaded from the first padding token on.
            max_load_tokens: tokens to load of each row at most; None: all that are stored.
            explain: put into the cache's `explanation`, for each row, what was hit and why the rest
                was not (docs/request-options.md).

        Returns:
            A `DynamicCache` to pass to `generate` as `cache` (`past_key_values` before Transformers
            5.24), with all of `input_ids` and the mask. `get_seq_length()` is the number of loaded
            tokens of each row, padding included.

        Raises:
            ConfigError: malformed ids or a malformed mask.
        """
        from kvferry.adapters.transformers.loaded_cache import LoadedCache

        self._check_open()
        options = read_options(
            None, {STAMP: {"max_load_tokens": max_load_tokens, "explain": explain}}
        )
        rows = read_rows(input_ids, self._model.vocab_size)
        prompts = read_prompts(rows, attention_mask, self._model)
        cache = LoadedCache(rows, prompts, attention_mask)
        limit = len(rows[0]) - 1
        if options.max_load_tokens is not None:
            least_padding = min(prompt.num_padding for prompt in prompts)
            limit = min(limit, least_padding + options.max_load_tokens)
        off = None if self._serves() else LookupMiss.NOT_LOADING
        if self._auditor.is_other:
            off = LookupMiss.OTHER_MODEL
        chains = [self._keys(prompt, len(rows[0])) for prompt in prompts]
        if off is None:
            self._load_into(cache, chains, limit)
        if options.explain:
            cache.explanation = explained_rows(
                cache, chains, limit, self._store, self._config.chunk_tokens, off
            )
        return cache

    def _load_into(self, cache: LoadedCache, chains: list[list[ChunkKey]], limit: int) -> None:
        """Fill a new cache with the stored chunks of its rows, at most `limit` tokens of each."""
        started = time.perf_counter()
        prompts, num_rows = cache.prompts, len(cache.prompts)
        found = self._read_right(prompts, chains, limit)
        if found is None:
            self._observer.count("requests_missed", num_rows)
            return
        stored, num_tokens = found
        hits = [number for number, each in enumerate(stored) if each.images]
        self._observer.count("requests_missed", num_rows - len(hits))
        fill(cache, stored, self._rows, self._model, num_tokens)
        self._provenance.loaded(cache, prompts)
        for number in hits:
            self._store.touch(chains[number][: len(stored[number].images)])
            self._observer.count("hits")
            self._observer.count("hit_tokens", num_tokens - prompts[number].num_padding)
        self._observer.observe("load", time.perf_counter() - started)

    def _read_right(
        self, prompts: list[Prompt], chains: list[list[ChunkKey]], limit: int
    ) -> tuple[list[StoredRow], int] | None:
        """Return what `_read` finds, unless an audit refuses it: then read again without the
        records found wrong. None if nothing usable is stored, or the audit failed."""
        while not self._auditor.is_other:
            stored, num_tokens = self._read(prompts, chains, limit)
            longest = max(range(len(stored)), key=lambda number: len(stored[number].images))
            images = stored[longest].images
            if not images:
                break
            keys = chains[longest][: len(images)]
            num_right = self._auditor.num_right(
                StoredPrefix(keys, images, prompts[longest].token_ids)
            )
            if num_right == len(images):
                return stored, num_tokens
            if num_right is None:
                break
        return None

    def _read(
        self, prompts: list[Prompt], chains: list[list[ChunkKey]], limit: int
    ) -> tuple[list[StoredRow], int]:
        """Return the stored chunks of each row's first tokens, and how many tokens of a row these
        are, padding included: as many for every row, at most `limit`."""
        deadline = time.monotonic() + self._config.load_timeout_seconds
        size = self._config.chunk_tokens
        known: dict[ChunkKey, memoryview] = {}
        for prompt, keys in zip(prompts, chains, strict=True):
            wanted = self._auditor.usable(keys[: _num_chunks(limit - prompt.num_padding, size)])
            images = self._records.get_leading(wanted, deadline, known)
            known.update(zip(wanted, images, strict=False))
            limit = min(limit, prompt.num_padding + len(images) * size)
        stored = []
        for prompt, keys in zip(prompts, chains, strict=True):
            wanted = keys[: _num_chunks(limit - prompt.num_padding, size)]
            stored.append(StoredRow(prompt.num_padding, [known[key] for key in wanted]))
        return stored, limit

    # ---- saving

    def save(
        self,
        token_ids: Any,
        cache: Any,
        *,
        attention_mask: Any = None,
        num_tokens: int | None = None,
        pin: float = 0.0,
    ) -> int:
        """Store the whole chunks of every row of a cache that are not stored yet.

        If it is not known that this model computed the cache from these tokens, `save` first
        computes the KV again, and compares. Stores nothing if the model was changed, or while an
        audit is undecided. Blocks until the chunks are written, but not much longer than
        `save_timeout_seconds`. After beam search, only the prompts are stored: the cache holds
        other answers than those returned.

        Args:
            token_ids: all tokens that the cache was computed from: the output of `generate`, or the
                prompts alone after a forward. The keys of the records are made of them.
            cache: a `DynamicCache`, from `load` or not. Chunks with tokens that a sliding-window
                layer has dropped are not stored. A cache of several rows that is not from `load`
                needs `num_tokens`.
            attention_mask: the mask that was used, or its part for the prompts. None: the mask that
                `load` was given; rows of a batch are then stored up to the end of their first
                answer. Without any mask, padding is recognised by its id.
            num_tokens: tokens of each row to store at most, padding included; for example those of
                the prompt, without the answer.
            pin: seconds from now for which a store that can pin keeps these chunks from eviction, a
                day at most (docs/request-options.md).

        Returns:
            Number of tokens newly stored.

        Raises:
            ConfigError: a cache of another kind, model, length, prompt or mask, or with other KV
                than the model computes for these tokens.
        """
        from kvferry.adapters.transformers.loaded_cache import (
            LoadedCache,
            num_savable,
            refuse_other_prompts,
        )

        self._check_open()
        pin_seconds = read_options(None, {STAMP: {"pin": pin}}).pin
        rows = read_rows(token_ids, self._model.vocab_size)
        prompts = self._prompts_of(cache, rows, attention_mask)
        shape = shape_of(cache, self._model)
        if shape.num_tokens == 0 or not self._serves() or self._auditor.is_undecided:
            return 0
        limit = num_savable(cache, shape, rows, num_tokens)
        refuse_other_prompts(cache, shape, rows, prompts)
        num_loaded = cache.num_loaded if isinstance(cache, LoadedCache) else 0
        chains = [
            self._auditor.savable(self._keys(prompt, limit), num_loaded - prompt.num_padding)
            for prompt in prompts
        ]
        wanted = self._not_stored(cache, shape.num_rows, prompts, chains)
        return self._write(cache, wanted, chains, pin_seconds) * self._config.chunk_tokens

    def _write(
        self,
        cache: Any,
        wanted: dict[ChunkKey, CachedChunk],
        chains: list[list[ChunkKey]],
        pin_seconds: float,
    ) -> int:
        """Store the chunks `wanted` of a cache, and return how many were stored. Touch all keys of
        `chains`, and pin them for `pin_seconds`."""
        deadline = time.monotonic() + self._config.save_timeout_seconds
        num_stored = self._records.put_all(self._images(cache, wanted, chains), deadline)
        if num_stored == len(wanted):
            self._auditor.stored(wanted)
        # After the writes: each write counts as a use, and prefixes must not be evicted first.
        for keys in chains:
            self._store.touch(keys)
            if pin_seconds > 0.0 and not self._store.pin_for(keys, pin_seconds):
                self._observer.count("pins_refused")
        return num_stored

    def _prompts_of(self, cache: Any, rows: list[list[int]], attention_mask: Any) -> list[Prompt]:
        """Return what can be stored of each row, by this mask or by the one given to `load`."""
        from kvferry.adapters.transformers.loaded_cache import LoadedCache

        if attention_mask is not None or not isinstance(cache, LoadedCache):
            return read_prompts(rows, attention_mask, self._model)
        prompts = read_prompts(rows, cache.attention_mask, self._model)
        if len(rows) == 1:
            return prompts
        return [
            Prompt(padding, ids[: self._model.num_answered(ids, cache.num_prompt_tokens - padding)])
            for padding, ids in prompts
        ]

    def _not_stored(
        self, cache: Any, num_rows: int, prompts: list[Prompt], chains: list[list[ChunkKey]]
    ) -> dict[ChunkKey, CachedChunk]:
        """Return the chunks that every layer of a cache still has and that are not stored yet."""
        size, kept = self._config.chunk_tokens, first_kept(cache)
        if kept:
            self._observer.count("save_windowed")
        wanted: dict[ChunkKey, CachedChunk] = {}
        for number, (prompt, keys) in enumerate(zip(prompts, chains, strict=True)):
            row = number * num_rows // len(prompts)
            for chunk in range(_num_chunks(kept - prompt.num_padding, size), len(keys)):
                if keys[chunk] not in wanted and not self._store.contains(keys[chunk]):
                    wanted[keys[chunk]] = CachedChunk(row, prompt, chunk * size)
        return wanted

    def _images(
        self, cache: Any, wanted: dict[ChunkKey, CachedChunk], chains: list[list[ChunkKey]]
    ) -> Iterator[Image]:
        """Yield images of chunks of a cache. A row that is not known to be computed from its prompt
        is computed again.

        Raises:
            ConfigError: the cache has other KV than the model computes.
        """
        # The other half of the time is for writing.
        deadline = time.monotonic() + self._config.save_timeout_seconds / 2
        size, known = self._config.chunk_tokens, self._provenance.prompts_of(cache)
        for row, each in groupby(wanted.items(), key=lambda item: item[1].row):
            chunks = dict(each)
            *_, (_, prompt, last) = chunks.values()
            if known and _is_of(known[row], prompt, last + size):
                for key, (_, _, token) in chunks.items():
                    at = prompt.num_padding + token
                    yield key, token, gather(self._rows, cache, self._model, row, at)
                continue
            keys = next(keys for keys in chains if not chunks.keys().isdisjoint(keys))
            first = next(index for index, key in enumerate(keys) if key in chunks)
            stored = self._auditor.usable(keys[:first])
            images = self._records.get_leading(stored, deadline, {})
            yield from self._recomputer.images(cache, chunks, images, deadline)

    # ---- checks

    def _keys(self, prompt: Prompt, num_tokens: int) -> list[ChunkKey]:
        """Return the keys of the whole chunks in the first `num_tokens` of a row, from its padding
        to the next hidden token: behind that token, KV depends on more than token ids."""
        visible = prompt.token_ids[: max(0, num_tokens - prompt.num_padding)]
        if prompt.num_padding + len(visible) < num_tokens:
            self._observer.count("requests_padded")
        chain = ChunkKeys(self._rows.schema.namespace, self._config.chunk_tokens)
        chain.extend(visible)
        return chain.keys

    def _serves(self) -> bool:
        """Whether the model is unchanged, and no audit found records of another model. Warns once
        of a change."""
        if self._auditor.is_other:
            return False
        if self._model.is_unchanged:
            return True
        self._observer.count("model_changed")
        if not self._warned_of_change:
            self._warned_of_change = True
            logger.warning(
                "the model was moved, trained, compiled or changed since StoredKV was made: "
                "nothing is loaded or saved; make a new one, with a weights_version if its weights "
                "are new"
            )
        return False

    # ---- the end

    def close(self) -> None:
        """Wait at most `CLOSE_SECONDS` for reads and writes, and close the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._provenance.close()
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
