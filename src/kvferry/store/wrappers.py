"""The base of stores that stand in front of another store and change one thing about it."""

from __future__ import annotations

from abc import update_abstractmethods
from typing import Any

from kvferry.store.base import Catalogue, Store

_OF_EACH = ("check_medium", "put_all", "values_per_put")
"""What a wrapper keeps: these become one `read`, and one `put` after another."""


class _OfInner:
    """An attribute or a method of a wrapper that is that of the inner store."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: WrapperStore | None, owner: type) -> Any:  # noqa: ANN401  # of its kind
        return self if wrapper is None else getattr(wrapper.inner, self._name)


class WrapperStore(Catalogue):
    """A store that hands every call to `inner`; `put_all` becomes one `put` after another.
    Subclasses override what they change.

    Closing the wrapper closes the inner store.
    """

    def __init__(self, inner: Catalogue) -> None:
        self.inner = inner
        self.url = inner.url
        self.multi_process = inner.multi_process

    def of(self, namespace: bytes) -> Catalogue:
        values = self.inner.of(namespace)
        return self if values is self.inner else values

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"


for _name in {*vars(Store), *vars(Catalogue)} - {*vars(WrapperStore), *_OF_EACH}:
    if not _name.startswith("_"):
        setattr(WrapperStore, _name, _OfInner(_name))
update_abstractmethods(WrapperStore)  # type: ignore[type-abstract]  # no longer
