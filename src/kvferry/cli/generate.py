"""`kvferry generate`: one prompt through the embedded engine, streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kvferry.cli.output import JsonOption, emit, read_text, require_extra
from kvferry.cli.prompts import ChunkTokensOption, RawOption
from kvferry.errors import ConfigError
from kvferry.observe import Counters

if TYPE_CHECKING:
    from kvferry.engine import TokenEvent


def generate(
    model_dir: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Directory of a Hugging Face causal LM.")
    ],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT|-", help="The prompt; '-' reads stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Read the prompt from here.")
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Keep and reuse KV in this store.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer.")] = 128,
    raw: RawOption = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto (the model's).")] = "auto",
    chunk_tokens: ChunkTokensOption = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Append the prompt's keys to this journal.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Generate text; KV of the prompt that the store holds is read instead of computed.

    Each token is the likeliest. A model with a chat template gets the prompt as a message of the
    user. The text goes to stdout, hit tokens and time to first token to stderr.

    Example: kvferry generate path/to/model "Hello" --store file:///tmp/kv
    """
    if record is not None and store is None:
        raise ConfigError(f"--record {record} needs --store: without one there are no keys")
    options = {"chunk_tokens": chunk_tokens, "record": None if record is None else str(record)}
    text = _read_prompt(prompt, prompt_file)
    require_extra("the engine", "transformers", "transformers")
    from kvferry.engine import LLM, SamplingParams
    from kvferry.engine.model import encode_message

    counters = Counters()
    with LLM(
        model_dir,
        store=store,
        connector_options=None if store is None else options,
        observer=counters,
        dtype=dtype,
    ) as llm:
        prompt_token_ids = llm.encode(text)  # raises without a tokenizer
        if not raw:
            prompt_token_ids = encode_message(llm.tokenizer, text)
        events = llm.stream(prompt_token_ids, SamplingParams(max_tokens=max_tokens))
        answer = _stream(events, echo=json != "-")
    _show(answer, len(prompt_token_ids), counters, json)


class _Streamed(NamedTuple):
    """An answer; its fields are named as in the JSON."""

    generated_tokens: int
    ttft_s: float
    total_s: float
    text: str


def _show(answer: _Streamed, num_prompt: int, counters: Counters, json: str | None) -> None:
    num_hit, num_audited = counters["hit_tokens"], counters["miss_tokens/audit"]
    audited = f", {num_audited} computed for an audit" if num_audited else ""
    emit({"prompt_tokens": num_prompt, "hit_tokens": num_hit, **answer._asdict()}, json, "")
    print(
        f"{num_prompt} prompt tokens, {num_hit} read from the store{audited}; first token after "
        f"{answer.ttft_s:.2f} s, {answer.generated_tokens} tokens in {answer.total_s:.2f} s",
        file=sys.stderr,
    )


def _stream(events: Iterator[TokenEvent], *, echo: bool) -> _Streamed:
    """Take all tokens; with `echo`, write each to stdout as it comes."""
    pieces: list[str] = []
    ttft = 0.0
    started = time.perf_counter()
    for event in events:
        ttft = ttft or time.perf_counter() - started
        pieces.append(event.text)
        if echo:
            print(event.text, end="", flush=True)
    return _Streamed(len(pieces), ttft, time.perf_counter() - started, "".join(pieces))


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ConfigError("give a prompt, '-' to read it from stdin, or --prompt-file FILE")
    if prompt_file is not None:
        return read_text("prompt", prompt_file)
    return sys.stdin.read() if prompt == "-" else str(prompt)
