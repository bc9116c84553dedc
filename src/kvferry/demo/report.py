"""The outcome of the demonstration: one table, one verdict, one JSON value, one picture."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvferry.config import printable
from kvferry.demo.run import Comparison, DemoResult
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.keys import JsonValue

_COLD, _WARM, _CORRUPTED = "#8d99ae", "#2a7f62", "#c8553d"

MAX_LOGIT_DIFF = 1e-3
"""Bound in float32. Honest reuse differs by some 1e-5: parts of another size round in another
order; a single wrong block differs by more than 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole demonstration in a few numbers.

    Attributes:
        model: name of the model's directory.
        prompts: number of questions.
        prompt_tokens: median over the questions, as are the next three.
        hit_tokens: read from the store in the warm phase.
        cold_ttft_s: time to first token, all computed.
        warm_ttft_s: time to first token in a new process, from the store.
        speedup: the ratio of these two medians.
        max_abs_logit_diff: the largest over all questions and phases.
        tokens_equal: True if no answer changed, in any phase.
        quarantined: records taken out in the corrupted phase.
    """

    model: str
    prompts: int
    prompt_tokens: float
    hit_tokens: float
    cold_ttft_s: float
    warm_ttft_s: float
    speedup: float
    max_abs_logit_diff: float
    tokens_equal: bool
    quarantined: int

    @property
    def is_right(self) -> bool:
        """Whether reuse changed nothing and the one corrupted record was found."""
        return (
            self.tokens_equal
            and self.max_abs_logit_diff <= MAX_LOGIT_DIFF
            and self.quarantined == 1
        )


def summarise(model: str, result: DemoResult) -> Summary:
    """Fold all comparisons into one."""
    everything = [*result.warm, result.corrupted]
    cold = median(run.cold_ttft_seconds for run in result.warm)
    warm = median(run.ttft_seconds for run in result.warm)
    return Summary(
        model=model,
        prompts=len(result.warm),
        prompt_tokens=median(run.prompt_tokens for run in result.warm),
        hit_tokens=median(run.hit_tokens for run in result.warm),
        cold_ttft_s=cold,
        warm_ttft_s=warm,
        speedup=cold / warm,
        max_abs_logit_diff=max(run.max_abs_logit_diff for run in everything),
        tokens_equal=all(run.tokens_equal for run in everything),
        quarantined=result.quarantined,
    )


def as_json(summary: Summary, result: DemoResult) -> dict[str, JsonValue]:
    """The summary's fields, and every comparison under `runs`."""
    runs = [("warm", run) for run in result.warm] + [("corrupted", result.corrupted)]
    return {
        **dataclasses.asdict(summary),
        "runs": [
            {
                "phase": phase,
                "question": run.question,
                "prompt_tokens": run.prompt_tokens,
                "hit_tokens": run.hit_tokens,
                "cold_ttft_s": run.cold_ttft_seconds,
                "ttft_s": run.ttft_seconds,
                "speedup": run.speedup,
                "max_abs_logit_diff": run.max_abs_logit_diff,
                "tokens_equal": run.tokens_equal,
                "answer": run.answer,
            }
            for phase, run in runs
        ],
    }


def table(summary: Summary, result: DemoResult) -> Table:
    """One line per question in a new process, one with a corrupted record, one for all."""
    title = f"{summary.model}, float32: computed once, read back by other processes"
    table = Table(title=_text(title), title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("from the\nstore")
    table.add_column("question", overflow="fold")
    for column in ("prompt\ntokens", "hit\ntokens", "cold\nTTFT", "\nTTFT", "times\nfaster"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("max\n|Δlogit|", justify="right", no_wrap=True)
    table.add_column("same\nanswer", no_wrap=True)
    for run in result.warm:
        table.add_row("in a new\nprocess", _text(run.question), *_figures(run))
    corrupted = result.corrupted
    table.add_row("one byte\nflipped", _text(corrupted.question), *_figures(corrupted))
    table.add_row(
        "[bold]median,\nworst[/]",
        f"{summary.prompts} questions",
        f"{summary.prompt_tokens:.0f}",
        f"{summary.hit_tokens:.0f}",
        f"{summary.cold_ttft_s:.2f} s",
        f"{summary.warm_ttft_s:.2f} s",
        f"[bold]{summary.speedup:.1f} x[/]",
        f"{summary.max_abs_logit_diff:.1e}",
        _yes_or_no(summary.tokens_equal),
    )
    return table


def _text(foreign: str) -> Text:
    return Text(printable(foreign))


def _yes_or_no(tokens_equal: bool) -> str:
    return "yes" if tokens_equal else "[bold red]no[/]"


def _figures(run: Comparison) -> tuple[str, ...]:
    return (
        str(run.prompt_tokens),
        str(run.hit_tokens),
        f"{run.cold_ttft_seconds:.2f} s",
        f"{run.ttft_seconds:.2f} s",
        f"{run.speedup:.1f} x",
        f"{run.max_abs_logit_diff:.1e}",
        _yes_or_no(run.tokens_equal),
    )


def verdict(summary: Summary) -> str:
    """One line: right, or what was wrong."""
    if summary.is_right:
        return (
            "Right: every answer as computed, the corrupted record found, taken out and computed "
            "again."
        )
    faults = []
    if not summary.tokens_equal:
        faults.append("an answer changed")
    if not summary.max_abs_logit_diff <= MAX_LOGIT_DIFF:
        faults.append(f"logits differ by {summary.max_abs_logit_diff:.1e}")
    if summary.quarantined != 1:
        faults.append(f"{summary.quarantined} records quarantined instead of 1")
    return f"[bold red]Wrong:[/] {'; '.join(faults)}."


def save_plot(path: Path, summary: Summary, result: DemoResult) -> None:
    """Write a PNG; needs no display.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = [*result.warm, result.corrupted]
    figure = Figure(figsize=(10, 1.9 + 0.85 * len(runs)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(runs))
    colours = [_WARM] * len(result.warm) + [_CORRUPTED]
    cold = [run.cold_ttft_seconds for run in runs]
    reused = [run.ttft_seconds for run in runs]
    axes.barh([y - 0.2 for y in places], cold, 0.36, color=_COLD, label="computed")
    axes.barh([y + 0.2 for y in places], reused, 0.36, color=colours)
    # Names for the legend only; the bars above have one colour each.
    axes.barh([0], [0], color=_WARM, label="from the store, in a new process")
    axes.barh([0], [0], color=_CORRUPTED, label="from the store, one record corrupted")
    reach = max(cold + reused)
    for y, run in zip(places, runs, strict=True):
        axes.text(run.cold_ttft_seconds + reach * 0.01, y - 0.2, _cold_label(run), va="center")
        axes.text(run.ttft_seconds + reach * 0.01, y + 0.2, _hit_label(run), va="center")
    axes.set_yticks(list(places), [textwrap.fill(run.question, 28) for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, reach * 1.35)  # room for the text behind the longest bar
    axes.set_xlabel("time to first token, seconds")
    figure.suptitle(_title(summary), x=0.01, ha="left", fontsize=12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _cold_label(run: Comparison) -> str:
    return f"{run.cold_ttft_seconds:.2f} s   {run.prompt_tokens} tokens computed"


def _hit_label(run: Comparison) -> str:
    share = 100 * run.hit_tokens / run.prompt_tokens
    return f"{run.ttft_seconds:.2f} s   {run.hit_tokens} tokens read ({share:.0f} %)"


def _title(summary: Summary) -> str:
    changed = "same answers" if summary.tokens_equal else "ANSWERS CHANGED"
    return (
        f"{summary.model}, float32: {summary.prompts} questions about one document\n"
        f"first token {summary.speedup:.1f} times sooner (median), {changed}, "
        f"max |Δlogit| {summary.max_abs_logit_diff:.0e}"
    )
