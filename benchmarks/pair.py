"""Two engines, one of which prefills what the other decodes, and the rounds that are measured.

The engines list each other as peers and have no other store. Each round has two long prompts that
begin differently. The first is handed over, and then asked again of the decoder, which by then has
it in its own prefix cache. The decoder computes the second one. The prefiller also gives the whole
answer to the first prompt, as the single engine that the decoder is compared with.
"""

from __future__ import annotations

import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kvferry.demo.child import DemoProcess
from kvferry.demo.run import default_document, load_tokenizer, make_prompts
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError, KVError
from kvferry.observe import Counters

HOST = "127.0.0.1"
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""The transfer parameters that a proxy sends to the engine that prefills."""

LOAD_SECONDS = 60.0
"""Longer than by default: a busy machine shall show a long time, not a recomputed prompt."""

_START_SECONDS = 600
_SUMS = {
    "moved_tokens": "hit_tokens/peer",
    "moved_bytes": "tier_read_bytes/peer",
    "moved_s": "promise_seconds",
    "ttft_s": "first_token_seconds",
}
_QUESTION = "What is this text about?"
_WARM_UP_CHUNKS = 3


class Said(NamedTuple):
    """The answer to one prompt.

    Attributes:
        seconds: time to the first token.
        text: generated text.
        logprobs: log-probabilities of the chosen tokens.
        params: transfer parameters for the engine that decodes.
    """

    seconds: float
    text: str
    logprobs: tuple[float, ...]
    params: Mapping[str, Any] | None = None


Sums = Mapping[str, float]
"""Sums since the start of an engine, by the keys of `_SUMS`: tokens and bytes that came from peers,
seconds from first look-ups until the hits were verified in memory (`moved_s`), and seconds from
requests to their first tokens (`ttft_s`)."""


class Side(Protocol):
    """One engine, or a proxy before both."""

    def ask(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Said:
        """Have a prompt answered. Raises KVError if the engine does not answer."""

    def sums(self) -> Sums: ...


class Pair(NamedTuple):
    """Two engines, and maybe a proxy before them.

    Attributes:
        shapes: ranks and blocks of prefiller and decoder, in words.
        peer: address from which the decoder reads.
        block_size: tokens in a block of the decoder.
    """

    prefiller: Side
    decoder: Side
    proxy: Side | None
    shapes: tuple[str, str]
    peer: str
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverOptions:
    """The model, the lengths of prompts and answers, and where logs go.

    Attributes:
        model_dir: directory of a model with a tokenizer.
        rounds: number of prompts that are handed over.
        document_tokens: length of the prompts, without question and template.
        work_dir: directory in which servers write their logs.
        max_tokens: most tokens of an answer.
        chunk_tokens: tokens per record.
    """

    model_dir: Path
    rounds: int
    document_tokens: int
    work_dir: Path
    max_tokens: int
    chunk_tokens: int

    def connector_options(self, port: int) -> dict[str, Any]:
        """Return the cache's options for an engine that serves peers at `port`. No hit is computed
        again for an audit, as every answer is compared."""
        return {
            "chunk_tokens": self.chunk_tokens,
            "audit": "off",
            "load_timeout_seconds": LOAD_SECONDS,
            "serve": f"{HOST}:{port}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The measurements of one prompt that was handed over.

    Attributes:
        figures: measurements by their names in the JSON; those of `Sums` are the decoder's.
        expected_tokens: tokens of whole chunks that fill whole blocks of the decoder.
        same_answer: whether the decoder's answers are that of the prefiller alone.
        logprob_diff: largest difference of a log-probability from the prefiller's.
    """

    figures: Mapping[str, float]
    expected_tokens: int
    same_answer: bool
    logprob_diff: float


Advance = Callable[[int, int, str], None]
"""Is told how many requests of how many were answered, and what the last one was."""


def prompt_of(options: HandoverOptions, name: str, num_tokens: int) -> list[int]:
    """Make a long prompt whose document begins with `name`."""
    tokenizer = load_tokenizer(options.model_dir)
    text = f"Edition {name}. {default_document()}"
    [prompt] = make_prompts(tokenizer, text, num_tokens, [_QUESTION])
    return prompt


def run_rounds(options: HandoverOptions, pair: Pair, advance: Advance) -> list[Round]:
    """Measure and return all rounds; call `advance` after each request. A short round before the
    others keeps the cost of first forwards and of the connection out of the figures.

    Raises:
        ConfigError: the model or its tokenizer cannot be used.
        KVError: an engine failed.
    """
    lengths = [_WARM_UP_CHUNKS * options.chunk_tokens] + [options.document_tokens] * options.rounds
    rounds: list[Round] = []
    num_done = 0

    def answered(what: str) -> None:
        nonlocal num_done
        num_done += 1
        where = f"round {len(rounds)} of {options.rounds}" if rounds else "warm-up"
        advance(num_done, len(lengths) * len(_REQUESTS), f"{where}, {what}")

    for number, length in enumerate(lengths):
        handed, computed = (prompt_of(options, f"{number} {of}", length) for of in ("one", "two"))
        rounds.append(_measure(options, pair, handed, computed, answered))
    return rounds[1:]


_REQUESTS = ("handed over", "from the decoder's own cache", "computed", "of one engine")
"""The requests of a round."""


def _measure(
    options: HandoverOptions,
    pair: Pair,
    prompt: list[int],
    other: list[int],
    answered: Callable[[str], None],
) -> Round:
    before = pair.prefiller.sums(), pair.decoder.sums()
    if pair.proxy is not None:
        decoded = pair.proxy.ask(prompt, options.max_tokens)
    else:
        prefilled = pair.prefiller.ask(prompt, 1, PREFILL)
        decoded = pair.decoder.ask(prompt, options.max_tokens, prefilled.params)
    after = pair.prefiller.sums(), pair.decoder.sums()
    first, second = (
        {name: now[name] - then[name] for name in _SUMS}
        for now, then in zip(after, before, strict=True)
    )
    answered(_REQUESTS[0])
    local = pair.decoder.ask(prompt, options.max_tokens)
    answered(_REQUESTS[1])
    computed = pair.decoder.ask(other, options.max_tokens)
    answered(_REQUESTS[2])
    alone = pair.prefiller.ask(prompt, options.max_tokens)
    answered(_REQUESTS[3])
    size, chunk = len(prompt), options.chunk_tokens
    whole = min(size // chunk * chunk, size - 1)
    differences = [abs(a - b) for a, b in zip(decoded.logprobs, alone.logprobs, strict=False)]
    figures = {
        "prompt_tokens": size,
        "prefill_s": first["ttft_s"],
        **second,
        "local_ttft_s": local.seconds,  # by a hit in the decoder's own prefix cache
        "computed_ttft_s": computed.seconds,
    }
    if pair.proxy is not None:
        figures["proxied_ttft_s"] = decoded.seconds  # at the proxy's client, prefill included
    return Round(
        figures=figures,
        expected_tokens=whole // pair.block_size * pair.block_size,
        same_answer=decoded.text == local.text == alone.text,
        logprob_diff=max(differences, default=float("inf")),
    )


# -- two engines of ours ---------------------------------------------------------------------------


@contextmanager
def embedded_pair(options: HandoverOptions) -> Iterator[Pair]:
    """Start two embedded engines that differ in ranks and block size, each in its own process.

    Raises:
        ConfigError, KVError: an engine does not start.
    """
    ranks = _ranks_of(options.model_dir)
    ports = free_ports()
    shapes = ({"tensor_parallel_size": ranks, "block_size": 16}, {"block_size": 64})
    with ExitStack() as closing_all:
        engines = [
            closing_all.enter_context(EmbeddedEngine(options, here, there, shape))
            for here, there, shape in zip(ports, reversed(ports), shapes, strict=True)
        ]
        for engine in engines:
            engine.receive(_START_SECONDS)
        words = f"{ranks} ranks, blocks of 16", "1 rank, blocks of 64"
        prefiller, decoder = engines
        yield Pair(prefiller, decoder, None, words, f"{HOST}:{ports[0]}", 64)


def _ranks_of(model_dir: Path) -> int:
    """Return the smallest prime up to 7 that divides the heads of a model; 1 if none does."""
    try:
        heads = json.loads((model_dir / "config.json").read_text())["num_attention_heads"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model_dir} is not a model directory: {error}") from error
    return next((ranks for ranks in (2, 3, 5, 7) if heads % ranks == 0), 1)


def free_ports() -> tuple[int, int]:
    """Find two ports that nothing listens on; an engine must know both before it starts."""
    with socket.socket() as one, socket.socket() as other:
        one.bind((HOST, 0))
        other.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]


class EmbeddedEngine(DemoProcess):
    """An embedded engine in a process of its own. It sends None when it has started.

    Args:
        options: options of the run.
        here: port at which it serves peers.
        there: port of its only peer.
        shape: ranks and block size, as options of the engine.
    """

    def __init__(
        self, options: HandoverOptions, here: int, there: int, shape: Mapping[str, Any]
    ) -> None:
        super().__init__("an engine", _serve_engine, options, here, there, shape)

    def ask(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Said:
        self.send((list(prompt), max_tokens, params))
        found: Said = self.receive()
        return found

    def sums(self) -> Sums:
        self.send(())
        found: Sums = self.receive()
        return found


def _serve_engine(
    options: HandoverOptions, here: int, there: int, shape: Mapping[str, Any], asked: Connection
) -> None:
    """Answer prompts in float32 until the other end closes. Between prompts the engine goes on
    stepping while it has work: the last chunks of a prefill are completed only after its answer.

    Runs in: the process of an engine.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it closes its ranks and files
    logging.getLogger().addHandler(logging.NullHandler())
    counters = Counters()
    with closing(asked):
        try:
            with LLM(
                options.model_dir,
                store=f"peer://{HOST}:{there}",
                connector_options=options.connector_options(here),
                dtype="float32",
                observer=counters,
                **shape,
            ) as llm:
                asked.send(None)
                while True:
                    while not asked.poll(0 if llm.scheduler.has_work() else None):
                        llm.step()
                    asked.send(_answer(llm, counters, asked.recv()))
        except KVError as error:
            asked.send(error)
        except (EOFError, ConnectionError):
            pass


def _answer(llm: LLM, counters: Counters, question: tuple[Any, ...]) -> Said | Sums:
    if not question:
        sums = counters.snapshot()
        return {figure: sums.get(name, 0.0) for figure, name in _SUMS.items()}
    prompt, max_tokens, params = question
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=1, kv_transfer_params=params)
    [found] = llm.generate([prompt], sampling)
    if found.ttft_seconds is None or found.logprobs is None:
        raise KVError("the engine ended a request before its first token")
    counters.observe("first_token", found.ttft_seconds)
    chosen = tuple(each.chosen for each in found.logprobs)
    given = None if found.params is None else dict(found.params)
    return Said(found.ttft_seconds, found.text or "", chosen, given)
