"""What of vLLM's configuration says in what order bytes stand in a row."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.adapters.vllm.tier_identity import _layout


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
