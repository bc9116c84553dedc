"""Learns the laws of a model's cache by running it on a few chunks of text."""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from kvferry.adapters.transformers.cache_laws import (
    Laws,
    Rows,
    State,
    are_constant,
    batch_axis,
    count_of,
    form_of_leaf,
    rows_of,
)
from kvferry.adapters.transformers.cache_leaves import Path, aliases_of, name_of, snapshot
from kvferry.adapters.transformers.cache_tree import CacheTree
from kvferry.errors import ConfigError
from kvferry.record.schema import CHUNK_BYTES, Component

_ROUNDING = 0.02
"""Tolerance relative to the largest value; above bfloat16's error from reordered additions."""

_DEFAULT_CHUNK_TOKENS, _FEWEST_TOKENS = 64, 16


class NoRowsError(ConfigError):
    """A cache of states alone."""


class ModelRun(Protocol):
    """What learning needs of a model."""

    def run(
        self, input_ids: torch.Tensor, cache: Any, num_cached: int, *, num_logits: int = 0
    ) -> tuple[Any, torch.Tensor]:
        """Append tokens to a cache of `num_cached` tokens (None: to a new one of the model). Return
        the cache, and the logits of the last `num_logits` tokens, or of more."""

    def new_cache(self) -> Any:
        """Return an empty cache that keeps as many tokens as it can; None: the model makes one."""

    def probe_ids(self, num_tokens: int, seed: int, num_rows: int = 1) -> torch.Tensor:
        """Return ids `[num_rows, num_tokens]` of text, the same for one seed."""


def learn(model: ModelRun, chunk_tokens: int | None) -> CacheTree:
    """Run a model, and learn the laws of its cache.

    Args:
        chunk_tokens: None: by the size of the leaves.

    Raises:
        ConfigError: a leaf without a law, or one that depends on later tokens.
    """
    size = chunk_tokens or _default_chunk_tokens(model)
    ids = model.probe_ids(3 * size, 1)
    cache, seen, template = model.new_cache(), [], None
    for stop in (size, 2 * size, 3 * size):
        cache, _ = model.run(ids[:, stop - size : stop], cache, stop - size)
        seen.append(snapshot(cache))
        template = copy.deepcopy(cache) if template is None else template
    pair, _ = model.run(model.probe_ids(size, 2, 2), model.new_cache(), 0)
    laws = _laws_of(seen, snapshot(pair), aliases_of(cache))
    _refuse_later_tokens(model, ids, laws, size)
    if not laws.rows:
        raise NoRowsError(
            "no leaf of its cache grows by token, so generate() cannot see where to go on"
        )
    return CacheTree(size, template, seen, laws)


def _laws_of(
    seen: list[dict[Path, Any]], pair: Mapping[Path, Any], aliases: dict[Path, Path]
) -> Laws:
    """Find the law of each leaf. `seen` are the leaves after one, two and three chunks, `pair`
    those of two other prompts of one chunk."""
    if not seen[0].keys() == seen[1].keys() == seen[2].keys() == pair.keys():
        names = [frozenset(each) for each in (*seen, pair)]
        gone = frozenset().union(*names) - names[0].intersection(*names)
        raise ConfigError(f"leaf {name_of(min(gone))} of its cache comes and goes")
    shapes: dict[tuple[str, int, int, int], int] = {}
    layers: list[int] = []
    rows, states, counts = [], [], []
    same: dict[Path, Path] = {}
    for path in seen[0]:
        values = [each[path] for each in seen]
        if path in aliases and all(are_constant([v[path], v[aliases[path]]]) for v in seen):
            same[path] = aliases[path]
            continue
        batch = batch_axis(values[0], pair[path])
        if are_constant([*values, pair[path]]):
            continue
        if (count := count_of(path, values, pair[path])) is not None:
            counts.append(count)
        elif (found := rows_of(values)) is not None:
            axis, size = found
            if not values[0].numel():
                rows.append(Rows(path, axis, batch, size, None, 0))
                continue
            shape = form_of_leaf(values[0], axis, batch, size)
            component = shapes.setdefault(shape, len(shapes))
            layers += [0] * (len(shapes) - len(layers))
            rows.append(Rows(path, axis, batch, size, component, layers[component]))
            layers[component] += 1
        elif all(isinstance(each, torch.Tensor) for each in values):
            dtype = str(values[0].dtype).removeprefix("torch.")
            states.append(State(path, dtype, _sizes_of(values), batch))
        else:
            raise ConfigError(
                f"leaf {name_of(path)} of its cache is {', '.join(map(repr, values))} after "
                "one, two and three chunks, which follows no law"
            )
    components = tuple(
        Component(name=f"kv.{number}", dtype=dtype, shape=(layers[number], heads, size, content))
        for (dtype, heads, size, content), number in shapes.items()
    )
    return Laws(tuple(rows), tuple(states), tuple(counts), components, same)


def _refuse_later_tokens(model: ModelRun, ids: torch.Tensor, laws: Laws, size: int) -> None:
    """Refuse rows of a token that depend on tokens behind it."""
    other = ids[:, : 2 * size].clone()
    other[:, -1] = ids[:, 0] if ids[0, 0] != other[0, -1] else ids[:, 1]
    runs = [
        snapshot(model.run(each, model.new_cache(), 0)[0]) for each in (ids[:, : 2 * size], other)
    ]
    for law in laws.rows:
        if law.component is None:
            continue
        # Where a chunk has as many rows as tokens, all but the last token's are compared.
        num_rows = 2 * size - 1 if law.size == size else law.size
        one, two = (each[law.path].narrow(law.axis, 0, num_rows).float() for each in runs)
        if (one - two).abs().max() > _ROUNDING * one.abs().max():
            raise ConfigError(
                f"is not causal: rows of a token in leaf {name_of(law.path)} of its cache "
                "depend on later tokens, so the KV of a prefix cannot be reused"
            )


def _default_chunk_tokens(model: ModelRun) -> int:
    """Return the tokens of a chunk where no option sets them: at most `CHUNK_BYTES` of rows."""
    size = _DEFAULT_CHUNK_TOKENS
    cache, _ = model.run(model.probe_ids(size, 1), model.new_cache(), 0)
    tensors = [each for each in snapshot(cache).values() if isinstance(each, torch.Tensor)]
    num_bytes = sum(each.numel() * each.element_size() for each in tensors if size in each.shape)
    while size > _FEWEST_TOKENS and num_bytes > CHUNK_BYTES:
        size, num_bytes = size // 2, num_bytes // 2
    return size


def _sizes_of(values: Sequence[torch.Tensor]) -> tuple[int | None, ...]:
    """Return the size of each axis; None where it is not the same in all."""
    first = values[0].shape
    return tuple(
        size if all(each.shape[axis : axis + 1] == (size,) for each in values) else None
        for axis, size in enumerate(first)
    )
