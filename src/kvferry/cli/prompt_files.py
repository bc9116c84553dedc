"""`kvferry export` and `kvferry import`: the records of a prompt as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.choice import (
    Choice,
    DryRunOption,
    LoraOption,
    ModelOption,
    NamespaceOption,
    PromptOption,
    RawOption,
    SaltOption,
    TokensOption,
    prompt_spaces,
    read_choice,
)
from kvferry.cli.output import JsonOption, JsonRow, emit, progress, require_writable
from kvferry.cli.prompts import model_identity
from kvferry.cli.stores import UrlArgument, await_answer, open_existing
from kvferry.config import format_size
from kvferry.errors import ConfigError
from kvferry.store.base import Store
from kvferry.store.kind import Opening, StoreUrl
from kvferry.store.url import open_one, parse_store_url, read_options, refuse_small_quota

if TYPE_CHECKING:
    from kvferry.prompt_file import StoredPrompt

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="File of records.")]


def export(
    url: UrlArgument,
    file: FileArgument,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    prompt_file: PromptOption = None,
    tokens: TokensOption = None,
    raw: RawOption = False,
    salt: SaltOption = None,
    lora: LoraOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Copy the records of a prompt into one file, which `kvferry import` reads.

    Copies and verifies the records from the start of the prompt up to the first that is missing or
    damaged. Exit code 1 if no record was copied, or a damaged one ended it. An existing file is
    replaced if there is a record. The file holds the prompt's token ids and its salt, and only you
    may read it.

    Example: kvferry export file:///kv --model MODEL --prompt-file F out.kv
    """
    choice = read_choice(
        namespace=namespace, model=model, tenant=None, prompt_file=prompt_file, tokens=tokens,
        raw=raw, salt=salt, lora=lora,
    )  # fmt: skip
    if choice.token_ids is None:
        raise ConfigError("give the prompt: --prompt-file FILE or --tokens FILE")
    require_writable(file)
    if file.exists() and not file.is_file():
        raise ConfigError(f"cannot write {file}: not a regular file")
    from kvferry.prompt_file import export_prompt

    with open_existing(url) as store, progress() as bar:
        prompt = _prompt_in(store, choice)
        task = bar.add_task("exporting", total=len(prompt.keys))
        done = export_prompt(
            store,
            prompt,
            None if dry_run else file,
            lambda count: bar.update(task, completed=count),
        )
    facts = _facts(prompt, done.num_records)
    facts |= {"dry_run": dry_run, "num_bytes": done.num_bytes, "fault": done.fault}
    verb = "would be exported" if dry_run else "exported"
    if not done.num_records:
        verb = "stored, so nothing is written"
    said = f"{_summary(prompt, done.num_records)}, {format_size(done.num_bytes)}, {verb}"
    if done.fault is not None:
        said += f"; the next record is damaged ({done.fault}), see `kvferry verify`"
    emit(facts, json, said)
    if not done.num_records or done.fault is not None:
        raise typer.Exit(1)


def import_(
    file: FileArgument,
    url: UrlArgument,
    model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Refuse records of other weights than this model's."),
    ] = None,
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Store the records of a file that `kvferry export` wrote.

    The whole file is checked before anything is written: the namespace against its description,
    every key against the tokens, every checksum. A directory that is no store yet becomes one.

    Example: kvferry import prompt.kv file:///var/cache/kvferry --model DIR
    """
    parsed = _place(url)
    from kvferry.prompt_file import PromptFile

    with PromptFile(file) as opened, progress() as bar:
        prompt = opened.prompt
        num_bytes = prompt.schema.record_bytes
        notes = [] if model is None else _compare(prompt, model)
        refuse_small_quota(parsed, num_bytes)
        task = bar.add_task("checking", total=len(prompt.keys))
        count = opened.check(lambda done: bar.update(task, completed=done))
        _refuse_too_many(parsed, count * num_bytes)
        facts = {"dry_run": dry_run, "num_bytes": count * num_bytes, **_facts(prompt, count)}
        said = f"{_summary(prompt, count)}, {format_size(count * num_bytes)}"
        if dry_run:
            emit(facts, json, f"{said}, would be imported", *notes)
            return
        task = bar.add_task("importing", total=count)
        opening = Opening(index=False, namespace=prompt.namespace.digest, value_bytes=num_bytes)
        with open_one(parsed, opening) as store:
            await_answer(store)
            done = opened.copy_to(store, lambda done: bar.update(task, completed=done))
    facts |= {"stored": done.num_stored, "existing": done.num_existing}
    emit(facts, json, f"{said}, imported; {done.num_existing} were there before", *notes)


def _prompt_in(store: Store, choice: Choice) -> StoredPrompt:
    """Return the prompt as of the chosen namespace that holds its first chunk; if none holds it, as
    of the first namespace.

    Raises:
        ConfigError: several namespaces hold it.
    """
    from kvferry.prompt_file import StoredPrompt

    prompts = [
        StoredPrompt(space, list(choice.token_ids or ()), choice.extra)
        for space in prompt_spaces(store, choice)
    ]
    held = [
        each
        for each in prompts
        if each.keys and store.of(each.namespace.digest).read(each.keys[0], ()) is not None
    ]
    if len(held) > 1:
        digits = ", ".join(each.namespace.digest.hex()[:16] for each in held)
        raise ConfigError(f"{len(held)} namespaces hold this prompt; give --namespace: {digits}")
    return held[0] if held else prompts[0]


def _place(url: str) -> StoreUrl:
    """Parse a store URL. Raises ConfigError if nothing can be imported into that store."""
    parsed = parse_store_url(url)
    if parsed.scheme in ("memory", "peer"):
        raise ConfigError(f"{parsed.where}: ends with its process; name a directory or a server")
    if getattr(read_options(parsed), "read_only", False):
        raise ConfigError(f"{parsed.where} says read_only, and this command changes the store")
    return parsed


def _refuse_too_many(url: StoreUrl, num_bytes: int) -> None:
    max_bytes = getattr(read_options(url), "max_bytes", None)
    if max_bytes is not None and max_bytes < num_bytes:
        raise ConfigError(
            f"max_bytes={format_size(max_bytes)} is less than the records of the prompt have "
            f"({format_size(num_bytes)}); raise it"
        )


def _compare(prompt: StoredPrompt, model: Path) -> list[str]:
    """Return a line per setting in which the engine that stored the records differs from `model`.
    Only an engine with equal settings finds the records. Raises ConfigError for other weights."""
    from kvferry.explain import differences_of_model

    differs = differences_of_model(prompt.namespace, model_identity(model))
    if "weights" in differs:
        raise ConfigError(
            f"these records are of other weights than those in {model}: of {prompt.namespace.title}"
        )
    return [
        f"the engine that stored it ran with {name} = {str(there)[:60]}, {model} says "
        f"{str(here)[:60]}"
        for name, (there, here) in differs.items()
    ]


def _facts(prompt: StoredPrompt, num_records: int) -> JsonRow:
    return {
        "namespace": prompt.namespace.digest.hex(),
        "model": prompt.namespace.title,
        "records": num_records,
        "num_tokens": prompt.tokens_in(num_records),
        "prompt_tokens": len(prompt.token_ids),
    }


def _summary(prompt: StoredPrompt, num_records: int) -> str:
    return (
        f"{num_records} records, {prompt.tokens_in(num_records)} of {len(prompt.token_ids)} tokens"
        f" of a prompt of {prompt.namespace.title}"
    )
