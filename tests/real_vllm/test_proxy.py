"""vLLM's own toy proxy, unchanged, before two servers that share nothing but their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.testing.models import make_tiny_model
from tests.real_vllm.host import RELEASE
from tests.tokenizers import save_tiny_tokenizer

PROXY = Path(__file__).parents[2] / ".vllm-connectors" / "0.32.0" / "toy_proxy_server.py"
DEMO_SECONDS = 600


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
    demo = subprocess.Popen(
        command, env=os.environ | {"OMP_NUM_THREADS": "2"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        said, errors = demo.communicate(timeout=DEMO_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait(timeout=20)
    logs = {path.name: path.read_text(errors="replace") for path in tmp_path.glob("*.log")}
    assert demo.returncode == 0, (said, errors, logs)
    result = json.loads(said)
    assert result["faults"] == []
    assert result["moved_tokens"] == 768
    assert result["proxied_ttft_s"] >= result["ttft_s"] > 0
    told = f"prefilled by another engine at {result['peer']}"
    assert told in logs["disaggregated-kv_consumer.log"]
