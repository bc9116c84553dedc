"""What a connector costs and saves inside real vLLM: `make bench NAME=vllm`.

It runs with the Python of vLLM's environment. The model is a small random Llama. In each round,
every case stores in one process; every case with a connector also reads in a second process. One
process runs at a time, each with a fresh engine (`vllm_child`). Medians are over prompts and
rounds, and exact to a few per cent. docs/benchmarks.md explains each phase and column.
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
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import Progress

from benchmarks import Options
from benchmarks.report import Row
from benchmarks.vllm_child import Json
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

COMMAND = (sys.executable, "-m", "benchmarks.vllm_child")
ROOT = Path(__file__).resolve().parent.parent
"""Working directory of the child, where it finds `benchmarks`. Inside that package, `import vllm`
would find this file."""

PROCESS_SECONDS = 600.0
"""Time limit of one process."""

TOLERANCE = 1e-3
"""Largest difference of logprobs from those of the engine's own prefix hit."""

ALONE = "none"
"""vLLM without a connector."""

NOTES = {
    "example": "vLLM's ExampleConnector",
    "fs-tier": "vLLM's OffloadingConnector with its fs tier, which needs a device",
}

REQUIRED = (ALONE, "kvferry")
"""The benchmark ends if one of these fails; other cases may fail."""


def connectors(directory: Path) -> dict[str, Json | None]:
    """Return the cases, each with vLLM's `kv_transfer_config` that stores in `directory`. The first
    case is vLLM alone."""
    return {
        ALONE: None,
        "kvferry": {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.adapters.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "store": f"file://{directory}/store?max_bytes=8GiB",
                "audit": "off",  # it would compute a part of the first hit, or all
            },
        },
        "example": {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(directory)},
        },
        "fs-tier": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 1 << 30,
                "secondary_tiers": [{"type": "fs", "root_dir": str(directory)}],
            },
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each process does."""

    prompt_tokens: int = 2108
    prompts: int = 3
    answer_tokens: int = 8
    warm_up_tokens: int = 300
    decode_steps: int = 150


QUICK = Sizes(prompt_tokens=300, prompts=1, decode_steps=20)


@dataclass(slots=True)
class Measured:
    """The results of one case, as its processes print them.

    Attributes:
        case: name of the case.
        cold: results of the storing processes, one per round, with `bytes_per_token` in the store.
        warm: results of the reading processes; empty for vLLM alone.
        failure: why the case was given up; None if it was not.
    """

    case: str
    cold: list[Json] = field(default_factory=list)
    warm: list[Json] = field(default_factory=list)
    failure: str | None = None


class ChildFailedError(Exception):
    """A process with an engine failed; the message is one line from the end of its log."""


def run(options: Options) -> Sequence[Row]:
    """Measure all cases; return a row for each case and phase.

    Raises:
        ConfigError: there is no vLLM in this environment, or it does not run without a connector.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the benchmark vllm needs vLLM beside kvferry in one environment; for a CPU, "
            "`make bench NAME=vllm` makes one"
        )
    sizes = QUICK if options.quick else Sizes()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    cases = list(connectors(options.directory))
    return rows_of(measure(cases, sizes, options.directory, rounds=rounds, seed=options.seed))


def measure(
    cases: Sequence[str], sizes: Sizes, directory: Path, *, rounds: int, seed: int
) -> list[Measured]:
    """Run `rounds` rounds, in each of which every case stores and then reads what it stored.

    Args:
        cases: names of `connectors`, vLLM alone first.
        sizes: sizes of the work.
        directory: directory for the model and the stores; each store is removed after its use.
        rounds: number of rounds, at least one.
        seed: seed of weights and prompts.

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
                    _store_and_read(measured, work, directory / measured.case)
    return found


def _store_and_read(measured: Measured, work: Json, directory: Path) -> None:
    """One round of one case: add the results, or note why the case is given up.

    Raises:
        ConfigError: a required case failed.
    """
    store, log = directory / "store", directory / "log"
    store.mkdir(parents=True)
    work = work | {"connector": connectors(store)[measured.case]}
    try:
        cold = run_child(log, work)
        cold["bytes_per_token"] = _bytes_per_token(store, work)
        if measured.case != ALONE:
            reading = {"stored": str(store), "decode": None}
            measured.warm.append(run_child(log, work | reading))
        measured.cold.append(cold)
    except ChildFailedError as error:
        if measured.case in REQUIRED:
            raise ConfigError(f"vLLM with {measured.case} failed: {error}") from error
        measured.failure = str(error)
    finally:
        shutil.rmtree(directory)


def run_child(
    log: Path, work: Json, command: Sequence[str] = COMMAND, seconds: float = PROCESS_SECONDS
) -> Json:
    """Start a process, send its work as JSON to its stdin, and read the result from its stdout; its
    stderr goes to `log`. The process leads a process group of its own, which ends with it.

    Raises:
        ChildFailedError: the process failed, or took longer than `seconds`.
    """
    with (
        log.open("ab") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=os.environ | ENVIRONMENT,
            cwd=ROOT,
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
    """The work of every storing process of a round, without the connector."""

    def tokens(count: int) -> list[int]:
        return [source.randrange(3, MODEL["vocab_size"]) for _ in range(count)]

    prompts = [tokens(sizes.prompt_tokens) for _ in range(sizes.prompts)]
    return {
        "arguments": {**ENGINE, "model": str(model)},
        "warm_up": tokens(sizes.warm_up_tokens),
        "stored": None,
        "prompts": prompts,
        "max_tokens": sizes.answer_tokens,
        "decode": {"tokens": prompts[-1], "num_steps": sizes.decode_steps},
    }


def _bytes_per_token(store: Path, work: Json) -> float:
    """Return the stored bytes per token in whole blocks, over all prompts of a storing process."""
    num_bytes = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    prompts = [work["warm_up"], *work["prompts"]]
    return num_bytes / sum(len(tokens) // BLOCK_SIZE * BLOCK_SIZE for tokens in prompts)


# ---- rows


def rows_of(found: Sequence[Measured]) -> list[Row]:
    """Return rows of medians over all processes, in the order of the cases, vLLM alone first."""
    alone = found[0]
    prompts, own_hits = _all(alone.cold, "prompts"), _all(alone.cold, "again")
    rows: list[Row] = []
    for measured in found:
        case = measured.case
        if measured.failure is not None:
            note = f"not measured: {measured.failure}"
            rows.append({"case": case, "phase": "cold", "note": note})
            continue
        cold = _row(case, "cold", _all(measured.cold, "prompts"), prompts)
        if measured is alone:
            hit = _row(case, "own_hit", own_hits)
        else:
            cold["bytes_per_token"] = median(result["bytes_per_token"] for result in measured.cold)
            hit = _warm_row(measured, own_hits)
        rows += [cold, hit, _decode_row(measured, alone)]
    return rows


def _row(case: str, phase: str, ours: Sequence[Json], plain: Sequence[Json] = ()) -> Json:
    """Return the medians of a phase's figures, and of the ratios of its CPU times to `plain`'s."""
    row: Json = {"case": case, "phase": phase, "note": NOTES.get(case)}
    for name in ("cpu_s", "wall_s", "hit_tokens"):
        if all(name in one for one in ours):
            row[name] = float(median(one[name] for one in ours))
    if plain:
        pairs = zip(ours, plain, strict=True)
        row["cpu_ratio"] = median(one["cpu_s"] / other["cpu_s"] for one, other in pairs)
    return row


def _warm_row(measured: Measured, own_hits: Sequence[Json]) -> Json:
    prompts, again = _all(measured.warm, "prompts"), _all(measured.warm, "again")
    beyond = [one["wall_s"] - own["wall_s"] for one, own in zip(prompts, again, strict=True)]
    return _row(measured.case, "warm", prompts, again) | {
        "beyond_ms": 1e3 * median(beyond),
        "equal": all(is_equal(*pair) for pair in zip(prompts, own_hits, strict=True)),
    }


def _decode_row(measured: Measured, alone: Measured) -> Json:
    decodes = [result["decode"] for result in measured.cold]
    row = _row(measured.case, "decode", decodes, [result["decode"] for result in alone.cold])
    if measured is not alone:
        row["us_per_step"] = median(median(decode["hooks_us"]) for decode in decodes)
    row["p50_ms"] = 1e3 * median(median(decode["steps_s"]) for decode in decodes)
    return row


def is_equal(ours: Json, reference: Json) -> bool:
    """Whether tokens are equal, and logprobs of tokens that both list differ by at most
    `TOLERANCE`."""
    if ours["tokens"] != reference["tokens"] or len(ours["logprobs"]) != len(ours["tokens"]):
        return False
    return all(
        token in here and token in theirs and abs(theirs[token] - here[token]) <= TOLERANCE
        for chosen, here, theirs in zip(
            ours["tokens"], ours["logprobs"], reference["logprobs"], strict=True
        )
        # The least likely listed token may change places with one that is not listed.
        for token in {str(chosen)} | (here.keys() & theirs.keys())
    )


def _all(results: Iterable[Json], name: str) -> list[Json]:
    return [one for result in results for one in result[name]]
