"""Why a request must not be cached."""

import pytest

from kvferry.cache.deciding.miss import Miss, refused
from kvferry.contract.messages import LookupMiss
from kvferry.types import ExtraKeys


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Miss(LookupMiss.NOT_CACHEABLE)),
        ({"reason": "adapter", "why": "no files"}, Miss(LookupMiss.ADAPTER, "no files")),
        ({"reason": "my own"}, Miss(LookupMiss.NOT_CACHEABLE, "my own")),
        ({"reason": "my own", "why": "x"}, Miss(LookupMiss.NOT_CACHEABLE, "my own x")),
    ],
)
def test_a_refusal_is_a_miss_whatever_an_engine_gives_as_its_reason(given, expected):
    assert refused(ExtraKeys(cacheable=False, **given)) == expected
