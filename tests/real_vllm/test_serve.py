"""A server as an operator starts it: the engine's core and the API in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.testing.stores.hooks import wait_until
from tests.dashboards.queries import missing
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Oracle, Process, kvferry, wait_for_records
from tests.real_vllm.host import RELEASE
from tests.servers.process import LOCALHOST, free_ports

START_SECONDS = 240.0
STOP_SECONDS = 60.0


def ask(port: int, path: str, body: dict[str, Any] | None = None) -> bytes:
    request = urllib.request.Request(f"http://{LOCALHOST}:{port}{path}")
    if body is not None:
        request.data = json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{path}: {error}: {error.read()[:500]!r}") from error


class Server:
    """A server that begins with its construction. A context manager, whose end is checked.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, model: Path, connector: dict[str, Any], log: Path, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self._log = log
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--port", str(self.port), "--host", LOCALHOST, "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "8"),
            *("--kv-transfer-config", json.dumps(connector), *arguments),
        ]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=out, env=environment, start_new_session=True
            )

    def wait_ready(self) -> None:
        def answers() -> bool:
            with suppress(OSError, AssertionError):
                ask(self.port, "/health")
                return True
            said = self._log.read_text(errors="replace")[-3000:]
            assert self._process.poll() is None, said
            return False

        wait_until(answers, f"the server answers; see {self._log}", START_SECONDS, interval=0.5)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if exc[0] is None:
                self._process.send_signal(signal.SIGTERM)
                self._process.wait(timeout=STOP_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=20)


def test_a_server_reads_what_another_engine_stored_and_its_metrics_say_so(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, oracle: Oracle, first: Process
) -> None:
    prompts = [make_prompt(n) for n in (300, 385)]
    own = oracle(prompts)
    with first.engine(models["plain"], kvferry(tmp_path / "store")) as engine:
        engine.generate(prompts)
    wait_for_records(tmp_path / "store", 5)
    log = tmp_path / "server.log"
    arguments = ["--skip-tokenizer-init", "--block-size", "128"]
    if RELEASE >= (0, 32):
        arguments.append("--enable-scale-out")  # prompts and answers as token ids
    with Server(models["plain"], kvferry(tmp_path / "store"), log, *arguments) as server:
        server.wait_ready()
        for prompt, answer in zip(prompts, own, strict=True):
            body = {"token_ids": prompt, "sampling_params": {
                "temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "detokenize": False,
            }}  # fmt: skip
            said = json.loads(ask(server.port, "/inference/v1/generate", body))
            assert said["choices"][0]["token_ids"] == answer.tokens
        metrics = ask(server.port, "/metrics").decode()
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
    ours = [line for line in metrics.splitlines() if line.startswith("vllm:kvferry_")]
    assert all('model_name="' in line for line in ours)  # which the dashboard selects
    assert 'tier="file"' in metrics.split("vllm:kvferry_tier_since_seconds{", 1)[1].split("}")[0]
    assert set(hits) <= {"file", "memory"}
    assert counts["vllm:kvferry_hook_failed_total"] == 0
    assert "Traceback" not in log.read_text(errors="replace").split("Chat template", 1)[0]
