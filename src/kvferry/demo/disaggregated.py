"""Prefill in one engine, decode in another: what the way over costs, beside what it saves.

The engines list each other as peers and have no other store. Each round has two long prompts that
begin differently: one is handed over, and asked again of the decoder, which then has it in its own
prefix cache; the decoder computes the other one. The prefiller, asked for the whole answer, is the
single engine that the decoder is compared with.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from rich.table import Table
from rich.text import Text

from kvferry.config import printable
from kvferry.demo.run import default_document, load_tokenizer, make_prompts
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError, KVError, StoreError
from kvferry.keys import JsonValue
from kvferry.observe import Counters

HOST = "127.0.0.1"
MAX_LOGPROB_DIFF = 1e-3
"""Bound in float32; see `kvferry.demo.run.MAX_LOGIT_DIFF`."""

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a proxy says to the engine that prefills."""

LOAD_SECONDS = 60.0
"""Longer than by default: a busy machine shall show its time, not a recomputed prompt."""

_START_SECONDS = 600
_ANSWER_SECONDS = 1800
_END_SECONDS = 60
_QUESTION = "What is this text about?"
_WARM_UP_CHUNKS = 3


class Said(NamedTuple):
    """The answer to one prompt.

    Attributes:
        seconds: to the first token.
        text: generated.
        logprobs: of the chosen tokens.
        params: for the engine that goes on.
    """

    seconds: float
    text: str
    logprobs: tuple[float, ...]
    params: Mapping[str, Any] | None = None


class Moved(NamedTuple):
    """What an engine got from peers since its start.

    Attributes:
        seconds: from first look-ups until all was verified in memory.
    """

    num_tokens: float
    num_bytes: float
    seconds: float


class Side(Protocol):
    """One engine, or a proxy before both."""

    def ask(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Said:
        """Have a prompt answered. Raises StoreError for an engine that does not."""

    def moved(self) -> Moved: ...


class Pair(NamedTuple):
    """Two engines, and maybe a proxy before them.

    Attributes:
        shapes: of prefiller and decoder, in words.
        peer: address at which the decoder reads.
        block_size: of the decoder, in tokens.
    """

    prefiller: Side
    decoder: Side
    proxy: Side | None
    shapes: tuple[str, str]
    peer: str
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverOptions:
    """Attributes:
    model_dir: with a tokenizer.
    rounds: prompts that are handed over.
    document_tokens: length of the prompts, without question and template.
    work_dir: where servers write their logs.
    max_tokens: answer length.
    chunk_tokens: tokens per record.
    """

    model_dir: Path
    rounds: int
    document_tokens: int
    work_dir: Path
    max_tokens: int
    chunk_tokens: int

    def connector_options(self, port: int) -> dict[str, Any]:
        """Of an engine that serves peers at `port`. No hit is computed again for an audit, for
        every answer is compared."""
        return {
            "chunk_tokens": self.chunk_tokens,
            "audit": "off",
            "load_timeout_seconds": LOAD_SECONDS,
            "serve": f"{HOST}:{port}",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One prompt, handed over.

    Attributes:
        prefill_seconds: until the prefiller's answer; None behind a proxy.
        moved: tokens, bytes and seconds of the transfer.
        expected_tokens: that could be moved.
        seconds: to the decoder's first token; behind a proxy to that of the client, prefill and
            all.
        local_seconds: the same for a hit in the decoder's own prefix cache.
        computed_seconds: the same where the decoder computes.
        same_answer: as that of the prefiller alone.
        logprob_diff: largest difference from it.
    """

    num_tokens: int
    prefill_seconds: float | None
    moved: Moved
    expected_tokens: int
    seconds: float
    local_seconds: float
    computed_seconds: float
    same_answer: bool
    logprob_diff: float


Advance = Callable[[str], None]


def prompt_of(options: HandoverOptions, name: str, num_tokens: int) -> list[int]:
    """A long prompt that begins with `name`."""
    tokenizer = load_tokenizer(options.model_dir)
    text = f"Edition {name}. {default_document()}"
    [prompt] = make_prompts(tokenizer, text, num_tokens, [_QUESTION])
    return prompt


def run_rounds(options: HandoverOptions, pair: Pair, advance: Advance) -> Result:
    """Measure; `advance` is called after each round. A short round before the others keeps the
    cost of first forwards and of the connection out of the figures.

    Raises:
        ConfigError: the model or its tokenizer cannot be used.
        StoreError: an engine that failed.
    """
    lengths = [_WARM_UP_CHUNKS * options.chunk_tokens] + [options.document_tokens] * options.rounds
    rounds = []
    for number, length in enumerate(lengths):
        handed, computed = (prompt_of(options, f"{number} {of}", length) for of in ("one", "two"))
        rounds.append(_measure(options, pair, handed, computed))
        advance(f"round {number}" if number else "warm-up")
    return Result(
        model=options.model_dir.resolve().name,
        engines=pair.shapes,
        peer=pair.peer,
        is_proxied=pair.proxy is not None,
        rounds=rounds[1:],
    )


def _measure(options: HandoverOptions, pair: Pair, prompt: list[int], other: list[int]) -> Round:
    before, prefilled = pair.decoder.moved(), None
    if pair.proxy is not None:
        decoded = pair.proxy.ask(prompt, options.max_tokens)
    else:
        prefilled = pair.prefiller.ask(prompt, 1, PREFILL)
        decoded = pair.decoder.ask(prompt, options.max_tokens, prefilled.params)
    after = pair.decoder.moved()
    local = pair.decoder.ask(prompt, options.max_tokens)
    computed = pair.decoder.ask(other, options.max_tokens)
    alone = pair.prefiller.ask(prompt, options.max_tokens)
    size, chunk = len(prompt), options.chunk_tokens
    whole = min(size // chunk * chunk, size - 1)
    differences = [abs(a - b) for a, b in zip(decoded.logprobs, alone.logprobs, strict=False)]
    return Round(
        num_tokens=size,
        prefill_seconds=None if prefilled is None else prefilled.seconds,
        moved=Moved(*(now - then for now, then in zip(after, before, strict=True))),
        expected_tokens=whole // pair.block_size * pair.block_size,
        seconds=decoded.seconds,
        local_seconds=local.seconds,
        computed_seconds=computed.seconds,
        same_answer=decoded.text == local.text == alone.text,
        logprob_diff=max(differences, default=float("inf")),
    )


# -- two engines of ours ---------------------------------------------------------------------------


@contextmanager
def embedded_pair(options: HandoverOptions) -> Iterator[Pair]:
    """Two embedded engines in processes of their own, with other ranks and other blocks.

    Raises:
        ConfigError, StoreError: an engine that does not start.
    """
    ranks = _ranks_of(options.model_dir)
    ports = free_ports()
    shapes = ({"tensor_parallel_size": ranks, "block_size": 16}, {"block_size": 64})
    with ExitStack() as closing_all:
        engines = [
            closing_all.enter_context(_EngineProcess(options, here, there, shape))
            for here, there, shape in zip(ports, reversed(ports), shapes, strict=True)
        ]
        for engine in engines:
            engine.wait_ready()
        words = f"{ranks} ranks, blocks of 16", "1 rank, blocks of 64"
        prefiller, decoder = engines
        yield Pair(prefiller, decoder, None, words, f"{HOST}:{ports[0]}", 64)


def _ranks_of(model_dir: Path) -> int:
    """The smallest number above 1 that divides the heads of a model."""
    try:
        heads = json.loads((model_dir / "config.json").read_text())["num_attention_heads"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{model_dir} is not a model directory: {error}") from error
    return next((ranks for ranks in (2, 3, 5, 7) if heads % ranks == 0), 1)


def free_ports() -> tuple[int, int]:
    """Two that nothing listens on. The engines must know each other's before they start."""
    with socket.socket() as one, socket.socket() as other:
        one.bind((HOST, 0))
        other.bind((HOST, 0))
        return one.getsockname()[1], other.getsockname()[1]


class _EngineProcess:
    """An embedded engine in a process of its own. A context manager."""

    def __init__(
        self, options: HandoverOptions, here: int, there: int, shape: Mapping[str, Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve_engine, args=(options, here, there, shape, theirs)
        )
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        self._receive(_START_SECONDS)

    def ask(
        self, prompt: Sequence[int], max_tokens: int, params: Mapping[str, Any] | None = None
    ) -> Said:
        self._ours.send((list(prompt), max_tokens, params))
        return Said(*self._receive(_ANSWER_SECONDS))

    def moved(self) -> Moved:
        self._ours.send(())
        return Moved(*self._receive(_ANSWER_SECONDS))

    def _receive(self, seconds: float) -> Any:  # noqa: ANN401 - what `_serve_engine` sent
        try:
            if not self._ours.poll(seconds):
                raise StoreError(f"an engine gave no answer in {seconds:.0f} s")
            answer = self._ours.recv()
        except EOFError:
            raise StoreError("an engine died") from None
        if isinstance(answer, KVError):
            raise type(answer)(f"an engine failed: {answer}")
        return answer

    def __enter__(self) -> _EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ours.close()
        self._process.join(_END_SECONDS)
        self._process.kill()  # does nothing if it ended
        self._process.join()


def _serve_engine(
    options: HandoverOptions, here: int, there: int, shape: Mapping[str, Any], asked: Connection
) -> None:
    """Answer prompts in float32 until the other end closes. Between them the engine steps on while
    its connector has work: the last chunks of a prefill are sealed behind its answer.

    Runs in: the process of an engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
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


def _answer(llm: LLM, counters: Counters, question: tuple[Any, ...]) -> tuple[Any, ...]:
    if not question:
        sums = counters.snapshot()
        names = "hit_tokens/peer", "tier_read_bytes/peer", "promise_seconds"
        return tuple(sums.get(name, 0.0) for name in names)
    prompt, max_tokens, params = question
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=1, kv_transfer_params=params)
    [found] = llm.generate([prompt], sampling)
    if found.ttft_seconds is None or found.logprobs is None:
        raise StoreError("the engine ended a request before its first token")
    chosen = tuple(each.chosen for each in found.logprobs)
    given = None if found.params is None else dict(found.params)
    return found.ttft_seconds, found.text or "", chosen, given


# -- the report ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What all rounds showed."""

    model: str
    engines: tuple[str, str]
    peer: str
    is_proxied: bool
    rounds: Sequence[Round]

    def median_of(self, read: Callable[[Round], float]) -> float:
        return median(map(read, self.rounds))

    def faults(self) -> list[str]:
        """What was wrong; empty if every answer was that of a single engine, and all came over."""
        faults = []
        if not all(each.same_answer for each in self.rounds):
            faults.append("an answer changed")
        worst = max(each.logprob_diff for each in self.rounds)
        if not worst <= MAX_LOGPROB_DIFF:
            faults.append(f"log-probabilities differ by {worst:.1e}")
        faults += [
            f"{each.moved.num_tokens:.0f} tokens came over instead of {each.expected_tokens}"
            for each in self.rounds
            if each.moved.num_tokens != each.expected_tokens
        ]
        return faults


def as_json(result: Result) -> dict[str, JsonValue]:
    """Medians over the rounds, seconds and bytes."""
    of = result.median_of
    num_bytes, seconds = of(lambda each: each.moved.num_bytes), of(lambda each: each.moved.seconds)
    prefill = None
    if not result.is_proxied:
        prefill = of(lambda each: each.prefill_seconds or 0.0)
    return {
        "model": result.model,
        "engines": list(result.engines),
        "peer": result.peer,
        "is_proxied": result.is_proxied,
        "rounds": len(result.rounds),
        "prompt_tokens": of(lambda each: each.num_tokens),
        "prefill_s": prefill,
        "moved_tokens": of(lambda each: each.moved.num_tokens),
        "moved_bytes": num_bytes,
        "moved_s": seconds,
        "gb_per_s": num_bytes / seconds / 1e9 if seconds else 0.0,
        "ttft_s": of(lambda each: each.seconds),
        "local_ttft_s": of(lambda each: each.local_seconds),
        "computed_ttft_s": of(lambda each: each.computed_seconds),
        "max_abs_logprob_diff": max(each.logprob_diff for each in result.rounds),
        "faults": list(result.faults()),
    }


def table(result: Result) -> Table:
    """One line for each stage, and for each way to the first token."""
    found = as_json(result)
    title = f"{result.model}, float32: medians of {len(result.rounds)} prompts"
    table = Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for column in ("tokens", "time"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")

    def add(what: str, tokens: str, seconds: str, remark: str = "") -> None:
        table.add_row(what, f"{found[tokens]:.0f}", f"{found[seconds]:.3f} s", printable(remark))

    prefiller, decoder = result.engines
    if not result.is_proxied:
        add("prefill", "prompt_tokens", "prefill_s", prefiller)
    size = f"{found['moved_bytes']:,.0f} bytes, {found['gb_per_s']:.2f} GB/s"
    add("transfer", "moved_tokens", "moved_s", f"{size} from peer {result.peer}")
    over = "first token, proxy and all" if result.is_proxied else "first token, handed over"
    add(over, "prompt_tokens", "ttft_s", decoder)
    add("first token, own prefix hit", "prompt_tokens", "local_ttft_s", decoder)
    add("first token, computed", "prompt_tokens", "computed_ttft_s", decoder)
    return table


def verdict(result: Result) -> str:
    """One line: right, or what was wrong."""
    if faults := result.faults():
        return f"[bold red]Wrong:[/] {'; '.join(faults)}."
    worst = max(each.logprob_diff for each in result.rounds)
    return f"Right: every answer as of a single engine (log-probabilities within {worst:.0e})."
