"""Events for the host's subscribers: chunks that this engine saved, and their removal.

Events follow the store's index, so it does not matter which process stored or evicted a chunk. Each
step checks a few of the announced chunks in turn, so a removal is announced late, but steps stay
short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from kvferry.cache.deciding.requests import RequestState
from kvferry.cache.messages import Save
from kvferry.contract.messages import ChunksRemoved, ChunkStored
from kvferry.store.base import Store
from kvferry.types import ChunkKey, StepView

CHECKS_PER_STEP = 32

MAX_PENDING = 4096
"""Saves under way that are remembered for an announcement. With more, the oldest is forgotten."""

MAX_ANNOUNCED = 1 << 18
"""Chunks watched for removal (some 20 MiB). With more, the oldest is announced as gone: a
subscriber that misses a chunk asks another engine, one that expects a lost chunk asks in vain."""


class Announcer:
    """Asks the index of `store` only. Runs in: scheduler thread; memory only."""

    def __init__(self, store: Store, chunk_tokens: int) -> None:
        self._store = store
        self._chunk = chunk_tokens
        self._pending: dict[bytes, ChunkStored] = {}
        self._announced: OrderedDict[bytes, None] = OrderedDict()  # the next to be checked first
        self._gone: list[bytes] = []

    def planned(
        self, saves: Iterable[Save], step: StepView, requests: Mapping[str, RequestState]
    ) -> None:
        """Remember the events of a step's saves until the index knows the chunks."""
        by_key = {save.chunk.key: save.chunk.first_token // self._chunk for save in saves}
        for item in step.scheduled:
            state = requests.get(item.request.request_id)
            keys = () if state is None else state.keys.keys
            for key, index in by_key.items():
                if index < len(keys) and keys[index] == key and key not in self._announced:
                    first = index * self._chunk
                    tokens = item.request.all_token_ids[first : first + self._chunk]
                    self._pending[key] = ChunkStored(
                        key=key,
                        parent=keys[index - 1] if index else None,
                        token_ids=tuple(tokens),
                        extra_keys=item.request.extra_keys,
                    )
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]

    def failed(self, key: bytes) -> None:
        """A save failed."""
        self._pending.pop(key, None)

    def take(self) -> list[ChunkStored | ChunksRemoved]:
        """The events since the last call."""
        contains = self._store.contains
        gone, self._gone = self._gone, []
        stored = [key for key in self._pending if contains(ChunkKey(key))]
        events: list[ChunkStored | ChunksRemoved] = [self._pending.pop(key) for key in stored]
        self._announced.update(dict.fromkeys(stored))
        for _ in range(min(CHECKS_PER_STEP, len(self._announced))):
            key, _nothing = self._announced.popitem(last=False)
            # None, while the store asks, says nothing.
            if contains(ChunkKey(key)) is not False and len(self._announced) < MAX_ANNOUNCED:
                self._announced[key] = None
            else:
                gone.append(key)
        if gone:
            events.append(ChunksRemoved(keys=tuple(gone)))
        return events

    def forget_all(self) -> None:
        """Another epoch began: announced chunks can no longer be read."""
        self._gone += self._announced
        self._pending.clear()
        self._announced.clear()
