"""How much host memory a model gets where the operator says nothing."""

from __future__ import annotations

import pytest

from kvferry.cache.config import default_memory_bytes

KIB, GIB = 1 << 10, 1 << 30


@pytest.mark.parametrize(
    ("token_bytes", "step_tokens", "machine_gib", "expected"),
    [
        (23 * KIB, 2048, 24, GIB),  # a small model: a GiB holds far more than four steps
        (128 * KIB, 8192, 2048, 4 * GIB),  # 8B on an H100: four steps
        (320 * KIB, 8192, 2048, 10 * GIB),  # 70B
        (320 * KIB, 8192, 24, 6 * GIB),  # 70B where a quarter of the machine is less
        (320 * KIB, None, 2048, GIB),  # a host that names no step
        (23 * KIB, 2048, 2, GIB // 2),  # a small machine
    ],
)
def test_the_default_pool_holds_four_steps_within_a_quarter_of_the_machine(
    token_bytes, step_tokens, machine_gib, expected
):
    assert default_memory_bytes(token_bytes, step_tokens, machine_gib * GIB) == expected
