"""Images, videos and sounds in a prompt: the tokens that they fill, and their part of each tensor.

An item is what cannot be cut: an image, a tile, a clip, or several where tensors do not say what
belongs to which. Its identity is that of the processed tensors, as they reach the model, and of its
tokens. It enters the key of each chunk that it overlaps, and so of all behind (keys/chain.py).

Nothing here knows a family of models. How tensors are divided is read off their shapes, as one of a
few laws; `item_proofs.ItemProofs` shows for each law and set of arguments that the model agrees.
"""

# ruff: noqa: ANN401 - the configs of Transformers share no typed surface.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from blake3 import blake3

from kvferry.types import NO_EXTRA_KEYS, ExtraKeys, MultimodalItem

_PLACEHOLDER = re.compile(r"(image|video|audio|img_context|media|speech)_token_(id|index)")
"""Names of config fields with the id of tokens that features replace."""

_TYPES = "token_type_ids"
"""End of the names of arguments that say of each token what it stands for; 0: text."""

_OF_ITEMS = (
    *("pixel_", "image_", "video_", "audio_", "input_features", "feature_attention_mask"),
    *("spatial_shapes", "high_res_pixel_values"),
)
"""Beginnings of the names of arguments that processors make of images, videos and sounds. Such an
argument says nothing of text in front of them; each proof shows it of those it was made with."""


WHOLE = "all"
"""The law of what cannot be divided: one item, from the first token of any to the last."""


def is_types(name: str) -> bool:
    """Whether an argument says of each token what it stands for."""
    return name.endswith(_TYPES)


def is_of_items(name: str) -> bool:
    """Whether an argument describes images, videos or sounds."""
    return is_types(name) or name.startswith(_OF_ITEMS)


class Item(NamedTuple):
    """One item: tokens `[first, stop)` of the prompt."""

    first: int
    stop: int
    digest: str

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.stop - self.first


class _Part(NamedTuple):
    """How a tensor is divided among items: item `i` has `[bounds[i], bounds[i + 1])` of `axis`."""

    axis: int
    bounds: tuple[int, ...]

    def of(self, tensor: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        begin, end = self.bounds[first], self.bounds[stop]
        if (begin, end) == (self.bounds[0], self.bounds[-1]):
            return tensor
        return tensor.narrow(self.axis, begin, end - begin)


@dataclass(frozen=True)
class Items:
    """The items of one prompt.

    Attributes:
        items: in the order of their tokens.
        law: how tensors are divided, in words.
        tensors: arguments that are divided among items.
        along: arguments that have a value for each token on their last axis: types, positions.
    """

    items: tuple[Item, ...] = ()
    law: str = ""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    along: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parts: Mapping[str, _Part] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the arguments."""
        return sorted([*self.tensors, *self.along])

    @property
    def extra_keys(self) -> ExtraKeys:
        """What enters the keys of chunks."""
        if not self.items:
            return NO_EXTRA_KEYS
        found = [
            MultimodalItem(digest=each.digest, offset=each.first, length=each.num_tokens)
            for each in self.items
        ]
        return ExtraKeys(items=tuple(found))

    def cut(self, num_tokens: int) -> int:
        """Return the most tokens up to `num_tokens` that end in no item."""
        inside = (each.first for each in self.items if each.first < num_tokens < each.stop)
        return next(inside, num_tokens)

    def aligned_cut(self, num_tokens: int, size: int) -> int:
        """Return the most tokens up to `num_tokens` that are a multiple of `size` and end in no
        item."""
        while (found := self.cut(num_tokens // size * size)) != num_tokens:
            num_tokens = found
        return num_tokens

    def cover(self, num_tokens: int) -> int:
        """Return the fewest tokens from `num_tokens` on that end in no item."""
        inside = (each.stop for each in self.items if each.first < num_tokens < each.stop)
        return next(inside, num_tokens)

    def inputs(self, first: int, stop: int) -> dict[str, torch.Tensor]:
        """Return the arguments of a forward of the tokens `[first, stop)`, neither in an item: what
        is along tokens, up to `stop`, and the tensors of the items among these tokens."""
        found = {name: tensor[..., :stop] for name, tensor in self.along.items()}
        inside = [at for at, each in enumerate(self.items) if first <= each.first < stop]
        if inside:
            for name, tensor in self.tensors.items():
                found[name] = self.parts[name].of(tensor, inside[0], inside[-1] + 1)
        return found

    def placed(self, positions: Mapping[str, torch.Tensor]) -> Items:
        """Add the positions of tokens."""
        return replace(self, along={**self.along, **positions})


NO_ITEMS = Items()


def placeholders(config: Any) -> set[int]:
    """Return the ids of the tokens that a config names for features to replace. Some are outside
    the vocabulary."""
    return {
        value
        for name, value in vars(config).items()
        if _PLACEHOLDER.fullmatch(name) and isinstance(value, int)
    }


def items_of(config: Any, ids: Sequence[int], given: Mapping[str, Any]) -> Items | str:
    """Find the items of a prompt.

    Args:
        config: of the model.
        ids: the prompt.
        given: arguments for which `is_of_items` holds.

    Returns:
        Why they cannot be found, in words, if they cannot.
    """
    named = f"it uses {', '.join(sorted(given))}"
    types = {name: value for name, value in given.items() if is_types(name)}
    tensors = {name: value for name, value in given.items() if name not in types}
    for name, value in given.items():
        is_strided = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if not is_strided or value.is_meta or not value.dim():
            return f"it uses {name}, which is no tensor with rows"
    if not tensors:
        return named
    if any(value.shape != (1, len(ids)) for value in types.values()):
        return f"{named}, of other shapes than the input_ids"
    kinds = placeholders(config)
    marks = [0] * len(ids)
    for value in types.values():
        marks = [max(pair) for pair in zip(marks, value[0].tolist(), strict=True)]
    marked = [place for place, mark in enumerate(marks) if mark]
    places = [place for place, each in enumerate(ids) if each in kinds] or marked
    if not places:
        return f"{named}, and no token of the prompt stands for it"
    told = {ids[each] for each in places} if ids[places[0]] in kinds else set()
    is_one_kind = len(told) < 2 and len({marks[each] for each in marked}) < 2
    runs = _runs(places)
    division = _divide(tensors, runs) if is_one_kind else None
    whole = [(min([*places, *marked]), max([*places, *marked]) + 1)]
    if division is None or not set(marked) <= _tokens(division.spans):
        division = _Division(WHOLE, whole, {name: _Part(0, (0, 1)) for name in tensors})
    found = Items((), division.law, tensors, types, division.parts)
    items = [
        Item(*span, _digest(found, ids, number, span)) for number, span in enumerate(division.spans)
    ]
    return replace(found, items=tuple(items))


def _digest(items: Items, ids: Sequence[int], number: int, span: tuple[int, int]) -> str:
    """Return the digest of an item's tensors, as they reach the model, and of its tokens."""
    tokens = slice(*span)
    types = [(name, value[0, tokens].tolist()) for name, value in sorted(items.along.items())]
    hasher = blake3(repr([list(ids[tokens]), types]).encode())
    for name, tensor in sorted(items.tensors.items()):
        part = items.parts[name].of(tensor, number, number + 1).detach().cpu().contiguous()
        hasher.update(f"\n{name} {part.dtype} {list(part.shape)}\n".encode())
        hasher.update(memoryview(part.reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return hasher.hexdigest()


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs `[first, stop)` of tokens that follow each other."""
    breaks = [at + 1 for at, (one, two) in enumerate(pairwise(places)) if two != one + 1]
    return [
        (places[first], places[stop - 1] + 1) for first, stop in pairwise([0, *breaks, len(places)])
    ]


def _tokens(spans: Sequence[tuple[int, int]]) -> set[int]:
    return {place for span in spans for place in range(*span)}


# ---- laws of division


class _Division(NamedTuple):
    law: str
    spans: Sequence[tuple[int, int]]
    parts: dict[str, _Part]


def _divide(
    tensors: Mapping[str, torch.Tensor], runs: Sequence[tuple[int, int]]
) -> _Division | None:
    """Divide tensors among runs of placeholders; None if their shapes do not say how.

    The laws, by shapes alone:

    - each: every tensor has one row for each run, and runs are of one length if it is alone;
    - a grid: one tensor says of each item how many cells it has, and a token stands for the same
      number of cells in all; other tensors have a row for each item, or for each cell;
    - alike: the only tensor has rows of one size each, so that all stand for as many tokens.
    """
    tokens = [stop - first for first, stop in runs]
    for axis in (0, 1):  # the second where the first is that of a batch of one prompt
        if axis and any(each.dim() < 2 or len(each) != 1 for each in tensors.values()):
            break
        is_told = len(tensors) > 1 or len(set(tokens)) == 1  # rows of one size have as many tokens
        if is_told and all(each.shape[axis] == len(runs) for each in tensors.values()):
            parts = {name: [1] * len(runs) for name in tensors}
            return _joined(f"each of axis {axis}", runs, tokens, parts, axis)
    total = sum(tokens)
    for name, grid in sorted(tensors.items()):
        cells = _cells(grid)
        size, rest = divmod(sum(cells), total)
        if not cells or rest or not size or any(each % size for each in cells):
            continue
        ones, sizes = [1] * len(cells), {len(cells), sum(cells)}
        if all(len(each) in sizes for each in tensors.values()):
            parts = {
                other: ones if len(each) == len(cells) else cells for other, each in tensors.items()
            }
            return _joined(f"by {name}", runs, [each // size for each in cells], parts)
    if len(tensors) == 1:
        ((name, tensor),) = tensors.items()
        axis = int(len(tensor) == 1 and tensor.dim() > 1)
        size, rest = divmod(total, max(1, tensor.shape[axis]))
        if size and not rest:
            ones = [1] * tensor.shape[axis]
            return _joined(f"alike on axis {axis}", runs, [size] * len(ones), {name: ones}, axis)
    return None


def _cells(grid: torch.Tensor) -> list[int]:
    """Return the cells of each item by a tensor of heights and widths, maybe with times; empty if
    it is none."""
    is_grid = grid.dim() == 2 and grid.shape[1] in (2, 3) and grid.dtype in _INTEGERS
    return (
        [int(each) for each in grid.prod(1).tolist()] if is_grid and bool((grid > 0).all()) else []
    )


_INTEGERS = (torch.int64, torch.int32, torch.int16)


def _joined(
    law: str,
    runs: Sequence[tuple[int, int]],
    units: Sequence[int],
    parts: Mapping[str, Sequence[int]],
    axis: int = 0,
) -> _Division:
    """Join units to items that end where a run does.

    Args:
        units: tokens of each.
        parts: for each tensor its rows by unit.
    """
    run_ends = list(accumulate(stop - first for first, stop in runs))
    spans, ends, first = [], [0], 0
    for unit, end in enumerate(accumulate(units)):
        if end in run_ends:
            run = run_ends.index(end)
            spans.append((runs[first][0], runs[run][1]))
            ends.append(unit + 1)
            first = run + 1
    sums = {name: [0, *accumulate(rows)] for name, rows in parts.items()}
    divided = {name: _Part(axis, tuple(each[end] for end in ends)) for name, each in sums.items()}
    return _Division(law, spans, divided)
