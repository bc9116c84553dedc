"""Reads the options of commands that name a model, a namespace or a prompt."""

from __future__ import annotations

import json as json_module
import re
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvferry.cli.body import Prompt, encode, prints_date, read_prompt
from kvferry.cli.output import progress, read_text, require_extra
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, ModelIdentity
from kvferry.store.kind import shown_url
from kvferry.types import ExtraKeys

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
ChatOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Body of its request instead: JSON with messages."),
]
DateOption = Annotated[
    str | None,
    typer.Option(metavar="DATE", help="Day of the request, if the chat template prints the date."),
]
SaltOption = Annotated[
    str | None, typer.Option(help="Cache salt of the prompt, or of all requests.")
]
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


class AskedPrompt(NamedTuple):
    """The prompt that the options of a command name."""

    token_ids: list[int]
    extra: ExtraKeys
    """Its salt and LoRA adapter."""
    hints: tuple[str, ...] = ()
    """Sentences on what other tokens or keys the request may have had, for where nothing is found.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The options that name a prompt; at most one of the three files."""

    prompt_file: Path | None = None
    tokens: Path | None = None
    chat: Path | None = None
    raw: bool = False
    date: str | None = None
    salt: str | None = None
    lora: str | None = None

    @property
    def names_prompt(self) -> bool:
        return (self.prompt_file, self.tokens, self.chat) != (None, None, None)

    def read(self, model: Path | None) -> AskedPrompt:
        """Read the prompt. Raises ConfigError unless exactly one file is given, if it cannot be
        read, or if its text needs a model or a tokenizer that is not there."""
        if [self.prompt_file, self.tokens, self.chat].count(None) != 2:
            raise ConfigError("give --prompt-file FILE, --chat FILE or --tokens FILE")
        extra = ExtraKeys(cache_salt=self.salt, lora=lora_identity(self.lora))
        if self.tokens is not None:
            return AskedPrompt(
                _parse_tokens(self.tokens, read_text("token ids", self.tokens)), extra
            )
        option = "--chat" if self.prompt_file is None else "--prompt-file"
        if model is None:
            raise ConfigError(f"{option} needs --model DIR, whose tokenizer reads the text")
        prompt = self._prompt(model)
        if prompt.salt is not None:
            if self.salt not in (None, prompt.salt):
                raise ConfigError(f"{self.chat} has another cache_salt than --salt; give one")
            extra = replace(extra, cache_salt=prompt.salt)
        require_extra(option, "transformers", "transformers")
        from kvferry.engine.model import load_tokenizer

        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise ConfigError(f"{model} holds no tokenizer; give the token ids by --tokens")
        day = parse_day(self.date)
        token_ids = encode(tokenizer, prompt, raw=self.raw, day=day)
        hints = []
        if not self.raw and day is None and prints_date(tokenizer, prompt):
            hints.append("The chat template prints the date, here today's: give --date DATE.")
        if not self.raw and self.chat is None:
            hints.append(
                "A chat with a system message or tools has other tokens: give --chat FILE."
            )
        return AskedPrompt(token_ids, extra, tuple(hints))

    def _prompt(self, model: Path) -> Prompt:
        if self.chat is None:
            return Prompt(content=read_text("prompt", Path(str(self.prompt_file))))
        try:
            prompt = read_prompt(parse_json(read_text("chat", self.chat)))
        except ConfigError as error:
            raise ConfigError(f"{self.chat}: {error}") from None
        check_model_name(prompt, model, has_lora=self.lora is not None)
        return prompt


def parse_json(text: str) -> JsonValue:
    """Parse JSON that a user wrote. Raises ConfigError."""
    try:
        value: JsonValue = json_module.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError("no JSON") from None
    return value


def check_model_name(prompt: Prompt, model: Path, *, has_lora: bool = False) -> None:
    """Raise ConfigError if the body of a request asks for another model than the directory, or for
    an adapter that is not given: its keys would be others."""
    name = prompt.model
    if name is None or has_lora or Path(name).name.lower() == model.resolve().name.lower():
        return
    raise ConfigError(
        f"the body asks for model {name!r}, and --model is {model}: if that is its name on the "
        "server, leave `model` out; if it is a LoRA adapter, give --lora"
    )


def parse_day(date: str | None) -> datetime | None:
    """Parse a date, or date and time. Raises ConfigError."""
    try:
        return None if date is None else datetime.fromisoformat(date)
    except ValueError:
        raise ConfigError(f"--date {date!r}: write 2027-01-31 or 2027-01-31T08:00") from None


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


def about_weights(model: Path) -> dict[str, JsonValue]:
    """Say which files of a directory are its weights, what their digests rest on, and which files
    do not count, as no host reads them by default."""
    from kvferry.identity import Loads, basis_of, weight_files

    files = weight_files(model, Loads.BY_NAME, may_be_none=True)
    found: dict[str, list[str]] = {}
    for name, path in files.counted.items():
        found.setdefault(basis_of(path), []).append(name)
    about: dict[str, JsonValue] = {
        "weights": "; ".join(f"{_listed(names)} (by {basis})" for basis, names in found.items())
    }
    if files.left_out:
        by_pattern = weight_files(model, Loads.BY_PATTERN, may_be_none=True).counted
        read = [name for name in files.left_out if name in by_pattern]
        about["not_counted"] = _listed(list(files.left_out))
        if read:
            about["not_counted"] = f"{about['not_counted']}; vLLM and SGLang count {_listed(read)}"
    return about


def _listed(names: list[str]) -> str:
    most = 4
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def model_identity(model: Path, weights_version: JsonValue = None) -> ModelIdentity:
    """Return the identity of a model for an engine that runs its directory unchanged."""
    from kvferry.identity import Loads, identify, weight_files, weights_digest

    with progress() as bar:
        bar.add_task("hashing the weights", total=None)
        version = None if weights_version is None else str(weights_version)
        found = identify(
            model, dtype=None, deviations={}, weights_version=version, name=str(model),
            loads=Loads.BY_NAME,
        )  # fmt: skip
        if not weight_files(model, Loads.BY_NAME, may_be_none=True).left_out:
            return found
        others = (Loads.BY_PATTERN, Loads.ALL)
        return replace(
            found, other_weights=tuple(weights_digest(model, loads=each) for each in others)
        )
