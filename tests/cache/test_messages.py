"""What crosses between the roles is a value: nobody changes it after it was handed over."""

from __future__ import annotations

import inspect

import msgspec
import pytest
from msgspec.structs import replace

from kvferry.cache import messages
from kvferry.cache.messages import CacheMeta, Filled, RankReport, SlotRegion
from kvferry.layout.shards import tensor_parallel_shard
from tests.cache.hosts import make_groups

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


def test_a_region_of_a_release_that_does_not_tell_its_slots_is_read():
    shard = tensor_parallel_shard(make_groups(), 1, 2)
    region = SlotRegion("name", 7, 3, shard, b"n" * 32, True, 8, 4096)
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(region))
    assert msgspec.convert(told, SlotRegion, strict=False) == region
    for number, lacking in ((1, {"slot_bytes": 0}), (2, {"slot_bytes": 0, "num_slots": 0})):
        assert msgspec.convert(told[:-number], SlotRegion, strict=False) == replace(
            region, **lacking
        )
