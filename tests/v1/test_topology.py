"""`TpKVTopology` gives the numbers of its release, and names the sizes that do not fit."""

from __future__ import annotations

import pytest

from kvferry.errors import TopologyError
from kvferry.v1 import TpKVTopology


class KVFirst:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class BlocksFirst:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)


class Latent:
    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, block_size, head_size)


def make_topology(
    *,
    rank=0,
    local=4,
    remote=2,
    heads=8,
    is_mla=False,
    backend=KVFirst,
    blocks=16,
    remote_blocks=16,
):
    return TpKVTopology(
        tp_rank=rank,
        remote_tp_size={"local": local, "remote": remote},
        is_mla=is_mla,
        total_num_kv_heads=heads,
        attn_backend=backend,
        engine_id="local",
        remote_block_size={"local": blocks, "remote": remote_blocks},
    )


# local TP, remote TP, heads, MLA, ratio, target ranks of each local rank, whether the remote (then
# the local) engine replicates in the 0.14 sense.
ROWS = [
    (4, 2, 8, False, 2, [[0], [0], [1], [1]], (False, False)),
    (2, 4, 8, False, -2, [[0, 1], [2, 3]], (False, False)),
    (4, 4, 8, False, 1, [[0], [1], [2], [3]], (False, False)),
    (8, 1, 8, False, 8, [[0]] * 8, (False, True)),
    (8, 2, 4, False, 4, [[0]] * 4 + [[1]] * 4, (False, True)),
    (2, 8, 4, False, -4, [[0, 1, 2, 3], [4, 5, 6, 7]], (True, False)),
    (1, 4, 4, False, -4, [[0, 1, 2, 3]], (True, False)),
    (4, 8, 8, False, -2, [[0, 1], [2, 3], [4, 5], [6, 7]], (True, False)),
    (4, 4, 1, True, 1, [[0], [1], [2], [3]], (True, True)),
]


@pytest.mark.parametrize(
    ("local", "remote", "heads", "is_mla", "ratio", "targets", "replicated"), ROWS
)
def test_worked_rows(local, remote, heads, is_mla, ratio, targets, replicated):
    for rank, expected in enumerate(targets):
        topology = make_topology(
            rank=rank, local=local, remote=remote, heads=heads, is_mla=is_mla,
            backend=Latent if is_mla else KVFirst,
        )  # fmt: skip
        assert topology.tp_ratio(remote) == ratio
        assert topology.tp_ratio_from_engine_id("remote") == ratio
        assert topology.get_target_remote_ranks(remote) == expected
        assert topology.get_target_remote_ranks_from_engine_id("remote") == expected
    assert tuple(map(topology.is_kv_replicated, ("remote", "local"))) == replicated
    assert topology.replicates_kv_cache("remote") is (is_mla or replicated[0])


def test_mla_is_replicated_even_on_one_rank():
    topology = make_topology(local=1, remote=1, heads=8, is_mla=True, backend=Latent)
    assert not topology.is_kv_replicated("remote")
    assert topology.replicates_kv_cache("remote")


@pytest.mark.parametrize(
    ("backend", "is_mla", "blocks_first", "split"),
    [
        (KVFirst, False, False, True),
        (BlocksFirst, False, True, False),
        (Latent, True, False, False),
    ],
)
def test_the_layout_follows_from_the_backend(backend, is_mla, blocks_first, split):
    topology = make_topology(backend=backend, is_mla=is_mla)
    assert topology.is_kv_layout_blocks_first is blocks_first
    assert topology.split_k_and_v is split


@pytest.mark.parametrize(("local", "remote", "ratio"), [(16, 16, 1), (64, 16, 4), (128, 32, 4)])
def test_block_size_ratios(local, remote, ratio):
    topology = make_topology(blocks=local, remote_blocks=remote)
    assert topology.block_size_ratio(remote) == ratio
    assert topology.block_size_ratio_from_engine_id("remote") == ratio


@pytest.mark.parametrize(("local", "remote"), [(3, 2), (2, 3), (4, 6), (6, 4)])
def test_sizes_that_do_not_divide_are_named(local, remote):
    topology = make_topology(local=local, remote=remote)
    message = rf"sizes {local} \(local\) and {remote} \(remote\)"
    for call in (topology.tp_ratio, topology.get_target_remote_ranks):
        with pytest.raises(TopologyError, match=message):
            call(remote)


@pytest.mark.parametrize(("local", "remote"), [(16, 64), (48, 32)])
def test_block_sizes_that_do_not_divide_are_named(local, remote):
    topology = make_topology(blocks=local, remote_blocks=remote)
    with pytest.raises(TopologyError, match=f"{local} is not a multiple .* {remote}"):
        topology.block_size_ratio(remote)


def test_an_unknown_engine_is_named_with_the_known_ones():
    with pytest.raises(TopologyError, match=r"'other' is known \(known: 'local', 'remote'\)"):
        make_topology().is_kv_replicated("other")
    with pytest.raises(TopologyError, match="block size of engine 'other'"):
        make_topology().block_size_ratio_from_engine_id("other")


@pytest.mark.parametrize(
    ("topology", "call"),
    [
        (make_topology(rank=4), lambda t: t.get_target_remote_ranks(2)),
        (make_topology(rank=-1), lambda t: t.get_target_remote_ranks(2)),
        (make_topology(local=0), lambda t: t.tp_ratio(1)),
        (make_topology(), lambda t: t.tp_ratio(0)),
        (make_topology(), lambda t: t.block_size_ratio(-16)),
    ],
)
def test_impossible_ranks_and_sizes_are_refused(topology, call):
    with pytest.raises(TopologyError):
        call(topology)


def test_a_model_without_heads_is_refused():
    with pytest.raises(TopologyError, match="total_num_kv_heads is 0"):
        make_topology(heads=0)
