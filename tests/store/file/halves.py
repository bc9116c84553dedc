"""The two halves of a put, for tests that act in between: write hidden bytes, then show them."""

from __future__ import annotations

from kvferry.store.base import PutResult
from kvferry.store.file import FileStore
from kvferry.store.file.writing import Writing
from kvferry.types import ChunkKey


def begin(store: FileStore, key: ChunkKey, value: bytes) -> Writing:
    begun = store._write(key, [memoryview(value)])
    assert isinstance(begun, Writing)
    return begun


def finish(store: FileStore, writing: Writing) -> PutResult:
    (answer,) = store._finish([writing])
    writing.close()
    return answer.result
