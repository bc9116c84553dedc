"""Named layouts: what they say of a tensor, and tensors that are something else."""

from __future__ import annotations

import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.layout import spec
from kvferry.layout.ops import PagedKV
from kvferry.layout.spec import ContentPart, Strided, parse
from kvferry.types import GroupShard, KVGroup
from tests.layout.paging import LAYOUTS, MLA_LAYOUTS, Cache

# 2 layers, 5 blocks, 3 heads, 4 tokens, head_dim 2: strides of [block, head, token, content] and
# the offset of the second layer, in elements, by hand.
WORKED = {
    "LBHNC": ((48, 16, 4, 1), 240),
    "LBNHC": ((48, 4, 12, 1), 240),
    "LHBNC": ((16, 80, 4, 1), 240),
    "BLHNC": ((96, 16, 4, 1), 48),
    "BLNHC": ((96, 4, 12, 1), 48),
    "BHLNC": ((96, 32, 4, 1), 16),
}


@pytest.mark.parametrize("name", WORKED)
def test_views_in_hosts_six_orders_are_read_by_their_strides(name):
    cache = Cache(name, num_blocks=5)
    strides, second_layer = WORKED[name]
    for tensor, offset in zip(cache.tensors, (0, second_layer), strict=True):
        described = Strided(
            tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), 1, "float32"
        )
        parse(name).check(described)
        assert parse(name).parts(described) == (ContentPart(1, offset, (5, 3, 4, 4), strides, 0),)


@pytest.mark.parametrize(
    ("name", "shape", "key", "value"),
    [
        ("2BNHD", (2, 5, 4, 3, 2), (24, 2, 6, 1), 120),
        ("B2NHD", (5, 2, 4, 3, 2), (48, 2, 6, 1), 24),
    ],
)
def test_keys_and_values_apart_are_two_parts_of_the_content(name, shape, key, value):
    tensor = Strided(shape, torch.empty(shape).stride(), 7, 1, "float32")
    assert parse(name).parts(tensor) == (
        ContentPart(1, 7, (5, 3, 4, 2), key, 0),
        ContentPart(1, 7 + value, (5, 3, 4, 2), key, 2),
    )


def test_the_latent_of_mla_is_one_head():
    tensor = Strided((5, 4, 6), (24, 6, 1), 0, 1, "float32")
    assert parse("BND").parts(tensor) == (ContentPart(1, 0, (5, 1, 4, 6), (24, 0, 6, 1), 0),)


@pytest.mark.parametrize(
    "name", ["", "XYZ", "BHN", "BHNCC", "BNHD", "NBD", "BNHC", "2BNHC", "BHNC:", "BHNC:BHN",
             "BL2NHD", "2BNHD:L2BHND", "bhnc"]
)  # fmt: skip
def test_an_unknown_layout_is_named_with_those_that_are_known(name):
    with pytest.raises(LayoutError, match=r"unknown KV layout .*known: BHNC, .*HND.*BHLNC"):
        parse(name)


@pytest.mark.parametrize("name", [*spec.MEMORY_ORDERS, *spec.ALIASES])
def test_names_of_orders_take_views_in_any_order(name):
    for actual in spec.MEMORY_ORDERS:
        cache = Cache(actual, num_blocks=5)
        cache.layout = name
        cache.paged()
        cache.tensors = [tensor.clone() for tensor in cache.tensors]  # each in its own memory
        cache.paged()


def test_padded_pages_are_no_disagreement():
    page = torch.zeros(6, 100)
    tensor = page[:, :48].unflatten(1, (3, 4, 4))
    group = KVGroup(num_layers=1, num_kv_heads=3, content_size=4, dtype="float32", block_size=4)
    PagedKV([tensor], group, GroupShard(layers=(0, 1), heads=(0, 3)), "HND")


def test_a_tensor_that_overlaps_itself_is_refused():
    tensor = torch.zeros(6, 1, 4, 4).expand(6, 3, 4, 4)
    group = KVGroup(num_layers=1, num_kv_heads=3, content_size=4, dtype="float32", block_size=4)
    with pytest.raises(LayoutError, match="BHNC is without overlaps in memory"):
        PagedKV([tensor], group, GroupShard(layers=(0, 1), heads=(0, 3)), "BHNC")


@pytest.mark.parametrize("layout", [*LAYOUTS, *MLA_LAYOUTS])
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"dtype": "bfloat16"}, "KV dtype is bfloat16, the tensor has float32"),
        ({"block_size": 8}, "block_size"),
        ({"content_size": 8}, "content size is 8, the tensor holds 4"),
        ({"num_kv_heads": 1 << 10}, "expected .blocks, heads, block_size. ="),
        ({"num_layers": 3}, "2 KV tensors for a shard of 3 layers"),
    ],
)
def test_a_tensor_that_is_not_what_the_model_says_is_refused(layout, wrong, says):
    cache = Cache(layout, num_heads=1 if layout in MLA_LAYOUTS else 3)
    group = KVGroup(**{
        "num_layers": 2, "num_kv_heads": cache.num_heads, "content_size": 4, "dtype": "float32",
        "block_size": 4, **wrong,
    })  # fmt: skip
    shard = GroupShard(layers=(0, group.num_layers), heads=(0, group.num_kv_heads))
    with pytest.raises(LayoutError, match=says):
        PagedKV(cache.tensors, group, shard, cache.layout)


def test_another_number_of_axes_is_refused():
    with pytest.raises(LayoutError, match="layout 2BNHD has 5 axes, the tensor 4"):
        parse("2BNHD").check(Strided((5, 3, 4, 4), (48, 16, 4, 1), 0, 1, "float32"))
    with pytest.raises(LayoutError, match="axis 1 must be 2, not 5"):
        parse("B2NHD").check(Strided((2, 5, 4, 3, 2), (120, 24, 6, 2, 1), 0, 1, "float32"))
