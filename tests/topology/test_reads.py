"""Read plans: each layer, head and token once, from a rank that has it, into its place."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import TopologyError
from kvferry.topology import KVPlacement, RankId, TokenRuns, read_plan, readers

ALL_TOKENS = TokenRuns(1, ((0, 1),))


def make_placement(*, tp=1, heads=4, layers=(2,), **sizes):
    return KVPlacement(num_kv_heads=heads, layers=layers, tp_size=tp, **sizes)


def sources(local, remote):
    """For each local tensor-parallel rank, the remote ones that it reads."""
    return [
        [read.rank.tp for read in read_plan(local, RankId(tp=tp), remote)]
        for tp in range(local.tp_size)
    ]


@pytest.mark.parametrize(
    ("local", "remote", "heads", "expected"),
    [
        (2, 8, 4, [[0, 2], [4, 6]]),
        (1, 4, 2, [[0, 2]]),
        (4, 8, 2, [[0], [2], [4], [6]]),
        (2, 4, 1, [[0], [2]]),  # MLA
        (8, 2, 4, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (8, 4, 4, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (4, 2, 8, [[0], [0], [1], [1]]),
        (1, 4, 4, [[0, 1, 2, 3]]),
    ],
)
def test_a_replicated_head_is_read_from_one_rank(local, remote, heads, expected):
    local, remote = make_placement(tp=local, heads=heads), make_placement(tp=remote, heads=heads)
    assert sources(local, remote) == expected


@pytest.mark.parametrize(
    ("local", "remote", "heads", "offsets", "consumers"),
    [
        (8, 2, 4, [0, 0, 1, 1, 0, 0, 1, 1], 4),
        (4, 2, 8, [0, 1, 0, 1], 2),  # in shares of a local rank: 2 heads
        (8, 4, 4, [0] * 8, 2),
    ],
)
def test_offsets_inside_the_remote_rank(local, remote, heads, offsets, consumers):
    local, remote = make_placement(tp=local, heads=heads), make_placement(tp=remote, heads=heads)
    reads = [read_plan(local, rank, remote) for rank in local.ranks()]
    share = max(1, heads // local.tp_size)
    assert [read.remote_head / share for (read,) in reads] == offsets
    assert {len(readers(local, remote, rank)) for rank in remote.ranks()} == {consumers}


@pytest.mark.parametrize(
    ("tp", "dcp", "expected", "consumers"),
    [
        ((4, 2), (4, 2), [[0], [1], [0], [1]], 2),
        ((2, 4), (2, 4), [[0, 2], [1, 3]], 1),
        ((1, 4), (1, 4), [[0, 1, 2, 3]], 1),
    ],
)
def test_mla_with_decode_context_parallelism(tp, dcp, expected, consumers):
    local, remote = (
        make_placement(tp=t, heads=1, dcp_size=d) for t, d in zip(tp, dcp, strict=True)
    )
    assert sources(local, remote) == expected
    assert {len(readers(local, remote, rank)) for rank in remote.ranks()} == {consumers}


def test_a_rank_that_no_reader_needs_has_no_readers():
    local, remote = make_placement(tp=1, heads=1), make_placement(tp=2, heads=1)
    assert readers(local, remote, RankId(tp=0)) == (RankId(),)
    assert readers(local, remote, RankId(tp=1)) == ()


def test_pipeline_stages_are_read_from_where_they_are():
    local, remote = make_placement(layers=(3, 4)), make_placement(tp=2, layers=(2, 0, 5))
    reads = read_plan(local, RankId(pp=1), remote)
    assert [(r.rank, r.layers, r.heads) for r in reads] == [
        (RankId(tp=0, pp=2), (3, 7), (0, 2)),
        (RankId(tp=1, pp=2), (3, 7), (2, 4)),
    ]
    assert [(r.remote_layer, r.local_layer, r.remote_head, r.local_head) for r in reads] == [
        (1, 0, 0, 0),
        (1, 0, 0, 2),
    ]
    first = read_plan(local, RankId(pp=0), remote)
    assert [(r.rank.pp, r.layers, r.remote_layer, r.local_layer) for r in first] == [
        (0, (0, 2), 0, 0), (0, (0, 2), 0, 0), (2, (2, 3), 0, 2), (2, (2, 3), 0, 2),
    ]  # fmt: skip


def test_tokens_of_other_interleaving():
    local, remote = make_placement(pcp_size=2, interleave=4), make_placement(pcp_size=3)
    reads = read_plan(local, RankId(pcp=1), remote)
    assert [read.rank.pcp for read in reads] == [0, 1, 2]
    # Of 24 positions the reader has 4-7, 12-15, 20-23.
    assert reads[0].tokens == TokenRuns(24, ((6, 7), (12, 13), (15, 16), (21, 22)))
    assert list(reads[0].tokens.clip(7, 31)) == [(12, 13), (15, 16), (21, 22), (30, 31)]


def test_runs_are_joined_and_clipped():
    assert list(ALL_TOKENS.clip(5, 37)) == [(5, 37)]
    assert list(ALL_TOKENS.clip(5, 5)) == []
    assert list(TokenRuns(8, ((0, 2), (6, 8))).clip(1, 20)) == [(1, 2), (6, 10), (14, 18)]


# -- any sizes that divide ---------------------------


@st.composite
def pairs(draw):
    """Two placements of one model."""
    heads = draw(st.integers(1, 6))
    num_layers = draw(st.integers(1, 5))
    return tuple(draw(placements(heads, num_layers)) for _ in range(2))


@st.composite
def placements(draw, heads, num_layers):
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    tp = draw(st.sampled_from(divisors)) if draw(st.booleans()) else heads * draw(st.integers(1, 6))
    replicas = max(1, tp // heads)
    cuts = draw(st.lists(st.integers(0, num_layers), max_size=2).map(sorted))
    bounds = [0, *cuts, num_layers]
    return KVPlacement(
        num_kv_heads=heads,
        layers=tuple(stop - start for start, stop in pairwise(bounds)),
        tp_size=tp,
        dcp_size=draw(st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0])),
        pcp_size=draw(st.integers(1, 2)),
        interleave=draw(st.integers(1, 3)),
    )


def cells(placement, rank, tokens):
    """All (layer, head, token) that a rank holds."""
    layers, heads = placement.layers_of(rank), placement.heads_of(rank)
    shard = placement.token_shard_of(rank)
    return {
        (layer, head, token)
        for layer in range(*layers)
        for head in range(*heads)
        for token in range(tokens)
        if placement.token_shard(token) == shard
    }


def cells_of(read, tokens):
    positions = [t for start, stop in read.tokens.clip(0, tokens) for t in range(start, stop)]
    return [(la, h, t) for la in range(*read.layers) for h in range(*read.heads) for t in positions]


@given(pairs(), st.data())
def test_every_head_of_every_layer_is_read_once(pair, data):
    local, remote = pair
    rank = data.draw(st.sampled_from(list(local.ranks())))
    tokens = 2 * lcm(*(p.num_token_shards * p.interleave for p in pair)) + 1
    plan = read_plan(local, rank, remote)
    read_cells = Counter(cell for read in plan for cell in cells_of(read, tokens))
    assert read_cells == Counter(cells(local, rank, tokens))
    for read in plan:
        assert set(cells_of(read, tokens)) <= cells(remote, read.rank, tokens)
        first_layer, first_head = read.layers[0], read.heads[0]
        assert read.remote_layer == first_layer - remote.layers_of(read.rank)[0] >= 0
        assert read.remote_head == first_head - remote.heads_of(read.rank)[0] >= 0
        assert read.local_layer == first_layer - local.layers_of(rank)[0] >= 0
        assert read.local_head == first_head - local.heads_of(rank)[0] >= 0


@given(pairs())
def test_the_writers_of_an_engine_hold_everything_once(pair):
    placement = pair[0]
    tokens = 2 * placement.num_token_shards * placement.interleave
    held = Counter(
        cell
        for rank in placement.ranks()
        if placement.writes(rank)
        for cell in cells(placement, rank, tokens)
    )
    whole = placement.num_layers * placement.num_kv_heads * tokens
    assert len(held) == whole
    assert held.total() == whole


@given(pairs())
def test_a_ranks_tokens_are_counted_without_gaps(pair):
    placement = pair[0]
    tokens = 3 * placement.num_token_shards * placement.interleave
    for shard in range(placement.num_token_shards):
        mine = [t for t in range(tokens) if placement.token_shard(t) == shard]
        assert [placement.token_index(t) for t in mine] == list(range(len(mine)))


# -- bad input ---------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 3, "heads": 2},
        {"tp": 2, "heads": 3},
        {"tp": 0},
        {"heads": 0},
        {"layers": ()},
        {"layers": (2, -1)},
        {"interleave": 0},
        {"tp": 4, "heads": 4, "dcp_size": 2},
        {"tp": 8, "heads": 2, "dcp_size": 3},
    ],
)
def test_sizes_that_do_not_map_are_refused(sizes):
    with pytest.raises(TopologyError):
        make_placement(**sizes)


@pytest.mark.parametrize("rank", [RankId(tp=2), RankId(pp=1), RankId(pcp=1), RankId(tp=-1)])
def test_ranks_that_are_not_there_are_refused(rank):
    placement = make_placement(tp=2)
    with pytest.raises(TopologyError, match="is not a rank"):
        read_plan(placement, rank, placement)
    with pytest.raises(TopologyError, match="is not a rank"):
        readers(placement, placement, rank)


@pytest.mark.parametrize("sizes", [{"heads": 8}, {"layers": (3,)}])
def test_engines_of_different_models_are_refused(sizes):
    with pytest.raises(TopologyError, match="serve different models"):
        read_plan(make_placement(), RankId(), make_placement(**sizes))
