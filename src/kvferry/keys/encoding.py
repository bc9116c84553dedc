"""Encodes a value as bytes that are the same in every process, platform and Python.

Chunk keys, namespaces and digests of weights hash such bytes. JSON text cannot carry identity: `1`,
`1.0` and `true` blur, the order of keys is free, and floats print in many ways. Here each value is
a type byte, a length and a body. So no two different values share an encoding, and none is a prefix
of another. `docs/format.md` has the table.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

from kvferry.errors import ConfigError

JsonValue = None | bool | int | float | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]

MAX_DEPTH = 64
"""Deeper values are refused, to bound the recursion; no model config comes near."""

_QUIET_NAN = bytes.fromhex("000000000000f87f")


def canonical(value: JsonValue) -> bytes:
    """Encode `value`. Equal encodings mean equal values of equal types.

    Raises:
        ConfigError: a value of another type (the path to it is named), or deeper than `MAX_DEPTH`.
    """
    parts: list[bytes] = []
    _append(parts, value, "", 0)
    return b"".join(parts)


def _append(parts: list[bytes], value: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ConfigError(f"value at {path!r} is nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        _append_map(parts, value, path, depth)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        parts.append(b"L" + len(value).to_bytes(8, "little"))
        for index, item in enumerate(value):
            _append(parts, item, f"{path}[{index}]", depth + 1)
    else:
        tag, body = _scalar(value, path)
        parts.append(tag + len(body).to_bytes(8, "little") + body)


def _append_map(parts: list[bytes], value: Mapping[object, object], path: str, depth: int) -> None:
    keyed = []
    for key, item in value.items():
        # Fields such as `id2label` have integer keys once a library has parsed them. Refusing is
        # better than guessing whether 1 or "1" was meant.
        if not isinstance(key, str):
            raise ConfigError(f"key {key!r} at {path or 'the top'!r} must be a str to be hashed")
        keyed.append((key.encode("utf-8", "surrogatepass"), key, item))
    keyed.sort(key=lambda entry: entry[0])
    parts.append(b"M" + len(keyed).to_bytes(8, "little"))
    for encoded, key, item in keyed:
        parts.append(b"S" + len(encoded).to_bytes(8, "little") + encoded)
        _append(parts, item, f"{path}.{key}" if path else key, depth + 1)


def _scalar(value: object, path: str) -> tuple[bytes, bytes]:
    if value is None:
        return b"N", b""
    if isinstance(value, bool):  # before int: True is an int to Python
        return b"B", bytes([value])
    if isinstance(value, int):
        num_bytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
        return b"I", value.to_bytes(num_bytes, "little", signed=True)
    if isinstance(value, float):
        return b"F", _QUIET_NAN if math.isnan(value) else struct.pack("<d", value)
    if isinstance(value, str):
        return b"S", value.encode("utf-8", "surrogatepass")
    raise ConfigError(
        f"value at {path or 'the top'!r} is a {type(value).__name__}; identity is made of None, "
        "bool, int, float, str, lists and mappings: convert it first"
    )
