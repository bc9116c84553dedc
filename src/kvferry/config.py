"""Turns text into typed options: sizes, and frozen dataclasses of options. Reads no file.

Hosts' adapters, the embedded engine, stores and commands call `build_config` at start-up. Every
refusal is a `ConfigError` of one line: where, what was given, what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# At most two digits of exponent: a longer one would make int() work for minutes.
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:e\d{1,2})?)\s*([a-z]*)", re.ASCII)
_MAX_SIZE = 2**63 - 1
_SIZES = "write a number of bytes such as 4096, 500MB or 10GiB"
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})

OPTION_NAME = re.compile(r"(?=.{1,24}$)[a-z]+(?:_[a-z]+)*", re.ASCII)
"""Form of an option's name; other text may be a secret and is not shown (`unknown`)."""


def parse_size(text: str | int) -> int:
    """Return the bytes that `text` means: a number, alone or with B, KB, MB, GB, TB (powers of
    1000) or KiB, MiB, GiB, TiB (powers of 1024), in any case. Fractions of a byte are dropped.

    Raises:
        ConfigError: negative, too large for a file size, or not a size.

    >>> parse_size("1.5GiB"), parse_size("500 MB"), parse_size(4096)
    (1610612736, 500000000, 4096)
    """
    match = _SIZE.fullmatch(str(text).strip().lower())
    if match is None:
        fault = "is negative" if str(text).strip().startswith("-") else "is not a size"
        raise ConfigError(f"{text!r} {fault}; {_SIZES}")
    number, unit = match.groups()
    if unit not in _UNITS:
        # A lone G is refused: half of all tools read it as 1000^3, the other half as 1024^3.
        hint = f"; write {unit}ib (1024) or {unit}b (1000)" if f"{unit}ib" in _UNITS else ""
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}{hint or '; ' + _SIZES}")
    size = Decimal(number) * _UNITS[unit]
    if size > _MAX_SIZE:
        raise ConfigError(f"{text!r} is more than the largest size, {_MAX_SIZE} bytes")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Write `num_bytes` for people, in a form that `parse_size` reads. Exact up to 1023 bytes and
    for round numbers; else rounded to one decimal.

    >>> format_size(4096), format_size(1_610_612_736), format_size(5000)
    ('4KiB', '1.5GiB', '4.9KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    size = float(num_bytes)
    # 1023.95 and more would print as 1024.0 of the smaller unit.
    while size >= 1023.95 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.1f}".removesuffix(".0") + units[0]


def printable(text: str) -> str:
    r"""Return `text` as one line that is safe to print: Python escapes replace control characters.

    >>> print(printable(chr(27) + "[31m"), printable("[31m"))
    \x1b[31m [31m
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def unknown(what: str, name: object, known: Iterable[str], *, hides: bool = False) -> str:
    """Write one sentence about a name that is not in `known`. It suggests the nearest known name,
    or lists all. With `hides`, it shows the given name only if that looks like an option's name."""
    by_lower = {entry.lower(): entry for entry in sorted(known)}
    shown = "" if hides and OPTION_NAME.fullmatch(str(name)) is None else f" {name!r}"
    if not by_lower:
        return f"unknown {what}{shown}; there are none"
    hint = f"known: {', '.join(by_lower.values())}"
    for near in difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6):
        hint = f"did you mean {by_lower[near]!r}?"
    return f"unknown {what}{shown}; {hint}"


def build_config(cls: type[T], mapping: Mapping[str, Any], *, where: str, hides: bool = False) -> T:
    """Make the frozen dataclass `cls` from options as a URL, command line or file gives them.

    Text is converted to the type of the field: int, float, bool (true/false, yes/no, on/off, 1/0),
    str, a Literal of strings or ints, or a union of these and None (the text "none"). A tuple of
    one of these types is made from a list. A field whose metadata is `{"unit": "bytes"}` takes what
    `parse_size` takes. Values that already have the type pass. An int field refuses a float that is
    not whole.

    Args:
        cls: a dataclass; its `__post_init__` may raise ConfigError for what types cannot say.
        mapping: option name to value.
        where: what the options belong to; every message starts with it.
        hides: whether messages hide every given value, as for the options of a URL, which can hold
            a secret anywhere. Without it, they hide only a name or value that may be a URL.

    Raises:
        ConfigError: an unknown, missing or unusable option.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in fields:
            fault = unknown("option", name, fields, hides=hides or _may_be_url(name))
            raise ConfigError(f"{where}: {fault}")
        is_size = fields[name].metadata.get("unit") == "bytes"
        try:
            values[name] = _convert(hints[name], value, is_size=is_size)
        except ValueError as error:  # also a ConfigError of parse_size
            is_hidden = hides or _may_be_url(value)
            fault = _refusal(hints[name], is_size=is_size) if is_hidden else f": {error}"
            raise ConfigError(f"{where}: option {name!r}{fault}") from None
    for name, field in fields.items():
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_required and name not in values:
            raise ConfigError(f"{where}: option {name!r} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The options of a store that every host offers. The defaults suit one machine.

    Attributes:
        load_timeout_seconds: time limit of a load; what has not arrived by then is recomputed.
        io_threads: threads for loads. An engine's connector also saves on up to half of them; the
            other hosts have half as many more for that.
        tenant: name of a tenant, whose records no other tenant reads.
        weights_version: a name for weights that are not those of the model's directory, or that
            change in place. The operator guarantees that different weights never share a name.
    """

    load_timeout_seconds: float = 5.0
    # More than cores: a thread that waits for a busy core does not delay the others.
    io_threads: int = 4
    tenant: str = ""
    weights_version: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.io_threads <= 64:
            raise ConfigError(f"io_threads must be between 1 and 64, not {self.io_threads}")
        for field in dataclasses.fields(self):
            if field.name.endswith("_seconds") and not getattr(self, field.name) > 0:
                raise ConfigError(
                    f"{field.name} must be more than 0, not {getattr(self, field.name)}"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions(StoreOptions):
    """The options of a cache that keeps KV in chunks of tokens, beside those of `StoreOptions`.

    Attributes:
        chunk_tokens: tokens per stored record. Part of the namespace, so records that were stored
            with another value are not read. None: what `default_chunk_tokens` returns.
        audit: how often a hit is compared with what the model computes. "first": the first hit; a
            number from 0 to 1: the first, and this part of later hits; "off": never. An audit
            computes two chunks on average; see docs/identity.md.
    """

    chunk_tokens: int | None = None
    audit: Literal["first", "off"] | float = "first"

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        audit = self.audit
        if self.chunk_tokens is not None and self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, not {self.chunk_tokens}")
        if isinstance(audit, int | float) and not isinstance(audit, bool):
            is_known = 0 <= audit <= 1
        else:
            is_known = audit in ("first", "off")
        if not is_known:
            raise ConfigError(
                f'audit must be "first", "off" or a number from 0 to 1, not {audit!r}'
            )


def _convert(hint: object, value: object, *, is_size: bool) -> object:
    """Return `value` as the type `hint`. Raises ValueError that says what is allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        is_none = value is None or (isinstance(value, str) and value.strip().lower() == "none")
        if is_none and type(None) in members:
            return None
        faults = []
        for member in members:
            if member is not type(None):
                try:
                    return _convert(member, value, is_size=is_size)
                except ValueError as error:
                    faults.append(str(error))
        raise ValueError(", and ".join(faults))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"a value of type {type(value).__name__} is not a list")
        member = typing.get_args(hint)[0]
        return tuple(_convert(member, each, is_size=is_size) for each in value)
    if typing.get_origin(hint) is Literal:
        members = typing.get_args(hint)
        text = value.strip().lower() if isinstance(value, str) else None
        for choice in members:
            if (type(choice) is type(value) and choice == value) or str(choice).lower() == text:
                return choice
        raise ValueError(f"{value!r} is none of {', '.join(map(str, members))}")
    if is_size:
        return parse_size(value if isinstance(value, str) else _to_int(value))
    return _CONVERTERS[hint](value)


def _may_be_url(given: object) -> bool:
    """Whether `given` may hold a password, as a store's URL given for a wrong option does."""
    return isinstance(given, str) and ("@" in given or "://" in given)


def _refusal(hint: object, *, is_size: bool) -> str:
    """Say what is wrong with a value that is not of type `hint`, without showing the value."""
    members = [each for each in typing.get_args(hint) if each is not type(None)]
    if typing.get_origin(hint) is Literal:
        return f" is none of {', '.join(map(str, members))}"
    if hint is bool:
        return " is neither true nor false"
    if is_size:
        return f" is not a size; {_SIZES}"
    kinds = {int: "a whole number", float: "a finite number"}
    return f" is not {' or '.join(kinds.get(each, 'text') for each in members or [hint])}"


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _to_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip(), re.ASCII):
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _to_float(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    raise ValueError(f"{value!r} is not a finite number")


def _to_str(value: object) -> str:
    if isinstance(value, str):
        return value
    # The message leaves the value out: it may be a URL with a password.
    raise ValueError(f"a value of type {type(value).__name__} is not text")


_CONVERTERS: Mapping[object, Callable[[object], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
}
