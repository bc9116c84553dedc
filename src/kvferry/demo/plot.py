"""The outcome as a picture: time to first token, computed and read back."""

from __future__ import annotations

import textwrap
from pathlib import Path

from kvferry.demo.compare import Comparison
from kvferry.demo.report import Summary
from kvferry.demo.run import DemoResult
from kvferry.errors import ConfigError

_COLD, _WARM, _CORRUPTED = "#8d99ae", "#2a7f62", "#c8553d"


def save_plot(path: Path, summary: Summary, result: DemoResult) -> None:
    """Write a PNG; needs no display.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the plot needs matplotlib: pip install 'kvferry[demo]'") from error
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
