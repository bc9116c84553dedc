"""vLLM's own toy proxy, unchanged, before two servers that share nothing but their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Answer, Process, assert_same, kvferry
from tests.real_vllm.host import RELEASE
from tests.real_vllm.test_serve import Server, ask
from tests.servers.process import LOCALHOST, ServerProcess, accepts, free_ports
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
        *(sys.executable, "-m", "kvferry.cli", "demo-disaggregated", "--engine", "vllm"),
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


CHUNK_TOKENS = 32
SETTLE_SECONDS = 60.0
LENGTHS = (10, 300, 385, 300)
"""Of prompts; the first is shorter than a chunk."""


def complete(port: int, prompt: list[int], max_tokens: int = 4, **more: Any) -> Answer:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0,
        "logprobs": 5, "ignore_eos": True, "return_tokens_as_token_ids": True, **more,
    }  # fmt: skip
    (choice,) = json.loads(ask(port, "/v1/completions", body))["choices"]
    tops = [
        {name.removeprefix("token_id:"): value for name, value in top.items()}
        for top in choice["logprobs"]["top_logprobs"]
    ]
    tokens = [int(each.removeprefix("token_id:")) for each in choice["logprobs"]["tokens"]]
    return Answer(
        tokens=tokens, logprobs=tops, cached=None, reason=choice["finish_reason"], seconds=None
    )


def counted(server: Server, name: str, label: str = "") -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in ask(server.port, "/metrics").decode().splitlines()
        if line.startswith(name) and label in line
    )


@pytest.mark.sweep
@pytest.mark.skipif(RELEASE < (0, 32), reason="the proxy is that of 0.32")
def test_two_prefillers_and_two_decoders_behind_the_toy_proxy(
    tmp_path: Path, make_prompt: MakePrompt, first: Process
) -> None:
    """With the cases of vLLM's test_edge_cases.py: a short prompt, and one of which the decoder has
    all, and one of which it has the start. Then the proxy is killed in mid-answer."""
    shape = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 384}
    model = make_tiny_model(tmp_path / "model", max_position_embeddings=2048, **shape)
    save_tiny_tokenizer(model)
    prompts = [make_prompt(length) for length in LENGTHS]
    prompts += [prompts[1], prompts[1] + make_prompt(100)]
    with first.engine(model) as engine:
        own = engine.generate(prompts, logprobs=5).answers
        alone = engine.generate([prompts[2]], logprobs=5).answers
    ports = free_ports(2)
    peers = [f"{LOCALHOST}:{port}" for port in ports]
    options = {"chunk_tokens": CHUNK_TOKENS, "load_timeout_seconds": 60}
    shapes = [("kv_producer", 32), ("kv_producer", 128), ("kv_consumer", 128), ("kv_consumer", 32)]
    with ExitStack() as running:
        servers = []
        for number, (role, block) in enumerate(shapes):
            # A prefiller lists the other one, a decoder both.
            listed = [peer for index, peer in enumerate(peers) if index != number]
            serve = {"serve": peers[number]} if number < len(peers) else {}
            connector = kvferry(f"peer://{','.join(listed)}", **options, **serve)
            arguments = ["--block-size", f"{block}", "--served-model-name", "tiny"]
            log = tmp_path / f"{role}-{number}.log"
            server = Server(model, {**connector, "kv_role": role}, log, *arguments)
            servers.append(running.enter_context(server))
        for server in servers:
            server.wait_ready()
        (front,) = free_ports(1)
        hosts = [LOCALHOST, LOCALHOST]
        command = [sys.executable, str(PROXY), "--port", f"{front}"]
        for kind, pair in (("prefiller", servers[:2]), ("decoder", servers[2:])):
            command += [f"--{kind}-hosts", *hosts]
            command += [f"--{kind}-ports", *(f"{server.port}" for server in pair)]
        proxy = ServerProcess(command, tmp_path / "proxy.log")
        running.callback(proxy.kill)
        proxy.wait_ready(lambda: accepts(front))
        answers = [complete(front, prompt) for prompt in prompts]
        # It takes prefillers and decoders in turn; one that refuses is passed over, and from then
        # on each prefiller is before the other decoder.
        with pytest.raises(AssertionError):
            complete(front, make_prompt(1500))
        answers += [complete(front, prompt) for prompt in prompts[:4]]
        assert_same(own + own[:4], answers)
        moved = [counted(each, "vllm:kvferry_hit_tokens_total{", "peer") for each in servers[2:]]
        assert min(moved) >= 256
        asked = sum(counted(each, "vllm:kvferry_remote_prefills_total") for each in servers[2:])
        assert asked == len(answers)
        for server in servers:
            assert counted(server, "vllm:kvferry_remote_prefills_computed_total") == 0
            assert counted(server, "vllm:kvferry_hook_failed_total") == 0
        client = Thread(target=suppress(Exception)(complete), args=(front, prompts[2], 600))
        client.start()
        wait_until(lambda: num_running(servers) > 0, "a decoder generates", SETTLE_SECONDS)
        proxy.kill()
        client.join(SETTLE_SECONDS)
        wait_until(lambda: num_running(servers) == 0, "its request ends", SETTLE_SECONDS)
        for server in servers:
            assert_same(alone, [complete(server.port, prompts[2])])


def num_running(servers: list[Server]) -> float:
    return sum(counted(server, "vllm:num_requests_running{") for server in servers)
