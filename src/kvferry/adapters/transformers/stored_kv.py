"""`StoredKV`, the front end: generates, and computes prompts, with what is stored."""

# ruff: noqa: ANN401 - the models, caches and token ids of Transformers share no typed surface.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.arguments import (
    Prompt,
    Prompts,
    StoredKVConfig,
    read_call,
    read_mask,
    read_rows,
)
from kvferry.adapters.transformers.audit import Auditor
from kvferry.adapters.transformers.cache_copies import (
    StoredRow,
    filled_cache,
    gather,
    record_layout,
)
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.config import build_config
from kvferry.engine.model_config import require_transformers
from kvferry.errors import ContractError
from kvferry.keys import ChunkKeys
from kvferry.observe import Observer
from kvferry.store.base import Catalogue
from kvferry.store.record_client import RecordClient
from kvferry.store.recordio import value_check
from kvferry.store.url import open_store
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `close` waits for reads and writes under way."""

READY_SECONDS = 0.5
"""How long opening waits for the store to list its records. Only speed depends on it."""


def _num_chunks(num_tokens: int, chunk_tokens: int) -> int:
    """Return how many chunks begin within the first `num_tokens`."""
    return max(0, -(-num_tokens // chunk_tokens))


class _Row(NamedTuple):
    """A row of a call: what can be stored of it, and under which keys."""

    prompt: Prompt
    keys: list[ChunkKey]
    """Of the whole chunks of `prompt.token_ids`."""


class StoredKV:
    """The KV of one model in a store: prompts that are stored are not computed again.

    Guarantee: every byte that is read is verified against the checksums of its record, and only KV
    that this object itself computed is stored. The first hit is audited: the first chunk and one
    other are computed and compared with their records. The option `audit` sets whether more hits
    are audited, or none. A store that fails or stalls costs a bounded time, and is counted.

    A context manager. Not thread-safe: one thread at a time.

    Attributes:
        num_loaded: tokens of each row, padding included, that the last call read from the store.

    Example:
        >>> with StoredKV(model, "file:///var/cache/kvferry") as kv:  # doctest: +SKIP
        ...     output = kv.generate(input_ids, max_new_tokens=40)
    """

    def __init__(
        self,
        model: Any,
        store: str | Sequence[str] | Catalogue,
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
        if not isinstance(store, Catalogue):
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
        self._closed = False
        self.num_loaded = 0
        logger.info("%s: namespace %s", self._model.identity.name, self.namespace)

    @property
    def namespace(self) -> str:
        """The namespace of all records read and written here, in hexadecimal as in `kvferry ls`."""
        return self._rows.schema.namespace.hex()

    def generate(self, inputs: Any = None, generation_config: Any = None, **arguments: Any) -> Any:
        """Call the model's `generate` on top of the stored KV of its prompts; store what was not.

        Prompts are stored, each without its last token, after `generate` returns; answers are not.
        A call that may compute other KV than that of its tokens runs without the store, for example
        with `inputs_embeds`, a cache of the caller or an assistant model (docs/transformers.md).

        Args:
            inputs, generation_config, arguments: as for `generate`.

        Returns:
            What `generate` returns.

        Raises:
            ConfigError: malformed ids or a malformed mask.
        """
        self._check_open()
        self.num_loaded = 0
        call = read_call(self._model, inputs, generation_config, arguments)
        if isinstance(call, Prompts) and not self._serves():
            call = "the model was changed, or an audit failed"
        if isinstance(call, str):
            self._observer.count("generated_without_store")
            logger.info("a call of generate() runs without the store: %s", call)
            return self._model.generate(inputs, generation_config, **arguments)
        cache, rows = self._computed(call)
        if call.num_copies > 1:
            cache.batch_repeat_interleave(call.num_copies)
        arguments |= {"attention_mask": call.mask, self._model.cache_argument: cache}
        output = self._model.generate(inputs, generation_config, **arguments)
        self._save(cache, rows, call.num_copies)
        return output

    def prefill(self, input_ids: Any, attention_mask: Any = None) -> Any:
        """Return a new cache of all tokens but the last, read or computed, and store what was not.

        Args:
            input_ids: one prompt: `[1, num_tokens]`, `[num_tokens]` or a list of token ids. A
                batch: `[rows, num_tokens]`, padded on the left.
            attention_mask: the tokenizer's mask, of the same shape. Without one, padding is
                recognised by its id, as in `generate`.

        Returns:
            A `DynamicCache` to pass to the model with the last token, as `cache`
            (`past_key_values` before Transformers 5.24). All its layers keep all tokens.

        Raises:
            ConfigError: malformed ids or a malformed mask.
        """
        self._check_open()
        self.num_loaded = 0
        rows = read_rows(input_ids, self._model.vocab_size)
        config, _ = self._model.prepare_generation(None, {})
        prompts = Prompts(rows, read_mask(attention_mask, rows, config))
        cache, stored = self._computed(prompts, serves=self._serves())
        self._save(cache, stored)
        return cache

    def _computed(self, prompts: Prompts, *, serves: bool = True) -> tuple[Any, list[_Row]]:
        """Return a cache of all tokens but the last, and its rows; no rows if nothing may be
        stored. `serves` is whether the store is used."""
        limit = len(prompts.rows[0]) - 1
        rows = [_Row(each, self._keys(each)) for each in prompts.each()] if serves else []
        cache = self._loaded(rows, limit)
        first = cache.get_seq_length()
        if first < limit:
            input_ids = torch.tensor(prompts.rows)[:, first:limit]
            self._model.compute(input_ids, cache, prompts.mask[:, :limit])
        return cache, [] if self._auditor.has_failed else rows

    # ---- loading

    def _loaded(self, rows: list[_Row], limit: int) -> Any:
        """Return a cache of the stored chunks of each row, at most `limit` tokens; an empty one if
        nothing is stored, or an audit fails. The row whose stored prefix ends first limits the
        others."""
        started = time.perf_counter()
        stored, num_tokens = self._read(rows, limit)
        hits = [place for place, each in enumerate(stored) if each.images]
        if hits:
            longest = max(hits, key=lambda place: len(stored[place].images))
            prompt, keys = rows[longest]
            if not self._auditor.agrees(keys, stored[longest].images, prompt.token_ids):
                hits = []
        self._observer.count("requests_missed", len(rows) - len(hits))
        if not hits:
            return filled_cache([], self._rows, self._model, 0)
        self.num_loaded = num_tokens
        for place in hits:
            self._observer.count("hits")
            self._observer.count("hit_tokens", num_tokens - rows[place].prompt.num_padding)
        cache = filled_cache(stored, self._rows, self._model, num_tokens)
        self._observer.observe("load", time.perf_counter() - started)
        return cache

    def _read(self, rows: list[_Row], limit: int) -> tuple[list[StoredRow], int]:
        """Return the stored chunks of each row's first tokens, and how many tokens of a row these
        are, padding included: as many for every row, at most `limit`."""
        deadline = time.monotonic() + self._config.load_timeout_seconds
        size = self._rows.schema.chunk_tokens
        known: dict[ChunkKey, memoryview] = {}
        for prompt, keys in rows:
            wanted = keys[: _num_chunks(limit - prompt.num_padding, size)]
            images = self._records.get_leading(wanted, deadline, known)
            known.update(zip(wanted, images, strict=False))
            limit = min(limit, prompt.num_padding + len(images) * size)
        stored = []
        for prompt, keys in rows:
            wanted = keys[: _num_chunks(limit - prompt.num_padding, size)]
            stored.append(StoredRow(prompt.num_padding, [known[key] for key in wanted]))
        return stored, limit

    # ---- saving

    def _save(self, cache: Any, rows: list[_Row], num_copies: int = 1) -> None:
        """Store the whole chunks of all tokens but the last that are not stored yet. Blocks until
        they are written, but not much longer than `save_timeout_seconds`.

        Args:
            cache: begins with the KV of these rows, `num_copies` times each.
        """
        size = self._rows.schema.chunk_tokens
        wanted: dict[ChunkKey, tuple[int, int, int]] = {}
        for place, (prompt, keys) in enumerate(rows):
            for number in range((len(prompt.token_ids) - prompt.is_whole) // size):
                if keys[number] not in wanted and not self._store.contains(keys[number]):
                    first = number * size
                    wanted[keys[number]] = place * num_copies, prompt.num_padding + first, first
        images = (
            (key, first, gather(self._rows, cache, self._model, row, at))
            for key, (row, at, first) in wanted.items()
        )
        self._records.put_all(images, time.monotonic() + self._config.save_timeout_seconds)
        # After the writes: each write counts as a use, and prefixes must not be evicted first.
        for row in rows:
            self._store.touch(row.keys)

    # ---- checks

    def _keys(self, prompt: Prompt) -> list[ChunkKey]:
        """Return the keys of the whole chunks of a row, from its padding to the next hidden token:
        behind that token, KV depends on more than token ids."""
        if not prompt.is_whole:
            self._observer.count("requests_padded")
        chain = ChunkKeys(self._rows.schema.namespace, self._rows.schema.chunk_tokens)
        chain.extend(prompt.token_ids)
        return chain.keys

    def _serves(self) -> bool:
        """Whether the model is unchanged, and no audit failed. Warns once of a change."""
        if self._auditor.has_failed:
            return False
        if self._model.is_unchanged:
            return True
        self._observer.count("model_changed")
        if not self._warned_of_change:
            self._warned_of_change = True
            logger.warning(
                "the model was moved, trained, compiled or changed since StoredKV was made: "
                "nothing is read or stored; make a new one, with a weights_version if its weights "
                "are new"
            )
        return False

    # ---- the end

    def close(self) -> None:
        """Wait at most `CLOSE_SECONDS` for reads and writes, and close the store. Idempotent."""
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
