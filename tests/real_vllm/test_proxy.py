"""vLLM's own proxies, unchanged, before servers that share nothing but their memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerFast

from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Answer, Process, assert_same, expected_hit, kvferry
from tests.real_vllm.host import RELEASE
from tests.real_vllm.test_serve import Server, ask
from tests.servers.process import LOCALHOST, ServerProcess, accepts, free_ports
from tests.tokenizers import save_tiny_tokenizer

FETCHED = Path(__file__).parents[2] / ".vllm-connectors" / "0.32.0"
PROXY = FETCHED / "toy_proxy_server.py"
DEMO_SECONDS = 600
pytestmark = pytest.mark.skipif(RELEASE < (0, 32), reason="the proxies are those of 0.32")


def test_what_the_toy_proxy_hands_over_is_read_and_answered_as_by_one_server(
    tmp_path: Path,
) -> None:
    assert PROXY.is_file(), "scripts/vllm-connectors fetches it"
    model = model_with_tokenizer(tmp_path)
    command = [
        *(sys.executable, "-m", "examples.cpu.disaggregated", "--engine", "vllm"),
        *("--proxy", str(PROXY), "--model-dir", str(model), "--dir", str(tmp_path)),
        *("--rounds", "2", "--document-tokens", "700", "--max-tokens", "5", "--json"),
    ]
    demo = subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        said, errors = demo.communicate(timeout=DEMO_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)
        demo.wait(timeout=20)
    logs = {path.name: path.read_text(errors="replace") for path in tmp_path.glob("*.log")}
    if demo.returncode:  # not by an assertion, which pytest cuts short
        pytest.fail("\n".join([said, errors, *(log[-4000:] for log in logs.values())]))
    result = json.loads(said)
    assert result["faults"] == []
    assert result["moved_tokens"] == 768
    assert result["proxied_ttft_s"] >= result["ttft_s"] > 0
    told = f"prefilled by another engine at {result['peer']}"
    assert told in logs["disaggregated-decoder.log"]


CHUNK_TOKENS = 32
SETTLE_SECONDS = 60.0
LENGTHS = (10, 300, 385, 300)
"""Of prompts; the first is shorter than a chunk."""
MOVED = ("vllm:kvferry_hit_tokens_total{", "peer")
ASKED = ("vllm:kvferry_remote_prefills_total",)


def model_with_tokenizer(folder: Path) -> Path:
    shape = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 384}
    model = make_tiny_model(folder / "model", max_position_embeddings=2048, **shape)
    save_tiny_tokenizer(model)
    return model


def complete(port: int, prompt: list[int], max_tokens: int = 4, **more: Any) -> Answer:
    body = {"prompt": prompt, "max_tokens": max_tokens, "logprobs": 5, **more}
    said = [choice["logprobs"] for choice in streamed(port, "/v1/completions", body)]
    return as_answer(
        [token for each in said for token in each["tokens"]],
        [top for each in said for top in each["top_logprobs"]],
    )


def chat(port: int, text: str, max_tokens: int = 4) -> Answer:
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": max_tokens, "logprobs": True, "top_logprobs": 5}
    said = streamed(port, "/v1/chat/completions", body)
    tokens = [token for choice in said for token in choice["logprobs"]["content"]]
    tops = [{top["token"]: top["logprob"] for top in token["top_logprobs"]} for token in tokens]
    return as_answer([token["token"] for token in tokens], tops)


def streamed(port: int, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The pieces of an answer that have tokens. Not streamed, the proxy for turns leaves the
    logprobs out."""
    body |= {"model": "tiny", "temperature": 0.0, "ignore_eos": True, "stream": True}
    lines = ask(port, path, body | {"return_tokens_as_token_ids": True}).split(b"\n")
    pieces = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    choices = [choice for piece in pieces for choice in piece["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return [choice for choice in choices if choice["logprobs"]]


def as_answer(names: list[str], tops: list[dict[str, float]]) -> Answer:
    """Of tokens whose names are their numbers."""
    logprobs = [{name.removeprefix("token_id:"): top[name] for name in top} for top in tops]
    tokens = [int(name.removeprefix("token_id:")) for name in names]
    return Answer(tokens=tokens, logprobs=logprobs, cached=None, reason="length", seconds=None)


def counted(server: Server, name: str, label: str = "") -> float:
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in ask(server.port, "/metrics").decode().splitlines()
        if line.startswith(name) and label in line
    )


@pytest.mark.sweep
def test_two_prefillers_and_two_decoders_behind_the_toy_proxy(
    tmp_path: Path, make_prompt: MakePrompt, first: Process
) -> None:
    """With the cases of vLLM's test_edge_cases.py: a short prompt, and one of which the decoder has
    all, and one of which it has the start. Then the proxy is killed in mid-answer."""
    model = model_with_tokenizer(tmp_path)
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
        moved = [counted(each, *MOVED) for each in servers[2:]]
        assert min(moved) >= 256
        asked = sum(counted(each, *ASKED) for each in servers[2:])
        assert asked == len(answers)
        for server in servers:
            assert counted(server, "vllm:kvferry_remote_prefills_computed_total") == 0
            assert counted(server, "vllm:kvferry_hook_failed_total") == 0

        def ask_in_vain() -> None:
            with suppress(OSError, HTTPException, AssertionError):
                complete(front, prompts[2], 600)

        client = Thread(target=ask_in_vain)
        client.start()
        wait_until(lambda: num_running(servers) > 0, "a decoder generates", SETTLE_SECONDS)
        proxy.kill()
        client.join(SETTLE_SECONDS)
        wait_until(lambda: num_running(servers) == 0, "its request ends", SETTLE_SECONDS)
        for server in servers:
            assert_same(alone, [complete(server.port, prompts[2])])


def num_running(servers: list[Server]) -> float:
    return sum(counted(server, "vllm:num_requests_running{") for server in servers)


def all_requests(servers: list[Server]) -> float:
    return sum(counted(server, "vllm:num_requests_") for server in servers)


class Pair(NamedTuple):
    """Two servers of one model, each of which lists the other.

    Attributes:
        ports: by what the arguments of proxies name them. `peer` is where the prefiller's memory is
            served, `names` that of a server that answers Mooncake's proxy.
    """

    model: Path
    prefiller: Server
    decoder: Server
    ports: dict[str, int]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    model = model_with_tokenizer(folder)
    here, there, names = free_ports(3)
    (folder / "names").mkdir()
    (folder / "names" / "query").write_text('{"0": {"engine_id": "any"}}')
    options = {"chunk_tokens": CHUNK_TOKENS, "load_timeout_seconds": 60, "save_generated": True}
    common = ["--served-model-name", "tiny", "--chat-template", "{{ messages[0].content }}"]
    with ExitStack() as running:
        command = [sys.executable, "-m", "http.server", "--bind", LOCALHOST, f"{names}"]
        command += ["--directory", str(folder / "names")]
        running.callback(ServerProcess(command, folder / "names.log").kill)
        servers = []
        for role, block, own, other in (
            ("kv_both", 32, here, there),
            ("kv_consumer", 128, there, here),
        ):
            serve = f"{LOCALHOST}:{own}"
            connector = kvferry(f"peer://{LOCALHOST}:{other}", **options, serve=serve)
            arguments = [*common, "--block-size", f"{block}"]
            server = Server(
                model, {**connector, "kv_role": role}, folder / f"{role}.log", *arguments
            )
            servers.append(running.enter_context(server))
        for server in servers:
            server.wait_ready()
        prefiller, decoder = servers
        ports = {"prefill": prefiller.port, "decode": decoder.port, "peer": here, "names": names}
        yield Pair(model, prefiller, decoder, ports)
        for server in servers:
            assert counted(server, "vllm:kvferry_hook_failed_total") == 0


HOSTS = (
    f"--prefiller-host {LOCALHOST} --prefiller-port {{prefill}}"
    f" --decoder-host {LOCALHOST} --decoder-port {{decode}}"
)
P2P = f"{HOSTS} --p2p-connector-host {LOCALHOST} --p2p-connector-port {{peer}}"
ADDRESSES = f"--model tiny --prefill {LOCALHOST}:{{prefill}} --decode {LOCALHOST}:{{decode}}"


@dataclass(frozen=True)
class Proxy:
    """One of vLLM's, and how it is started.

    Attributes:
        arguments: with the names of ports.
        says: the decode that another engine prefills.
        waits: has the decode wait for that.
        ready: what it prints when it is.
    """

    file: str
    arguments: str
    says: bool = True
    waits: bool = True
    ready: str = ""


PROXIES = {
    "toy": Proxy("toy_proxy_server.py", HOSTS),
    "turns": Proxy("disagg_proxy_multiturn.py", HOSTS),
    # There is nothing to encode in a text: any server does for that.
    "encode": Proxy(
        "disagg_epd_proxy.py",
        f"--encode-servers-urls http://{LOCALHOST}:{{prefill}}"
        f" --prefill-servers-urls http://{LOCALHOST}:{{prefill}}"
        f" --decode-servers-urls http://{LOCALHOST}:{{decode}}",
    ),
    "push": Proxy(
        "disagg_proxy_pushconnector_demo.py",
        f"{ADDRESSES} --prefill-engine-id any --prefill-kv-host {LOCALHOST}"
        " --prefill-side-channel-port {peer}",
    ),
    "mooncake": Proxy(
        "mooncake_connector_proxy.py",
        f"--prefill http://{LOCALHOST}:{{prefill}} {{names}}"
        f" --decode http://{LOCALHOST}:{{decode}}",
        ready="instances are ready",
    ),
    "p2p": Proxy("p2p_connector_proxy.py", P2P),
    "p2p-decoder-first": Proxy("p2p_connector_proxy.py", f"{P2P} --decoder-first"),
    "p2p-source": Proxy("p2p_connector_proxy.py", f"{P2P} --p2p", waits=False),
    "own": Proxy(
        str(Path(__file__).parents[2] / "examples" / "proxy.py"),
        f"--prefill http://{LOCALHOST}:{{prefill}} --decode http://{LOCALHOST}:{{decode}}",
    ),
    "demo": Proxy("disagg_proxy_demo.py", ADDRESSES, says=False, waits=False),
    "lmcache": Proxy("disagg_proxy_server.py", HOSTS, says=False, waits=False),
}


@contextmanager
def started(name: str, pair: Pair, log: Path) -> Iterator[tuple[int, ServerProcess]]:
    """A proxy, and its port."""
    proxy = PROXIES[name]
    assert (FETCHED / proxy.file).is_file(), "scripts/vllm-connectors fetches it"
    (front,) = free_ports(1)
    arguments = proxy.arguments.format(**pair.ports).split()
    command = [sys.executable, str(FETCHED / proxy.file), "--port", f"{front}", *arguments]
    process = ServerProcess(command, log, {"PYTHONUNBUFFERED": "1"})
    try:
        process.wait_ready(lambda: accepts(front) and proxy.ready in log.read_text())
        yield front, process
    finally:
        process.kill()


def settle(server: Server) -> None:
    """Wait until a server has stored what it was asked to."""

    def is_idle() -> bool:
        complete(server.port, [7, 8, 9], 1)  # counts travel with steps
        return counted(server, "vllm:kvferry_pool_slots{", 'state="in_use"') == 0

    wait_until(is_idle, "its saves end", SETTLE_SECONDS)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROXIES)
def test_a_proxy_of_vllm_before_a_prefiller_and_a_decoder(
    tmp_path: Path, pair: Pair, make_prompt: MakePrompt, first: Process, name: str
) -> None:
    """Shorter than a chunk, and longer; the decode reads all that it can. One that is not told to
    wait finds what was stored before."""
    proxy, decoder = PROXIES[name], pair.decoder
    prompts = [make_prompt(length) for length in LENGTHS[:3]]
    if name == "encode":  # takes nothing but chats
        tokenizer = PreTrainedTokenizerFast.from_pretrained(pair.model)
        texts = ["".join(chr(ord("A") + each % 26) for each in prompt) for prompt in prompts]
        prompts = [tokenizer.encode(text) for text in texts]
    with first.engine(pair.model) as engine:
        own = engine.generate(prompts, logprobs=5).answers
    if not proxy.waits:
        for prompt in prompts:
            complete(pair.prefiller.port, prompt, 1)
        settle(pair.prefiller)
    moved, asked = counted(decoder, *MOVED), counted(decoder, *ASKED)
    with started(name, pair, tmp_path / "proxy.log") as (front, _):
        if name == "encode":
            answers = [chat(front, text) for text in texts]
        else:
            answers = [complete(front, prompt) for prompt in prompts]
    assert_same(own, answers)
    assert counted(decoder, *ASKED) - asked == len(prompts) * proxy.says
    moved = counted(decoder, *MOVED) - moved
    most = sum(expected_hit(len(prompt), chunk=CHUNK_TOKENS) for prompt in prompts)
    assert moved == most or (not proxy.waits and 0 < moved < most)


@pytest.mark.sweep
def test_a_turn_behind_the_proxy_for_turns_is_read_from_the_decoder(
    tmp_path: Path, pair: Pair, make_prompt: MakePrompt, first: Process
) -> None:
    """By its content, since 0.32 leaves the parameters out of streamed answers, where this proxy
    looks for them."""
    prompt = make_prompt(350)
    moved = counted(pair.prefiller, *MOVED)
    with started("turns", pair, tmp_path / "proxy.log") as (front, _):
        answers = [complete(front, prompt, 100, conversation_id="one")]
        history = prompt + answers[0].tokens
        settle(pair.decoder)
        later = history + make_prompt(50)
        answers += [complete(front, later, conversation_id="one")]
    with first.engine(pair.model) as engine:
        own = engine.generate([prompt], max_tokens=100, logprobs=5).answers
        own += engine.generate([later], logprobs=5).answers
    assert_same(own, answers)
    # The prompt of the first turn it has itself.
    assert counted(pair.prefiller, *MOVED) > moved


@pytest.mark.sweep
def test_a_decoder_that_refuses_a_request_begins_nothing_for_it(
    pair: Pair, make_prompt: MakePrompt, first: Process
) -> None:
    """vLLM's server then sends a stub with the same parameters through its engine."""
    prompt, decoder = make_prompt(300), pair.decoder
    with first.engine(pair.model) as engine:
        own = engine.generate([prompt], logprobs=5).answers
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
    asked = body | {"kv_transfer_params": {"do_remote_decode": True}}
    given = json.loads(ask(pair.prefiller.port, "/v1/completions", asked))["kv_transfer_params"]
    before = [counted(decoder, *each) for each in (MOVED, ASKED)]
    with pytest.raises(AssertionError, match="400"):
        complete(decoder.port, prompt + make_prompt(1200), kv_transfer_params=given)
    settle(decoder)
    wait_until(lambda: all_requests([decoder]) == 0, "it has nothing to do", SETTLE_SECONDS)
    assert [counted(decoder, *each) for each in (MOVED, ASKED)] == before
    assert_same(own, [complete(decoder.port, prompt, kv_transfer_params=given)])
    hit = expected_hit(len(prompt), chunk=CHUNK_TOKENS)
    after = [counted(decoder, *each) for each in (MOVED, ASKED)]
    assert after == [before[0] + hit, before[1] + 1]


@pytest.mark.sweep
def test_a_proxy_that_stops_in_mid_answer_and_a_client_that_goes_leave_nothing(
    tmp_path: Path, pair: Pair, make_prompt: MakePrompt, first: Process
) -> None:
    """The next request goes through a new proxy, while the old one still has its connections."""
    prompts, servers = [make_prompt(350) for _ in range(2)], [pair.prefiller, pair.decoder]
    with first.engine(pair.model) as engine:
        own = engine.generate(prompts, logprobs=5).answers
    with started("toy", pair, tmp_path / "stopped.log") as (front, stopped):
        body = {"model": "tiny", "prompt": prompts[0], "max_tokens": 600, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{LOCALHOST}:{front}/v1/completions",
            json.dumps(body | {"stream": True}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SETTLE_SECONDS) as answer:
            assert answer.readline().startswith(b"data: {")
            stopped.pause()
        wait_until(lambda: all_requests(servers) == 0, "both engines drain", SETTLE_SECONDS)
        for server in servers:
            settle(server)
        with started("toy", pair, tmp_path / "proxy.log") as (new, _):
            moved = counted(pair.decoder, *MOVED)
            answers = [complete(new, prompt) for prompt in prompts]
        assert_same(own, answers)
        # The decoder has the first prompt itself.
        hit = expected_hit(len(prompts[1]), chunk=CHUNK_TOKENS)
        assert counted(pair.decoder, *MOVED) - moved == hit
