"""The base of stores that stand in front of another store and change one thing about it."""

from kvferry.store.wrapper import WrapperStore

__all__ = ["WrapperStore"]
