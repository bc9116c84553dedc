"""The order of the pool's axes in memory."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.config import KV_LAYOUTS, EngineConfig
from kvferry.engine.kv_pool import PoolSpec, allocate_pool
from kvferry.errors import ConfigError

SPEC = PoolSpec(
    layer_names=("a", "b", "c"),
    num_blocks=5,
    block_size=7,
    num_kv_heads=2,
    head_size=6,
    dtype=torch.float16,
)
SIZES = {"L": 3, "B": 5, "H": 2, "N": 7, "C": 6}


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_layers_are_views_into_one_tensor_whose_axes_lie_as_the_name_says(kv_layout):
    layers = allocate_pool(SPEC, kv_layout, torch.device("cpu"))
    assert [name for name, _ in layers] == ["a", "b", "c"]
    step = 1
    strides = {}
    for axis in reversed(KV_LAYOUTS[kv_layout]):
        strides[axis] = step
        step *= SIZES[axis]
    for index, (_, tensor) in enumerate(layers):
        assert tensor.shape == (5, 2, 7, 6)
        assert tensor.stride() == tuple(strides[axis] for axis in "BHNC")
        assert tensor.storage_offset() == index * strides["L"]
        assert tensor.untyped_storage().data_ptr() == layers[0][1].untyped_storage().data_ptr()
        assert tensor.dtype is torch.float16
        assert not tensor.any()


def test_a_pool_that_does_not_fit_and_an_unknown_layout_are_refused():
    huge = PoolSpec(
        **{name: getattr(SPEC, name) for name in PoolSpec.__slots__ if name != "num_blocks"},
        num_blocks=1 << 50,
    )
    with pytest.raises(ConfigError, match="no memory for a KV pool"):
        allocate_pool(huge, "HND", torch.device("cpu"))
    with pytest.raises(ConfigError, match="kv_layout is 'NDH'; it must be one of HND, NHD, cross"):
        EngineConfig(kv_layout="NDH")
