"""`StoredKV`, the front end: generates, and computes prompts, with what is stored."""

# ruff: noqa: ANN401 - the models, caches and token ids of Transformers share no typed surface.

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvferry.adapters.transformers.arguments import (
    Prompt,
    Prompts,
    StoredKVConfig,
    read_call,
    read_mask,
    read_rows,
    split_items,
    with_items,
)
from kvferry.adapters.transformers.audit import Auditor
from kvferry.adapters.transformers.cache_copies import TreeForm, form_of
from kvferry.adapters.transformers.cache_tree import Part
from kvferry.adapters.transformers.call_journal import CallJournal
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.item_proofs import ItemProofs
from kvferry.adapters.transformers.items import Items
from kvferry.adapters.transformers.loading import Hit, Loader, Row
from kvferry.adapters.transformers.prefill import Computed, TreePrefill, prefill_alone
from kvferry.adapters.transformers.proof import NUM_CHUNKS, ensure_proven
from kvferry.adapters.transformers.states import StateRecords
from kvferry.config import build_config
from kvferry.engine.model_config import require_transformers
from kvferry.errors import ConfigError, ContractError
from kvferry.keys import ChunkKeys
from kvferry.observe import Observer
from kvferry.store.base import Store, Where
from kvferry.store.record_client import RecordClient
from kvferry.store.recordio import value_check
from kvferry.store.url import open_store
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `close` waits for reads and writes under way."""

READY_SECONDS = 0.5
"""How long opening waits for the store to list its records. Only speed depends on it."""


class StoredKV:
    """The KV of one model in a store: prompts that are stored are not computed again.

    Guarantee: every byte that is read is verified against the checksums of its record, and only KV
    that this object itself computed is stored. The first hit is audited: the first chunk, and one
    other or the state at its end, are computed and compared with their records. The option `audit`
    sets whether more hits are audited, or none. A store that fails or stalls costs a bounded time,
    and is counted.

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
        self._form = form_of(self._model, self._config)
        self._schema = self._form.rows.schema
        self._store = self._opened(store)
        try:
            chunk_tokens = self._schema.chunk_tokens
            self._journal = CallJournal(self._config.record, self._store, chunk_tokens)
            self._item_proofs: ItemProofs | None = None
            self._prefill = self._proven_prefill()
        except BaseException:
            if self._store is not store:
                self._store.close()
            raise
        self._store.wait_indexed(READY_SECONDS)
        threads = self._config.io_threads
        self._records = RecordClient(self._store, self._schema, self._observer, threads)
        parts = self._form.state_parts if isinstance(self._form, TreeForm) else 0
        self._states = (
            StateRecords(self._store, self._schema, parts, self._observer, threads)
            if parts
            else None
        )
        self._warned: set[str] = set()
        self._auditor = Auditor(
            *(self._model, self._form, self._states, self._store, self._config.audit),
            self._observer,
        )
        self._loader = Loader(
            *(self._form, self._records, self._states),
            *(self._auditor, self._journal, self._observer),
        )
        self._closed = False
        self.num_loaded = 0
        logger.info("%s: namespace %s", self._model.identity.name, self.namespace)

    def _opened(self, store: str | Sequence[str] | Store) -> Store:
        if isinstance(store, Store):
            return store
        schemas = [self._schema]
        if isinstance(self._form, TreeForm) and self._form.state_parts:
            schemas.append(self._schema.of_state_parts())
        return open_store(
            store,
            observer=self._observer,
            namespace=self._schema.namespace,
            check=value_check(*schemas),
        )

    def _proven_prefill(self) -> TreePrefill | None:
        """Describe the namespace, after the form of a tree was proven. Return what computes on a
        tree; None for plain KV."""
        if not isinstance(self._form, TreeForm):
            self._store.describe(self._schema.namespace, self._form.namespace.as_text())
            return None
        self._proof = ensure_proven(self._model, self._form, self._store)
        if self._proof.seconds is not None:
            self._observer.observe("proof", self._proof.seconds)
        self._model.settle()
        self._item_proofs = ItemProofs(self._model, self._form, self._store)
        tree = self._form.tree
        return TreePrefill(self._model, tree, NUM_CHUNKS * tree.chunk_tokens)

    @property
    def namespace(self) -> str:
        """The namespace of all records read and written here, in hexadecimal as in `kvferry ls`."""
        return self._schema.namespace.hex()

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
        if isinstance(call, Prompts):
            call = self._why_not(call) or call
        if isinstance(call, str):
            self._observer.count("generated_without_store")
            logger.info("a call of generate() runs without the store: %s", call)
            return self._model.generate(inputs, generation_config, **arguments)
        call = self._placed(call)
        computed, rows = self._computed(call, len(call.rows[0]) - self._num_left)
        cache = computed.cache
        if call.num_copies > 1 and cache is not None:
            self._form.repeat(cache, call.num_copies)
        arguments["attention_mask"] = call.mask
        if call.items.items:
            for name in call.items.names:
                arguments.pop(name, None)
            arguments.update(call.items.inputs(computed.num_tokens, len(call.rows[0])))
        if cache is not None:
            arguments[self._model.cache_argument] = cache
        output = self._model.generate(inputs, generation_config, **arguments)
        self._save(computed, rows, call.num_copies)
        return output

    def prefill(self, input_ids: Any, attention_mask: Any = None, **inputs: Any) -> Any:
        """Return a new cache of all tokens but the last, read or computed, and store what was not.

        Args:
            input_ids: one prompt: `[1, num_tokens]`, `[num_tokens]` or a list of token ids. A
                batch: `[rows, num_tokens]`, padded on the left.
            attention_mask: the tokenizer's mask, of the same shape. Without one, padding is
                recognised by its id, as in `generate`.
            inputs: what the processor made of images, videos or sounds.

        Returns:
            A cache to pass to the model with the last token, as `cache` (`past_key_values` before
            Transformers 5.24). Its windows keep all tokens. None for a prompt of one token where
            the model makes its cache itself.

        Raises:
            ConfigError: malformed ids or a malformed mask.
        """
        self._check_open()
        self.num_loaded = 0
        rows = read_rows(input_ids, self._model)
        config, _ = self._model.prepare_generation(None, {})
        given, others = split_items(inputs)
        if others:
            raise ConfigError(f"prefill takes no {', '.join(sorted(others))}; generate() does")
        prompts = Prompts(rows, read_mask(attention_mask, rows, config))
        call = with_items(self._model, prompts, given)
        why_not = call if isinstance(call, str) else self._why_not(call)
        if why_not is not None:
            logger.info("a prefill runs without the store: %s", why_not)
        prompts = prompts if isinstance(call, str) else call
        if given and why_not is not None:
            return prefill_alone(self._model, torch.tensor(rows), prompts.mask, given)
        if prompts.items.cut(len(rows[0]) - 1) != len(rows[0]) - 1:
            raise ConfigError("the prompt ends in an image; nothing goes on from a part of one")
        prompts = self._placed(prompts)
        computed, stored = self._computed(prompts, len(rows[0]) - 1, serves=why_not is None)
        self._save(computed, stored)
        return computed.cache

    def _why_not(self, prompts: Prompts) -> str | None:
        """Return why these prompts are computed without the store; None if it is used."""
        if not self._serves():
            return "the model was changed, or an audit failed"
        if self._prefill is not None:
            why_not = self._why_not_rows(prompts)
            if why_not is not None:
                return why_not
        if not prompts.items.items:
            return None
        if self._item_proofs is None:
            return "the model keeps plain KV, which is served for text alone"
        return self._item_proofs.why_not(prompts.rows[0], prompts.items)

    def _why_not_rows(self, prompts: Prompts) -> str | None:
        """As `_why_not`, by how many prompts there are and what is hidden of them."""
        each = prompts.each()
        if self._proof.not_hidden and any(p.num_padding or not p.is_whole for p in each):
            return f"with hidden tokens, {self._proof.not_hidden}"
        if self._proof.not_together and len(each) > 1:
            return f"with several prompts, {self._proof.not_together}"
        longest = max(prompt.num_padding for prompt in each)
        if longest >= len(prompts.rows[0]) - self._num_left and not self._form.goes_on_anywhere:
            return "a prompt of the batch has hardly a token"
        return None

    def _placed(self, prompts: Prompts) -> Prompts:
        """Give items the positions of all tokens."""
        if not prompts.items.items:
            return prompts
        return prompts._replace(items=self._model.placed(prompts.rows, prompts.items))

    @property
    def _num_left(self) -> int:
        """How many tokens `generate` computes at least. It computes a single one in its own way,
        which some recurrent layers round differently."""
        return 1 if self._form.goes_on_anywhere else 2

    def _computed(
        self, prompts: Prompts, limit: int, *, serves: bool = True
    ) -> tuple[Computed, list[Row]]:
        """Return a cache of the first `limit` tokens, and its rows; no rows if nothing may be
        stored. For `generate`, where states end with chunks, the tokens behind the last are left to
        it, if all rows have as many. `serves` is whether the store is used."""
        items = prompts.items
        rows = [Row(each, self._keys(each, items)) for each in prompts.each()] if serves else []
        limit = items.cut(max(limit, 0))
        is_padded = any(row.prompt.num_padding for row in rows)
        if self._prefill is not None and limit < len(prompts.rows[0]) - 1 and not is_padded:
            limit = items.aligned_cut(limit, self._schema.chunk_tokens)
        if rows:
            hits = self._loader.load(rows, limit, items, self._config.load_timeout_seconds)
            if any(hit.num_tokens for hit in hits):
                self.num_loaded = min(hit.part.num_padding + hit.num_tokens for hit in hits)
        else:
            everything = Part(self._form.cache_of([], 0), range(len(prompts.rows)), 0)
            hits = [Hit(everything, 0)]
        started = time.perf_counter()
        if self._prefill is not None:
            keys = [row.keys for row in rows]
            computed = self._prefill.compute(hits, prompts, limit, keys)
            if items.items:  # its positions are left in the model, as by a run without the store
                self._model.placed(prompts.rows, items)
        else:
            ((cache, *_), first) = hits[0]
            computed = Computed(cache, {})
            if first < limit:
                input_ids = torch.tensor(prompts.rows)[:, first:limit]
                self._model.compute(input_ids, cache, prompts.mask[:, :limit])
        if self._model.is_timed:
            num_computed = sum(
                len(hit.part.places) * (limit - hit.part.num_padding - hit.num_tokens)
                for hit in hits
            )
            self._journal.computed(num_computed, time.perf_counter() - started)
        return computed, [] if self._auditor.has_failed else rows

    # ---- saving

    def _save(self, computed: Computed, rows: list[Row], num_copies: int = 1) -> None:
        """Store the whole chunks of all tokens but the last that are not stored yet, and the states
        behind them. Blocks until they are written, but not much longer than `save_timeout_seconds`.

        Args:
            computed: its cache begins with the KV of these rows, `num_copies` times each.
        """
        fault = computed.fault
        if self._prefill is not None and rows and fault is None:
            fault = self._prefill.is_kept(computed, num_copies)
        if fault is not None and rows:
            self._observer.count("cache_law_broken")
            self._warn("law", "a prompt is not stored: of the model's cache, leaf %s", fault)
            return
        size, cache = self._schema.chunk_tokens, computed.cache
        wanted: dict[ChunkKey, tuple[int, int, int]] = {}
        for place, (prompt, keys) in enumerate(rows):
            for number in range(self._num_saved(computed, prompt)):
                is_here = self._store.where(keys[number]) is Where.HERE
                if keys[number] not in wanted and not is_here:
                    first = number * size
                    wanted[keys[number]] = place * num_copies, prompt.num_padding + first, first
        images = (
            (key, first, self._form.gather(cache, row, at))
            for key, (row, at, first) in wanted.items()
        )
        deadline = time.monotonic() + self._config.save_timeout_seconds
        self._records.put_all(images, deadline)
        if self._states is not None and rows:
            self._states.write(computed.states, deadline)
        # After the writes: each write counts as a use, and prefixes must not be evicted first.
        for row in rows:
            self._store.touch(row.keys)

    def _num_saved(self, computed: Computed, prompt: Prompt) -> int:
        """Return how many chunks of a row are stored: of all tokens but the last. Of a tree, those
        that were computed here to their end."""
        num_tokens = len(prompt.token_ids) - prompt.is_whole
        if self._prefill is not None:
            num_tokens = min(num_tokens, computed.num_tokens - prompt.num_padding)
        return num_tokens // self._schema.chunk_tokens

    # ---- checks

    def _keys(self, prompt: Prompt, items: Items) -> list[ChunkKey]:
        """Return the keys of the whole chunks of a row, from its padding to the next hidden token:
        behind that token, KV depends on more than token ids."""
        if not prompt.is_whole:
            self._observer.count("requests_padded")
        chunk_tokens, extra = self._schema.chunk_tokens, items.extra_keys
        chain = ChunkKeys(self._schema.namespace, chunk_tokens, extra)
        chain.extend(prompt.token_ids)
        return chain.keys

    def _serves(self) -> bool:
        """Whether the model is unchanged, and no audit failed. Warns once of a change."""
        if self._auditor.has_failed:
            return False
        self._model.reset()
        if self._model.is_unchanged:
            return True
        self._observer.count("model_changed")
        self._warn(
            "change",
            "the model was moved, trained, compiled or changed since StoredKV was made: nothing is "
            "read or stored; make a new one, with a weights_version if its weights are new",
        )
        return False

    def _warn(self, kind: str, text: str, *values: object) -> None:
        """Log a warning, once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(text, *values)

    # ---- the end

    def close(self) -> None:
        """Wait at most `CLOSE_SECONDS` for reads and writes, and close the store. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._records.close(CLOSE_SECONDS)
            if self._states is not None:
                self._states.close(CLOSE_SECONDS)
            self._journal.close()
        finally:
            self._store.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ContractError("StoredKV is closed")

    def __enter__(self) -> StoredKV:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
