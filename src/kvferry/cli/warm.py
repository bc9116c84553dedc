"""`kvferry warm`: have prompts computed, so that their KV is stored before users ask."""

from __future__ import annotations

import contextlib
import json as json_module
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit

import typer

from kvferry.cli.body import Prompt, encode, read_prompt
from kvferry.cli.output import (
    Exit,
    JsonOption,
    JsonRow,
    NothingFound,
    emit,
    make_table,
    progress,
    read_text,
    require_extra,
)
from kvferry.cli.prompts import (
    ChunkTokensOption,
    DateOption,
    RawOption,
    check_model_name,
    parse_day,
    parse_json,
)
from kvferry.cli.stores import await_answer
from kvferry.config import build_config
from kvferry.errors import ConfigError
from kvferry.keys import ChunkKeys, Namespace
from kvferry.network import http
from kvferry.record.schema import default_chunk_tokens
from kvferry.store.kind import Opening
from kvferry.store.url import open_one

MAX_PROMPTS = 1 << 20
_MAX_ANSWER_BYTES = 16 << 20
_MAX_SHOWN = 10
_DRAIN_SECONDS = 60.0
_OF_PROMPT = (400, 413, 422)
"""HTTP statuses that refuse one prompt; any other failure of a server ends the command."""


class Warmed(NamedTuple):
    """The tokens of a prompt, or of all prompts."""

    num_tokens: int
    stored_before: int
    """Tokens of prompts that were stored whole; of a server, those that it calls cached."""


def warm(
    prompts: Annotated[Path, typer.Option(metavar="FILE", help="JSON lines: see docs/operate.md.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model directory; with --openai, the served name."),
    ] = None,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Store that the embedded engine fills.")
    ] = None,
    openai: Annotated[
        str | None,
        typer.Option(metavar="URL", help="OpenAI-compatible server, e.g. http://host:8000/v1."),
    ] = None,
    raw: RawOption = False,
    date: DateOption = None,
    dtype: Annotated[str, typer.Option(help="Of the embedded engine, as for generate.")] = "auto",
    chunk_tokens: ChunkTokensOption = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, metavar="SECONDS", help="Limit for an answer of a server.")
    ] = 600.0,
    json: JsonOption = None,
) -> None:
    """Compute prompts once, by the embedded engine or a server, so that their KV is stored.

    Run it again after an interrupt: what is stored already is read, not computed. Exit code 1 if a
    prompt could not be served.

    Example: kvferry warm path/to/model --store file:///srv/kv --prompts p.jsonl
    """
    if (store is None) == (openai is None):
        raise ConfigError("give --store URL for the embedded engine, or --openai URL for a server")
    wanted = _read_prompts(prompts, model, renders=openai is None)
    if not wanted:
        raise NothingFound(f"{prompts} has no prompts")
    serving: contextlib.AbstractContextManager[Serve]
    if openai is not None:
        serving = contextlib.nullcontext(_server(openai, model, timeout, raw=raw))
    else:
        encoding = partial(encode, raw=raw, day=parse_day(date))
        serving = _engine(model, str(store), dtype, chunk_tokens, encoding)
    failed, total, before = list[JsonRow](), 0, 0
    with serving as serve, progress() as bar:
        for number, prompt in enumerate(bar.track(wanted, description="warming"), 1):
            try:
                warmed = serve(prompt)
            except ConfigError as error:
                failed.append({"prompt": number, "why": str(error)[:200]})
                continue
            total += warmed.num_tokens
            before += warmed.stored_before
    num_done = len(wanted) - len(failed)
    summary = f"{num_done} prompts, {total:,} tokens, {before:,} of them stored before"
    value: JsonRow = {"prompts": num_done, "failed": list(failed)}
    value |= {"num_tokens": total, "stored_before": before}
    table = make_table({"prompt": "prompt", "failed": "why"}, failed[:_MAX_SHOWN])
    emit(value, json, summary, *([table] if failed else []))
    if failed:
        raise typer.Exit(Exit.NO)


# -- prompts --------------------------------------------------------------------------------------


def _read_prompts(path: Path, model: str | None, *, renders: bool) -> list[Prompt]:
    """Read one prompt of each line, as `kvferry.cli.body` does; empty lines are skipped. What asks
    for another model than `model` is refused, and a salt, if the embedded engine renders it. Raises
    ConfigError."""
    found = []
    for number, line in enumerate(read_text("prompts", path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = read_prompt(parse_json(line), renders=renders)
            _check_identity(prompt, model, renders=renders)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        found.append(prompt)
        if len(found) > MAX_PROMPTS:
            raise ConfigError(f"{path} has more than {MAX_PROMPTS} prompts; split it")
    return found


def _check_identity(prompt: Prompt, model: str | None, *, renders: bool) -> None:
    if not renders:
        if model is not None and prompt.model not in (None, model):
            raise ConfigError(f"it asks for model {prompt.model!r}, and MODEL is {model!r}")
        return
    if prompt.salt is not None:
        raise ConfigError("the embedded engine has no cache_salt; warm a server, by --openai")
    if model is not None:
        check_model_name(prompt, Path(model))


# -- the embedded engine --------------------------------------------------------------------------

Serve = Callable[[Prompt], Warmed]
"""Has one prompt computed and stored. Raises ConfigError if that fails for this prompt."""


@contextlib.contextmanager
def _engine(
    model: str | None,
    url: str,
    dtype: str,
    chunk_tokens: int | None,
    encoding: Callable[[Any, Prompt], list[int]],
) -> Iterator[Serve]:
    """Serve by the embedded engine, which loads its weights at the first prompt to compute."""
    if model is None:
        raise ConfigError("give the model directory")
    require_extra("the engine", "transformers", "transformers")
    from kvferry.engine import LLM, SamplingParams
    from kvferry.engine.model import load_tokenizer

    namespace, size = _namespace(Path(model), dtype, chunk_tokens)
    tokenizer = load_tokenizer(Path(model))
    with contextlib.ExitStack() as closing:
        store = closing.enter_context(open_one(url, Opening(index=False, namespace=namespace)))
        await_answer(store)
        opened: list[LLM] = []

        def is_stored(token_ids: list[int]) -> bool:
            keys = ChunkKeys(namespace, size)
            keys.extend(token_ids)
            return all(store.read(key, ()) is not None for key in keys.keys)

        def serve(prompt: Prompt) -> Warmed:
            token_ids = encoding(tokenizer, prompt)
            if is_stored(token_ids):
                return Warmed(len(token_ids), len(token_ids) // size * size)
            if not opened:
                options = {"chunk_tokens": size, "audit": "off"}
                llm = LLM(model, store=url, connector_options=options, dtype=dtype)
                opened.append(closing.enter_context(llm))
            opened[0].generate([token_ids], SamplingParams(max_tokens=1))
            # Store each before the next is computed, so that an interrupt costs one prompt.
            if not (opened[0].drain(_DRAIN_SECONDS) and is_stored(token_ids)):
                raise ConfigError("computed, but the store did not keep it")
            return Warmed(len(token_ids), 0)

        yield serve


def _namespace(model: Path, dtype: str, chunk_tokens: int | None) -> tuple[bytes, int]:
    """Return the digest of the namespace in which the embedded engine stores, and the tokens of its
    chunks."""
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.connector import engine_spec
    from kvferry.engine.model_config import ModelConfig

    engine = build_config(EngineConfig, {"dtype": dtype}, where="--dtype")
    spec = engine_spec(ModelConfig(model, engine), engine)
    chunk_tokens = chunk_tokens or default_chunk_tokens(spec.groups)
    return Namespace.of(spec.identity, spec.groups, chunk_tokens).digest, chunk_tokens


# -- a server -------------------------------------------------------------------------------------


def _server(url: str, model: str | None, timeout: float, *, raw: bool) -> Serve:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise ConfigError("--openai: write http://host:8000/v1, without a login")
    where = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    name = model or _at(_answer(f"{where}/models", None, timeout), "data", 0, "id")
    if not isinstance(name, str):
        raise ConfigError(f"{where}/models names no model; give its name as MODEL")

    def serve(prompt: Prompt) -> Warmed:
        body = dict(prompt.body)
        if isinstance(prompt.content, str) and not raw:
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        path = "chat/completions" if "messages" in body else "completions"
        body = {"model": name, **body, "max_tokens": 1, "temperature": 0}
        answer = _answer(f"{where}/{path}", body, timeout)
        total = _at(answer, "usage", "prompt_tokens")
        cached = _at(answer, "usage", "prompt_tokens_details", "cached_tokens")
        return Warmed(*(each if type(each) is int else 0 for each in (total, cached)))

    return serve


def _answer(url: str, body: Mapping[str, object] | None, timeout: float) -> object:
    """Return the JSON that a server answers to GET, or to POST if there is a body. Raises
    ConfigError if it refuses this prompt, OSError if it would fail for the next, too."""
    data = None if body is None else json_module.dumps(body).encode()
    try:
        return json_module.loads(http(url, timeout, _MAX_ANSWER_BYTES, body=data))
    except HTTPError as error:
        fault = f"{url} answers {error.code} {error.reason}"
        raise (ConfigError if error.code in _OF_PROMPT else OSError)(fault) from None
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        raise OSError(f"{url} does not answer: {error}") from None


def _at(value: Any, *path: str | int) -> object:  # noqa: ANN401 - what a server answers
    """Return what stands at a path of keys and places in JSON; None if nothing does."""
    for step in path:
        try:
            value = value[step]
        except (LookupError, TypeError):
            return None
    return value
