"""Two real vLLM servers for prompts that are handed over, and maybe vLLM's own proxy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pair import HOST, HandoverOptions, Pair, Said, Sums, free_ports
from kvferry.errors import ConfigError, KVError

_START_SECONDS = 900
_ANSWER_SECONDS = 1800
_END_SECONDS = 60
_MODEL = "demo"
_SUMS = {
    "moved_tokens": "vllm:kvferry_hit_tokens_total",
    "moved_bytes": "vllm:kvferry_tier_read_bytes_total",
    "moved_s": "vllm:kvferry_promise_seconds_sum",
    "ttft_s": "vllm:time_to_first_token_seconds_sum",
}

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # For vLLM's CPU build: two servers share the processors, and 1 GiB of KV is enough for each.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class Launch(NamedTuple):
    """How one of two servers starts.

    Attributes:
        connector: its `--kv-transfer-config`.
        block_size: in tokens.
        environment: variables of this server, beside those that both get.
    """

    connector: Mapping[str, Any]
    block_size: int
    environment: Mapping[str, str] = {}


def peers(options: HandoverOptions) -> tuple[Launch, Launch]:
    """Return two launches with kvferry's connector: each lists the other as its peer, and their
    block sizes differ."""
    ports = free_ports()
    return (
        Launch(_listing("kv_producer", options, *ports), 128),
        Launch(_listing("kv_consumer", options, *reversed(ports)), 32),
    )


def _listing(role: str, options: HandoverOptions, here: int, there: int) -> dict[str, Any]:
    extra = {"store": f"peer://{HOST}:{there}", **options.connector_options(here)}
    return {
        "kv_connector": "KVFerryConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


@contextmanager
def vllm_pair(
    options: HandoverOptions, proxy: Path | None, launches: tuple[Launch, Launch] | None = None
) -> Iterator[Pair]:
    """Two servers of this environment's vLLM.

    Args:
        proxy: vLLM's toy_proxy_server.py, which is in its source and not in its wheels; None: the
            client itself asks one server and then the other.
        launches: of the prefiller and the decoder; None: our `peers`.

    Raises:
        ConfigError: no vLLM here, or no such file.
        KVError: a server does not start; the message names its log.
    """
    if find_spec("vllm") is None:
        raise ConfigError("no vLLM is installed beside this kvferry; run it where one is")
    if proxy is not None and not proxy.is_file():
        raise ConfigError(f"{proxy} is not a file; give vLLM's toy_proxy_server.py")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    launches = launches or peers(options)
    ports, proxy_ports = free_ports(), free_ports()
    with ExitStack() as running:
        urls = [f"http://{HOST}:{port}" for port in ports]
        started = [
            running.enter_context(_running(options, name, _serve(options, port, launch), launch))
            for name, port, launch in zip(("prefiller", "decoder"), ports, launches, strict=True)
        ]
        for url, server in zip(urls, started, strict=True):
            server.wait_for(f"{url}/health")
        between = None
        if proxy is not None:
            command = [sys.executable, str(proxy), "--host", HOST, "--port", str(proxy_ports[0])]
            for kind, port in zip(("prefiller", "decoder"), ports, strict=True):
                command += [f"--{kind}-hosts", HOST, f"--{kind}-ports", str(port)]
            between = Server(f"http://{HOST}:{proxy_ports[0]}")
            front = running.enter_context(_running(options, "proxy", command))
            front.wait_for(f"{between.url}/healthcheck")
        prefiller, decoder = map(Server, urls, started)
        words = tuple(f"vLLM, blocks of {launch.block_size}" for launch in launches)
        peer = launches[0].connector.get("kv_connector_extra_config", {}).get("serve", "")
        yield Pair(prefiller, decoder, between, (words[0], words[1]), peer, launches[1].block_size)


def _serve(options: HandoverOptions, port: int, launch: Launch) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(options.model_dir), "--served-model-name", _MODEL),
        *("--host", HOST, "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--block-size", str(launch.block_size)),
        *("--kv-transfer-config", json.dumps(launch.connector)),
    ]


@dataclass(frozen=True, slots=True)
class Running:
    """A process of a server, which writes to a log."""

    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, url: str) -> None:
        """Wait until it answers at `url`. Raises KVError if it ends or takes too long."""
        until = time.monotonic() + _START_SECONDS
        while True:
            try:
                urllib.request.urlopen(url, timeout=10).close()
            except OSError:
                pass
            else:
                return
            if self.process.poll() is not None or time.monotonic() > until:
                raise KVError(f"a server did not start; see {self.log}")
            time.sleep(0.2)


@contextmanager
def _running(
    options: HandoverOptions, name: str, command: Sequence[str], launch: Launch | None = None
) -> Iterator[Running]:
    path = options.work_dir / f"disaggregated-{name}.log"
    more = {} if launch is None else launch.environment
    with path.open("wb") as log:
        environment = {**_ENVIRONMENT, **os.environ, **more}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        yield Running(process, path)
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Server:
    """A server, or a proxy, that answers completion requests at an address.

    Attributes:
        url: without a path.
        running: its process; None for the proxy.
    """

    def __init__(self, url: str, running: Running | None = None) -> None:
        self.url = url
        self.running = running

    def ask(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Said:
        body: dict[str, Any] = {
            "model": _MODEL,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": 1,
            # vLLM returns `kv_transfer_params` only in an answer that is not streamed.
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

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """Errors of the connection, while the answer is read too, are KVError."""
        request = urllib.request.Request(self.url + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
                yield answer
        except (OSError, HTTPException) as error:
            raise KVError(f"{self.url}{path}: {error}") from error


def _said(parts: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[float, ...]]:
    """Text and log-probabilities of an answer, whole or in pieces."""
    choices = [choice for part in parts for choice in part.get("choices", ())]
    logprobs = [
        each
        for choice in choices
        for each in (choice.get("logprobs") or {}).get("token_logprobs", ())
    ]
    return "".join(choice["text"] for choice in choices), tuple(logprobs)
