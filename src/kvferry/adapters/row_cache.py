"""Rows of a host's own cache as records of a store, under the host's keys.

vLLM's tier polls this, and SGLang's pages wait for it. Both know here when a store takes no rows,
which loads came too late, and to which namespace a row belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.keys import opaque_key
from kvferry.observe import Observer
from kvferry.record.check import ReadFault
from kvferry.record.schema import RecordSchema
from kvferry.store.base import PutResult, Store
from kvferry.store.record_client import Batch, RecordClient
from kvferry.types import ChunkKey

STORE_SECONDS = 30.0
"""After this, a row that is not stored yet is given up, and the host may use its memory again."""

Copy = Callable[[int, memoryview], None]
"""Copies from or to a payload. Gets the place of a row in its batch, and the record's payload,
which is all but its head. Must not block. Runs in: I/O thread."""


class RowCache:
    """See the module. Thread-safe; no call blocks but `close`.

    Args:
        schema: schema from `RecordSchema.for_rows`.
        threads: name of its I/O threads.

    Attributes:
        values: the store in the namespace of the rows.
    """

    def __init__(
        self,
        store: Store,
        schema: RecordSchema,
        observer: Observer,
        *,
        io_threads: int,
        threads: str,
    ) -> None:
        self._opened = store
        self.values = store.in_namespace(schema.namespace)
        self._schema = schema
        self._observer = observer
        self._client = RecordClient(store, schema, observer, io_threads, threads)

    @property
    def namespace(self) -> bytes:
        return self._schema.namespace

    @property
    def row_bytes(self) -> int:
        return self._schema.record_bytes - self._schema.head_bytes

    @property
    def is_stalled(self) -> bool:
        """See `RecordClient.is_stalled`."""
        return self._client.is_stalled

    def record(self, key: bytes) -> ChunkKey:
        """Return the key of the record of a row."""
        return opaque_key(self._schema.namespace, key)

    def load(self, records: Sequence[ChunkKey], land: Copy, deadline: float) -> Batch[ReadFault]:
        """Begin to read rows; each is verified before it goes to `land`."""
        head = self._schema.head_bytes

        def landed(place: int, image: memoryview) -> bool:
            land(place, image[head:])
            return False

        return self._client.get(records, [0] * len(records), landed, deadline)

    def store(self, records: Sequence[ChunkKey], fill: Copy, deadline: float) -> Batch[PutResult]:
        """Begin to store rows, which `fill` copies. Without I/O, none is stored if the store takes
        no values now."""
        if records and self.values.accepts() is not None:
            self._observer.count("stores_dropped", len(records))
            batch: Batch[PutResult] = Batch(len(records))
            batch.give_up(PutResult.FAILED)
            return batch
        head = self._schema.head_bytes

        def filled(place: int, image: memoryview) -> None:
            fill(place, image[head:])

        return self._client.put(records, [0] * len(records), filled, deadline)

    def give_up_load(self, batch: Batch[ReadFault]) -> None:
        """End a load whose deadline passed. If it brought nothing, the store is stalled."""
        brought = any(
            batch.has_ended(place) and result is not ReadFault.DEADLINE
            for place, result in enumerate(batch.results)
        )
        batch.give_up(ReadFault.DEADLINE)
        self._observer.count("loads_late")
        if not brought:
            self._client.note_stall()

    def give_up_store(self, batch: Batch[PutResult]) -> None:
        """End a store whose deadline passed."""
        batch.give_up(PutResult.FAILED)
        self._observer.count("stores_late")

    def begin_epoch(self, namespace: bytes) -> None:
        """Read and write under another namespace from now on."""
        self._schema = self._schema.with_namespace(namespace)
        self._client.switch_namespace(self._schema)
        self.values = self._opened.in_namespace(namespace)

    def close(self, seconds: float) -> None:
        """Wait up to `seconds` for threads. The store stays open."""
        self._client.close(seconds)
