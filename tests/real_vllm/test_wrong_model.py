"""`make proof-wrong-model` finds a wrong model where there is one: a case of its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real_vllm.harness import Process
from tests.real_vllm.wrong_model import CASES, Proof

pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure")  # as of 0.29


def test_another_revision_reads_wrong_kv_from_a_store_that_trusts_names_and_none_from_ours(
    tmp_path: Path, first: Process, second: Process
) -> None:
    proof = Proof(tmp_path, first, second)
    (case,) = (each for each in CASES if "revision" in each.name)
    own = proof.own(case)
    assert proof.verdict(case, "vLLM fs tier", own).startswith("**wrong output**")
    assert proof.verdict(case, "kvferry tier", own) == "miss"
    assert proof.verdict(case, "kvferry connector", own) == "miss"
