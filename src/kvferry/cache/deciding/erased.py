"""What commands erased, as the scheduler role heeds it."""

from __future__ import annotations

import logging

from kvferry.cache.deciding.host_pool import HostPool
from kvferry.cache.deciding.request import Request
from kvferry.cache.deciding.requests import Requests
from kvferry.store.base import Store, Value
from kvferry.store.erasures import name_of_key, name_of_mark, name_of_namespace, names_in, names_of

logger = logging.getLogger(__name__)


class Erased:
    """Drops what commands erased. Memory only.

    Runs in: scheduler thread, but for `covers`.

    Args:
        store: hears what is erased.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._num_heeded = 0  # of the names that the store heard of

    def heed(self, requests: Requests, pool: HostPool) -> None:
        """Drop what was erased since the last call: from memory, and of live requests what is still
        to be saved. What a live request was promised is loaded; no other finds it."""
        pending = self._store.erased_since(self._num_heeded)
        if not pending:
            return
        names = frozenset(pending)
        namespace = requests.namespace
        for request in requests.by_id.values():
            if _is_of(names, namespace, request):
                request.erase()
        pool.erase(lambda slot: not names.isdisjoint(names_of(namespace, slot.key, slot.mark)))
        self._num_heeded += len(pending)
        logger.info("dropped from memory what a command erased (%d names)", len(names))

    def covers(self, value: Value) -> bool:
        """Whether a record was erased, and is not dropped yet, as in an engine without requests.
        Any thread."""
        names = self._store.erased_since(self._num_heeded)
        return bool(names) and not set(names).isdisjoint(names_in(value))


def _is_of(names: frozenset[str], namespace: bytes, request: Request) -> bool:
    """Whether one of the names is that of a request's namespace, salt or chunk."""
    keys = request.keys
    if not names.isdisjoint((name_of_namespace(namespace), name_of_mark(keys.mark))):
        return True
    return any(name_of_key(key) in names for key in keys.keys)
