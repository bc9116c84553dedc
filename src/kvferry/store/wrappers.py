"""The base of stores that stand in front of another store and change one thing about it."""

from __future__ import annotations

from typing import Any

from kvferry.store.base import Catalogue


class _OfInner:
    """An attribute or a method of a wrapper that is that of the inner store."""

    def __set_name__(self, owner: type, name: str) -> None:
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
        self.quarantines = inner.quarantines

    takes_values: Any = _OfInner()
    refusal: Any = _OfInner()
    contains: Any = _OfInner()
    read: Any = _OfInner()
    put: Any = _OfInner()
    discard: Any = _OfInner()
    delete: Any = _OfInner()
    touch: Any = _OfInner()
    stat: Any = _OfInner()
    tiers: Any = _OfInner()
    close: Any = _OfInner()
    needs_probes: Any = _OfInner()
    probe: Any = _OfInner()
    assume: Any = _OfInner()
    awaits: Any = _OfInner()
    note_stored: Any = _OfInner()
    wait_indexed: Any = _OfInner()
    on_result: Any = _OfInner()
    tier_of: Any = _OfInner()
    lists: Any = _OfInner()
    scan: Any = _OfInner()
    stored: Any = _OfInner()
    recent: Any = _OfInner()
    namespaces: Any = _OfInner()
    described: Any = _OfInner()
    describe: Any = _OfInner()
    removals: Any = _OfInner()
    facts: Any = _OfInner()
    gc: Any = _OfInner()
    pin: Any = _OfInner()

    def of(self, namespace: bytes) -> Catalogue:
        values = self.inner.of(namespace)
        return self if values is self.inner else values

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.inner!r}>"
