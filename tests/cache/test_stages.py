"""Pipeline stages hold ranges of layers, some of them none, and their records are those of an
engine that holds all."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.layout.shards import pipeline_shard
from tests.cache.hosts import make_groups

from .keeping import PROMPT, records, run_until_stored
from .windowed import MIXED

ONE = make_groups(num_layers=5, num_kv_heads=2)
LATENT = make_groups(num_layers=3, num_kv_heads=1)

STAGES = {
    "halves": (ONE, 1, [[(0, 3)], [(3, 5)]]),
    "two ranks each": (ONE, 2, [[(0, 1)], [(1, 5)]]),
    "a head that ranks share": (LATENT, 2, [[(0, 2)], [(2, 3)]]),
    "three": (ONE, 1, [[(0, 1)], [(1, 2)], [(2, 5)]]),
    "none in the first": (ONE, 1, [[(0, 0)], [(0, 5)]]),
    "none in the last": (ONE, 2, [[(0, 5)], [(5, 5)]]),
    "a group in one of them": (MIXED, 1, [[(0, 2), (0, 0)], [(2, 2), (0, 3)]]),
    "both groups in both": (MIXED, 1, [[(0, 1), (0, 2)], [(1, 2), (2, 3)]]),
}


def shape_of(case: str) -> dict[str, object]:
    groups, tp_size, stages = STAGES[case]
    return {"groups": groups, "world_size": tp_size * len(stages), "stages": stages}


def stored(make_host, store: Path, **shape) -> dict[str, bytes]:
    host = make_host(store=store.as_uri(), engine_id=store.name, **shape)
    run_until_stored(host, PROMPT, budget=8)
    return {path.name: path.read_bytes() for path in records(store / "records")}


@pytest.mark.parametrize("case", STAGES)
def test_stages_store_the_bytes_that_one_rank_stores(make_host, tmp_path, case):
    alone = stored(make_host, tmp_path / "alone", groups=STAGES[case][0])
    assert stored(make_host, tmp_path / "stages", **shape_of(case)) == alone


@pytest.mark.parametrize("case", STAGES)
@pytest.mark.parametrize("audit", ["off", "1.0"])
def test_stages_read_what_one_rank_stored(make_host, tmp_path, case, audit):
    store = tmp_path / "store"
    stored(make_host, store, groups=STAGES[case][0])
    reader = make_host(store=store.as_uri(), audit=audit, engine_id="reader", **shape_of(case))
    # The host checks every byte of every rank.
    request = reader.run("reader", PROMPT)
    assert request.num_external_tokens == (40 if audit == "off" else 32)
    reader.settle()
    assert reader.observer["audits"] == (audit != "off")
    assert reader.observer["audit_mismatch"] == reader.observer["audit_failed"] == 0


def test_one_rank_reads_what_stages_stored_and_a_chunk_counts_with_the_last(make_host, tmp_path):
    store = tmp_path / "store"
    stored(make_host, store, **shape_of("two ranks each"))
    damaged = records(store / "records")[0]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1  # of the last layer, which the last stage alone reads
    for case, wrong in (("halves", 0), ("three", 1)):
        if wrong:
            damaged.write_bytes(content)
        reader = make_host(store=store.as_uri(), **shape_of(case))
        hit = reader.run("reader", PROMPT).num_external_tokens
        assert hit == 40 if not wrong else hit < 40
        assert reader.observer["miss_bad_checksum"] == wrong


def test_ranks_of_a_stage_share_memory_and_write_once():
    ranks = [pipeline_shard(LATENT, rank, 4, [[(0, 2)], [(2, 3)]]) for rank in range(4)]
    assert [rank.groups[0].layers for rank in ranks] == [(0, 2), (0, 2), (2, 3), (2, 3)]
    assert [rank.groups[0].writes for rank in ranks] == [True, False, True, False]
    assert {rank.num_replicas for rank in ranks} == {2}
    assert [rank.rank - rank.rank % rank.num_replicas for rank in ranks] == [0, 0, 2, 2]
