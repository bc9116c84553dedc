"""What of vLLM's configuration says in what order bytes stand in a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvferry.adapters.vllm.tier_identity import _layout, values_of_rows
from tests.adapters.vllm import fakes


def layout(num_ranks, *, certified=True, canonical=False, replicated=False):
    """Of an engine of which vLLM says that its ranks do not matter."""
    parallel = SimpleNamespace(
        is_parallelism_agnostic=certified, world_size=num_ranks, tp_size=num_ranks
    )
    config = SimpleNamespace(
        parallel=parallel,
        groups=(),
        model=SimpleNamespace(dtype="bfloat16"),
        canonical_layout=canonical,
        replicated_layout=replicated,
    )
    on_cpu = SimpleNamespace(device_config=SimpleNamespace(device_type="cpu"))
    return _layout(on_cpu, config)


def test_rows_of_the_direct_layout_are_of_one_number_of_ranks():
    assert layout(1) != layout(2)


def test_ranks_do_not_matter_in_a_certified_canonical_layout():
    assert layout(1, canonical=True) == layout(2, canonical=True)
    assert layout(1) != layout(1, canonical=True)
    assert layout(1, canonical=True, certified=False) != layout(2, canonical=True, certified=False)


@pytest.mark.parametrize("certified", [False, True])
def test_ranks_do_not_matter_where_all_hold_the_same(certified):
    of_two = layout(2, certified=certified, replicated=True)
    assert layout(1, certified=certified, replicated=True) == of_two


FULL, MLA = fakes.FullAttentionSpec, fakes.MLAAttentionSpec


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([FULL(dtype=torch.bfloat16)], "bfloat16"),
        ([FULL(dtype=torch.float16), fakes.SlidingWindowSpec(dtype=torch.float16)], "float16"),
        ([MLA(dtype=torch.bfloat16)], "bfloat16"),
        ([fakes.UniformTypeKVCacheSpecs({"a": FULL(), "b": FULL(num_kv_heads=3)})], "float32"),
        # Bytes, also where they are float8.
        ([FULL(dtype=torch.uint8, kv_quant_mode=fakes.QuantMode.FP8_PER_TENSOR)], "uint8"),
        # Values of several kinds, states, and pages that have scales or padding.
        ([FULL(dtype=torch.float16), FULL(dtype=torch.float32)], ""),
        ([FULL(), fakes.MambaSpec()], ""),
        ([fakes.odd(FULL, extra_bytes=8)], ""),
        ([fakes.odd(MLA, page_size_bytes=656 * 4)], ""),
        ([], ""),
    ],
)
def test_what_a_row_holds_is_known_if_all_of_it_is_of_one_dtype(specs, expected):
    groups = [fakes.Group([f"layer {at}"], spec) for at, spec in enumerate(specs)]
    assert values_of_rows(fakes.KVCacheConfig(groups)) == expected
