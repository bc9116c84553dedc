"""The leaves of a cache object: where they hang, and which classes hold them."""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

Path = tuple[str, ...]

_PLAIN = (bool, int, float, str, type(None))


class Slot(NamedTuple):
    """A leaf of one cache object, and where it hangs."""

    parent: Any
    name: Any
    value: Any

    def put(self, value: Any) -> None:
        """Replace the leaf."""
        if isinstance(self.parent, dict | list):
            self.parent[self.name] = value
        else:
            setattr(self.parent, self.name, value)


def slots(cache: Any) -> dict[Path, Slot]:
    """Return the leaves of a cache by path."""
    found: dict[Path, Slot] = {}
    seen: set[int] = set()
    open_objects: list[tuple[Path, Any]] = [((), cache)]
    while open_objects:
        path, parent = open_objects.pop()
        if id(parent) in seen:
            continue
        seen.add(id(parent))
        for name, value in _children(parent):
            here = (*path, str(name))
            if isinstance(value, (torch.Tensor, *_PLAIN)):
                found[here] = Slot(parent, name, value)
            elif _has_children(value):
                open_objects.append((here, value))
    return dict(sorted(found.items()))


def kinds(cache: Any) -> set[type]:
    """Return the classes of the objects that a cache consists of."""
    found = {type(cache)}
    open_objects, seen = [cache], set()
    while open_objects:
        parent = open_objects.pop()
        if id(parent) in seen:
            continue
        seen.add(id(parent))
        inner = [value for _, value in _children(parent) if _has_children(value)]
        found |= {type(each) for each in inner}
        open_objects += inner
    return {each for each in found if each not in (dict, list, tuple)}


def _has_children(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return True
    is_other = isinstance(value, (type, torch.nn.Module, torch.Tensor))
    is_made = hasattr(value, "__dict__") and not is_other
    return is_made and not callable(value) and not hasattr(value, "to_diff_dict")  # a config


def _children(parent: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(parent, dict):
        return list(parent.items())
    if isinstance(parent, list | tuple):
        return list(enumerate(parent))
    return list(vars(parent).items())


def snapshot(cache: Any) -> dict[Path, Any]:
    """Copy the leaves of a cache."""
    return {
        path: slot.value.detach().clone() if isinstance(slot.value, torch.Tensor) else slot.value
        for path, slot in slots(cache).items()
    }


def name_of(path: Path) -> str:
    """Name a leaf for people."""
    return ".".join(path)


def aliases_of(cache: Any) -> dict[Path, Path]:
    """Return the leaves that are the same tensor as one before them."""
    first: dict[tuple[Any, ...], Path] = {}
    found = {}
    for path, slot in slots(cache).items():
        value = slot.value
        if isinstance(value, torch.Tensor) and value.numel():
            same = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            original = first.setdefault(same, path)
            if original != path:
                found[path] = original
    return found


def described(value: Any) -> str:
    """Describe a leaf for people."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return repr(value)[:60]


def relative_error(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference of two leaves, relative to the first's."""
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point() or not one.numel():
        return 0.0
    one, other = one.double(), other.double()
    return float((one - other).norm() / one.norm().clamp_min(1e-30))
