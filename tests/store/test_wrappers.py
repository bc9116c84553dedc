from __future__ import annotations

from kvferry.store.base import (
    SupportsProbe,
    SupportsScan,
    SupportsShardedWrite,
)
from kvferry.store.memory import MemoryStore
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.faults import FailingStore, StallingStore
from kvferry.testing.stores import make_key


class EverythingStore(MemoryStore):
    """Has every ability and remembers what was called."""

    multi_process = True

    def __init__(self):
        super().__init__("everything")
        self.calls = []

    def probe(self, keys):
        self.calls.append(("probe", keys))

    def note_stored(self, key):
        pass

    def wait_indexed(self, timeout):
        self.calls.append(("wait_indexed", timeout))
        return True

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


def test_a_wrapper_has_the_abilities_of_its_inner_store_and_no_others():
    plain = WrapperStore(MemoryStore())
    assert isinstance(plain, SupportsScan)
    assert not isinstance(plain, SupportsProbe)
    assert not isinstance(plain, SupportsShardedWrite)
    able = WrapperStore(EverythingStore())
    assert isinstance(able, SupportsScan)
    assert isinstance(able, SupportsProbe)
    assert isinstance(able, SupportsShardedWrite)


def test_optional_calls_go_to_the_inner_store_as_they_are():
    inner = EverythingStore()
    with WrapperStore(inner) as store:
        store.probe([make_key()])
        assert store.wait_indexed(0.5) is True
        assert store.begin(make_key(), 7) == "session"
        assert store.write_at("session", 3, [b"x"]) is True
        assert store.commit("session", b"head") == "committed"
        store.abort("session")
        assert (store.url, store.multi_process) == ("memory://everything", True)
    assert inner.calls == [
        ("probe", [make_key()]),
        ("wait_indexed", 0.5),
        ("begin", make_key(), 7),
        ("write_at", "session", 3, [b"x"]),
        ("commit", "session", b"head"),
        ("abort", "session"),
    ]


def test_subclasses_and_nested_wrappers_keep_class_name_and_abilities():
    store = FailingStore(WrapperStore(EverythingStore()), operations={"put"})
    assert type(store).__name__ == "FailingStore"
    assert isinstance(store, FailingStore)
    assert not isinstance(store, StallingStore)
    assert isinstance(store, SupportsShardedWrite)
    assert repr(store) == (
        "<FailingStore of <WrapperStore of <MemoryStore memory://everything 0 values, 0 bytes>>>"
    )


def test_closing_a_wrapper_closes_the_inner_store():
    inner = MemoryStore()
    WrapperStore(inner).close()
    assert inner.put(make_key(), [b"late"]) == "failed"
