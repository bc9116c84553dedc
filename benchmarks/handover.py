"""Time to first token of prompts that another engine prefilled, at an idle and a loaded decoder.

The prefiller is an engine in a process of its own; the decoder runs in this process. They are
peers. Each round has new prompts of each length. The decoder computes one prompt. Another prompt is
handed over and then asked again, which hits the decoder's own prefix cache. A plain socket carries
as many bytes for comparison. Then the same three requests come while the decoder generates for
another request.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, cast

from benchmarks import Options
from benchmarks.limits import timed
from benchmarks.pair import (
    HOST,
    PREFILL,
    EmbeddedEngine,
    HandoverOptions,
    free_ports,
)
from benchmarks.peer import Reads, schema_of, served
from benchmarks.report import Row
from benchmarks.vllm import MODEL
from kvferry.engine import LLM, SamplingParams
from kvferry.engine.generation import TokenEvent
from kvferry.errors import KVError
from kvferry.observe import Counters
from kvferry.testing.models import make_tiny_model

CHUNK_TOKENS = 128
RECORD_BYTES = 4 << 20
"""Size of a chunk of `MODEL` in float32."""
VOCABULARY = range(3, 320)
"""Token ids of the prompts, valid in any of the models."""
STEPS = 16
"""Steps of the loaded decoder that are timed, from the arrival of a request on."""
MEMORY: Mapping[str, Any] = {"memory_bytes": 740 << 20}
"""Host memory of the decoder. The first round fills it, and the other rounds use it again."""
ENGINE: Mapping[str, Any] = {"dtype": "float32", "kv_cache_bytes": 256 << 20}
LOAD = SamplingParams(max_tokens=2000, ignore_eos=True)
"""Sampling of the request that keeps the decoder loaded."""
_SEAL_SECONDS = 60.0


class Decoder(LLM):
    """An engine whose steps are timed.

    Attributes:
        steps: milliseconds of each step since the list was emptied.
    """

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - those of an engine
        self.steps: list[float] = []
        super().__init__(*args, **options)

    def step(self) -> None:
        self.steps.append(1e3 * timed(super().step).wall)


class Arrival(NamedTuple):
    """One request at the decoder.

    Attributes:
        way: how the KV of its prompt comes.
        first_token: milliseconds until the first token.
        num_steps: steps until the first token.
        steps: milliseconds of each step from the arrival on, later steps included.
    """

    way: str
    first_token: float
    num_steps: int
    steps: Sequence[float]


class Handovers:
    """Measures one round after the other.

    Args:
        prefiller, decoder: the two engines.
        counters: counters of the decoder.
        reads: reads from a plain socket.
        chance: source of random prompts.
    """

    def __init__(
        self,
        prefiller: EmbeddedEngine,
        decoder: Decoder,
        counters: Counters,
        reads: Reads,
        chance: random.Random,
    ) -> None:
        self._prefiller = prefiller
        self._decoder = decoder
        self._counters = counters
        self._reads = reads
        self._chance = chance

    def round(self, num_tokens: int) -> dict[str, float]:
        """Measure new prompts of one length."""
        before = self._counters.snapshot()
        found = {
            f"{each.way}_ms": each.first_token for each in self._arrivals(num_tokens, self._drain)
        }
        after = self._counters.snapshot()
        moved_tokens, moved_bytes, seconds = (
            after.get(name, 0.0) - before.get(name, 0.0)
            for name in ("hit_tokens/peer", "tier_read_bytes/peer", "promise_seconds")
        )
        self._reads.count = num_tokens // CHUNK_TOKENS
        return {
            "moved_tokens": moved_tokens,
            "moved_mb": moved_bytes / 1e6,
            **found,
            "transfer_ms": 1e3 * seconds,
            "socket_ms": 1e3 * timed(self._reads.plain_asked).wall,
            **self._loaded_round(num_tokens),
        }

    def _loaded_round(self, num_tokens: int) -> dict[str, float]:
        load = self._decoder.stream(self._prompt(CHUNK_TOKENS), LOAD)
        with closing(cast("Generator[TokenEvent]", load)):
            next(load)
            self._decoder.steps.clear()
            self._step_on()
            alone = list(self._decoder.steps)
            found = {"step_ms": statistics.median(alone), "worst_step_ms": max(alone)}
            for way, first_token, num_steps, steps in self._arrivals(num_tokens, self._step_on):
                found[f"loaded_{way}_ms"] = first_token
                found[f"{way}_step_ms"] = statistics.median(steps[:num_steps])
                found[f"{way}_worst_step_ms"] = max(steps)
                found[f"{way}_takes_ms"] = sum(steps) - len(steps) * statistics.mean(alone)
        self._drain()
        return found

    def _arrivals(self, num_tokens: int, go_on: Callable[[], None]) -> Iterator[Arrival]:
        """Send two new prompts: the decoder computes one, and the other is handed over and then
        hit. `go_on` runs steps until the next request may come."""
        handed, other = self._prompt(num_tokens), self._prompt(num_tokens)
        params = self._prefiller.ask(handed, 1, PREFILL).params
        # The computed prompt goes first, so that the prefiller has time to seal the other's end.
        for way, prompt, from_proxy in (
            ("computed", other, None),
            ("handed_over", handed, params),
            ("own_hit", handed, None),
        ):
            sampling = SamplingParams(max_tokens=1, kv_transfer_params=from_proxy)
            self._decoder.steps.clear()
            started = time.perf_counter()
            for _ in self._decoder.stream(prompt, sampling):
                pass
            first_token = 1e3 * (time.perf_counter() - started)
            num_steps = len(self._decoder.steps)
            go_on()
            yield Arrival(way, first_token, num_steps, list(self._decoder.steps))

    def _prompt(self, num_tokens: int) -> list[int]:
        return self._chance.choices(VOCABULARY, k=num_tokens)

    def _step_on(self) -> None:
        while len(self._decoder.steps) < STEPS:
            self._decoder.step()

    def _drain(self) -> None:
        if not self._decoder.drain(_SEAL_SECONDS):
            raise KVError("the decoder does not seal what it computed")


def run(options: Options) -> Sequence[Row]:
    """Return a row for each length of a prompt, with medians of all rounds but the first. The last
    prompt ends in the middle of a chunk, so the decoder computes half a chunk, as in the mean.
    `first_transfer_ms` is from the first round, whose memory nothing has touched."""
    few, some, many = (1, 2, 3) if options.quick else (1, 8, 16)
    lengths = [chunks * CHUNK_TOKENS + 1 for chunks in (few, some, many)]
    lengths.append(some * CHUNK_TOKENS + CHUNK_TOKENS // 2)
    num_rounds = 1 if options.quick else (options.rounds or 7)
    rounds: dict[int, list[dict[str, float]]] = {length: [] for length in lengths}
    with ExitStack() as undo:
        handovers = _open(options, undo)
        handovers.round(many * CHUNK_TOKENS)  # uses up the memory that the start has touched
        for _ in range(num_rounds + 1):
            for length in lengths:
                rounds[length].append(handovers.round(length))
    return [_row(length, found) for length, found in rounds.items()]


def _row(prompt_tokens: int, rounds: Sequence[Mapping[str, float]]) -> Row:
    first, *others = rounds
    return {
        "prompt_tokens": prompt_tokens,
        **{name: statistics.median(each[name] for each in others) for name in first},
        "moved_tokens": min(each["moved_tokens"] for each in others),
        "first_transfer_ms": first["transfer_ms"],
    }


def _open(options: Options, undo: ExitStack) -> Handovers:
    shape: dict[str, Any] = (
        {**MODEL, "num_hidden_layers": 1, "vocab_size": 320} if options.quick else MODEL
    )
    model = make_tiny_model(options.directory / "model", seed=options.seed, **shape)
    handover = HandoverOptions(
        model_dir=model,
        rounds=0,
        document_tokens=0,
        work_dir=options.directory,
        max_tokens=1,
        chunk_tokens=CHUNK_TOKENS,
    )
    here, there = free_ports()
    prefiller = undo.enter_context(EmbeddedEngine(handover, here, there, {}))
    counters = Counters()
    decoder = Decoder(
        model,
        store=f"peer://{HOST}:{here}",
        connector_options={**handover.connector_options(there), **MEMORY},
        observer=counters,
        **ENGINE,
    )
    undo.enter_context(decoder)
    key_file, ports = undo.enter_context(served(options.directory, RECORD_BYTES, options.seed))
    reads = Reads(key_file, ports, schema_of(RECORD_BYTES), 0, options.threads)
    undo.enter_context(closing(reads))
    prefiller.receive()
    return Handovers(prefiller, decoder, counters, reads, random.Random(options.seed))
