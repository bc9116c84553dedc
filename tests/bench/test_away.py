"""`kvferry bench away`: that its stores are away, each in its way."""

from __future__ import annotations

import time

import pytest

from kvferry.bench import BenchOptions, away
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


def test_each_store_is_a_row_beside_the_engine_without(tmp_path):
    plain, *others = away.run(BenchOptions(directory=tmp_path, quick=True))
    assert plain["store"] == "no connector"
    assert plain["ratio"] == 1
    assert [row["store"] for row in others] == ["refuses", "never answers"]
    for row in others:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / plain["tokens_per_s"])
