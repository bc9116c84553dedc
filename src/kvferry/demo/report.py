"""The result of `kvferry demo` as JSON, a table, a verdict and a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from statistics import median

from rich.table import Table
from rich.text import Text

from kvferry.config import printable
from kvferry.demo.run import Comparison, DemoResult, TimedAnswer
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue

_COLD, _WARM, _CORRUPTED = "#8d99ae", "#2a7f62", "#c8553d"


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


def save_plot(path: Path, result: DemoResult) -> None:
    """Write a PNG; needs no display.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    runs = [*result.warm, result.corrupted]
    figure = Figure(figsize=(10, 1.9 + 0.85 * len(runs)), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    places = range(len(runs))
    colours = [_WARM] * len(result.warm) + [_CORRUPTED]
    cold = [run.cold.ttft_seconds for run in runs]
    reused = [run.reused.ttft_seconds for run in runs]
    axes.barh([y - 0.2 for y in places], cold, 0.36, color=_COLD, label="computed")
    axes.barh([y + 0.2 for y in places], reused, 0.36, color=colours)
    # Names for the legend only; the bars above have one colour each.
    axes.barh([0], [0], color=_WARM, label="from the store, in a new process")
    axes.barh([0], [0], color=_CORRUPTED, label="from the store, one record corrupted")
    reach = max(cold + reused)
    for y, run in zip(places, runs, strict=True):
        for place, answer in ((y - 0.2, run.cold), (y + 0.2, run.reused)):
            axes.text(answer.ttft_seconds + reach * 0.01, place, _label(answer), va="center")
    axes.set_yticks(list(places), [textwrap.fill(run.question, 28) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, reach * 1.35)  # room for the text behind the longest bar
    axes.set_xlabel("time to first token, seconds")
    figure.suptitle(_title(result), x=0.01, ha="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _label(answer: TimedAnswer) -> str:
    label = f"{answer.ttft_seconds:.2f} s   "
    if not answer.hit_tokens:
        return label + f"{answer.prompt_tokens} tokens computed"
    share = 100 * answer.hit_tokens / answer.prompt_tokens
    return label + f"{answer.hit_tokens} tokens read ({share:.0f} %)"


def _title(result: DemoResult) -> str:
    changed = "same answers" if result.tokens_equal else "ANSWERS CHANGED"
    return (
        f"{result.model}, float32: {len(result.warm)} questions about one document\n"
        f"first token {result.speedup:.1f} times sooner (median), {changed}, "
        f"max |Δlogit| {result.max_abs_logit_diff:.0e}"
    )
