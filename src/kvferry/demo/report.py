"""The result of `kvferry demo` as JSON, a table and a verdict."""

from __future__ import annotations

from statistics import median

from rich.table import Table
from rich.text import Text

from kvferry.config import printable
from kvferry.demo.run import Comparison, DemoResult
from kvferry.keys import JsonValue


def as_json(result: DemoResult) -> dict[str, JsonValue]:
    """Return medians over the warm runs, the worst over all runs (also the corrupted one), and each
    run under `runs`."""
    runs = [("warm", run) for run in result.warm] + [("corrupted", result.corrupted)]
    return {
        "model": result.model,
        "prompts": len(result.warm),
        "prompt_tokens": _median_tokens(result, "prompt_tokens"),
        "hit_tokens": _median_tokens(result, "hit_tokens"),
        "cold_ttft_s": result.cold_ttft_seconds,
        "warm_ttft_s": result.warm_ttft_seconds,
        "speedup": result.speedup,
        "max_abs_logit_diff": result.max_abs_logit_diff,
        "tokens_equal": result.tokens_equal,
        "quarantined": result.quarantined,
        "runs": [
            {
                "phase": phase,
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
            for phase, run in runs
        ],
    }


def _median_tokens(result: DemoResult, name: str) -> float:
    return float(median(getattr(run.reused, name) for run in result.warm))


def table(result: DemoResult) -> Table:
    """Make a line per question in a new process, one for the corrupted record, one for all."""
    title = f"{result.model}, float32: computed once, read back by other processes"
    table = Table(
        title=Text(printable(title)), title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    table.add_column("from the\nstore")
    table.add_column("question", overflow="fold")
    for column in ("prompt\ntokens", "hit\ntokens", "cold\nTTFT", "\nTTFT", "times\nfaster"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("max\n|Δlogit|", justify="right", no_wrap=True)
    table.add_column("same\nanswer", no_wrap=True)
    for run in result.warm:
        table.add_row("in a new\nprocess", *_figures(run))
    table.add_row("one byte\nflipped", *_figures(result.corrupted))
    table.add_row(
        "[bold]median,\nworst[/]",
        f"{len(result.warm)} questions",
        f"{_median_tokens(result, 'prompt_tokens'):.0f}",
        f"{_median_tokens(result, 'hit_tokens'):.0f}",
        f"{result.cold_ttft_seconds:.2f} s",
        f"{result.warm_ttft_seconds:.2f} s",
        f"[bold]{result.speedup:.1f} x[/]",
        f"{result.max_abs_logit_diff:.1e}",
        _yes_or_no(result.tokens_equal),
    )
    return table


def _yes_or_no(tokens_equal: bool) -> str:
    return "yes" if tokens_equal else "[bold red]no[/]"


def _figures(run: Comparison) -> tuple[str | Text, ...]:
    return (
        Text(printable(run.question)),
        str(run.reused.prompt_tokens),
        str(run.reused.hit_tokens),
        f"{run.cold.ttft_seconds:.2f} s",
        f"{run.reused.ttft_seconds:.2f} s",
        f"{run.speedup:.1f} x",
        f"{run.max_abs_logit_diff:.1e}",
        _yes_or_no(run.tokens_equal),
    )


def verdict(result: DemoResult) -> str:
    """One line: right, or what was wrong."""
    if faults := result.faults():
        return f"[bold red]Wrong:[/] {'; '.join(faults)}."
    return (
        "Right: every answer as computed, the corrupted record found, taken out and computed again."
    )
