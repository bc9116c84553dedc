"""`kvferry explain`: why a prompt would miss in a store, or why recorded requests missed."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import RenderableType

from kvferry.cli import stores
from kvferry.cli.choice import of_tokens
from kvferry.cli.output import (
    JsonOption,
    JsonRow,
    NothingFound,
    emit,
    format_age,
    make_table,
    plain,
)
from kvferry.cli.prompts import (
    AskedPrompt,
    ChatOption,
    DateOption,
    LoraOption,
    ModelOption,
    NamespaceOption,
    PromptOption,
    PromptOptions,
    RawOption,
    SaltOption,
    TokensOption,
    about_weights,
    check_digits,
    model_identity,
)
from kvferry.config import format_size
from kvferry.contract.messages import LookupMiss
from kvferry.errors import ConfigError, Fault, StoreError
from kvferry.explain import Nearest, PromptAnswer, PromptSearch, Run, Space, away_lines
from kvferry.journal import JournalLine, read_journal
from kvferry.keys import JsonValue, ModelIdentity, Namespace
from kvferry.store.base import Store
from kvferry.store.kind import shown_url
from kvferry.store.url import parse_store_url, read_options
from kvferry.survey import (
    Differences,
    are_of_blocks,
    differences,
    differences_of_model,
    has_states_in_blocks,
    of_hosts,
    survey,
    unread,
)
from kvferry.types import NO_EXTRA_KEYS

_MAX_TEXT = 200
"""Most characters that are shown of an untrusted value."""

_MAX_VALUE = 24
"""The same on the first line."""

_MAX_DIFFERENCES = 12
_MAX_RUNS = 200
_MAX_STATES = 12

HIT = "hit"
"""What is shown as the reason of tokens that would be read."""


def explain(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="URL", help="Store, or its tiers, nearest first; none with --journal."
        ),
    ] = None,
    model: ModelOption = None,
    namespace: NamespaceOption = None,
    prompt_file: PromptOption = None,
    chat: ChatOption = None,
    tokens: TokensOption = None,
    raw: RawOption = False,
    date: DateOption = None,
    salt: SaltOption = None,
    lora: LoraOption = None,
    block_size: Annotated[
        int, typer.Option(min=1, help="Tokens of the engine's blocks; vLLM on CPUs has 128.")
    ] = 16,
    journal: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Explain recorded requests instead.")
    ] = None,
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Only requests whose id starts with this.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Requests to show.")] = 10,
    json: JsonOption = None,
) -> None:
    """Say why a prompt misses: how far it would hit, and what became of the rest.

    Example: kvferry explain file:///var/cache/kvferry --model path/to/model --prompt-file F
    """
    if bool(urls) == (journal is not None):
        raise ConfigError("give the URL of a store, or --journal FILE, and not both")
    if journal is not None:
        _explain_journal(journal, request, limit, json)
        return
    options = PromptOptions(
        prompt_file=prompt_file, chat=chat, tokens=tokens, raw=raw, date=date, salt=salt, lora=lora
    )
    if model is None and namespace is None:
        raise ConfigError("whose prompt is it? give --model DIR or --namespace DIGEST")
    asked, digits = options.read(model), check_digits(namespace or "0", "a namespace")
    identity = model_identity(Path(str(model))) if namespace is None else None

    def ask(token_ids: Sequence[int]) -> PromptAnswer:
        def of_tiers(tiers: Mapping[str, Store], away: dict[str, Fault]) -> PromptAnswer:
            prompt = PromptSearch(tiers, token_ids, asked.extra, block_size, away)
            return _ask_model(identity, prompt) if identity else _ask_namespace(digits, prompt)

        return _ask_tiers(urls or [], of_tiers)

    answer = ask(asked.token_ids)
    notes = _notes(answer, asked) + _weights_notes(answer, model)
    if prompt_file is not None and answer.reason is LookupMiss.ABSENT:
        other = ask(replace(options, raw=not raw).read(model).token_ids)
        notes += _of_other_form(answer, other, raw=raw)
    _show(answer, notes, json)


def _of_other_form(answer: PromptAnswer, other: PromptAnswer, *, raw: bool) -> list[str]:
    form = "Without --raw, in the chat template," if raw else "With --raw,"
    return [f"{form} {_hits(other)}."] if other.hit_tokens > answer.hit_tokens else []


# -- the store ------------------------------------------------------------------------------------


def _ask_tiers(
    urls: list[str], question: Callable[[Mapping[str, Store], dict[str, Fault]], PromptAnswer]
) -> PromptAnswer:
    """Ask one store, or several as tiers, by name. A tier that cannot be opened is away."""

    def ask(tiers: Mapping[str, Store], away: dict[str, Fault]) -> PromptAnswer:
        try:
            return question(tiers, away)
        except ConfigError as error:
            if not away:
                raise
            # What was not found may be in a tier that is away, so this is no answer.
            raise ConfigError("; ".join([str(error), *away_lines(away)])) from error

    if len(urls) == 1:
        scheme = parse_store_url(urls[0]).scheme
        return stores.query_store(urls[0], lambda store: ask({scheme: store}, {}))
    opened: dict[str, Store] = {}
    away: dict[str, Fault] = {}
    with ExitStack() as closing:
        for number, url in enumerate(urls, 1):
            read_options(parse_store_url(url))  # raises for what no store could be
            name = f"tier {number}, {shown_url(url)}"
            try:
                opened[name] = closing.enter_context(stores.open_existing(url))
            except (ConfigError, StoreError) as error:
                away[name] = error.fault
        return ask(opened, away)


def _ask_model(identity: ModelIdentity, prompt: PromptSearch) -> PromptAnswer:
    spaces = [Space(each, differences_of_model(each, identity)) for each in prompt.of_tokens()]
    if not spaces and (lost := sum(number for _, number in prompt.ask(_num_lost))):
        raise ConfigError(
            f"{prompt.where} has {lost} records of namespaces without a description, so nothing "
            "says of which model they are; an engine that uses the store describes its own"
        )
    ours = [space for space in spaces if "weights" not in space.differs]
    others = [space for space in spaces if "weights" in space.differs]
    if ours:
        return prompt.answer(ours, lambda: others)
    nearest = prompt.nearest(others, 0)
    if nearest is None and others:
        nearest = Nearest(min(others, key=lambda space: len(space.differs)), 0)
    num_tokens = len(prompt.token_ids)
    return PromptAnswer(
        num_tokens=num_tokens,
        found=[],
        elsewhere=nearest,
        away=prompt.away,
        unread=prompt.unread,
    )


def _num_lost(store: Store) -> int:
    """Count the records whose namespaces have no description. Raises StoreError where that is not
    known."""
    store.catalogue().described()  # raises where those that may be there are not listed
    counts = stores.namespaces(store)  # raises where the prefix is wrong
    found = survey(store, counts, counts)
    if (why := unread(found)) is not None:
        raise StoreError(why.kind, f"{store.url}: {why}")
    return sum(each.num_records for each in found if not each.is_described)


def _ask_namespace(digits: str, prompt: PromptSearch) -> PromptAnswer:
    found = prompt.namespaces(digits)
    if len(found) > 1:
        raise ConfigError(f"{len(found)} namespaces start with {digits}; give more digits")
    if not found:
        list(prompt.ask(_num_lost))  # raises where it cannot be known
        raise NothingFound(f"no namespace in {prompt.where} starts with {digits}; see `kvferry ls`")
    (target,) = of_tokens(prompt.where, found)

    def others() -> list[Space]:
        return [
            Space(each, differences(each.description, target.description))
            for each in prompt.of_tokens()
            if each.digest != target.digest
        ]

    return prompt.answer([Space(target, {})], others)


# -- what is shown --------------------------------------------------------------------------------


def _notes(answer: PromptAnswer, asked: AskedPrompt) -> list[str]:
    """Return hints where to look further."""
    notes = away_lines(answer.away)
    notes += [f"{why}; one of these namespaces may be nearer" for why in answer.unread]
    other = [] if answer.elsewhere is None else [answer.elsewhere.space]
    spaces = [*(each.space for each in answer.found), *other]
    of_kernels = {name for space in spaces for name in of_hosts(space.differs)}
    sizes = {space.chunk_tokens for space in spaces if has_states_in_blocks(space.namespace)}
    if len(sizes) > 1:
        notes.append(
            f"Chunks of {' and '.join(map(str, sorted(sizes)))} tokens: this model has recurrent "
            "states, and its chunks divide the blocks of an engine, whose size follows from the "
            "number of ranks. Engines share with one --block-size; doctor --model says which."
        )
    if answer.found and (states := answer.found[0].states):
        parts, shown = answer.found[0].space.namespace.state_parts, states[-_MAX_STATES:]
        size = format_size(answer.found[0].state_bytes)
        first = "..., " if len(states) > len(shown) else ""
        notes.append(
            f"States are stored after {first}{', '.join(f'{each:,}' for each in shown)} tokens, "
            f"each of {size} in {parts} record{'s' * (parts > 1)}."
        )
    for name in sorted(of_kernels):
        notes.append(f"No option sets {name}: it follows from the kernels of an engine's host.")
    if answer.reason is LookupMiss.ABSENT:
        if answer.hit_tokens:
            last = answer.hit_tokens + answer.found[0].space.chunk_tokens
            notes.append(
                f"The prompt differs from what was stored within tokens {answer.hit_tokens + 1:,}-"
                f"{last:,}, or nothing longer was stored."
            )
        notes += asked.hints
        if asked.extra == NO_EXTRA_KEYS:
            notes.append(
                "A request with a salt or a LoRA adapter has other keys: see --salt, --lora."
            )
    return notes


def _weights_notes(answer: PromptAnswer, model: Path | None) -> list[str]:
    """Name the files that make the difference, where the weights are others."""
    if model is None or not answer.elsewhere or "weights" not in answer.elsewhere.space.differs:
        return []
    about = about_weights(model)
    left_out = f"; not counted: {about['not_counted']}" if "not_counted" in about else ""
    return [f"The weights of {model}: {about['weights']}{left_out}."]


def _show(answer: PromptAnswer, notes: list[str], json: str | None) -> None:
    summary = _summary(answer)
    shown: list[RenderableType] = [summary]
    if answer.found:
        best, runs, *_ = answer.found[0]
        model = f"{_runs_as(best.namespace)}, {best.chunk_tokens} tokens a chunk"
        rows = [_row(run) for run in runs[:_MAX_RUNS]]
        columns = {"tokens": "tokens", "what": "why", "more": "more"}
        title = f"namespace {best.namespace.digest.hex()[:16]} ({model})"
        shown.append(make_table(columns, rows, title=title))
        if len(runs) > _MAX_RUNS:
            shown.append(f"{len(runs) - _MAX_RUNS} more rows; --json has all")
        shown += _difference_table("it differs from the model directory in", best.differs)
    if also := answer.found[1:]:
        columns = {"namespace": "namespace", "chunk": "chunk_tokens"}
        columns |= {"would hit": "hit_tokens", "then": "why", "differs in": "differs"}
        rows = [
            {
                **_about(each.space, each.hit_tokens),
                "why": each.first_miss and each.first_miss.why,
                "differs": _values(each.space.differs),
            }
            for each in also[:_MAX_DIFFERENCES]
        ]
        title = f"{len(also)} more of this model; an engine reads one (dtype, chunk size, tenant)"
        shown.append(make_table(columns, rows, title=title))
    if answer.elsewhere is not None:
        other = answer.elsewhere.space
        about = f"{other.namespace.digest.hex()[:16]} ({other.namespace.title})"
        shown += _difference_table(f"nearest: namespace {about} differs in", other.differs)
    emit({**_as_json(answer, summary), "notes": list(notes)}, json, *shown, *map(plain, notes))


def _runs_as(namespace: Namespace) -> str:
    """Name the model, and its dtype and tenant, by which its namespaces commonly differ."""
    config, tenant = namespace.description.get("config"), namespace.description.get("tenant")
    dtype = config.get("dtype") if isinstance(config, Mapping) else None
    said = namespace.title, _cut(dtype or ""), f"tenant {_cut(tenant)}" if tenant else ""
    return ", ".join(filter(None, said))


def _summary(answer: PromptAnswer) -> str:
    """Say in one line why the hit ends where it ends, and how far it goes."""
    if not answer.num_tokens:
        return "the prompt is empty"
    return f"{answer.reason}: {_because(answer)}; {_hits(answer)}"


def _because(answer: PromptAnswer) -> str:
    reason, other = answer.reason, answer.elsewhere
    miss = answer.found[0].first_miss if answer.found else None
    where = "the tiers that answer" if answer.away else "this store"
    nothing = f"nothing in {where} is of this model"
    if reason is LookupMiss.OTHER_KEYS:
        return f"{answer.without_extra:,} tokens are stored without this salt and LoRA adapter"
    if reason is LookupMiss.OTHER_NAMESPACE and other is not None:
        there = f"{other.hit_tokens:,} tokens are stored under {_values(other.space.differs)}"
        if are_of_blocks(other.space.namespace, other.space.differs):
            there += ": its engines need one --block-size"
        return there if miss else f"{nothing}; {there}"
    if miss is None:
        return nothing
    size = answer.found[0].space.chunk_tokens
    if reason is LookupMiss.PARTIAL:
        if answer.num_tokens < size:
            return f"the prompt is shorter than a chunk of {size} tokens"
        is_last = miss.num_tokens == 1
        return "the last token is always computed" if is_last else reason.meaning[:-1]
    more = f"the chunk at token {miss.first_token + 1:,}"
    if miss.at is not None:
        more += f", {format_age(miss.at)} ago"
    return f"{more}, {_cut(miss.detail)}" if miss.detail else more


def _values(differs: Differences) -> str:
    """Name the fields that differ, with both values."""
    return ", ".join(
        f"{_cut(name)} {_cut(there, _MAX_VALUE)} (asked for: {_cut(here, _MAX_VALUE)})"
        for name, (there, here) in list(differs.items())[:3]
    )


def _hits(answer: PromptAnswer) -> str:
    text = f"{answer.hit_tokens:,} of {answer.num_tokens:,} tokens would hit"
    differs = answer.found[0].space.differs if answer.found and answer.hit_tokens else {}
    if differs:  # an engine that runs the directory as it is written reads none of it
        text += f" for an engine that differs from the model directory in {_values(differs)}"
    return text


def _row(run: Run) -> JsonRow:
    last = run.first_token + run.num_tokens
    more = [] if run.why is None else [run.why.meaning]
    if run.at is not None:
        more.append(f"{format_age(run.at)} ago by {_cut(run.by)}.")
    if run.detail:
        more.append(_cut(run.detail))
    tokens = f"{run.first_token + 1:,}-{last:,}"
    return {"tokens": tokens, "why": run.why or HIT, "more": " ".join(more)}


def _difference_table(title: str, differs: Differences) -> list[RenderableType]:
    rows: list[JsonRow] = [
        {"field": _cut(name), "there": _cut(there), "here": _cut(here)}
        for name, (there, here) in list(differs.items())[:_MAX_DIFFERENCES]
    ]
    if not rows:
        return []
    if len(differs) > len(rows):
        title += f" {len(differs)} fields, among them"
    columns = {"field": "field", "in the store": "there", "asked for": "here"}
    return [make_table(columns, rows, title=title)]


def _cut(value: JsonValue, most: int = _MAX_TEXT) -> str:
    """An untrusted value, as short text."""
    if value is None:
        return "-"
    text = value if isinstance(value, str) else json_module.dumps(value)
    return text if len(text) <= most else f"{text[:most]}..."


def _as_json(answer: PromptAnswer, summary: str) -> JsonRow:
    found: list[JsonValue] = [
        {
            **_about(each.space, each.hit_tokens),
            "states": list(each.states),
            "state_bytes": each.state_bytes,
            "chunks": [{**run._asdict(), "why": run.why or HIT} for run in each.runs],
        }
        for each in answer.found
    ]
    return {
        "summary": summary,
        "num_tokens": answer.num_tokens,
        "hit_tokens": answer.hit_tokens,
        "reason": answer.reason,
        "namespaces": found,
        "elsewhere": answer.elsewhere and _about(*answer.elsewhere),
        "without_extra": answer.without_extra,
        "away": {name: fault.text for name, fault in answer.away.items()},
        "unread": [{"kind": kind, "why": why} for kind, why in answer.unread],
        "faults": {name: fault.kind for name, fault in answer.away.items()},
    }


def _about(space: Space, hit_tokens: int) -> JsonRow:
    differs: JsonRow = {
        _cut(name): {"there": _cut(there), "here": _cut(here)}
        for name, (there, here) in space.differs.items()
    }
    row: JsonRow = {"namespace": space.namespace.digest.hex(), "model": space.namespace.title}
    row |= {"chunk_tokens": space.chunk_tokens, "hit_tokens": hit_tokens}
    return {**row, "differs": differs}


# -- the journal ----------------------------------------------------------------------------------


def _explain_journal(path: Path, request: str | None, limit: int, json: str | None) -> None:

    lines = read_journal(path, request, limit)
    if not lines:
        which = "" if request is None else f" whose id starts with {request!r}"
        raise NothingFound(f"journal {path} has no request{which}")
    misses: Counter[str] = Counter()
    not_stored: Counter[str] = Counter()
    for line in lines:
        misses.update(line.misses)
        not_stored.update(line.not_stored)
    hit = sum(sum(line.by_source().values()) for line in lines)
    total = sum(line.num_tokens for line in lines)
    summary = f"{hit:,} of {total:,} tokens of the last {len(lines)} requests hit"
    if misses:
        reason, count = misses.most_common(1)[0]
        summary += f"; {count:,} missed as {_cut(reason)}"
    requests: list[JsonRow] = [msgspec.structs.asdict(line) for line in lines]
    for request_facts in requests:
        del request_facts["keys"]
    reasons: list[JsonRow] = [
        {
            "reason": _cut(reason),
            "tokens": misses[reason],
            "not_stored": not_stored[reason],
            "means": _meaning(reason),
        }
        for reason, _ in (misses + not_stored).most_common(_MAX_DIFFERENCES)
    ]
    columns = {"at": "at", "request": "request", "tokens": "num_tokens", "hit": "hits"}
    columns |= {"missed": "misses", "not stored": "not_stored", "why": "why"}
    tables = [make_table(columns, map(_journal_row, lines))]
    columns = {"reason": "reason", "missed": "tokens", "not stored": "not_stored", "means": "means"}
    tables.append(make_table(columns, reasons))
    value: JsonRow = {"summary": summary, "requests": list(requests), "reasons": list(reasons)}
    emit(value, json, summary, *tables)


def _meaning(reason: str) -> str:
    known = reason in set(LookupMiss)
    return LookupMiss(reason).meaning if known else "A reason that this release does not know."


def _journal_row(line: JournalLine) -> JsonRow:
    hits, why = line.by_source(), "; ".join(filter(None, (line.why, line.not_stored_why)))
    if not (hits or line.misses):
        why = "it ended before admission"
    return {
        "at": line.time,
        "request": _cut(line.request),
        "num_tokens": line.num_tokens,
        "hits": _counts(hits),
        "misses": _counts(line.misses),
        "not_stored": _counts(line.not_stored),
        "why": _cut(why),
    }


def _counts(counts: Mapping[str, int]) -> str:
    return _cut(", ".join(f"{name} {count:,}" for name, count in counts.items()))
