"""The embedded default store: one directory, shared by processes, bounded, exact after a kill."""

from kvferry.store.file.store import FileStore

__all__ = ["FileStore"]
