"""What a store that cannot be reached costs an engine, in tokens a second and per look-up.

The embedded engine computes prompts that no store has, on one thread. An engine without a connector
is the limit. One store refuses connections, as after its server was killed. Another accepts them
and never answers, as a stopped server or one behind a broken network.

The second part times look-ups through the scheduler role, in microseconds: once with a directory
alone, once with a second tier that never answers. Half of each prompt is stored.
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
from benchmarks.report import Row
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
"""Host memory of each engine. The warm-up rounds fill it."""

STORED_TOKENS, NEW_TOKENS = 8 * CHUNK_TOKENS, 8 * CHUNK_TOKENS
"""Tokens of a looked-up prompt that are stored, and tokens that are not."""
LOOKUP_SECONDS = 30.0
"""Time for look-ups: the tier is found to be away and tried again several times meanwhile."""
ASKS, STEP_SECONDS = 3, 0.001
"""How often each prompt is looked up, and the pause for an engine's step in between."""


def run(options: Options) -> Sequence[Row]:
    """Return a row for the engine without a connector, one for each store that is away, then the
    look-ups. `ratio` compares a rate with that of the engine without a connector; `worst_round` is
    the lowest such ratio of a round."""
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
    """Compare each engine's tokens a second, in rounds of equal work, with the first engine's."""
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
    """Return the engine's tokens a second for a batch of new prompts."""
    batch = [prompts.choices(range(3, 250), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
    started = time.monotonic()
    engine.generate(batch, GENERATE)
    seconds = time.monotonic() - started
    return PROMPTS * (PROMPT_TOKENS + (GENERATE.max_tokens or 0)) / seconds


def _lookups(name: str, urls: list[str], prompts: random.Random, seconds: float) -> Row:
    """Look up many prompts in the tiers `urls`, of which the first is a directory, and return the
    slowest look-ups. Between look-ups, sums run that take as long as the second prompt's first
    look-up took. The slowest sums show what this machine adds to any code."""
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
            if found is not None:  # a hit needs a fetch first, which no worker makes here
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
    """Yield the URL of a store where nothing listens, or where nobody accepts connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if listens:
            held.listen(1024)
        yield f"valkey://127.0.0.1:{held.getsockname()[1]}/kv"
