"""The benchmark of the proxy in little: its row, and that a prefiller may die behind its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import Options, proxied
from tests.real_vllm.host import RELEASE


@pytest.mark.sweep
@pytest.mark.skipif(RELEASE < (0, 32), reason="the proxy is that of 0.32")
def test_kvferry_hands_over_behind_the_proxy_of_vllm(tmp_path: Path) -> None:
    row = proxied.run(Options(directory=tmp_path, quick=True))[0]
    assert row.keys() == {
        "case", "prompt_tokens", "prefill_ms", "handed_over_ms", "own_hit_ms", "computed_ms",
        "through_proxy_ms", "equal", "after_kill", "after_kill_ms",
    }  # fmt: skip
    assert row["case"] == "kvferry"
    assert row["equal"]
    assert row["after_kill"] == "right"
