"""What a store that is away costs an engine that finds nothing in it: tokens a second.

The embedded engine computes prompts that no store has, with one thread. The engine without a
connector is the limit. One store refuses connections, as where a server was killed; one takes them
and never answers, as a server that is stopped or behind a broken network.

Then look-ups through the scheduler role, in microseconds: in a directory alone, and with a second
tier that never answers. Each prompt is half stored, half new.
"""

from __future__ import annotations

import random
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import Options
from benchmarks.host import CHUNK_TOKENS, HostRequest, engine_spec
from benchmarks.lookup import GROUP, create_records, rebuild
from kvferry.bench import Row
from kvferry.cache.build import PrefixCache
from kvferry.engine import LLM, SamplingParams
from kvferry.keys import ChunkKeys
from kvferry.observe import Observer
from kvferry.testing.models import make_tiny_model

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
PROMPT_TOKENS, PROMPTS = 512, 8
GENERATE = SamplingParams(max_tokens=16, ignore_eos=True)
MEMORY_BYTES = 128 << 20
"""Host memory; the rounds before the first that counts fill it."""

STORED_TOKENS, NEW_TOKENS = 8 * CHUNK_TOKENS, 8 * CHUNK_TOKENS
"""Of a prompt that is looked up."""
LOOKUP_SECONDS = 30.0
"""In which the tier is found to be away and tried again several times."""
ASKS, STEP_SECONDS = 3, 0.001
"""How often a prompt is looked up, and how long the engine's step takes between."""


def run(options: Options) -> Sequence[Row]:
    """Rows: the engine without a connector, then with each store that is away. `ratio` is of the
    engine without; `worst_round` is the ratio of the round that lost most. Then the look-ups."""
    rounds, warm_rounds = (1, 1) if options.quick else (options.rounds or 30, 6)
    shape = {**SHAPE, "num_hidden_layers": 1} if options.quick else SHAPE
    prompts = random.Random(options.seed)
    with ExitStack() as undo:
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        model = make_tiny_model(options.directory / "model", seed=options.seed, **shape)
        stores = {
            "no connector": None,
            "refuses": undo.enter_context(server(listens=False)),
            "never answers": undo.enter_context(server(listens=True)),
        }
        memory = {"memory_bytes": MEMORY_BYTES}
        engines = {
            name: undo.enter_context(
                LLM(
                    model,
                    store=url,
                    connector_options=None if url is None else memory,
                    prefix_caching=False,
                )
            )
            for name, url in stores.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(warm_rounds + rounds):
            for name, engine in engines.items():
                rates[name].append(_round(engine, prompts))
    rows = rows_of({name: found[warm_rounds:] for name, found in rates.items()})
    directory = f"file://{options.directory / 'store'}"
    seconds = 0.2 if options.quick else LOOKUP_SECONDS
    with server(listens=True) as hangs:
        tiers = {"directory": [directory], "directory, never answers": [directory, hangs]}
        return rows + [_lookups(name, urls, prompts, seconds) for name, urls in tiers.items()]


def rows_of(rates: Mapping[str, Sequence[float]]) -> list[Row]:
    """Each engine beside the first one, from its tokens a second in rounds of equal work."""
    plain = next(iter(rates.values()))
    return [
        {
            "store": name,
            "tokens_per_s": statistics.harmonic_mean(ours),
            "ratio": statistics.harmonic_mean(ours) / statistics.harmonic_mean(plain),
            "worst_round": min(a / b for a, b in zip(ours, plain, strict=True)),
        }
        for name, ours in rates.items()
    ]


def _round(engine: LLM, prompts: random.Random) -> float:
    """Tokens a second for some prompts that were never seen."""
    batch = [prompts.choices(range(3, 250), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
    started = time.monotonic()
    engine.generate(batch, GENERATE)
    seconds = time.monotonic() - started
    return PROMPTS * (PROMPT_TOKENS + (GENERATE.max_tokens or 0)) / seconds


def _lookups(name: str, urls: list[str], prompts: random.Random, seconds: float) -> Row:
    """The slowest look-ups of many prompts, where the first of these tiers is a directory, and the
    slowest of sums between them, each as long as the first look-up of a prompt: what this machine
    adds to any code."""
    options = {"store": urls, "chunk_tokens": CHUNK_TOKENS, "audit": "off"}
    stored = prompts.choices(range(3, 250), k=STORED_TOKENS)
    cache = PrefixCache(engine_spec(GROUP), options, Observer())
    keys = ChunkKeys(cache.schema.namespace, CHUNK_TOKENS)
    keys.extend(stored)
    directory = Path(urls[0].removeprefix("file://"))
    cache.close()
    create_records(directory, keys.keys, len(keys.keys), seed=0)
    rebuild(urls[0], directory)
    cache = PrefixCache(engine_spec(GROUP), options, Observer())
    if not cache.store.wait_indexed(60.0):
        raise AssertionError("the directory is not indexed")
    scheduler = cache.scheduler()
    times: list[float] = []
    sums: list[float] = []
    work = range(0)
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        tokens = [*stored, *prompts.choices(range(3, 250), k=NEW_TOKENS), 3]
        prompt = HostRequest(f"prompt {len(times)}", tokens, len(tokens))
        started = time.perf_counter()
        scheduler.on_new_request(prompt)
        for _ in range(ASKS):
            found = scheduler.lookup(prompt, 0).num_tokens
            times.append(1e6 * (time.perf_counter() - started))
            if found is not None:  # what is stored would be fetched first
                raise AssertionError(f"looked up {found} tokens of a prompt that is half stored")
            time.sleep(STEP_SECONDS)
            if len(times) == ASKS + 1:
                work = range(int(times[-1] / _timed_sum(range(10_000)) * 10_000))
            if work:
                sums.append(_timed_sum(work))
                time.sleep(STEP_SECONDS)
            started = time.perf_counter()
        scheduler.request_finished(prompt, ([],))
    scheduler.close()
    cache.close()
    return {
        "store": name,
        "lookups": len(times),
        "lookup_p999_us": statistics.quantiles(times, n=1000)[-1],
        "worst_lookup_us": max(times),
        "sum_p999_us": statistics.quantiles(sums, n=1000)[-1],
        "worst_sum_us": max(sums),
    }


def _timed_sum(numbers: range) -> float:
    started = time.perf_counter()
    sum(numbers)
    return 1e6 * (time.perf_counter() - started)


@contextmanager
def server(*, listens: bool) -> Iterator[str]:
    """URL of a store where nothing listens, or where no process accepts connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if listens:
            held.listen(1024)
        yield f"valkey://127.0.0.1:{held.getsockname()[1]}/kv"
