from __future__ import annotations

import pytest

from kvferry.errors import StoreError
from kvferry.store.base import Store, SupportsShardedWrite
from kvferry.store.memory import MemoryStore
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.faults import FailingStore
from kvferry.testing.stores import make_key


class EverythingStore(MemoryStore):
    """Is written in parts, and remembers what was called."""

    multi_process = True

    def __init__(self):
        super().__init__("everything")
        self.calls = []

    def begin(self, key, num_bytes):
        self.calls.append(("begin", key, num_bytes))
        return "session"

    def write_at(self, session, offset, buffers):
        self.calls.append(("write_at", session, offset, buffers))
        return True

    def commit(self, session, head):
        self.calls.append(("commit", session, head))
        return "committed"

    def abort(self, session):
        self.calls.append(("abort", session))


@pytest.mark.parametrize("name", [name for name in vars(Store) if not name.startswith("_")])
def test_every_call_goes_to_the_inner_store(name):
    """A method that the wrapper forgot would be answered by its default."""
    assert name in vars(WrapperStore) or name in vars(WrapperStore(MemoryStore()))


@pytest.mark.parametrize("make", [WrapperStore, lambda inner: FailingStore(inner, operations={})])
def test_values_are_written_in_parts_where_the_inner_store_can(make):
    assert not isinstance(make(MemoryStore()), SupportsShardedWrite)
    assert isinstance(make(EverythingStore()), SupportsShardedWrite)
    assert isinstance(make(WrapperStore(EverythingStore())), SupportsShardedWrite)


def test_parts_go_to_the_inner_store_as_they_are():
    inner = EverythingStore()
    with WrapperStore(inner) as store:
        assert store.begin(make_key(), 7) == "session"
        assert store.write_at("session", 3, [b"x"]) is True
        assert store.commit("session", b"head") == "committed"
        store.abort("session")
        assert (store.url, store.multi_process) == ("memory://everything", True)
    assert inner.calls == [
        ("begin", make_key(), 7),
        ("write_at", "session", 3, [b"x"]),
        ("commit", "session", b"head"),
        ("abort", "session"),
    ]


def test_the_text_of_a_wrapper_shows_what_is_inside():
    store = FailingStore(WrapperStore(EverythingStore()), operations={"put"})
    assert repr(store) == (
        "<FailingStore of <WrapperStore of <MemoryStore memory://everything 0 values, 0 bytes>>>"
    )


def test_values_of_the_inner_store_are_read_through_the_wrapper():
    store = FailingStore(MemoryStore(), operations={"read"})
    with pytest.raises(StoreError):
        store.of(bytes(32)).read(make_key(), ())


def test_closing_a_wrapper_closes_the_inner_store():
    inner = MemoryStore()
    WrapperStore(inner).close()
    assert inner.put(make_key(), [b"late"]) == "failed"
