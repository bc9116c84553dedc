"""The outcome of the demonstration: one table, one verdict, one JSON value."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from kvferry.config import printable
from kvferry.demo.compare import Comparison
from kvferry.demo.run import DemoResult

if TYPE_CHECKING:
    from kvferry.keys import JsonValue

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
    runs = [_run_json("warm", run) for run in result.warm]
    runs.append(_run_json("corrupted", result.corrupted))
    return {
        "model": summary.model,
        "prompts": summary.prompts,
        "prompt_tokens": summary.prompt_tokens,
        "hit_tokens": summary.hit_tokens,
        "cold_ttft_s": summary.cold_ttft_s,
        "warm_ttft_s": summary.warm_ttft_s,
        "speedup": summary.speedup,
        "max_abs_logit_diff": summary.max_abs_logit_diff,
        "tokens_equal": summary.tokens_equal,
        "quarantined": summary.quarantined,
        "runs": runs,
    }


def _run_json(phase: str, run: Comparison) -> dict[str, JsonValue]:
    return {
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


def table(summary: Summary, result: DemoResult) -> Table:
    """One line per question in a new process, one with a corrupted record, one for all."""
    table = Table(
        title=_text(
            f"{summary.model}, float32: a prompt computed once, read back by other processes"
        ),
        title_justify="left",
    )
    table.add_column("from the store")
    table.add_column("question", overflow="fold")
    for column in ("prompt\ntokens", "hit\ntokens", "cold\nTTFT", "TTFT", "speed-up"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("max\n|Δlogit|", justify="right", no_wrap=True)
    table.add_column("same\nanswer")
    table.add_column("quaran-\ntined", justify="right")
    for run in result.warm:
        table.add_row("new process", _text(run.question), *_figures(run), "0")
    corrupted = result.corrupted
    table.add_row(
        "one byte flipped",
        _text(corrupted.question),
        *_figures(corrupted),
        str(result.quarantined),
    )
    table.add_section()
    table.add_row(
        "[bold]median / worst[/]",
        f"{summary.prompts} questions",
        f"{summary.prompt_tokens:.0f}",
        f"{summary.hit_tokens:.0f}",
        f"{summary.cold_ttft_s:.2f} s",
        f"{summary.warm_ttft_s:.2f} s",
        f"[bold]{summary.speedup:.1f} x[/]",
        f"{summary.max_abs_logit_diff:.1e}",
        "yes" if summary.tokens_equal else "[bold red]no[/]",
        str(summary.quarantined),
    )
    return table


def _text(foreign: str) -> Text:
    return Text(printable(foreign))


def _figures(run: Comparison) -> tuple[str, ...]:
    return (
        str(run.prompt_tokens),
        str(run.hit_tokens),
        f"{run.cold_ttft_seconds:.2f} s",
        f"{run.ttft_seconds:.2f} s",
        f"{run.speedup:.1f} x",
        f"{run.max_abs_logit_diff:.1e}",
        "yes" if run.tokens_equal else "[bold red]no[/]",
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
