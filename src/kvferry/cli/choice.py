"""Finds the records that `rm`, `pin` and `copy` mean: by namespace, tenant, prompt or age."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from kvferry.cli import stores
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
    check_digits,
    model_identity,
)
from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.keys import ChunkKeys, ModelIdentity, Namespace, salt_mark, state_keys
from kvferry.record.check import ReadFault
from kvferry.store import maintenance
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry, StoredBytes
from kvferry.store.erasures import name_of_key, name_of_mark, name_of_namespace
from kvferry.survey import chunk_tokens_of, differences_of_model, shards_of, survey
from kvferry.types import NO_EXTRA_KEYS, ChunkKey

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Report what would be changed; change nothing.")
]

_MAX_KEYS = 256
"""Most chunks of a prompt that a notice names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The options that choose records; a record must match all that are not None.

    Attributes:
        digits: first digits of the namespace's digest.
        prompt: a prompt, whose whole chunks are meant, and the states behind them.
        salt: salt of the requests, without a prompt.
        age: seconds since the last use, at least.
    """

    digits: str | None
    identity: ModelIdentity | None
    tenant: str | None
    prompt: AskedPrompt | None
    salt: str | None = None
    age: float | None = None

    @property
    def is_everything(self) -> bool:
        parts = (self.digits, self.identity, self.tenant, self.prompt, self.salt, self.age)
        return all(part is None for part in parts)


def _read_choice(
    *,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: Annotated[str | None, typer.Option(help="All namespaces of this tenant.")] = None,
    prompt_file: PromptOption = None,
    chat: ChatOption = None,
    tokens: TokensOption = None,
    raw: RawOption = False,
    date: DateOption = None,
    salt: SaltOption = None,
    lora: LoraOption = None,
) -> Choice:
    """Read the options. Raises ConfigError if they cannot be read, or do not go together."""
    prompt = PromptOptions(
        prompt_file=prompt_file, chat=chat, tokens=tokens, raw=raw, date=date, salt=salt, lora=lora
    )
    if prompt.names_prompt and namespace is None and model is None:
        raise ConfigError("whose prompt is it? give --model DIR or --namespace DIGEST")
    if not prompt.names_prompt and lora is not None:
        raise ConfigError("--lora is of a prompt: give --prompt-file, --chat or --tokens")
    return Choice(
        digits=None if namespace is None else check_digits(namespace, "a namespace"),
        identity=None if model is None else model_identity(model),
        tenant=tenant,
        prompt=prompt.read(model) if prompt.names_prompt else None,
        salt=None if prompt.names_prompt else salt,
    )


def choosing(command: Callable[..., None]) -> Callable[..., None]:
    """Put the options that choose records in the place of a command's argument `choice`."""
    options = signature(_read_choice, eval_str=True).parameters
    parameters = {**signature(command, eval_str=True).parameters, **options}
    del parameters["choice"]

    @wraps(command)
    def call(**given: Any) -> None:  # noqa: ANN401 - as typer reads them
        choice = _read_choice(**{name: given.pop(name) for name in options})
        command(choice=choice, **given)

    call.__dict__["__signature__"] = Signature(
        [each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters.values()]
    )
    call.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    return call


@dataclass(slots=True)
class Looked:
    """What a search by salt could not tell.

    Attributes:
        num_unmarked: records that say no salt.
        num_unreadable: records whose header could not be read, or is wrong.
    """

    num_unmarked: int = 0
    num_unreadable: int = 0


def chosen(store: Store, choice: Choice, looked: Looked | None = None) -> Iterator[Entry]:
    """Yield the chosen records as `Store.scan` finds them; those of a prompt have no last use. A
    pinned record is never too old. A search by salt reads every header, and counts in `looked` what
    it cannot tell. Raises as `stores.entries` and `of_tokens` do, and ConfigError
    if the store does not know when its records were used."""
    if choice.prompt is not None:
        yield from _of_prompt(store, choice, choice.prompt)
        return
    digests = set(_spaces(store, choice)) if _names_spaces(choice) else None
    looked = Looked() if looked is None else looked
    unused_since = None if choice.age is None else time.time() - choice.age
    for entry in stores.entries(store, store.catalogue().scan()):
        if digests is not None and entry.namespace not in digests:
            continue
        if unused_since is not None:
            if not entry.last_used:
                raise ConfigError(
                    f"{store.url} does not say when its records were used; leave --older-than out"
                )
            if entry.last_used > unused_since or entry.pinned_until > time.time():
                continue
        if choice.salt is None or _has_salt(store, entry, choice.salt, looked):
            yield entry


def _names_spaces(choice: Choice) -> bool:
    return (choice.digits, choice.identity, choice.tenant) != (None, None, None)


def _has_salt(store: Store, entry: Entry, salt: str, looked: Looked) -> bool:
    info = maintenance.inspect(store, entry)
    if isinstance(info, ReadFault):
        looked.num_unreadable += info is not ReadFault.ABSENT
        return False
    looked.num_unmarked += not info.mark
    return info.mark == salt_mark(info.schema.namespace, salt)


def names_of_choice(store: Store, choice: Choice) -> set[str]:
    """The names under which engines learn that what is chosen was erased. Raises as `_spaces`, and
    as `stores.namespaces`."""
    if choice.age is not None:
        return set()  # what was used lately stays
    counted = stores.namespaces(store)
    if _names_spaces(choice):
        known = _spaces(store, choice)
    else:
        known = dict.fromkeys([*counted, *store.catalogue().described()])
    spaces = [space for space in known if space]
    if choice.salt is not None:
        return {name_of_mark(salt_mark(space, choice.salt)) for space in spaces}
    if choice.prompt is None:
        return {name_of_namespace(space) for space in spaces}
    found: list[str] = []
    for described in known.values():
        size = None if described is None else chunk_tokens_of(described)
        if described is not None and size is not None:
            keys = ChunkKeys(described.digest, size, choice.prompt.extra)
            keys.extend(choice.prompt.token_ids)
            for chunk in keys.keys[:_MAX_KEYS]:  # behind one that is gone, nothing is found
                found += map(name_of_key, (chunk, *state_keys(chunk, described.state_parts)))
    return set(found)


def of_tokens(where: str, spaces: Mapping[bytes, Namespace | None]) -> list[Namespace]:
    """Return those of the namespaces whose keys follow from the tokens of a prompt; at least one.
    Raises ConfigError if there is none, or one lacks a sound description."""
    found: list[Namespace] = []
    for digest, space in spaces.items():
        if space is not None and chunk_tokens_of(space) is not None:
            found.append(space)
        elif space is None or not space.is_opaque:
            raise ConfigError(
                f"the description of namespace {digest.hex()[:16]} in {where} is missing or "
                "damaged, so nothing says how many tokens its chunks have"
            )
    if not found:
        digest, opaque = next(iter(spaces.items()))
        raise ConfigError(
            f"namespace {digest.hex()[:16]} holds opaque {opaque and opaque.title}: their keys "
            "are hashes of the host, which do not follow from the tokens of a prompt"
        )
    return found


def _spaces(store: Store, choice: Choice) -> dict[bytes, Namespace | None]:
    """Return the chosen namespaces by digest; None for one without a readable description. Raises
    ConfigError if the digits are those of several."""
    digests = [
        *store.catalogue().described(),
        *(store.catalogue().namespaces() if choice.digits else ()),
    ]
    if choice.digits is not None:
        digests = [each for each in digests if each.hex().startswith(choice.digits)]
    found: dict[bytes, Namespace | None] = {}
    for holding in survey(store, digests, seconds=math.inf):
        if holding.fault is not None:  # it may be one of those chosen
            raise StoreError(*holding.fault)
        space = holding.namespace
        if choice.identity is not None and (
            space is None or "weights" in differences_of_model(space, choice.identity)
        ):
            continue
        if choice.tenant is not None and (
            space is None or space.description.get("tenant") != choice.tenant
        ):
            continue
        found[holding.digest] = space
    if choice.digits is not None and len(found) > 1:
        raise ConfigError(f"{len(found)} namespaces start with {choice.digits}; give more digits")
    return found


def _of_prompt(store: Store, choice: Choice, prompt: AskedPrompt) -> Iterator[Entry]:
    keys = dict.fromkeys(keys_of_prompt(store, choice, prompt))
    for namespace, key in keys:
        size = store.in_namespace(namespace).read(key, ())
        if size is not None:
            # Only a listing says what a record takes; that costs more than its size.
            yield Entry(key, StoredBytes(size), 0.0, namespace)
    if keys:
        yield from _shards_of(store, choice, keys)


def _shards_of(
    store: Store, choice: Choice, keys: Collection[tuple[bytes, ChunkKey]]
) -> Iterator[Entry]:
    """Yield the shards of some records; none where the store cannot be listed."""
    spaces = [space for space in _spaces(store, choice).values() if space]
    try:
        listing = stores.entries(store, store.catalogue().scan())
        yield from (entry for entry, _ in shards_of(store, listing, keys, spaces))
    except StoreError as error:
        if error.fault.kind is not FaultKind.UNLISTED:
            raise


def keys_of_prompt(
    store: Store, choice: Choice, prompt: AskedPrompt
) -> Iterator[tuple[bytes, ChunkKey]]:
    """Yield the namespace and the key of each chunk, and of each part of a state behind it, in the
    order of the prompt. Raises as `of_tokens`."""
    spaces = _spaces(store, choice)
    for space in of_tokens(store.url, spaces) if spaces else ():
        keys = ChunkKeys(space.digest, chunk_tokens_of(space) or 1, prompt.extra)
        keys.extend(prompt.token_ids)
        for chunk in keys.keys:
            for key in (chunk, *state_keys(chunk, space.state_parts)):
                yield space.digest, key


def why_nothing(store: Store, choice: Choice) -> str:
    """Say why `chosen` yields nothing. Raises as `chosen`."""
    if _names_spaces(choice) and not _spaces(store, choice):
        return f"no such namespace in {store.url}; see `kvferry ls URL --by namespace`"
    if choice.prompt is None:
        what = "" if choice.age is None else ", or all are pinned or were used since"
        what += "" if choice.salt is None else " (records of older releases do not say their salt)"
        return f"no record in {store.url} matches{what}"
    text = f"no chunk of this prompt of {len(choice.prompt.token_ids)} tokens is in {store.url}. "
    hints = list(choice.prompt.hints)
    if choice.prompt.extra == NO_EXTRA_KEYS:
        hints.append("With a salt or an adapter it has other keys: give --salt or --lora.")
    return text + " ".join(hints)
