"""Proves on the real model that a cache restored from records computes what a cache in memory does.

A cache of which this is not shown is not served. The proof compares, for a prompt of a few chunks:

- leaves of a prefill in pieces with those of one piece: what Transformers itself computes wrongly
  in pieces (as the state of Mamba 1) is found here;
- each leaf of a restored cache with the one that was stored, after another prompt ran in the model;
- logits of further tokens on the restored cache, on the stored one, and of a run without a cache;
- logits of `generate` with the restored cache and without;
- leaves and logits of a batch of restored rows, with hidden tokens before and among them, with
  those of the batch in one piece. Where these differ, such calls alone run without the store.

Images, videos and sounds are proven at the first call that has some, with its own tensors, for each
set of arguments and law of division: nobody can make up pixels for a class that is not known.

Results are kept beside the namespace's description, under the code and libraries of the proof.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from kvferry.adapters.transformers.cache_copies import StoredRow, TreeForm
from kvferry.adapters.transformers.cache_leaves import Path, name_of, relative_error, slots
from kvferry.adapters.transformers.cache_tree import Part
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import WHOLE, Items, items_of
from kvferry.adapters.transformers.plain_kv import UNRUNNABLE
from kvferry.blocks.tolerance import (
    TOLERANCE,
    TOLERANCE_OF_8_BITS,
    TOLERANCE_OF_8_BITS_WITH_EXPERTS,
)
from kvferry.engine.model_config import first_line
from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Catalogue

logger = logging.getLogger(__name__)

NUM_CHUNKS, NUM_MORE, NUM_GENERATED = 3, 37, 4
"""Size of the proof: chunks that are stored, tokens computed on top, tokens generated."""

KERNELS = ("torch", "flash_attn", "flash-linear-attention", "causal_conv1d", "mamba_ssm", "kernels")
"""Packages whose kernels may compute a cache otherwise in pieces."""

PROOF_VERSION = 2

_ODD = 5
"""A number of tokens that ends no chunk and no block."""

_LOGITS = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest difference of logits, relative to the largest, that rounding explains."""


class Proof(NamedTuple):
    """What was shown of a model: that its restored cache is right, at least for one prompt that is
    all visible."""

    seconds: float | None
    """That it took; None if the store had it."""
    not_hidden: str
    """Why calls with hidden tokens are not served; empty if they are."""
    not_together: str
    """Why calls with several prompts are not served; empty if they are."""


def ensure_proven(host: HostModel, form: TreeForm, store: Catalogue) -> Proof:
    """Prove the form of a cache, unless the store has a proof of the same code.

    Raises:
        ConfigError: it is not right; names the leaf, or the comparison, and the difference.
    """
    digest, mark = form.namespace.digest, _mark(host, form)
    kept = _kept(store, form)
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


def _mark(host: HostModel, form: TreeForm, *more: str) -> str:
    """Return a digest of all that a proof depends on."""
    facts = [PROOF_VERSION, form.namespace.digest.hex(), str(host.model.device.type), *more]
    return blake3(repr([*facts, *map(_version, KERNELS)]).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kept(store: Catalogue, form: TreeForm) -> dict[str, Any]:
    """Return the description of the namespace with its proofs."""
    try:
        value = json.loads(store.describe(form.namespace.digest) or "{}")
    except (ValueError, RecursionError, StoreError):  # untrusted, or it cannot be read
        return {}
    return value if isinstance(value, dict) else {}


class _Limits(NamedTuple):
    """Limits of relative differences."""

    leaves: float
    """Of a leaf that was computed in other pieces."""
    logits: float
    """Of logits on top of such leaves."""
    restored: float
    """Of logits of the same computation on a restored cache."""


def _limits(host: HostModel) -> _Limits:
    """Return what rounding explains.

    Raises:
        ConfigError: it explains any difference.
    """
    if not host.tolerances:
        raise ConfigError(
            "it rounds activations to 4 bits: in pieces it computes as much otherwise as another "
            "model, so that nothing can be proven"
        )
    dtype = str(host.model.dtype).removeprefix("torch.")
    leaves = host.tolerances.get(dtype, TOLERANCE.get(dtype, TOLERANCE["bfloat16"])).error
    logits = _LOGITS.get(dtype, _LOGITS["bfloat16"])
    if host.tolerances in (TOLERANCE_OF_8_BITS, TOLERANCE_OF_8_BITS_WITH_EXPERTS):
        # In other pieces, a value may be rounded to the next of 256.
        return _Limits(leaves, leaves, logits / 10)
    return _Limits(leaves, logits, logits / 10)


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
    error, limit, restored_limit = _limits(host)

    one = _leaves(tree.leaves(_in_pieces(host, ids[:, :end], [end])))
    two = _leaves(tree.leaves(_in_pieces(host, ids[:, :end], [2 * size, end])))
    cache = _in_pieces(host, ids[:, :end], [size * (number + 1) for number in range(NUM_CHUNKS)])
    kept = _leaves({path: slot.value for path, slot in slots(cache).items()})
    for other in (two, kept):
        for path, value in one.items():
            _refuse_difference(name_of(path), value, other[path], error)

    images = [form.gather(cache, 0, number * size) for number in range(NUM_CHUNKS)]
    state = tree.state(cache) if tree.states else None
    _, expected = host.run(ids[:, end:], cache, end, num_logits=NUM_MORE)
    _in_pieces(host, host.probe_ids(size + 5, 77), [size + 5])
    host.reset_all()
    first = StoredRow(0, images, state)
    restored = form.cache_of([first], end)
    _refuse_changed_leaves(kept, restored)
    _, logits = host.run(ids[:, end:], restored, end, num_logits=NUM_MORE)
    _refuse_logits("a restored cache and the one in memory", expected, logits, restored_limit)
    _, whole = host.run(ids, host.new_cache(), 0, num_logits=NUM_MORE)
    _refuse_logits("a restored cache and a run without one", whole, logits, limit)

    restored = form.cache_of([first], end)
    _refuse_generated(host, ids, {}, restored, {}, limit)
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
    error, limit, _ = _limits(host)
    paddings = (0, _ODD, end - 1) if is_hidden else (0, 0)
    rows = torch.cat((ids, host.probe_ids(ids.shape[1], 6, len(paddings) - 1)))
    mask = torch.ones_like(rows)
    parts = [Part(form.cache_of([first], end), [0], 0)]
    for row, padding in enumerate(paddings[1:], 1):
        mask[row, :padding] = 0
        mask[row, end + _ODD] = int(not is_hidden)
        alone = rows[row : row + 1, padding:end]
        stop = min(2 * size, alone.shape[1])
        cache = _in_pieces(host, alone[:, :stop], [stop])
        if stop == 2 * size:
            images = [form.gather(cache, 0, number * size) for number in range(2)]
            state = tree.state(cache) if tree.states else None
            cache = form.cache_of([StoredRow(0, images, state)], stop)
        if stop < alone.shape[1]:
            cache, _ = host.run(alone[:, stop:], cache, stop)
        parts.append(Part(cache, [row], padding))
    reused = _answer(host, rows, mask, 1, {host.cache_argument: tree.stack(parts, end)})
    cold = _answer(host, rows, mask, 1, {host.cache_argument: host.new_cache()})
    what = "a restored batch and one in one piece"
    for row, padding in enumerate(paddings):
        one, other = (tree.leaves_of_row(each.cache, row, padding) for each in (cold, reused))
        for path, value in one.items():
            found = relative_error(value, other[path])
            if not found <= error:
                raise ConfigError(f"leaf {name_of(path)} of {what} differs by {found:.1e}")
    if tree.counts_in(cold.cache) != tree.counts_in(reused.cache):
        raise ConfigError(f"counts in the cache of {what} differ")
    _refuse_logits(what, cold.logits[0], reused.logits[0], limit)


def _in_pieces(host: HostModel, ids: torch.Tensor, stops: list[int]) -> Any:
    """Prefill a new prompt in pieces."""
    cache, at = host.new_cache(), 0
    for stop in stops:
        cache, _ = host.run(ids[:, at:stop], cache, at)
        at = stop
    return cache


def _leaves(found: dict[Path, Any]) -> dict[Path, Any]:
    """Copy leaves, which further tokens may change."""
    return {
        path: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for path, value in found.items()
    }


def _refuse_generated(
    host: HostModel, ids: torch.Tensor, given: Mapping[str, Any], restored: Any,
    left: Mapping[str, Any], limit: float,
) -> None:  # fmt: skip
    """Compare the logits of `generate` without and with a restored cache, as long as both choose
    the same tokens.

    Args:
        given, left: other arguments without and with it.
    """
    mask = torch.ones_like(ids)
    alone = _answer(host, ids, mask, NUM_GENERATED, given)
    reused = _answer(host, ids, mask, NUM_GENERATED, {**left, host.cache_argument: restored})
    for number in range(min(len(alone.logits), len(reused.logits))):
        if not torch.equal(alone.tokens[:, :number], reused.tokens[:, :number]):
            return
        what = f"token {number + 1} of generate() with a restored cache and without one"
        _refuse_logits(what, alone.logits[number], reused.logits[number], limit)


class _Answer(NamedTuple):
    logits: tuple[torch.Tensor, ...]
    tokens: torch.Tensor
    cache: Any


def _answer(
    host: HostModel, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int,
    others: Mapping[str, Any],
) -> _Answer:  # fmt: skip
    """Let `generate` compute so many tokens, given a cache or other arguments."""
    device = host.model.device
    host.reset_all()
    output = host.generate(
        ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,  # as in every call that is served, whatever the model's default is
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **others,
    )
    return _Answer(output.logits, output.sequences[:, ids.shape[1] :], host.cache_of_output(output))


def _refuse_difference(name: str, one: torch.Tensor, other: torch.Tensor, limit: float) -> None:
    """Compare a leaf of a prefill in one piece with that in pieces."""
    if one.shape != other.shape:
        raise ConfigError(
            f"leaf {name} of its cache is {list(one.shape)} after a prefill in one piece and "
            f"{list(other.shape)} in pieces"
        )
    found = relative_error(one, other)
    if not found <= limit:
        raise ConfigError(
            f"Transformers computes leaf {name} of its cache otherwise in pieces than in one "
            f"piece, by {found:.1e} of its norm, so that no stored piece can be gone on from"
        )


def _refuse_changed_leaves(kept: dict[Path, Any], restored: Any) -> None:
    """Compare every leaf of a restored cache with the stored one, bit for bit."""
    found = slots(restored)
    for path, value in kept.items():
        other = found[path].value if path in found else None
        if isinstance(value, torch.Tensor):
            is_same = isinstance(other, torch.Tensor) and torch.equal(value, other)
        else:
            is_same = type(value) is type(other) and value == other
        if not is_same:
            raise ConfigError(f"leaf {name_of(path)} of its cache is not restored as it was")


def _refuse_logits(what: str, expected: torch.Tensor, logits: torch.Tensor, limit: float) -> None:
    found = float((expected.double() - logits.double()).abs().max() / expected.abs().max())
    if not found <= limit:
        raise ConfigError(f"logits of {what} differ by {found:.1e} of the largest")


# ---- images, videos and sounds


_CANNOT = (*UNRUNNABLE, StopIteration)
"""Errors of a model that cannot run with such images; the last where grids are too few."""

_ITEM_PROOFS = "item_proofs"
"""Field of a namespace's description."""

_MOST_TRIES = 3
"""So many calls with wrong images may come first."""


class ItemProofs:
    """Proofs of prompts with items, each made at the first call that needs it."""

    def __init__(self, host: HostModel, form: TreeForm, store: Catalogue) -> None:
        self._host = host
        self._form = form
        self._store = store
        self._found: dict[str, str | None] = {}
        self._tries: Counter[str] = Counter()

    def why_not(self, ids: Sequence[int], items: Items) -> str | None:
        """Return why a model cannot go on behind such items; None if it can. Proves it where no
        call before did, and the store has no proof of the same code.

        Args:
            ids: the prompt.
        """
        name = f"{', '.join(items.names)} ({items.law})"
        if name in self._found:
            return self._found[name]
        mark = _mark(self._host, self._form, name)
        if self._proofs().get(name) == mark:
            self._found[name] = None
            return None
        logger.info("%s are proven first", name)
        started = time.monotonic()
        try:
            prompt = _prompt_of_proof(self._host, self._form, ids, items)
        except _CANNOT as error:  # it may be the caller's: the next call is tried, too
            why_not = f"the model cannot run with {name}: {first_line(error)}"
            self._tries[name] += 1
            if self._tries[name] == _MOST_TRIES:
                self._found[name] = why_not
            return why_not
        finally:
            self._host.reset()
        try:
            _prove_items(self._host, self._form, prompt)
            self._host.settle()
        except _CANNOT as error:
            self._found[name] = f"{name} cannot be served: {first_line(error)}"
            return self._found[name]
        finally:
            self._host.reset()
        logger.info("%s are proven, in %.1f s", name, time.monotonic() - started)
        self._found[name] = None
        described = json.loads(self._form.namespace.as_text())
        kept, proofs = _kept(self._store, self._form), {**self._proofs(), name: mark}
        text = json.dumps({**described, **kept, _ITEM_PROOFS: proofs}, indent=1) + "\n"
        self._store.describe(self._form.namespace.digest, text)
        return None

    def _proofs(self) -> dict[str, Any]:
        """Return the marks of the proofs that the store has, by name."""
        proofs = _kept(self._store, self._form).get(_ITEM_PROOFS)
        return proofs if isinstance(proofs, dict) else {}


class _ItemPrompt(NamedTuple):
    """A prompt of text and items whose run went well."""

    ids: torch.Tensor
    items: Items
    """Placed."""
    given: Mapping[str, torch.Tensor]
    """The arguments as a caller passes them."""
    logits: torch.Tensor
    """Of its last `NUM_MORE` tokens, computed in one piece."""


def _prompt_of_proof(
    host: HostModel, form: TreeForm, ids: Sequence[int], items: Items
) -> _ItemPrompt:
    """Make a prompt of two items with text before, between and behind, and run it. The second is
    the first with other values where there is one alone. What is not divided is there once.

    Raises:
        ConfigError: it cannot be made.
        _CANNOT: it cannot run.
    """
    size, chosen = (
        form.tree.chunk_tokens,
        sorted(items.items, key=lambda each: each.num_tokens)[-2:],
    )
    numbers = [items.items.index(each) for each in reversed(chosen)]
    is_doubled = len(numbers) == 1 and items.law != WHOLE
    numbers += numbers if is_doubled else []
    lengths = [size + 3, *[size + 5] * (len(numbers) - 1), 2 * size + NUM_MORE]
    texts = [host.probe_ids(length, 90 + length)[0] for length in lengths]
    row, types = [texts[0]], {name: [torch.zeros(lengths[0])] for name in items.along}
    for number, text in zip(numbers, texts[1:], strict=True):
        item = items.items[number]
        span = slice(max(item.first - 1, 0), item.stop + 1)  # with the marks around it
        row += [torch.tensor(ids[span]), text]
        for name, parts in types.items():
            parts += [items.along[name][0, span], torch.zeros(len(text))]
    given = {
        name: torch.cat([each.to(parts[1]) for each in parts])[None]
        for name, parts in types.items()
    }
    for name, part in items.parts.items():
        tensors = [part.of(items.tensors[name], number, number + 1) for number in numbers]
        if is_doubled and tensors[1].is_floating_point():
            tensors[1] = -tensors[1]
        given[name] = torch.cat(tensors, part.axis) if len(tensors) > 1 else tensors[0]
    prompt = torch.cat(row)[None]
    found = items_of(host.model.config, prompt[0].tolist(), given)
    if isinstance(found, str) or (found.law, len(found.items)) != (items.law, len(numbers)):
        raise ConfigError("in another prompt, they would be divided otherwise")
    host.reset()
    found = host.placed(prompt.tolist(), found)
    inputs = found.inputs(0, prompt.shape[1])
    _, logits = host.run(prompt, host.new_cache(), 0, num_logits=NUM_MORE, inputs=inputs)
    if not bool(logits.isfinite().all()):
        raise ConfigError("it computes NaN or Inf")
    return _ItemPrompt(prompt, found, given, logits)


def _prove_items(host: HostModel, form: TreeForm, prompt: _ItemPrompt) -> None:
    """Compare, as `prove` does: a prompt with its items in one piece, with text alone and then a
    piece for each item, restored behind all and behind the first.

    Raises:
        ConfigError: a difference.
    """
    tree, size, (ids, items, given, whole) = form.tree, form.tree.chunk_tokens, prompt
    ends = [-(-each.stop // size) * size for each in items.items]
    end, length = ends[-1], ids.shape[1]
    error, limit, restored_limit = _limits(host)

    def run(cache: Any, first: int, stop: int) -> tuple[Any, torch.Tensor]:
        inputs = items.inputs(first, stop)
        return host.run(ids[:, first:stop], cache, first, num_logits=NUM_MORE, inputs=inputs)

    one = _leaves(tree.leaves(run(host.new_cache(), 0, end)[0]))
    at = items.items[0].first // size * size
    cache = _in_pieces(host, ids[:, :at], [at])  # as a prompt of text computes them
    states = {}
    for stop in ends:
        cache, _ = run(cache, at, stop)
        states[stop], at = tree.state(cache) if tree.states else None, stop
    kept = _leaves({path: slot.value for path, slot in slots(cache).items()})
    for path, value in one.items():
        _refuse_difference(name_of(path), value, kept[path], error)

    images = [form.gather(cache, 0, first) for first in range(0, end, size)]
    _, expected = run(cache, end, length)
    _in_pieces(host, host.probe_ids(size + 5, 77), [size + 5])
    host.reset()
    restored = form.cache_of([StoredRow(0, images, states[end])], end)
    _refuse_changed_leaves(kept, restored)
    _, logits = run(restored, end, length)
    _refuse_logits("a restored cache and the one in memory", expected, logits, restored_limit)
    _refuse_logits("a restored cache and a run without one", whole, logits, limit)
    for stop in {ends[0], end}:
        restored = form.cache_of([StoredRow(0, images[: stop // size], states[stop])], stop)
        _refuse_generated(host, ids, given, restored, items.inputs(stop, length), limit)
