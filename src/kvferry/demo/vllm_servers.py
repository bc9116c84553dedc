"""Two real vLLM servers for the demonstration of handovers, and maybe vLLM's own proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvferry.demo.disaggregated import HOST, HandoverOptions, Pair, Said, Sums, free_ports
from kvferry.errors import ConfigError, StoreError

_START_SECONDS = 900
_ANSWER_SECONDS = 1800
_END_SECONDS = 60
_MODEL = "demo"
_BLOCKS = (128, 32)
_SUMS = {
    "moved_tokens": "vllm:kvferry_hit_tokens_total",
    "moved_bytes": "vllm:kvferry_tier_read_bytes_total",
    "moved_s": "vllm:kvferry_promise_seconds_sum",
    "ttft_s": "vllm:time_to_first_token_seconds_sum",
}

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Of the CPU build: two servers share the processors, and 1 GiB of KV each is enough.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@contextmanager
def vllm_pair(options: HandoverOptions, proxy: Path | None) -> Iterator[Pair]:
    """Two servers of this environment's vLLM, with other block sizes.

    Args:
        proxy: vLLM's toy_proxy_server.py, which is in its source and not in its wheels; None: the
            client itself asks one server and then the other.

    Raises:
        ConfigError: no vLLM here, or no such file.
        StoreError: a server that does not start; the message names its log.
    """
    if find_spec("vllm") is None:
        raise ConfigError("no vLLM is installed beside this kvferry; run it where one is")
    if proxy is not None and not proxy.is_file():
        raise ConfigError(f"{proxy} is not a file; give vLLM's toy_proxy_server.py")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    peers, ports, proxy_ports = free_ports(), free_ports(), free_ports()
    with ExitStack() as running:
        urls = [f"http://{HOST}:{port}" for port in ports]
        roles = "kv_producer", "kv_consumer"
        started = [
            running.enter_context(
                _running(options, role, _serve(options, role, port, block, here, there))
            )
            for role, port, block, here, there in zip(
                roles, ports, _BLOCKS, peers, reversed(peers), strict=True
            )
        ]
        for url, await_server in zip(urls, started, strict=True):
            await_server(f"{url}/health")
        front = None
        if proxy is not None:
            command = [sys.executable, str(proxy), "--host", HOST, "--port", str(proxy_ports[0])]
            for kind, port in zip(("prefiller", "decoder"), ports, strict=True):
                command += [f"--{kind}-hosts", HOST, f"--{kind}-ports", str(port)]
            front = f"http://{HOST}:{proxy_ports[0]}"
            await_proxy = running.enter_context(_running(options, "proxy", command))
            await_proxy(f"{front}/healthcheck")
        prefiller, decoder = map(_Server, urls)
        words = tuple(f"vLLM, blocks of {block}" for block in _BLOCKS)
        between = None if front is None else _Server(front)
        peer = f"{HOST}:{peers[0]}"
        yield Pair(prefiller, decoder, between, (words[0], words[1]), peer, _BLOCKS[1])


def _serve(
    options: HandoverOptions, role: str, port: int, block: int, here: int, there: int
) -> list[str]:
    connector = {
        "kv_connector": "KVFerryConnector",
        "kv_role": role,
        "kv_connector_extra_config": {
            "store": f"peer://{HOST}:{there}",
            **options.connector_options(here),
        },
    }
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(options.model_dir), "--served-model-name", _MODEL),
        *("--host", HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--block-size", str(block), "--kv-transfer-config", json.dumps(connector)),
    ]


@contextmanager
def _running(
    options: HandoverOptions, name: str, command: Sequence[str]
) -> Iterator[Callable[[str], None]]:
    """A process of a server, which writes to a log. Gives a function that waits until it answers at
    a URL, and raises StoreError where it ends or takes too long."""
    path = options.work_dir / f"disaggregated-{name}.log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=_ENVIRONMENT | os.environ)

    def wait_for(url: str) -> None:
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                urllib.request.urlopen(url, timeout=10).close()
            except OSError:
                pass
            else:
                return
            if process.poll() is not None or time.monotonic() > until:
                raise StoreError(f"a server did not start; see {path}")
            time.sleep(0.2)

    try:
        yield wait_for
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class _Server:
    """What answers completions at an address.

    Args:
        url: without a path.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Said:
        body: dict[str, Any] = {
            "model": _MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": 1,
            # Only a whole answer has parameters for another engine.
            "stream": max_tokens > 1,
        }
        if params is not None:
            body["kv_transfer_params"] = dict(params)
        began = time.perf_counter()
        with self._open("/v1/completions", body) as answer:
            if not body["stream"]:
                whole = json.load(answer)
                seconds = time.perf_counter() - began
                return Said(seconds, *_said([whole]), whole.get("kv_transfer_params"))
            first = answer.readline()
            seconds = time.perf_counter() - began
            lines = [first, *answer]
        parts = [
            json.loads(line.removeprefix(b"data: "))
            for line in lines
            if line.startswith(b"data: {")
        ]
        return Said(seconds, *_said(parts))

    def sums(self) -> Sums:
        with self._open("/metrics") as answer:
            families = text_string_to_metric_families(answer.read().decode())
        sums: defaultdict[str, float] = defaultdict(float)
        for sample in chain.from_iterable(family.samples for family in families):
            if sample.labels.get("tier", "peer") == "peer":
                sums[sample.name] += sample.value
        return {figure: sums[name] for figure, name in _SUMS.items()}

    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> HTTPResponse:
        request = urllib.request.Request(self._url + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            found: HTTPResponse = urllib.request.urlopen(request, timeout=_ANSWER_SECONDS)
        except (OSError, HTTPException) as error:
            raise StoreError(f"{self._url}{path}: {error}") from error
        return found


def _said(parts: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[float, ...]]:
    """Text and log-probabilities of an answer, whole or in pieces."""
    choices = [choice for part in parts for choice in part.get("choices", ())]
    logprobs = [
        each
        for choice in choices
        for each in (choice.get("logprobs") or {}).get("token_logprobs", ())
    ]
    return "".join(choice["text"] for choice in choices), tuple(logprobs)
