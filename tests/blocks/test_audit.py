"""How far KV that was computed again differs from its record."""

from __future__ import annotations

import pytest
import torch

from kvferry.blocks.audit import largest_difference, tensors_of
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import TOLERANCE, TOLERANCE_WITH_EXPERTS, tolerances_for
from kvferry.record.schema import RecordSchema
from kvferry.types import GroupShard, KVGroup, RankShard


def random_kv(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("is_value", [False, True])
def test_it_names_the_group_layer_head_and_half_that_differ_most(is_value):
    kv = [random_kv(2, 3, 32, 16), random_kv(4, 3, 32, 16)]
    other = [each.clone() for each in kv]
    other[0][1, 1] *= 1.0001
    other[1][3, 2, :, 8 * is_value : 8 * is_value + 8] *= 1.1
    found = largest_difference(kv, other, TOLERANCE)
    assert (found.group, found.layer, found.head, found.is_value) == (1, 3, 2, is_value)
    assert found.error == pytest.approx(0.1, rel=1e-3)
    assert found.bias == pytest.approx(0.1, rel=1e-3)
    assert found.excess > 1


@pytest.mark.parametrize("name", list(TOLERANCE))
def test_rounding_is_tolerated_and_a_bias_below_rounding_is_not(name):
    dtype, limits = getattr(torch, name), TOLERANCE[name]
    kv = random_kv(2, 2, 128, 64)
    rounding = 0.2 * limits.error * random_kv(2, 2, 128, 64, seed=1)
    stored = (kv + rounding).to(dtype)
    assert largest_difference([kv.to(dtype)], [stored], TOLERANCE).excess < 1
    biased = (kv * (1 + 4 * limits.bias) + rounding).to(dtype)
    found = largest_difference([kv.to(dtype)], [biased], TOLERANCE)
    assert found.error < limits.error
    assert found.excess > 1


def test_a_tenth_of_the_tokens_may_have_gone_to_other_experts():
    kv, other = random_kv(2, 2, 40, 16), random_kv(2, 2, 40, 16)
    other[:, :, 7:11] = random_kv(2, 2, 4, 16, seed=1)
    assert largest_difference([kv], [other], TOLERANCE).excess < 1
    other[:, :, 20] = 0
    assert largest_difference([kv], [other], TOLERANCE).excess > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_equal_values_that_are_no_numbers_are_no_mismatch_and_others_are(value):
    kv = random_kv(2, 2, 32, 16)
    kv[1, 0, 3, 2] = value
    assert largest_difference([kv], [kv.clone()], TOLERANCE).excess <= 1
    assert not largest_difference([kv], [kv * value], TOLERANCE).excess <= 1
    scaled = kv.clone()
    scaled[1, 0, :, :2] *= 2
    assert largest_difference([kv], [scaled], TOLERANCE).excess > 1


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 8},
        {"n_routed_experts": 2},
        {"num_local_experts": 4},
        {"moe_num_experts": [64, 64]},
        {"text_config": {"num_experts": 8}, "id2label": {0: "a"}},
    ],
)
def test_models_with_experts_have_limits_of_their_own(config):
    assert tolerances_for(config) is TOLERANCE_WITH_EXPERTS


@pytest.mark.parametrize(
    "config", [{}, {"num_experts": 1}, {"num_experts": None}, {"hidden_size": 64}]
)
def test_models_without_experts_have_the_usual_limits(config):
    assert tolerances_for(config) is TOLERANCE


def test_a_rank_without_layers_of_a_group_compares_the_others():
    groups = tuple(
        KVGroup(
            num_layers=2,
            num_kv_heads=1,
            content_size=8,
            dtype="float32",
            block_size=4,
            window=window,
        )
        for window in (None, 16)
    )
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=8, groups=groups)
    shards = tuple(
        GroupShard(layers=layers, heads=(0, 1), writes=True) for layers in ((0, 2), (0, 0))
    )
    rows = RankRows(groups, RankShard(rank=0, world_size=2, groups=shards), schema)
    tensors = tensors_of(rows, memoryview(bytearray(rows.slot_bytes)))
    assert [each.shape[0] for each in tensors] == [2, 0]
    assert largest_difference(tensors, tensors, TOLERANCE).excess <= 1
    other = [each + 1 for each in tensors]
    assert largest_difference(tensors, other, TOLERANCE).excess > 1
