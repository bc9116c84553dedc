"""How far KV that was computed again differs from its record."""

from __future__ import annotations

import pytest
import torch

from kvferry.blocks.audit import largest_difference, tensors_of
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import (
    TOLERANCE,
    TOLERANCE_OF_8_BITS,
    TOLERANCE_OF_8_BITS_WITH_EXPERTS,
    TOLERANCE_WITH_EXPERTS,
    tolerances_for,
)
from kvferry.record.schema import RecordSchema
from kvferry.types import GroupShard, KVGroup, RankShard


def worst_of(computed, stored, tolerances=TOLERANCE):
    """The largest difference in layers of a shallow model."""
    depths = [range(len(each)) for each in computed]
    return largest_difference(computed, stored, tolerances, depths)


def random_kv(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("is_value", [False, True])
def test_it_names_the_group_layer_head_and_half_that_differ_most(is_value):
    kv = [random_kv(2, 3, 32, 16), random_kv(4, 3, 32, 16)]
    other = [each.clone() for each in kv]
    other[0][1, 1] *= 1.0001
    other[1][3, 2, :, 8 * is_value : 8 * is_value + 8] *= 1.1
    found = worst_of(kv, other)
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
    assert worst_of([kv.to(dtype)], [stored]).excess < 1
    biased = (kv * (1 + 4 * limits.bias) + rounding).to(dtype)
    found = worst_of([kv.to(dtype)], [biased])
    assert found.error < limits.error
    assert found.excess > 1


def test_a_tenth_of_the_tokens_may_have_gone_to_other_experts():
    kv, other = random_kv(2, 2, 40, 16), random_kv(2, 2, 40, 16)
    other[:, :, 7:11] = random_kv(2, 2, 4, 16, seed=1)
    assert worst_of([kv], [other]).excess < 1
    other[:, :, 20] = 0
    assert worst_of([kv], [other]).excess > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_equal_values_that_are_no_numbers_are_no_mismatch_and_others_are(value):
    kv = random_kv(2, 2, 32, 16)
    kv[1, 0, 3, 2] = value
    assert worst_of([kv], [kv.clone()]).excess <= 1
    assert not worst_of([kv], [kv * value]).excess <= 1
    scaled = kv.clone()
    scaled[1, 0, :, :2] *= 2
    assert worst_of([kv], [scaled]).excess > 1


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


def compressed(**inputs):
    """As compressed-tensors writes it."""
    inputs = inputs or None
    group = {"weights": {"num_bits": 4}, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def model_opt(algorithm, **more):
    """As ModelOpt writes it into `hf_quant_config.json`."""
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": "NVFP4", **more}
    return {"hf_quant_config": {"producer": {"name": "modelopt"}, "quantization": settings}}


def by_layer(*algorithms):
    layers = {f"layers.{n}": {"quant_algo": each} for n, each in enumerate(algorithms)}
    return model_opt("MIXED_PRECISION", quantized_layers=layers)


def quark(inputs, weight="fp4"):
    layer = {"weight": {"dtype": weight}, "input_tensors": inputs and {"dtype": inputs}}
    settings = {"global_quant_config": layer, "layer_quant_config": {}}
    return {"quantization_config": {"quant_method": "quark", **settings}}


OF_8_BITS = [
    model_opt("W4A8_MXFP4_FP8"),
    model_opt("fp8_pb_wo"),
    by_layer("FP8", "W4A16_NVFP4"),
    quark("fp8_e4m3"),
    quark("int8", weight="int4"),
    {"quantization_config": {"quant_method": "w4afp8"}},
    {"quantization_config": {"config_groups": {"W8A8": ["Linear"], "W4A16": ["re:x"]}}},
    {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
    {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    {"hf_quant_config": {"quantization": {"quant_algo": "FP8"}}},
    {"quantization_config": {"quant_method": "mxfp4"}},
    {"quantization_config": compressed(num_bits=8, type="float")},
    {"text_config": {"quantization_config": {"quant_method": "torchao"}}},
    {"overrides": {"quantization_config": {"quant_method": "of next year"}}},
    {"online_quantization": {"method": "mxfp8", "options": "None"}},
    {"quantization_config": {"quant_method": "gptq"}, "VLLM_MARLIN_INPUT_DTYPE": "int8"},
]


@pytest.mark.parametrize("config", OF_8_BITS)
def test_activations_of_8_bits_have_limits_of_their_own(config):
    assert tolerances_for(config) is TOLERANCE_OF_8_BITS
    assert tolerances_for(config | {"num_experts": 8}) is TOLERANCE_OF_8_BITS_WITH_EXPERTS


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {"quantization_config": compressed(num_bits=4, type="float")},
        {"quantization_config": {"quant_method": "fp_quant", "forward_dtype": "nvfp4"}},
        {"online_quantization": {"method": "nvfp4_per_token", "options": "None"}},
        {"online_quantization": {"method": "online", "options": "Args(linear=nvfp4_per_token)"}},
        {"quantization_config": {"quant_method": "modelopt_fp4"}},
        {"quantization_config": {"config_groups": {"MXFP4": ["Linear"]}}},
        model_opt("NVFP4"),
        by_layer("FP8", "NVFP4"),
        quark("fp4"),
        quark("int4"),
    ],
)
def test_activations_of_4_bits_have_none(config):
    assert tolerances_for(config) == tolerances_for(config | {"num_experts": 8}) == {}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"quantization_config": {"quant_method": "gptq", "bits": 8}},
        {"quantization_config": compressed()},
        {"online_quantization": {"method": "int8_per_channel_weight_only"}},
        {"quantization_config": None},
        {"quantization_config": {"quant_method": "moe_wna16"}},
        {"quantization_config": compressed() | {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {"quantization_config": {"config_groups": {"NVFP4A16": ["Linear"]}}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
        model_opt("W4A16_AWQ"),
        model_opt("W4A16_NVFP4"),
        by_layer("W4A16_AWQ", "W4A16_NVFP4"),
        quark(None),
    ],
)
def test_quantised_weights_alone_have_the_usual_limits(config):
    assert tolerances_for(config) is TOLERANCE
    assert tolerances_for(config | {"num_experts": 8}) is TOLERANCE_WITH_EXPERTS


def test_deep_layers_may_differ_by_the_square_root_of_their_depth():
    kv = random_kv(80, 1, 128, 16)
    other = kv + 5e-4 * random_kv(80, 1, 128, 16, seed=1)
    found = [
        largest_difference([kv[i : i + 1]], [other[i : i + 1]], TOLERANCE, [[i]]).excess
        for i in (0, 7, 8, 32, 79)
    ]
    assert found == pytest.approx([1, 1, 1, 1 / 2, (8 / 79) ** 0.5], rel=0.1)


@pytest.mark.parametrize(("held", "depths"), [((0, 3), [0, 4, 8]), ((2, 3), [8]), ((0, 0), [])])
def test_layers_of_a_group_are_taken_as_spread_over_the_model(held, depths):
    """Here 9 layers with a window stand beside 3 without."""
    sizes = {"num_kv_heads": 1, "content_size": 8, "dtype": "float32", "block_size": 4}
    groups = (KVGroup(num_layers=9, window=16, **sizes), KVGroup(num_layers=3, **sizes))
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=8, groups=groups)
    shards = tuple(
        GroupShard(layers=layers, heads=(0, 1), writes=True) for layers in ((0, 9), held)
    )
    rows = RankRows(groups, RankShard(rank=0, world_size=1, groups=shards), schema)
    assert rows.depths_of(1) == depths


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
    assert worst_of(tensors, tensors).excess <= 1
    other = [each + 1 for each in tensors]
    assert worst_of(tensors, other).excess > 1
