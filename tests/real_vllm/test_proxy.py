"""vLLM's own toy proxy, unchanged, before two servers that share nothing but their memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.testing.models import make_tiny_model
from tests.real_vllm.host import RELEASE
from tests.tokenizers import save_tiny_tokenizer

PROXY = Path(__file__).parents[2] / ".vllm-connectors" / "0.32.0" / "toy_proxy_server.py"


@pytest.mark.skipif(RELEASE < (0, 32), reason="the proxy is that of 0.32")
def test_what_the_toy_proxy_hands_over_is_read_and_answered_as_by_one_server(
    tmp_path: Path,
) -> None:
    assert PROXY.is_file(), "scripts/vllm-connectors fetches it"
    shape = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 384}
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=2048, **shape)
    save_tiny_tokenizer(model)
    command = [
        *(sys.executable, "-m", "kvferry.cli.main", "demo-disaggregated", "--engine", "vllm"),
        *("--proxy", str(PROXY), "--model-dir", str(model), "--dir", str(tmp_path)),
        *("--rounds", "2", "--document-tokens", "700", "--max-tokens", "5", "--json", "-"),
    ]
    ran = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    logs = {path.name: path.read_text(errors="replace") for path in tmp_path.glob("*.log")}
    assert ran.returncode == 0, (ran.stdout, ran.stderr, logs)
    result = json.loads(ran.stdout)
    assert result["faults"] == []
    assert result["moved_tokens"] == 768
    assert result["proxied_ttft_s"] >= result["ttft_s"] > 0
    told = f"prefilled by another engine at {result['peer']}"
    assert told in logs["disaggregated-kv_consumer.log"]
