from __future__ import annotations

import pytest

from kvferry.errors import StoreError
from kvferry.store.base import Store
from kvferry.store.memory import MemoryStore
from kvferry.testing.faults import FailingStore
from kvferry.testing.stores import make_key
from kvferry.testing.wrappers import WrapperStore

OF_EACH = {"check_medium", "put_all", "values_per_put", "catalogue"}
"""What follows from other calls: a wrapper that changes `put` changes it for values that are put
together, too, and one that changes `read` changes what the medium answers."""


@pytest.mark.parametrize("name", [n for n in vars(Store) if n[0] != "_" and n not in OF_EACH])
def test_every_call_goes_to_the_inner_store(name):
    assert name in vars(WrapperStore) or name in vars(WrapperStore(MemoryStore()))


def test_the_text_of_a_wrapper_shows_what_is_inside():
    store = FailingStore(WrapperStore(MemoryStore("inner")), operations={"put"})
    assert repr(store) == (
        "<FailingStore of <WrapperStore of <MemoryStore memory://inner 0 values, 0 bytes>>>"
    )


def test_values_of_the_inner_store_are_read_through_the_wrapper():
    store = FailingStore(MemoryStore(), operations={"read"})
    with pytest.raises(StoreError):
        store.in_namespace(bytes(32)).read(make_key(), ())


def test_closing_a_wrapper_closes_the_inner_store():
    inner = MemoryStore()
    WrapperStore(inner).close()
    assert inner.put(make_key(), [b"late"]).result == "failed"
