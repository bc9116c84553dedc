"""What crosses between the roles is a value: nobody changes it after it was handed over."""

from __future__ import annotations

import inspect

import msgspec
import pytest

from kvferry.cache import messages
from kvferry.cache.messages import CacheMeta, Filled, RankReport

MESSAGES = [
    kind
    for _, kind in inspect.getmembers(messages, inspect.isclass)
    if issubclass(kind, msgspec.Struct) and kind.__module__ == messages.__name__
]


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_is_frozen_down_to_its_fields(kind):
    assert kind.__struct_config__.frozen
    for field in msgspec.structs.fields(kind):
        assert "list[" not in str(field.type)
        assert not str(field.type).startswith(("set[", "dict["))


def test_a_report_is_the_same_on_the_other_side():
    report = RankReport(
        rank=1,
        pool=7,
        filled=(Filled(3), Filled(4, "wrong_size")),
        failed_requests=frozenset({"a"}),
        failed_keys=(b"k" * 32,),
    )
    meta = CacheMeta(reports=(report,))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(meta), type=CacheMeta)
    assert decoded == meta
    assert hash(decoded.reports) == hash(meta.reports)
