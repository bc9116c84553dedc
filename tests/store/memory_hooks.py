"""What the conformance suite does behind the API of a store in memory."""

from __future__ import annotations

from kvferry.store.memory import MemoryStore, _Value


class MemoryHooks:
    def poke(self, store, key, value):
        MemoryStore.delete(store, key)  # keeps the counts: there is nothing behind a dict
        if value is not None:
            store._values[key] = _Value(value, 0.0)
            store._used_bytes += len(value)

    def peek(self, store, key):
        value = store._values.get(key)
        return None if value is None else bytes(value.content)
