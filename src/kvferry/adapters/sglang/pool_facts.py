"""What a host pool of SGLang holds: what says how the bytes of its pages are to be read.

SGLang makes pools of options, variables, model and device. So no option is looked at here, but what
came of it: the attributes of the pool, and dtype and shape of the tensors in which its pages lie.
"""

# ruff: noqa: ANN401 - pools are the host's

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kvferry.errors import ConfigError
from kvferry.identity.resolved import describe_value
from kvferry.keys import JsonValue

_COUNTS = ("size", "page_num", "num_host_pages", "indexer_page_num")
"""Attributes that count a pool's places. One of them is an axis of each tensor that holds pages."""

OF_THIS_START = frozenset(
    {
        *_COUNTS,
        "device_capacity_tokens",
        "device_num_pages",
        "device_slots",
        "fd",
        "free_slots",
        "mem_state",
        "num_release_slots",
        "release_slots",
        "slot_used",
        "staging_page_capacity",
        "staging_token_capacity",
    }
)
"""Attributes that say how much memory this start has, and what of it is in use."""


def pool_facts(pool: Any, page_bytes: int) -> JsonValue:
    """Return what a pool holds, but for the number of its places.

    Raises:
        ConfigError: tensors that are not found here hold a part of each page.
    """
    facts = _Facts(pool)
    described = facts.of_pool(pool)
    if facts.page_bytes < page_bytes:
        raise ConfigError(
            f"kvferry finds {facts.page_bytes} of the {page_bytes} bytes of a page in the tensors "
            f"of {type(pool).__name__}, so it cannot say what the pages hold; use a release of "
            "kvferry that knows this SGLang's pools, or another storage back end"
        )
    return described


class _Facts:
    """Describes a pool, and counts the bytes of a page in the tensors on its way."""

    def __init__(self, pool: Any) -> None:
        self._device = torch.device(pool.device).type
        # Of a length of an axis of places, how many belong to a page.
        self._places = {int(getattr(pool, each)): 1 for each in _COUNTS[1:] if hasattr(pool, each)}
        self._places[int(pool.size)] = int(pool.page_size)
        self._held: dict[int, int] = {}

    @property
    def page_bytes(self) -> int:
        return sum(self._held.values())

    def of_pool(self, pool: Any) -> JsonValue:
        attributes = {
            name: self._described(value)
            for name, value in sorted(vars(pool).items())
            if name not in OF_THIS_START
        }
        return {"class": type(pool).__name__, **attributes}

    def _described(self, value: Any) -> JsonValue:
        """Return a value as plain values. Of objects that only hold memory or move bytes, such as
        allocators and pools of the device, the class is all that counts."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, Mapping):
            return {str(name): self._described(each) for name, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            items = [self._described(each) for each in value]
            is_long = len(items) > 2 and all(each == items[0] for each in items)
            return {"each": items[0], "count": len(items)} if is_long else items
        if hasattr(value, "get_data_page"):  # a pool within a pool
            return self.of_pool(value)
        if names := _fields(value):
            return {name: self._described(getattr(value, name)) for name in names}
        try:
            return describe_value(value, "")
        except ConfigError:
            return type(value).__name__

    def _tensor(self, value: torch.Tensor) -> str:
        shape: list[Any] = list(value.shape)
        axes = [at for at, length in enumerate(shape) if length in self._places]
        if not axes or value.device.type != self._device:
            return str(value.dtype)  # addresses, or memory of the device
        num_bytes = min(value.nbytes // shape[at] * self._places[shape[at]] for at in axes)
        storage = value.untyped_storage().data_ptr()
        self._held[storage] = max(num_bytes, self._held.get(storage, 0))  # others are its parts
        if len(axes) == 1:  # else any may be that of the places: all lengths count
            shape[axes[0]] = "places"
        return f"{value.dtype} {shape}"


def _fields(value: Any) -> tuple[str, ...]:
    """The fields of a structure; none of another value."""
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return tuple(getattr(value, "__struct_fields__", ()))
