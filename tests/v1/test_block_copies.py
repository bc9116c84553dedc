"""Whole blocks are copied between two sets of tensors, all of them or none."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout.spec import LAYOUTS
from kvferry.v1 import copy_kv_blocks

SHAPES = {
    "2BNHD": (2, "B", 3, 2, 5),
    "B2NHD": ("B", 2, 3, 2, 5),
    "BND": ("B", 3, 5),
    "BHNC": ("B", 2, 3, 10),
}


def make_caches(layout, num_blocks, *, dtype=torch.float32, layers=2, fill=None, physical=None):
    """Layers of a layout; `physical` permutes their axes in memory."""
    shape = [num_blocks if size == "B" else size for size in SHAPES[layout]]
    caches = {}
    for layer in range(layers):
        order = physical or range(len(shape))
        memory = torch.zeros([shape[i] for i in order], dtype=dtype)
        tensor = memory.permute(*[list(order).index(i) for i in range(len(shape))])
        values = torch.arange(math.prod(shape)) % 113 + layer + 1
        tensor.copy_(values.view(shape) if fill is None else torch.full(shape, fill))
        caches[str(layer)] = tensor
    return caches


def block(tensor, layout, index):
    return tensor.select(layout.index("B"), index)


def check_copied(src, dst, before, layout, pairs):
    targets = {target: source for source, target in pairs}
    for name in src:
        for index in range(dst[name].shape[layout.index("B")]):
            if index in targets:
                expected = block(src[name], layout, targets[index])
            else:
                expected = block(before[name], layout, index)
            assert torch.equal(block(dst[name], layout, index), expected)


@given(st.data())
def test_every_block_arrives_and_no_other_changes(data):
    layout = data.draw(st.sampled_from(sorted(SHAPES)))
    sizes = [data.draw(st.integers(3, 9)) for _ in range(2)]
    axes = list(range(len(SHAPES[layout])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]))
    src, dst = (
        make_caches(layout, size, fill=fill, physical=data.draw(st.permutations(axes)), dtype=dtype)
        for size, fill in zip(sizes, (None, -1), strict=True)
    )
    targets = data.draw(st.lists(st.integers(0, sizes[1] - 1), unique=True))
    sources = [data.draw(st.integers(0, sizes[0] - 1)) for _ in targets]
    if data.draw(st.booleans()):  # as allocators hand them out: in runs
        sources, targets = list(range(min(sizes))), list(range(min(sizes)))
    before = {name: tensor.clone() for name, tensor in dst.items()}
    named = data.draw(st.sampled_from([None, layout])) if layout in LAYOUTS else None
    direction = data.draw(st.sampled_from(["h2d", "d2h"]))
    copy_kv_blocks(src, dst, sources, targets, direction, layout=named)
    check_copied(src, dst, before, layout, list(zip(sources, targets, strict=True)))


def test_float8_is_copied_bit_by_bit():
    bits = torch.arange(256, dtype=torch.uint8).view(4, 64)  # NaN patterns too
    src, dst = bits.view(torch.float8_e4m3fn), torch.zeros(4, 64).to(torch.float8_e4m3fn)
    copy_kv_blocks({"0": src}, {"0": dst}, [3, 1, 0], [0, 1, 2], "d2h")
    assert torch.equal(dst.view(torch.uint8)[:3], bits[[3, 1, 0]])


def test_blocks_may_be_moved_within_one_tensor():
    caches = make_caches("BND", 4)
    before = {name: tensor.clone() for name, tensor in caches.items()}
    copy_kv_blocks(caches, caches, [0, 1, 2], [1, 2, 3], "h2d")
    check_copied(before, caches, before, "BND", [(0, 1), (1, 2), (2, 3)])


@pytest.mark.parametrize("layout", ["2BNHD", "B2NHD"])
def test_two_blocks_need_a_layout_by_name(layout):
    src, dst = make_caches(layout, 2), make_caches(layout, 2, fill=0.0)
    with pytest.raises(LayoutError, match="pass layout='2BNHD' or layout='B2NHD'"):
        copy_kv_blocks(src, dst, [0], [1], "h2d")
    copy_kv_blocks(src, dst, [0], [1], "h2d", layout=layout)
    check_copied(src, dst, make_caches(layout, 2, fill=0.0), layout, [(0, 1)])


def test_a_destination_with_two_blocks_is_not_taken_for_another_layout():
    src, dst = make_caches("2BNHD", 4), make_caches("2BNHD", 2, fill=0.0)
    with pytest.raises(LayoutError, match="pass layout="):
        copy_kv_blocks(src, dst, [3], [0], "h2d")
    copy_kv_blocks(src, dst, [3], [0], "h2d", layout="2BNHD")
    check_copied(src, dst, make_caches("2BNHD", 2, fill=0.0), "2BNHD", [(3, 0)])


def test_the_destination_may_have_more_layers():
    src, dst = make_caches("BND", 3), make_caches("BND", 3, layers=3, fill=0.0)
    copy_kv_blocks(src, dst, [1], [1], "h2d")
    assert not dst["2"].any()
    assert torch.equal(dst["1"][1], src["1"][1])


def test_no_block_is_no_copy():
    copy_kv_blocks({}, {}, [], [], "h2d")
    dst = make_caches("BND", 3, fill=0.0)
    copy_kv_blocks(make_caches("BND", 3), dst, [], [], "d2h")
    assert not dst["0"].any()


GOOD = {"src": "BND", "dst": "BND", "src_ids": [0, 1], "dst_ids": [1, 2], "direction": "h2d"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src_ids": [0]}, "1 source blocks for 2 destination blocks"),
        ({"src_ids": [0, 5]}, r"source block id 5 is outside \[0, 5\)"),
        ({"dst_ids": [1, -1]}, r"destination block id -1 is outside \[0, 5\)"),
        ({"dst_ids": [1, 1]}, "destination block 1 is named twice"),
        ({"src_ids": [0, 0.5]}, "block id 0.5 is not an integer"),
        ({"direction": "h2h"}, "direction is 'h2h'; known: 'h2d', 'd2h'"),
        ({"dst": "BHNC"}, "do not fit"),
        ({"dst_dtype": torch.float16}, r"torch.float32 in the source, torch.float16 to fill"),
        ({"dst_layers": 1}, "layer '1' is not in the destination"),
        ({"layout": "BHNC"}, "layout BHNC has 4 axes, the tensor 3"),
        ({"layout": "NBD"}, "unknown KV layout 'NBD'; known: BHNC"),
        ({"src_layers": 0}, "no layer to copy 2 blocks of"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_copied(change, message):
    case = GOOD | change
    src = make_caches(case["src"], 5, layers=case.get("src_layers", 2))
    dst = make_caches(case["dst"], 5, layers=case.get("dst_layers", 2), fill=0.0,
                      dtype=case.get("dst_dtype", torch.float32))  # fmt: skip
    with pytest.raises(LayoutError, match=message):
        copy_kv_blocks(
            src, dst, case["src_ids"], case["dst_ids"], case["direction"], layout=case.get("layout")
        )
    assert not any(tensor.any() for tensor in dst.values())


def test_a_fault_in_the_last_layer_is_found_before_the_first_is_copied():
    src, dst = make_caches("BND", 5), make_caches("BND", 5, fill=0.0)
    dst["1"] = dst["1"][:2]
    with pytest.raises(LayoutError, match=r"layer '1': destination block id 2 is outside \[0, 2\)"):
        copy_kv_blocks(src, dst, [0], [2], "h2d")
    assert not dst["0"].any()


def test_a_vector_has_no_blocks():
    with pytest.raises(LayoutError, match="a tensor with 1 axes has no blocks"):
        copy_kv_blocks({"0": torch.zeros(4)}, {"0": torch.zeros(4)}, [0], [1], "h2d")


def test_the_direction_must_be_true():
    far = {"0": torch.zeros(4, 3, 5, device="meta")}
    near = {"0": torch.zeros(4, 3, 5)}
    with pytest.raises(LayoutError, match="direction 'h2d', but the source is on meta"):
        copy_kv_blocks(far, near, [0], [1], "h2d")
    with pytest.raises(LayoutError, match="direction 'd2h', but the destination is on meta"):
        copy_kv_blocks(near, far, [0], [1], "d2h")
