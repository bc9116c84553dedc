"""The laws that single leaves of a cache follow, and the form in which records hold their rows."""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.cache_leaves import Path
from kvferry.record.schema import SAFETENSORS_DTYPE, Component

_MAX_COUNTS = 64
"""Most elements of a tensor of numbers that may count tokens."""


class Rows(NamedTuple):
    """The law of a leaf that grows, and its place in a record."""

    path: Path
    axis: int
    """Of tokens."""
    batch: int | None
    """Axis of the rows of a batch; None: the leaf has none."""
    size: int
    """Rows for each chunk."""
    component: int | None
    """None: its rows have no elements, so no record holds them."""
    layer: int
    """Its place among the leaves of its component."""


class State(NamedTuple):
    """The law of a leaf that is stored whole."""

    path: Path
    dtype: str
    sizes: tuple[int | None, ...]
    """Of its axes; None for one that changes with the tokens before it."""
    batch: int | None

    def may_be(self, shape: Sequence[int]) -> bool:
        """Whether a leaf of one prompt has this shape after whole chunks."""
        pairs = zip(self.sizes, shape, strict=False)
        return len(shape) == len(self.sizes) and all(size in (None, n) for size, n in pairs)


class Count(NamedTuple):
    """The law of a number: its value after the first chunk, and the step of each chunk."""

    path: Path
    first: int
    step: int


class Laws(NamedTuple):
    """The laws of all leaves of a cache; those that are in none are constants."""

    rows: tuple[Rows, ...]
    states: tuple[State, ...]
    counts: tuple[Count, ...]
    components: tuple[Component, ...]
    """One for all leaves of rows of one shape and dtype."""
    aliases: dict[Path, Path]
    """Leaves that are the same tensor as another."""


def are_constant(values: Sequence[Any]) -> bool:
    """Whether tensors or plain values are all equal."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return all(type(each) is type(first) and each == first for each in values[1:])
    return all(
        isinstance(each, torch.Tensor) and each.dtype == first.dtype and torch.equal(each, first)
        for each in values[1:]
    )


def count_of(path: Path, values: Sequence[Any], other: Any) -> Count | None:
    """Return the law of a number; `other` is its value after one chunk of another prompt."""
    numbers = []
    if isinstance(other, torch.Tensor) and other.shape != getattr(values[0], "shape", None):
        return None  # a number for each row of a batch is a state
    for value in (*values, other):
        if isinstance(value, torch.Tensor):
            is_number = not value.is_floating_point() and 1 <= value.numel() <= _MAX_COUNTS
            if not is_number or not is_all(value, first := int(value.flatten()[0])):
                return None
            numbers.append(first)
        elif type(value) is int:
            numbers.append(value)
        else:
            return None
    one, two, three, again = numbers
    return Count(path, one, two - one) if three - two == two - one and again == one else None


def is_all(value: Any, number: int) -> bool:
    """Whether a number, or each of a tensor's, is this one."""
    return bool((value == number).all()) if isinstance(value, torch.Tensor) else value == number


def rows_of(values: Sequence[Any]) -> tuple[int, int] | None:
    """Return the axis along which a leaf grows, and the rows of a chunk; None if it is no leaf of
    rows."""
    first = values[0]
    if not all(isinstance(each, torch.Tensor) and each.dim() == first.dim() for each in values):
        return None
    axes = [axis for axis in range(first.dim()) if len({each.shape[axis] for each in values}) > 1]
    if len(axes) != 1:
        return None
    (axis,) = axes
    size = int(first.shape[axis])
    if not size or [each.shape[axis] for each in values] != [size, 2 * size, 3 * size]:
        return None
    pairs = ((values[0], values[1]), (values[1], values[2]))
    stay = all(torch.equal(new.narrow(axis, 0, old.shape[axis]), old) for old, new in pairs)
    return (axis, size) if stay else None


def batch_axis(one: Any, pair: Any) -> int | None:
    """Return the axis along which a leaf has two rows of a batch in place of one."""
    if not isinstance(one, torch.Tensor) or not isinstance(pair, torch.Tensor):
        return None
    if one.dim() != pair.dim():
        return None
    axes = [axis for axis in range(one.dim()) if one.shape[axis] != pair.shape[axis]]
    is_batch = len(axes) == 1 and 2 * one.shape[axes[0]] == pair.shape[axes[0]]
    return axes[0] if is_batch and one.shape[axes[0]] == 1 else None


def form_of_leaf(
    value: torch.Tensor, axis: int, batch: int | None, size: int
) -> tuple[str, int, int, int]:
    """Return dtype, heads, rows and content of a leaf's component."""
    _, heads, _, content = canonical(value, axis, batch).shape
    dtype = SAFETENSORS_DTYPE.get(str(value.dtype).removeprefix("torch."))
    if dtype is None:  # stored as bytes
        return "U8", heads, size, content * value.element_size()
    return dtype, heads, size, content


def canonical(value: torch.Tensor, axis: int, batch: int | None) -> torch.Tensor:
    """Return a leaf as `[batch, heads, rows, content]`."""
    if batch is None:
        value, axis, batch = value[None], axis + 1, 0
    if value.dim() == 2:
        value = value[..., None]
    moved = value.movedim((batch, axis), (0, -2))
    heads = math.prod(moved.shape[1:-2])  # -1 would not say it of rows without elements
    return moved.reshape(moved.shape[0], heads, *moved.shape[-2:]).contiguous()


def natural(form: torch.Tensor, like: torch.Tensor, axis: int, batch: int | None) -> torch.Tensor:
    """Return `[batch, heads, rows, content]` in the form of a leaf `like` it: undo `_canonical`."""
    lacks_batch, lacks_content = batch is None, like.dim() + (batch is None) == 2
    if batch is None:
        like, axis, batch = like[None], axis + 1, 0
    if lacks_content:
        like = like[..., None]
    middle = like.movedim((batch, axis), (0, -2)).shape[1:-2]
    shape = (form.shape[0], *middle, *form.shape[-2:])
    value = form.reshape(shape).movedim((0, -2), (batch, axis))
    value = value[..., 0] if lacks_content else value
    return (value[0] if lacks_batch else value).contiguous()
