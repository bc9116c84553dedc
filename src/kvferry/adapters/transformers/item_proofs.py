"""Proves that a model can go on behind images, videos and sounds.

Each set of arguments and law of division is proven at the first call that has some, with its own
tensors: pixels for an unknown class cannot be made up. The result is kept beside the
proof of text.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.cache_copies import StoredRow, TreeForm
from kvferry.adapters.transformers.cache_leaves import name_of, slots
from kvferry.adapters.transformers.comparing import (
    copies_of,
    in_pieces,
    limits_of,
    refuse_changed_leaves,
    refuse_difference,
    refuse_generated,
    refuse_logits,
)
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import WHOLE, Items, items_of
from kvferry.adapters.transformers.plain_kv import UNRUNNABLE
from kvferry.adapters.transformers.proof import NUM_MORE, kept_proofs, mark_of
from kvferry.engine.model_config import first_line
from kvferry.errors import ConfigError
from kvferry.store.base import Store

logger = logging.getLogger(__name__)

_ITEM_PROOFS = "item_proofs"
"""Field of a namespace's description."""

_MOST_TRIES = 3
"""So many calls with wrong images may come first."""


class ItemProofs:
    """Proofs of prompts with items, each made at the first call that needs it."""

    def __init__(self, host: HostModel, form: TreeForm, store: Store) -> None:
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
        mark = mark_of(self._host, self._form, name)
        if self._proofs().get(name) == mark:
            self._found[name] = None
            return None
        logger.info("%s are proven first", name)
        started = time.monotonic()
        try:
            prompt = _prompt_of_proof(self._host, self._form, ids, items)
        except UNRUNNABLE as error:  # it may be the caller's: the next call is tried, too
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
        except UNRUNNABLE as error:
            self._found[name] = f"{name} cannot be served: {first_line(error)}"
            return self._found[name]
        finally:
            self._host.reset()
        logger.info("%s are proven, in %.1f s", name, time.monotonic() - started)
        self._found[name] = None
        described = json.loads(self._form.namespace.as_text())
        kept, proofs = kept_proofs(self._store, self._form), {**self._proofs(), name: mark}
        text = json.dumps({**described, **kept, _ITEM_PROOFS: proofs}, indent=1) + "\n"
        self._store.describe(self._form.namespace.digest, text)
        return None

    def _proofs(self) -> dict[str, Any]:
        """Return the marks of the proofs that the store has, by name."""
        proofs = kept_proofs(self._store, self._form).get(_ITEM_PROOFS)
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
        UNRUNNABLE: it cannot run.
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
    error, limit, restored_limit = limits_of(host)

    def run(cache: Any, first: int, stop: int) -> tuple[Any, torch.Tensor]:
        inputs = items.inputs(first, stop)
        return host.run(ids[:, first:stop], cache, first, num_logits=NUM_MORE, inputs=inputs)

    one = copies_of(tree.leaves(run(host.new_cache(), 0, end)[0]))
    at = items.items[0].first // size * size
    cache = in_pieces(host, ids[:, :at], [at])  # as a prompt of text computes them
    states = {}
    for stop in ends:
        cache, _ = run(cache, at, stop)
        states[stop], at = tree.state(cache) if tree.states else None, stop
    kept = copies_of({path: slot.value for path, slot in slots(cache).items()})
    for path, value in one.items():
        refuse_difference(name_of(path), value, kept[path], error)

    images = [form.gather(cache, 0, first) for first in range(0, end, size)]
    _, expected = run(cache, end, length)
    in_pieces(host, host.probe_ids(size + 5, 77), [size + 5])
    host.reset()
    restored = form.cache_of([StoredRow(0, images, states[end])], end)
    refuse_changed_leaves(kept, restored)
    _, logits = run(restored, end, length)
    refuse_logits("a restored cache and the one in memory", expected, logits, restored_limit)
    refuse_logits("a restored cache and a run without one", whole, logits, limit)
    for stop in {ends[0], end}:
        restored = form.cache_of([StoredRow(0, images[: stop // size], states[stop])], stop)
        refuse_generated(host, ids, given, restored, items.inputs(stop, length), limit)
