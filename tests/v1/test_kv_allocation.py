"""One KV tensor over all layers: when, of what shape, and where each layer's view lies in it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.v1.kv_allocation import allocate_uniform_kv_caches, use_uniform_kv_cache
from kvferry.v1.mixin import KVConnectorModelRunnerMixin


class Prefers:
    prefer_cross_layer_blocks = True


class DoesNotPrefer:
    prefer_cross_layer_blocks = False


@dataclass(frozen=True)
class AttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 3
    head_size: int = 5
    dtype: torch.dtype = torch.bfloat16
    content: int = 2
    padding: int = 0

    @property
    def page_size_bytes(self):
        values = self.content * self.block_size * self.num_kv_heads * self.head_size
        return values * self.dtype.itemsize + self.padding


@dataclass(frozen=True)
class RecurrentSpec:
    block_size: int = 16
    page_size_bytes: int = 480


def make_backend(shape, stride_order):
    class Backend:
        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size,
                               cache_dtype_str="auto"):  # fmt: skip
            sizes = {"B": num_blocks, "N": block_size, "H": num_kv_heads, "D": head_size, "2": 2}
            return tuple(sizes[axis] for axis in shape)

        @staticmethod
        def get_kv_cache_stride_order(include_num_layers_dimension=False):
            if isinstance(stride_order, Exception):
                raise stride_order
            return stride_order

    return Backend


class OldBackend:
    """Knows no stride order."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class OlderStrideOrder(OldBackend):
    """Knows none with layers."""

    @staticmethod
    def get_kv_cache_stride_order():
        return (0, 1, 2, 3, 4)


@dataclass
class Group:
    backend: type
    kv_cache_spec: object


@dataclass
class Planned:
    size: int
    shared_by: list[str]


@dataclass
class Config:
    kv_cache_tensors: list[Planned]


FLASH_NHD = make_backend("2BNHD", (2, 0, 1, 3, 4, 5))
FLASH_HND = make_backend("2BNHD", (2, 4, 0, 1, 3, 5))
FLASHINFER_NHD = make_backend("B2NHD", (1, 0, 2, 3, 4, 5))
FLASHINFER_HND = make_backend("B2NHD", (1, 2, 4, 0, 3, 5))
MLA = make_backend("BND", (1, 0, 2, 3))
MLA_SPEC = AttentionSpec(num_kv_heads=1, content=1)


def make_groups(backend=FLASH_NHD, spec=None):
    return [[Group(backend, spec or AttentionSpec())]]


def make_config(spec=None, *, num_blocks=4, layers=("a", "b", "c")):
    size = num_blocks * (spec or AttentionSpec()).page_size_bytes
    return Config([Planned(size, [name]) for name in layers])


# -- when ---------------------------


@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        *((each, None) for each in (FLASH_NHD, FLASH_HND, FLASHINFER_NHD, FLASHINFER_HND)),
        (MLA, MLA_SPEC),
    ],
)
def test_one_group_of_attention_layers_may_be_uniform(backend, spec):
    assert use_uniform_kv_cache(make_groups(backend, spec), "auto", connector=Prefers())


@pytest.mark.parametrize("connector", [None, DoesNotPrefer(), object()])
def test_not_unless_the_connector_prefers_it(connector):
    assert not use_uniform_kv_cache(make_groups(), "auto", connector=connector)


@pytest.mark.parametrize(
    "groups",
    [
        [],
        [[]],
        make_groups() * 2,
        [make_groups()[0] * 2],
        make_groups(spec=RecurrentSpec()),
        make_groups(spec=AttentionSpec(padding=32)),
        make_groups(OldBackend),
        make_groups(OlderStrideOrder),
        make_groups(make_backend("2BNHD", NotImplementedError())),
        make_groups(make_backend("2BNHD", (0, 1, 2, 3, 4))),
    ],
)
def test_not_if_the_model_or_the_backend_cannot(groups):
    assert not use_uniform_kv_cache(groups, "auto", connector=Prefers())


# -- shapes and views ---------------------------


@pytest.mark.parametrize(
    ("backend", "spec", "whole", "view"),
    [
        (FLASH_NHD, AttentionSpec(), (4, 3, 2, 16, 3, 5), (2, 4, 16, 3, 5)),
        (FLASH_HND, AttentionSpec(), (4, 3, 3, 2, 16, 5), (2, 4, 16, 3, 5)),
        (FLASHINFER_NHD, AttentionSpec(), (4, 3, 2, 16, 3, 5), (4, 2, 16, 3, 5)),
        (FLASHINFER_HND, AttentionSpec(), (4, 2, 3, 3, 16, 5), (4, 2, 16, 3, 5)),
        (MLA, MLA_SPEC, (4, 3, 16, 5), (4, 16, 5)),
        (OldBackend, AttentionSpec(), (3, 2, 4, 16, 3, 5), (2, 4, 16, 3, 5)),
    ],
)
def test_the_tensor_lies_in_stride_order_and_views_have_the_backends_shape(
    backend, spec, whole, view
):
    caches, cross_layers, found = allocate_uniform_kv_caches(
        make_config(spec), make_groups(backend, spec), "auto", torch.device("cpu"), [16]
    )
    assert found is backend
    assert tuple(cross_layers.shape) == whole
    assert cross_layers.is_contiguous()
    assert cross_layers.dtype == spec.dtype
    assert not cross_layers.any()
    assert list(caches) == ["a", "b", "c"]
    assert {tuple(cache.shape) for cache in caches.values()} == {view}
    # Every element belongs to one layer's view.
    for number, cache in enumerate(caches.values()):
        cache.fill_(number + 1)
    values, counts = cross_layers.flatten().unique(return_counts=True)
    assert values.tolist() == [1, 2, 3]
    assert set(counts.tolist()) == {cross_layers.numel() // 3}


def test_a_block_of_all_layers_is_one_run_of_memory():
    caches, cross_layers, _ = allocate_uniform_kv_caches(
        make_config(), make_groups(FLASH_NHD), "auto", "cpu", [16]
    )
    for cache in caches.values():
        cache[:, 2] = 1
    assert cross_layers[2].all()
    assert cross_layers.sum() == cross_layers[2].numel()


def test_kernel_blocks_may_be_smaller():
    caches, cross_layers, _ = allocate_uniform_kv_caches(
        make_config(), make_groups(FLASH_NHD), "auto", "cpu", [8]
    )
    assert tuple(cross_layers.shape) == (8, 3, 2, 8, 3, 5)
    assert tuple(caches["a"].shape) == (2, 8, 8, 3, 5)


def test_layers_that_share_a_tensor_share_a_view():
    config = Config([Planned(size := 4 * 960, ["a", "b"]), Planned(size, ["c"])])
    caches, cross_layers, _ = allocate_uniform_kv_caches(
        config, make_groups(FLASHINFER_NHD), "auto", "cpu", [16]
    )
    assert caches["a"].data_ptr() == caches["b"].data_ptr() != caches["c"].data_ptr()
    assert cross_layers.shape[1] == 2


# -- bad input ---------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": []}, "one KV group with one attention group; there are"),
        ({"groups": make_groups(spec=RecurrentSpec())}, "not for RecurrentSpec"),
        ({"config": Config([])}, r"layers of one size; planned are \[\] bytes"),
        (
            {"config": Config([Planned(960, ["a"]), Planned(1920, ["b"])])},
            r"layers of one size; planned are \[960, 1920\] bytes",
        ),
        ({"config": Config([Planned(961, ["a"])])}, "961 bytes are not whole blocks of 960"),
        ({"config": Config([Planned(0, ["a"])])}, "0 bytes are not whole blocks"),
        ({"kernel": [16, 16]}, r"one kernel block size, not \[16, 16\]"),
        ({"kernel": [5]}, "kernel block size 5 does not divide the block size 16"),
        ({"kernel": [0]}, "kernel block size 0 does not divide"),
        ({"groups": make_groups(make_backend("2BNHD", (0, 1, 2)))}, "does not order the 6 axes"),
        (
            {"groups": make_groups(make_backend("2BNHD", (0, 1, 2, 3, 4, 4)))},
            "does not order the 6 axes",
        ),
        (
            {
                "groups": make_groups(spec=AttentionSpec(padding=32)),
                "config": make_config(AttentionSpec(padding=32)),
            },
            "padded pages are not supported",
        ),
    ],
)
def test_plans_that_are_not_uniform_are_refused(change, message):
    case = {"config": make_config(), "groups": make_groups(), "kernel": [16]} | change
    with pytest.raises(LayoutError, match=message):
        allocate_uniform_kv_caches(case["config"], case["groups"], "auto", "cpu", case["kernel"])


# -- the mixin's names ---------------------------


def test_the_mixin_asks_its_connector():
    runner = KVConnectorModelRunnerMixin()
    assert not runner.use_uniform_kv_cache(make_groups(), "auto")
    runner.kv_connector = Prefers()
    assert runner.use_uniform_kv_cache(make_groups(), "auto")
    caches, cross_layers, backend = runner.allocate_uniform_kv_caches(
        make_config(), make_groups(), "auto", torch.device("cpu"), [16]
    )
    assert (list(caches), tuple(cross_layers.shape)) == (["a", "b", "c"], (4, 3, 2, 16, 3, 5))
    assert backend is FLASH_NHD
