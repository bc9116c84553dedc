"""All processes of a run: every case in every round, in turn."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvferry.bench.vllm.cases import Case
from kvferry.bench.vllm.servers import lmcache_server
from kvferry.errors import ConfigError
from kvferry.testing.models import make_tiny_model

Json = dict[str, Any]

ROUNDS = 10
PROCESS_SECONDS = 600.0

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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each process does."""

    prompt_tokens: int = 2108
    prompts: int = 2
    answer_tokens: int = 8
    warm_up_tokens: int = 300
    decode_steps: int = 150
    served: int = 10
    served_tokens: int = 400

    @staticmethod
    def quick() -> Sizes:
        return Sizes(prompt_tokens=300, prompts=1, decode_steps=20, served=4, served_tokens=140)


@dataclass(slots=True)
class Measured:
    """What one case gave.

    Attributes:
        case: which.
        cold: results of its first processes, one per round.
        warm: of its second ones; empty if it stores nothing.
        stored_bytes: after each first process.
        computed: tokens in whole blocks that each first process computed.
        failure: why it was given up, if it was.
    """

    case: Case
    cold: list[Json]
    warm: list[Json]
    stored_bytes: list[int]
    computed: list[int]
    failure: str | None = None


class ChildFailedError(Exception):
    """A process with an engine ended badly; the message is the end of its log, as one line."""


def measure(
    cases: Sequence[Case], sizes: Sizes, directory: Path, *, rounds: int, seed: int
) -> list[Measured]:
    """Run `rounds` rounds; in each, every case stores and then reads what it stored.

    Args:
        cases: the first one is needed by all.
        sizes: of the work.
        directory: for the model and the stores; emptied as the run goes on.
        rounds: how often.
        seed: of weights and prompts.

    Raises:
        ConfigError: a case that is required failed.
    """
    model = make_tiny_model(directory / "model", "llama", seed=seed, **MODEL)
    found = [Measured(case, [], [], [], [], case.refusal) for case in cases]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("rounds of engines", total=rounds * len(found))
        for number in range(rounds):
            jobs = _jobs(sizes, model, random.Random(seed * 1000 + number))
            # Whoever goes first has the quietest machine: nobody always does.
            turn = number % len(found)
            for measured in found[turn:] + found[:turn]:
                if measured.failure is None:
                    _run_case(measured, jobs, directory / f"round-{number}")
                progress.advance(task)
    return found


def _run_case(measured: Measured, jobs: tuple[Json, Json], directory: Path) -> None:
    case = measured.case
    store = directory / "store"
    store.mkdir(parents=True)
    connector = None if case.connector is None else case.connector(store)
    cold, warm = ({**job, "connector": connector} for job in jobs)
    cold["again"], warm["again"] = connector is None, True
    cold["stored"], warm["stored"] = None, str(store)
    log = directory / "log"
    try:
        with lmcache_server(store, log) if case.server else nullcontext():
            measured.cold.append(_run_child(cold, directory))
            measured.stored_bytes.append(_bytes_in(store))
            measured.computed.append(_tokens_in_blocks(cold))
            if connector is not None and case.stores:
                measured.warm.append(_run_child(warm, directory))
    except (ChildFailedError, ConfigError) as error:
        if case.required:
            raise ConfigError(f"vLLM with {case.name} failed: {error}") from error
        measured.failure = str(error)
    finally:
        shutil.rmtree(directory)


def _jobs(sizes: Sizes, model: Path, source: random.Random) -> tuple[Json, Json]:
    """What the storing and the reading process of one round do; the same for every case."""

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, MODEL["vocab_size"]) for _ in range(count)]

    common: Json = {
        "engine": {**ENGINE, "model": str(model)},
        "warm_up": [tokens(sizes.warm_up_tokens)],
        "prompts": [tokens(sizes.prompt_tokens) for _ in range(sizes.prompts)],
        "max_tokens": sizes.answer_tokens,
        "again": False,
    }
    serve = {
        "prompts": [tokens(sizes.served_tokens) for _ in range(sizes.served)],
        # Of different lengths, so that prompts are computed while others decode.
        "max_tokens": [20 + 7 * index % 30 for index in range(sizes.served)],
        "at_once": 4,
    }
    return (
        {**common, "serve": serve, "decode_steps": sizes.decode_steps},
        {**common, "serve": None, "decode_steps": 0},
    )


def _run_child(job: Json, directory: Path) -> Json:
    job_file, result_file, log = (directory / name for name in ("job", "result", "log"))
    job_file.write_text(json.dumps(job), encoding="utf-8")
    result_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "kvferry.bench.vllm.child", str(job_file), str(result_file)]
    with log.open("ab") as output:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | ENVIRONMENT,
                timeout=PROCESS_SECONDS,
                check=True,
            )
        except subprocess.TimeoutExpired as error:
            raise ChildFailedError(f"no end within {PROCESS_SECONDS:.0f} s") from error
        except subprocess.CalledProcessError as error:
            raise ChildFailedError(_reason(log)) from error
    result: Json = json.loads(result_file.read_text(encoding="utf-8"))
    return result


def _reason(log: Path) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line] or ["no output"]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Exception:" in line]
    return (errors or lines)[-1][:200]


def _tokens_in_blocks(job: Json) -> int:
    prompts = job["warm_up"] + job["prompts"] + job["serve"]["prompts"]
    return sum(len(tokens) // BLOCK_SIZE * BLOCK_SIZE for tokens in prompts)


def _bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
