"""Proves on the real model that a cache restored from records computes what a cache in memory does.

A cache of which this is not shown is not served. The proof compares, for a prompt of a few chunks:

- leaves of a prefill in pieces with those of one piece: what Transformers itself computes wrongly
  in pieces (as the state of Mamba 1) is found here;
- each leaf of a restored cache with the one that was stored, after another prompt ran in the model;
- logits of further tokens on the restored cache, on the stored one, and of a run without a cache;
- logits of `generate` with the restored cache and without;
- leaves and logits of a batch of restored rows, with hidden tokens before and among them, with
  those of the batch in one piece. Where these differ, such calls alone run without the store.

The result is kept beside the namespace's description, under the code and libraries of the proof.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from kvferry.adapters.transformers.cache_copies import StoredRow, TreeForm
from kvferry.adapters.transformers.cache_leaves import name_of, relative_error, slots
from kvferry.adapters.transformers.cache_tree import Part
from kvferry.adapters.transformers.comparing import (
    answer_of,
    copies_of,
    in_pieces,
    limits_of,
    refuse_changed_leaves,
    refuse_difference,
    refuse_generated,
    refuse_logits,
)
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.plain_kv import UNRUNNABLE
from kvferry.engine.model_config import first_line
from kvferry.errors import ConfigError, Fault, StoreError
from kvferry.store.base import Store

logger = logging.getLogger(__name__)

NUM_CHUNKS, NUM_MORE = 3, 37
"""Size of the proof: chunks that are stored, tokens computed on top."""

KERNELS = ("torch", "flash_attn", "flash-linear-attention", "causal_conv1d", "mamba_ssm", "kernels")
"""Packages whose kernels may compute a cache otherwise in pieces."""

PROOF_VERSION = 2

_ODD = 5
"""A number of tokens that ends no chunk and no block."""


class Proof(NamedTuple):
    """What was shown of a model: that its restored cache is right, at least for one prompt that is
    all visible."""

    seconds: float | None
    """That it took; None if the store had it."""
    not_hidden: str
    """Why calls with hidden tokens are not served; empty if they are."""
    not_together: str
    """Why calls with several prompts are not served; empty if they are."""


def ensure_proven(host: HostModel, form: TreeForm, store: Store) -> Proof:
    """Prove the form of a cache, unless the store has a proof of the same code.

    Raises:
        ConfigError: it is not right; names the leaf, or the comparison, and the difference.
    """
    digest, mark = form.namespace.digest, mark_of(host, form)
    kept = kept_proofs(store, form)
    if kept.get("proof") == mark:
        return Proof(None, str(kept.get("not_hidden")), str(kept.get("not_together")))
    name = type(host.model).__name__
    num_tokens = 13 * NUM_CHUNKS * form.tree.chunk_tokens
    logger.info("%s: its cache is proven first, on about %d tokens", name, num_tokens)
    started = time.monotonic()
    try:
        not_hidden, not_together = prove(host, form)
    except ConfigError as error:  # it is a ValueError, too
        names = host.hidden
        hidden = f" (it keeps {', '.join(names)} outside its cache)" if names else ""
        raise ConfigError(f"{name} cannot be served: {error}{hidden}") from error
    except UNRUNNABLE as error:
        raise ConfigError(f"{name} cannot go on from a cache: {first_line(error)}") from error
    fields = {
        **json.loads(form.namespace.as_text()),
        "proof": mark,
        "not_hidden": not_hidden,
        "not_together": not_together,
    }
    store.describe(digest, json.dumps(fields, indent=1) + "\n")
    seconds = time.monotonic() - started
    logger.info("%s: its cache is proven, in %.1f s", name, seconds)
    return Proof(seconds, not_hidden, not_together)


def mark_of(host: HostModel, form: TreeForm, *more: str) -> str:
    """Return a digest of all that a proof depends on."""
    facts = [PROOF_VERSION, form.namespace.digest.hex(), str(host.model.device.type), *more]
    return blake3(repr([*facts, *map(_version, KERNELS)]).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def kept_proofs(store: Store, form: TreeForm) -> dict[str, Any]:
    """Return the description of the namespace with its proofs, of the nearest tier that has one."""
    for found in store.catalogues():
        with suppress(ValueError, RecursionError, StoreError):  # untrusted, or it cannot be read
            text = None if isinstance(found, Fault) else found.description(form.namespace.digest)
            value = json.loads(text or "{}")
            if isinstance(value, dict) and value:
                return value
    return {}


def prove(host: HostModel, form: TreeForm) -> tuple[str, str]:
    """Compare runs on restored caches with runs without, as the module says. Return why hidden
    tokens and several prompts are not served; empty texts if they are.

    Raises:
        ConfigError: a difference.
    """
    tree = form.tree
    size = tree.chunk_tokens
    end = NUM_CHUNKS * size
    ids = host.probe_ids(end + NUM_MORE, 5)
    error, limit, restored_limit = limits_of(host)

    one = copies_of(tree.leaves(in_pieces(host, ids[:, :end], [end])))
    two = copies_of(tree.leaves(in_pieces(host, ids[:, :end], [2 * size, end])))
    cache = in_pieces(host, ids[:, :end], [size * (number + 1) for number in range(NUM_CHUNKS)])
    kept = copies_of({path: slot.value for path, slot in slots(cache).items()})
    for other in (two, kept):
        for path, value in one.items():
            refuse_difference(name_of(path), value, other[path], error)

    images = [form.gather(cache, 0, number * size) for number in range(NUM_CHUNKS)]
    state = tree.state(cache) if tree.states else None
    _, expected = host.run(ids[:, end:], cache, end, num_logits=NUM_MORE)
    in_pieces(host, host.probe_ids(size + 5, 77), [size + 5])
    host.reset_all()
    first = StoredRow(0, images, state)
    restored = form.cache_of([first], end)
    refuse_changed_leaves(kept, restored)
    _, logits = host.run(ids[:, end:], restored, end, num_logits=NUM_MORE)
    refuse_logits("a restored cache and the one in memory", expected, logits, restored_limit)
    _, whole = host.run(ids, host.new_cache(), 0, num_logits=NUM_MORE)
    refuse_logits("a restored cache and a run without one", whole, logits, limit)

    restored = form.cache_of([first], end)
    refuse_generated(host, ids, {}, restored, {}, limit)
    not_hidden = _not_served(host, form, ids, first, is_hidden=True)
    return not_hidden, not_hidden and _not_served(host, form, ids, first, is_hidden=False)


def _not_served(
    host: HostModel, form: TreeForm, ids: torch.Tensor, first: StoredRow, *, is_hidden: bool
) -> str:
    """Return why a batch is not served, in words; empty if it may be. `is_hidden` makes rows of it
    shorter, and hides a token further on."""
    tree = form.tree
    leaf = tree.not_of_batches or (is_hidden and tree.not_padded)
    if leaf:
        return f"rows cannot be told apart in leaf {leaf} of its cache"
    try:
        _prove_batch(host, form, ids, first, is_hidden=is_hidden)
    except (ConfigError, *UNRUNNABLE) as error:
        return first_line(error)
    return ""


def _prove_batch(
    host: HostModel, form: TreeForm, ids: torch.Tensor, first: StoredRow, *, is_hidden: bool
) -> None:
    """Compare a batch of restored rows with one that is computed in one piece.

    Args:
        ids: of the first row, whose chunks are stored.
        first: these chunks.

    Raises:
        ConfigError: a difference.
    """
    tree, size = form.tree, form.tree.chunk_tokens
    end = ids.shape[1] - NUM_MORE
    error, limit, _ = limits_of(host)
    paddings = (0, _ODD, end - 1) if is_hidden else (0, 0)
    rows = torch.cat((ids, host.probe_ids(ids.shape[1], 6, len(paddings) - 1)))
    mask = torch.ones_like(rows)
    parts = [Part(form.cache_of([first], end), [0], 0)]
    for row, padding in enumerate(paddings[1:], 1):
        mask[row, :padding] = 0
        mask[row, end + _ODD] = int(not is_hidden)
        alone = rows[row : row + 1, padding:end]
        stop = min(2 * size, alone.shape[1])
        cache = in_pieces(host, alone[:, :stop], [stop])
        if stop == 2 * size:
            images = [form.gather(cache, 0, number * size) for number in range(2)]
            state = tree.state(cache) if tree.states else None
            cache = form.cache_of([StoredRow(0, images, state)], stop)
        if stop < alone.shape[1]:
            cache, _ = host.run(alone[:, stop:], cache, stop)
        parts.append(Part(cache, [row], padding))
    reused = answer_of(host, rows, mask, 1, {host.cache_argument: tree.stack(parts, end)})
    cold = answer_of(host, rows, mask, 1, {host.cache_argument: host.new_cache()})
    what = "a restored batch and one in one piece"
    for row, padding in enumerate(paddings):
        one, other = (tree.leaves_of_row(each.cache, row, padding) for each in (cold, reused))
        for path, value in one.items():
            found = relative_error(value, other[path])
            if not found <= error:
                raise ConfigError(f"leaf {name_of(path)} of {what} differs by {found:.1e}")
    if tree.counts_in(cold.cache) != tree.counts_in(reused.cache):
        raise ConfigError(f"counts in the cache of {what} differ")
    refuse_logits(what, cold.logits[0], reused.logits[0], limit)
