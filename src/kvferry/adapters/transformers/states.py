"""States in a store: what a cache keeps after some chunk besides the rows of its chunks.

A state is cut into parts, each a record as large as those of chunks, under keys that follow from
the key of the chunk that it stands behind. So every store, quota and command treats a part like any
other record, and the records of chunks are the same whether there is a state or not.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterator

from kvferry.keys import state_keys
from kvferry.observe import Observer
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Store, Where
from kvferry.store.record_client import RecordClient
from kvferry.types import ChunkKey


def num_parts(schema: RecordSchema, state_bytes: int) -> int:
    """Return the number of records of a state. `schema` is that of chunks."""
    return math.ceil(state_bytes / schema.of_state_parts().payload_bytes) if state_bytes else 0


class StateRecords:
    """Reads and writes states. One thread at a time.

    Args:
        schema: of chunks.
        parts: records of a state.
    """

    def __init__(
        self, store: Store, schema: RecordSchema, parts: int, observer: Observer, io_threads: int
    ) -> None:
        self._store = store
        self._schema = schema.of_state_parts()
        self._parts = parts
        self._client = RecordClient(store, self._schema, observer, io_threads, "kvferry-state")

    def keys(self, chunk: ChunkKey) -> list[ChunkKey]:
        """Return the keys of the state behind a chunk."""
        return state_keys(chunk, self._parts)

    def is_known(self, chunk: ChunkKey) -> bool:
        """Whether the store knows the state behind a chunk. A hint."""
        return all(self._store.where(key) is Where.HERE for key in self.keys(chunk))

    def read(self, chunk: ChunkKey, num_tokens: int, deadline: float) -> bytes | None:
        """Return the state behind a chunk, which ends after `num_tokens` of its prompt; None if it
        is not there, not right, or late. Trailing bytes may follow it."""
        payload = self._schema.payload_bytes
        whole = bytearray(payload * self._parts)

        def land(place: int, image: memoryview) -> bool:
            whole[place * payload : (place + 1) * payload] = image[self._schema.head_bytes :]
            return False

        positions = [num_tokens] * self._parts
        batch = self._client.get(self.keys(chunk), positions, land, deadline)
        try:
            if not batch.wait(max(0.0, deadline - time.monotonic())):
                return None
        finally:
            batch.give_up(ReadFault.CANCELLED)
        return None if any(batch.results) else bytes(whole)

    def write(self, states: dict[ChunkKey, tuple[int, bytes]], deadline: float) -> None:
        """Store the states behind chunks, each with the tokens before it."""
        self._client.put_all(self._images(states), deadline)

    def _images(
        self, states: dict[ChunkKey, tuple[int, bytes]]
    ) -> Iterator[tuple[ChunkKey, int, memoryview]]:
        payload, head = self._schema.payload_bytes, self._schema.head_bytes
        for chunk, (num_tokens, state) in states.items():
            for part, key in enumerate(self.keys(chunk)):
                if self._store.where(key) is not Where.HERE:
                    image = memoryview(mmap.mmap(-1, self._schema.record_bytes))
                    piece = state[part * payload : (part + 1) * payload]
                    image[head : head + len(piece)] = piece
                    yield key, num_tokens, image

    def fits(self, state: bytes) -> bool:
        """Whether a state fits into its records."""
        return len(state) <= self._parts * self._schema.payload_bytes

    def close(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for reads and writes under way; True if all ended."""
        return self._client.close(timeout)
