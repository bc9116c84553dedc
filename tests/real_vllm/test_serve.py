"""A server as an operator starts it: the engine's core and the API in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.dashboards.queries import missing
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Oracle, Process, kvferry, wait_for_records
from tests.real_vllm.host import RELEASE

START_SECONDS = 240.0
STOP_SECONDS = 60.0


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error}: {error.read()[:500]!r}") from error


@contextmanager
def served(model: Path, connector: dict[str, Any], log: Path) -> Iterator[int]:
    """A server; the port it listens on. Asked to end at the end, and checked that it does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--port", str(port), "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager"),
        *("--skip-tokenizer-init", "--block-size", "128", "--max-model-len", "1024"),
        *("--max-num-seqs", "8", "--kv-transfer-config", json.dumps(connector)),
    ]
    if RELEASE >= (0, 32):
        command.append("--enable-scale-out")  # prompts and answers as token ids; always on before
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "2",
    }
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        until = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError, AssertionError):
                ask(port, "/health")
                break
            assert server.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < until, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield port
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=STOP_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=20)


def test_a_server_reads_what_another_engine_stored_and_its_metrics_say_so(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, oracle: Oracle, first: Process
) -> None:
    prompts = [make_prompt(n) for n in (300, 385)]
    own = oracle(prompts)
    with first.engine(models["plain"], kvferry(tmp_path / "store")) as engine:
        engine.generate(prompts)
    wait_for_records(tmp_path / "store", 5)
    log = tmp_path / "server.log"
    with served(models["plain"], kvferry(tmp_path / "store"), log) as port:
        for prompt, answer in zip(prompts, own, strict=True):
            body = {"token_ids": prompt, "sampling_params": {
                "temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False,
            }}  # fmt: skip
            said = json.loads(ask(port, "/inference/v1/generate", body))
            assert said["choices"][0]["token_ids"] == answer.tokens
        metrics = ask(port, "/metrics").decode()
    counts = {
        line.split("{")[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("vllm:kvferry_") and "_events" not in line
    }
    hits = {
        line.split('tier="')[1].split('"')[0]: float(line.split()[-1])
        for line in metrics.splitlines()
        if line.startswith("vllm:kvferry_hit_tokens_total{")
    }
    assert sum(hits.values()) == 256 + 384
    assert missing(metrics) == []
    assert 'tier="file"' in metrics.split("vllm:kvferry_tier_since_seconds{", 1)[1].split("}")[0]
    assert set(hits) <= {"file", "memory"}
    assert counts["vllm:kvferry_hook_failed_total"] == 0
    assert "Traceback" not in log.read_text(errors="replace").split("Chat template", 1)[0]
