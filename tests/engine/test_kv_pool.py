"""The order of the pool's axes in memory."""

from __future__ import annotations

import pytest
import torch

from kvferry.engine.config import KV_LAYOUTS, EngineConfig
from kvferry.engine.kv_pool import allocate_pool
from kvferry.errors import ConfigError

NAMES = ("a", "b", "c")
SIZES = {"L": 3, "B": 5, "H": 2, "N": 7, "C": 6}


@pytest.mark.parametrize("kv_layout", KV_LAYOUTS)
def test_layers_are_views_into_one_tensor_whose_axes_lie_as_the_name_says(kv_layout):
    layers = allocate_pool(
        NAMES, (5, 2, 7, 6), torch.float16, kv_layout=kv_layout, device=torch.device("cpu")
    )
    assert [name for name, _ in layers] == list(NAMES)
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
    options = {"kv_layout": "HND", "device": torch.device("cpu")}
    with pytest.raises(ConfigError, match="no memory for a KV pool"):
        allocate_pool(NAMES, (1 << 50, 2, 7, 6), torch.float16, **options)
    with pytest.raises(ConfigError, match="kv_layout is 'NDH'; it must be one of NHD, HND, cross"):
        EngineConfig(kv_layout="NDH")
