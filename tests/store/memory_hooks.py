"""Hooks by which the conformance suite changes and reads a store in memory behind its API."""

from __future__ import annotations

from kvferry.store.memory import MemoryStore


class MemoryHooks:
    def poke(self, store, key, value):
        MemoryStore.delete(store, key)  # keeps the counts: there is nothing behind a dict
        if value is not None:
            MemoryStore.put(store, key, [value])

    def peek(self, store, key):
        size = MemoryStore.read(store, key, [])
        if size is None:
            return None
        value = bytearray(size)
        MemoryStore.read(store, key, [(0, memoryview(value))])
        return bytes(value)
