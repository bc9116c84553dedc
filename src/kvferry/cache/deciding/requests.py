"""The live requests that the scheduler role knows, and the chunks that they share."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from kvferry.cache.deciding.failed_keys import FailedKeys
from kvferry.cache.deciding.request import Request
from kvferry.keys import ChunkKeys
from kvferry.types import ChunkKey, ExtraKeys, RequestView


class Requests:
    """The live requests that may be cached, or that run and may be later. Runs in: scheduler
    thread; not thread-safe.

    Args:
        namespace: digest that roots the chunk keys.
        clock: monotonic seconds.

    Attributes:
        namespace: digest that roots the keys of new requests.
        by_id: the state of each request.
        at_work: those that have work for a plan, in the order in which they got it. Some may have
            none any more, until `planned`.
        unreadable: chunks that are not offered, although the store may seem to have them.
        refused: chunks that the store did not take.
    """

    def __init__(
        self,
        namespace: bytes,
        chunk_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.namespace = namespace
        self._chunk_tokens = chunk_tokens
        self.by_id: dict[str, Request] = {}
        self.at_work: dict[Request, None] = {}
        self.unreadable = FailedKeys(clock)
        self.refused = FailedKeys(clock)

    def follow(self, view: RequestView) -> bool:
        """Whether a request may be cached. If it changed, as a session grows, what was decided for
        it before ends."""
        is_cacheable = view.extra_keys.cacheable
        request = self.by_id.get(view.request_id)
        if request is not None and not request.is_past and not request.is_of(view):
            if is_cacheable or request.uncached is not None:
                request.grow(*self._of(view))
            else:
                request.give_back()
                del self.by_id[view.request_id]
        return is_cacheable

    def track(self, view: RequestView) -> Request:
        """Return the state of a request, with the keys of all chunks that are whole by now. A new
        request gets a new state. If a session grew, all is hashed again: the host took back tokens
        that it had not computed, and an item may cover what had none."""
        request = self.by_id.get(view.request_id)
        if request is None or request.is_past:
            uncached = None if request is None else request.uncached  # until it is admitted again
            request = Request(view, *self._of(view), time.time(), self.at_work, uncached=uncached)
            self.by_id[view.request_id] = request
        elif not request.is_of(view):
            request.grow(*self._of(view))
        request.view = view
        request.keys.extend(view.all_token_ids)
        return request

    def _of(self, view: RequestView) -> tuple[ChunkKeys, tuple[ExtraKeys, int]]:
        keys = ChunkKeys(self.namespace, self._chunk_tokens, view.extra_keys)
        return keys, (view.extra_keys, view.num_prompt_tokens)

    @property
    def has_work(self) -> bool:
        """Whether some request has work for a plan."""
        return bool(self.at_work) and any(request.has_work for request in self.at_work)

    def planned(self) -> None:
        """A plan was built, or could not be. It carries the loads; those that have no work any more
        are let go of."""
        for request in tuple(self.at_work):
            if request.load is not None:
                request.drop_load()
            if not (request.is_saving or request.has_work):
                del self.at_work[request]

    def behind(self, key: bytes) -> list[ChunkKey]:
        """Return the chunks of live requests from this one on. Rare; walks all live requests."""
        found: dict[ChunkKey, None] = {}
        for request in self.by_id.values():
            keys = request.keys.keys
            if key in keys:
                found.update(dict.fromkeys(keys[keys.index(ChunkKey(key)) :]))
        return list(found)

    def withdraw(self, keys: Collection[ChunkKey]) -> None:
        """End the searches that wait for one of these chunks, or were promised it. Rare; walks all
        live requests."""
        for request in self.by_id.values():
            search = request.search
            if search is not None and any(slot.key in keys for slot in search.pinned):
                request.end_search()

    def begin_epoch(self, namespace: bytes) -> None:
        """Forget all requests, but what those got that run uncached. New ones get keys of that
        namespace."""
        for request in self.by_id.values():
            request.outlive_epoch()
        self.namespace = namespace
        self.by_id = {name: each for name, each in self.by_id.items() if each.uncached is not None}
        self.unreadable.clear()
