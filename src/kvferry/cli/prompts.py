"""Reads the options of commands that name a model, a namespace or a prompt."""

from __future__ import annotations

import json as json_module
import re
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.output import progress, read_text, require_extra
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, ModelIdentity
from kvferry.store.kind import shown_url

NamespaceOption = Annotated[
    str | None, typer.Option(metavar="DIGEST", help="This namespace: its digest, or first digits.")
]
ModelOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="All namespaces of this model.")
]
PromptOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Text of the prompt; needs --model.")
]
TokensOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Its token ids instead: a JSON list, or by spaces."),
]
RawOption = Annotated[bool, typer.Option("--raw", help="Use text without the chat template.")]
SaltOption = Annotated[str | None, typer.Option(help="The prompt's cache salt.")]
ChunkTokensOption = Annotated[int | None, typer.Option(min=1, help="Tokens per record.")]
LoraOption = Annotated[
    str | None, typer.Option(help="The prompt's LoRA adapter: directory or identity.")
]


def check_digits(digits: str, what: str) -> str:
    """Return the first digits of a key, or of `what` else, in lower case. Raises ConfigError unless
    they are 1 to 64 hexadecimal digits."""
    if re.fullmatch(r"[0-9a-f]{1,64}", digits.lower()) is None:
        raise ConfigError(f"{shown_url(digits)!r} is not {what}; give 1 to 64 hexadecimal digits")
    return digits.lower()


def lora_identity(lora: str | None) -> str | None:
    """Return the identity of the LoRA adapter in a directory; other text is an identity already.
    Raises ConfigError if the directory holds no adapter."""
    if lora is None or not Path(lora).is_dir():
        return lora
    from kvferry.identity import adapter_digest

    try:
        return adapter_digest(Path(lora))
    except OSError as error:
        raise ConfigError(f"--lora {lora} holds no adapter: {error}") from None


def read_tokens(
    model: Path | None, prompt_file: Path | None, tokens: Path | None, *, raw: bool
) -> list[int]:
    """Return the token ids of the prompt that the options name. Raises ConfigError if neither or
    both files are given, or the prompt cannot be read."""
    if (prompt_file is None) == (tokens is None):
        raise ConfigError("give --prompt-file FILE or --tokens FILE")
    if tokens is not None:
        return _parse_tokens(tokens, read_text("token ids", tokens))
    if model is None:
        raise ConfigError("--prompt-file needs --model DIR, whose tokenizer reads the text")
    text = read_text("prompt", Path(str(prompt_file)))
    require_extra("--prompt-file", "transformers", "transformers")
    from kvferry.engine.model import encode_message, load_tokenizer

    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ConfigError(f"{model} holds no tokenizer; give the token ids by --tokens")
    if raw:
        return list(tokenizer(text, verbose=False)["input_ids"])
    return encode_message(tokenizer, text)


def _parse_tokens(path: Path, text: str) -> list[int]:
    try:
        found = json_module.loads(text) if text.lstrip().startswith("[") else text.split()
        ids = [int(each) if isinstance(each, str) else each for each in found]
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(
            f"{path} holds no token ids; write a JSON list of whole numbers, or them with spaces"
        ) from None
    for each in ids:
        if type(each) is not int or not 0 <= each < 1 << 32:
            raise ConfigError(f"{path}: {str(each)[:40]!r} is not a token id (0 to 4294967295)")
    return ids


def model_identity(model: Path, weights_version: JsonValue = None) -> ModelIdentity:
    """Return the identity of a model for an engine that runs its directory unchanged."""
    from kvferry.identity import identify

    with progress() as bar:
        bar.add_task("hashing the weights", total=None)
        version = None if weights_version is None else str(weights_version)
        return identify(model, dtype=None, deviations={}, weights_version=version, name=str(model))
