"""What commands erased, as the scheduler role heeds it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvferry.cache.deciding.request import Request
from kvferry.keys import ChunkKeys
from kvferry.store.base import Store, Value
from kvferry.store.erasures import name_of_key, name_of_mark, name_of_namespace, names_in


class Erased:
    """The names that a store heard of, and how many of them the scheduler role has heeded. Memory
    only.

    Runs in: scheduler thread, but for `covers`.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_heeded = 0

    def pending(self) -> Sequence[str]:
        """The names that were not heeded yet; commonly none."""
        return self._store.erased_since(self._num_heeded)

    def heeded(self, names: Collection[str]) -> None:
        self._num_heeded += len(names)

    def covers(self, value: Value) -> bool:
        """Whether a record was erased, and the scheduler role has not dropped it yet, as in an
        engine without requests. Any thread."""
        names = self.pending()
        return bool(names) and not set(names).isdisjoint(names_in(value))


def is_of_request(names: frozenset[str], namespace: bytes, request: Request) -> bool:
    """Whether one of the names is that of a request's namespace, salt or chunk."""
    keys: ChunkKeys = request.keys
    if not names.isdisjoint((name_of_namespace(namespace), name_of_mark(keys.mark))):
        return True
    return any(name_of_key(key) in names for key in keys.keys)
