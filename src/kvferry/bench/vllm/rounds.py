"""All processes of a run: in every round, first those that store, then those that read."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from kvferry.bench.vllm.cases import Case
from kvferry.bench.vllm.phase import Measured, Phase, in_turn, live
from kvferry.testing.models import make_tiny_model

Json = dict[str, Any]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each process does."""

    prompt_tokens: int = 2108
    turns: int = 4
    prompts: int = 3
    answer_tokens: int = 8
    warm_up_tokens: int = 300
    decode_steps: int = 150
    served: int = 10
    served_tokens: int = 400

    @staticmethod
    def quick() -> Sizes:
        return Sizes(
            prompt_tokens=300, turns=1, prompts=1, decode_steps=20, served=4, served_tokens=140
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the processes of one round do; the same for every case.

    Attributes:
        engine: arguments of vLLM's `LLM`.
        warm_up: tokens of a short prompt.
        by_turns: arguments of `child.by_turns`.
        prompts: tokens of those that are timed.
        max_tokens: of each answer to them.
        serve: arguments of `child.serve`.
        decode_steps: of one request.
    """

    engine: Json
    warm_up: list[int]
    by_turns: Json
    prompts: list[list[int]]
    max_tokens: int
    serve: Json
    decode_steps: int

    def tokens_in_blocks(self) -> int:
        """In whole blocks, of all prompts that a storing process computes for others to read."""
        prompts = [self.warm_up, *self.prompts, *self.serve["prompts"]]
        return sum(len(tokens) // BLOCK_SIZE * BLOCK_SIZE for tokens in prompts)


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
    found = [Measured(case, [], [], [], []) for case in cases]
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        for number in progress.track(range(rounds), description="rounds of engines"):
            work = _work(sizes, model, random.Random(seed * 1000 + number))
            Round(live(found), work, directory / f"round-{number}", number).run()
    return found


@dataclass(frozen=True, slots=True)
class Round:
    """One round of all cases.

    Attributes:
        cases: they get the results, or the reason why they are given up.
        work: of each process.
        directory: made and removed again; each case has its store and its log in one of its own.
        number: of the round; who goes first depends on it.
    """

    cases: Sequence[Measured]
    work: Work
    directory: Path
    number: int

    def run(self) -> None:
        """Store, then read.

        Raises:
            ConfigError: a case that is required failed.
        """
        self.directory.mkdir(parents=True)
        try:
            for measured in self.cases:
                self._store(measured.case).mkdir(parents=True)
            self._cold()
            self._warm()
        finally:
            shutil.rmtree(self.directory)

    def _cold(self) -> None:
        """Everything that finds nothing stored; vLLM alone also shows its own prefix hits."""
        work, turn = self.work, self.number
        alone = [measured for measured in self.cases if measured.case.connector is None]
        steps = {"do": "decode", "tokens": work.prompts[-1], "num_steps": work.decode_steps}
        with Phase(self.cases, self.directory) as phase:
            phase.start(turn, lambda case: self._engine(case, reads=False))
            prompts = self._prompts(phase, self.cases)
            again = self._prompts(phase, alone)
            served = phase.ask(turn, {"do": "serve", **work.serve})
            decoded = phase.ask(turn, steps)
            by_turns = self._by_turns(phase, [m for m in self.cases if not m.case.stores])
            phase.close()
        for measured in live(self.cases):
            name = measured.case.name
            result = {
                "prompts": [answers[name] for answers in prompts],
                "again": [answers[name] for answers in again if name in answers],
                "serve": served[name],
                "decode": decoded[name],
                "by_turns": by_turns.get(name),
            }
            measured.cold.append(result)
            measured.stored_bytes.append(_bytes_in(self._store(measured.case)))
            measured.computed.append(work.tokens_in_blocks())

    def _warm(self) -> None:
        """The same prompts in other processes, of the cases that stored them. One process after the
        other: what is compared lies within each."""
        cases = [m for m in live(self.cases) if m.case.stores]
        for measured in in_turn(cases, self.number):
            with Phase([measured], self.directory) as phase:
                phase.start(0, lambda case: self._engine(case, reads=True))
                prompts = self._prompts(phase, [measured])
                again = self._prompts(phase, [measured])
                by_turns = self._by_turns(phase, [measured])
                phase.close()
            if measured.failure is None:
                name = measured.case.name
                result = {
                    "prompts": [answers[name] for answers in prompts],
                    "again": [answers[name] for answers in again],
                    "by_turns": by_turns[name],
                }
                measured.warm.append(result)

    def _engine(self, case: Case, *, reads: bool) -> Json:
        """A process's first command."""
        store = self._store(case)
        return {
            "arguments": self.work.engine,
            "connector": None if case.connector is None else case.connector(store),
            "warm_up": self.work.warm_up,
            "stored": str(store) if reads else None,
        }

    def _prompts(self, phase: Phase, cases: Sequence[Measured]) -> list[dict[str, Json]]:
        """Of each prompt, the answers by case."""
        return [
            phase.ask(
                self.number + index,
                {"do": "prompt", "tokens": tokens, "max_tokens": self.work.max_tokens},
                cases,
            )
            for index, tokens in enumerate(self.work.prompts)
        ]

    def _by_turns(self, phase: Phase, cases: Sequence[Measured]) -> dict[str, Json]:
        """In the last process of each case and after all else: what this stores, nothing reads."""
        return phase.ask(self.number, {"do": "by_turns", **self.work.by_turns}, cases)

    def _store(self, case: Case) -> Path:
        return self.directory / case.name / "store"


def _work(sizes: Sizes, model: Path, source: random.Random) -> Work:
    def tokens(count: int) -> list[int]:
        return [source.randrange(3, MODEL["vocab_size"]) for _ in range(count)]

    return Work(
        engine={**ENGINE, "model": str(model)},
        warm_up=tokens(sizes.warm_up_tokens),
        by_turns={
            "plugged": [tokens(sizes.prompt_tokens) for _ in range(sizes.turns)],
            "unplugged": [tokens(sizes.prompt_tokens) for _ in range(sizes.turns)],
            "max_tokens": sizes.answer_tokens,
        },
        prompts=[tokens(sizes.prompt_tokens) for _ in range(sizes.prompts)],
        max_tokens=sizes.answer_tokens,
        serve={
            "prompts": [tokens(sizes.served_tokens) for _ in range(sizes.served)],
            # Of different lengths, so that prompts are computed while others decode.
            "max_tokens": [20 + 7 * index % 30 for index in range(sizes.served)],
            "at_once": 4,
        },
        decode_steps=sizes.decode_steps,
    )


def _bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
