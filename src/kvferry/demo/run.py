"""The demonstration from start to end: three phases, each in a process of its own.

Cold: every question with a fresh store and an empty prefix cache of the engine's own. Warm: a new
process asks the same questions of the store that the first question filled. Corrupted: another new
process, after one byte of one record was flipped on disk.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from safetensors import safe_open

from kvferry.demo.phase import Answer, Ask, PhaseSpec
from kvferry.errors import ConfigError, StoreError

RUN_DIR = "kvferry-demo-run"
_PHASE_SECONDS = 1800

Advance = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What is asked, of which model, and where files go.

    Attributes:
        model_dir: the model.
        prompts: token ids, one list per question; they start alike.
        questions: what the prompts ask, for the report.
        work_dir: `RUN_DIR` in it is replaced.
        max_tokens: answer length.
        chunk_tokens: tokens per stored record.
    """

    model_dir: Path
    prompts: Sequence[list[int]]
    questions: Sequence[str]
    work_dir: Path
    max_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        shortest = min(map(len, self.prompts))
        if shortest < 3 * self.chunk_tokens:
            raise ConfigError(
                f"the shortest prompt has {shortest} tokens and a stored chunk "
                f"{self.chunk_tokens}; ask about a document of at least three chunks"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One prompt, computed and reused.

    Attributes:
        question: what the prompt asked.
        prompt_tokens: length of the prompt.
        hit_tokens: of these, read from the store.
        cold_ttft_seconds: time to first token when all of it was computed.
        ttft_seconds: the same with the store.
        max_abs_logit_diff: largest difference of any logit at the first answered position.
        tokens_equal: the answers are the same, token for token.
        answer: the text.
    """

    question: str
    prompt_tokens: int
    hit_tokens: int
    cold_ttft_seconds: float
    ttft_seconds: float
    max_abs_logit_diff: float
    tokens_equal: bool
    answer: str

    @property
    def speedup(self) -> float:
        return self.cold_ttft_seconds / self.ttft_seconds


def compare(question: str, cold: Answer, reused: Answer) -> Comparison:
    """Compare by logits first: greedy text can agree while the KV cache is wrong."""
    a = np.load(cold.logits, allow_pickle=False)
    b = np.load(reused.logits, allow_pickle=False)
    return Comparison(
        question=question,
        prompt_tokens=reused.prompt_tokens,
        hit_tokens=reused.hit_tokens,
        cold_ttft_seconds=cold.ttft_seconds,
        ttft_seconds=reused.ttft_seconds,
        # No number is no agreement; but JSON knows no infinity.
        max_abs_logit_diff=float(np.nan_to_num(np.abs(a - b), nan=np.finfo(a.dtype).max).max()),
        tokens_equal=cold.token_ids == reused.token_ids,
        answer=reused.text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the three phases showed.

    Attributes:
        warm: every question, answered from the store.
        corrupted: the first question, answered from the store with a corrupted record.
        quarantined: records that the last phase took out of the store.
        store: URL of the store, left in place for the other commands.
    """

    warm: list[Comparison]
    corrupted: Comparison
    quarantined: int
    store: str


def num_steps(options: DemoOptions) -> int:
    """How often `run_demo` calls `advance`."""
    return 2 * len(options.prompts) + 1


def run_demo(options: DemoOptions, advance: Advance) -> DemoResult:
    """Run all three phases.

    Args:
        options: what to ask.
        advance: called with the name of the phase after every answer.

    Raises:
        ConfigError: the model or a directory cannot be used.
        StoreError: a phase failed, or the store holds no record to corrupt.
    """
    root = options.work_dir / RUN_DIR
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    count = len(options.prompts)
    # The first question's store is the one that later phases read; the others are thrown away.
    stores = [root / ("store" if index == 0 else f"cold-{index}") for index in range(count)]
    cold = _run_phase("cold", options, list(zip(options.prompts, stores, strict=True)), advance)
    for store in stores[1:]:
        shutil.rmtree(store)
    asks = [(prompt, stores[0]) for prompt in options.prompts]
    warm = _run_phase("warm", options, asks, advance)
    shared = _common_prefix(options.prompts)
    _flip_byte(_middle_record(stores[0], shared, options.chunk_tokens))
    before = _num_quarantined(stores[0])
    [corrupted] = _run_phase("corrupted", options, asks[:1], advance)
    return DemoResult(
        warm=[compare(*pair) for pair in zip(options.questions, cold, warm, strict=False)],
        corrupted=compare(options.questions[0], cold[0], corrupted),
        quarantined=_num_quarantined(stores[0]) - before,
        store=_url(stores[0]),
    )


def _run_phase(
    name: str, options: DemoOptions, asks: Sequence[tuple[list[int], Path]], advance: Advance
) -> list[Answer]:
    directory = options.work_dir / RUN_DIR / name
    directory.mkdir()
    spec, result = directory / "spec.json", directory / "result.json"
    order = PhaseSpec(
        model_dir=str(options.model_dir),
        asks=[Ask(prompt=prompt, store=_url(store)) for prompt, store in asks],
        max_tokens=options.max_tokens,
        chunk_tokens=options.chunk_tokens,
        logits_dir=str(directory),
    )
    spec.write_bytes(msgspec.json.encode(order))
    command = [sys.executable, "-m", "kvferry.demo.phase", str(spec), str(result)]
    log = directory / "stderr.txt"
    code = _wait(command, log, lambda: advance(name))
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
        kind = ConfigError if code == 2 else StoreError
        raise kind(f"the {name} phase failed: {why} (its output: {log})")
    return msgspec.json.decode(result.read_bytes(), type=list[Answer])


def _wait(command: list[str], log: Path, advance: Callable[[], None]) -> int:
    """Exit code of `command`; calls `advance` for each line that it prints."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        timer = threading.Timer(_PHASE_SECONDS, process.kill)
        timer.start()
        try:
            for _ in process.stdout or ():
                advance()
            return process.wait()
        finally:
            timer.cancel()
            process.kill()  # nothing if it ended; else we were interrupted
            process.communicate()


def _url(store: Path) -> str:
    return store.resolve().as_uri()


def _common_prefix(prompts: Sequence[list[int]]) -> int:
    """How many tokens all prompts start with."""
    columns = zip(*prompts, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _middle_record(store: Path, shared_tokens: int, chunk_tokens: int) -> Path:
    """The record in the middle of what all prompts share, found by its own header: records are
    safetensors files, so no code of ours is needed to look into one."""
    wanted = str(shared_tokens // chunk_tokens // 2 * chunk_tokens)
    for path in sorted((store / "records").glob("*/*.safetensors")):
        with safe_open(path, framework="numpy") as record:
            if record.metadata()["first_token"] == wanted:
                return path
    raise StoreError(f"{store} holds no record of the tokens from {wanted} on; was it filled?")


def _flip_byte(path: Path) -> None:
    with path.open("r+b") as file:
        at = path.stat().st_size * 3 // 4  # well within the payload
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def _num_quarantined(store: Path) -> int:
    quarantine = store / "quarantine"
    return len(list(quarantine.iterdir())) if quarantine.is_dir() else 0
