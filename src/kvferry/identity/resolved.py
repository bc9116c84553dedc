"""What a host made of its options: the specs of its KV, read field by field.

A host resolves options, model and device into specs, of which all that lies in its blocks follows.
So identity is made of their fields, never of the options' names. An adapter brings a table of the
classes and fields that it knows, with what each field decides. Anything else is refused by name:
it may decide bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, Field, fields, is_dataclass
from fractions import Fraction
from typing import Any

from kvferry.errors import ConfigError
from kvferry.keys import JsonValue


class Use(enum.Enum):
    """What a field of a spec decides."""

    CONTENT = "what the KV of a token is"
    PAGE = "how KV lies in a block, or which KV: it counts where whole blocks are stored"
    UNSERVED = "what only whole blocks can hold: to store tokens, it must have its default"
    NOTHING = "how much memory there is, and when it is used: nothing of the bytes"


SpecTable = Mapping[str, Mapping[str, Use]]
"""By name of a class, its fields. An entry that is a property counts where a class has it."""


def describe_spec(spec: object, table: SpecTable, where: str) -> dict[str, JsonValue]:
    """Return the class of a spec and all its fields that decide bytes of whole blocks, as plain
    values that have one encoding. Specs in its fields are described in the same way.

    Args:
        where: what has this spec, for messages ("layer model.layers.0").

    Raises:
        ConfigError: a class, a field or a value that is not known.
    """
    uses = _known_class(spec, table, where)
    described: dict[str, JsonValue] = {"class": type(spec).__name__}
    for name, use in uses.items():
        if use is not Use.NOTHING and hasattr(spec, name):
            value = getattr(spec, name)
            described[name] = describe_value(value, f"{where}: {type(spec).__name__}.{name}", table)
    return described


def unserved_fields(spec: object, table: SpecTable, where: str) -> dict[str, Any]:
    """Return the fields that a connector of tokens cannot serve as they are, with their values.

    Raises:
        ConfigError: a class or a field that is not known.
    """
    uses = _known_class(spec, table, where)
    return {
        field.name: getattr(spec, field.name)
        for field in _fields(spec)
        if uses[field.name] is Use.UNSERVED and getattr(spec, field.name) != _default(field)
    }


def describe_value(value: object, where: str, table: SpecTable | None = None) -> JsonValue:
    """Return a value of a host as a plain value: an enum by its member's name, a fraction and a
    dtype as text, sequences and sets as lists, a spec as `describe_spec` does.

    Raises:
        ConfigError: another type.
    """
    if isinstance(value, enum.Enum):  # before int: members of an IntEnum are ints
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, tuple | list):
        return [describe_value(each, where, table) for each in value]
    if isinstance(value, AbstractSet):
        return sorted(str(describe_value(each, where, table)) for each in value)
    if isinstance(value, Mapping):
        return {
            str(key): describe_value(each, f"{where}[{key}]", table) for key, each in value.items()
        }
    if type(value).__name__ == "dtype":  # torch's or NumPy's; neither is imported here
        return str(value).removeprefix("torch.")
    if table is not None and is_dataclass(value):
        return describe_spec(value, table, where)
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which kvferry cannot describe, so it cannot tell "
        "this KV from other KV; use a release of kvferry that knows this host's"
    )


def _known_class(spec: object, table: SpecTable, where: str) -> Mapping[str, Use]:
    name = type(spec).__name__
    uses = table.get(name)
    if uses is None or not is_dataclass(spec):
        raise ConfigError(
            f"{where} keeps its KV as a {name}, which kvferry does not know; use a release of "
            "kvferry that knows this host's, or serve this model without it"
        )
    unknown = [field.name for field in _fields(spec) if field.name not in uses]
    if unknown:
        raise ConfigError(
            f"{where} keeps its KV as a {name} with {unknown[0]}="
            f"{getattr(spec, unknown[0], None)!r}, a field that kvferry does not know and that may "
            "decide its bytes; use a release of kvferry that knows this host's, or serve this "
            "model without it"
        )
    return uses


def _fields(spec: object) -> Iterator[Field[Any]]:
    assert is_dataclass(spec), "callers looked"
    yield from fields(spec)


def _default(field: Field[Any]) -> object:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()
