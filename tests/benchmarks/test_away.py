"""`bench away`: that its stores are away, each in its way."""

from __future__ import annotations

import time

import pytest

from benchmarks import away
from kvferry.errors import StoreError
from kvferry.store.url import open_store
from kvferry.types import ChunkKey


@pytest.mark.parametrize(("listens", "way"), [(False, "refused"), (True, "no answer in time")])
def test_a_store_is_away_in_its_way(listens, way):
    with (
        away.server(listens=listens) as url,
        open_store(url) as store,
        pytest.raises(StoreError, match=way),
    ):
        store.read(ChunkKey(b"k" * 32), (), time.monotonic() + 1.0)


def test_each_store_is_a_row_beside_the_engine_without():
    plain, late = away.rows_of({"no connector": [100.0, 50.0], "never answers": [100.0, 40.0]})
    assert (plain["ratio"], plain["worst_round"]) == (1, 1)
    assert late["store"] == "never answers"
    assert late["tokens_per_s"] == pytest.approx(2 / (1 / 100 + 1 / 40))
    assert late["ratio"] == pytest.approx(late["tokens_per_s"] / plain["tokens_per_s"])
    assert late["worst_round"] == pytest.approx(0.8)
