"""The records of recurrent states whose rows are known: a state is cut into parts of whole layers.

A part is a record as large as that of a chunk, so every store, quota and command treats it like any
other. Its components are those of a few layers, `[layers, heads, 1, content]`, so a rank reads and
writes its heads alone, as it does of chunks. What is left of the record is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.record.schema import (
    SAFETENSORS_DTYPE,
    STATE_COMPONENT,
    Component,
    RecordSchema,
    default_chunk_tokens,
)
from kvferry.types import KVGroup

_ROUNDS = 8
"""The size of a header depends on that of the zeros, by a few digits and leaves."""


class StatePart(NamedTuple):
    """One record of a state.

    Attributes:
        kind: index of the kind of layers.
        layers: which layers of that kind, `[start, stop)`.
        groups: what the record holds, in order: the kind's groups, of these layers; then zeros.
        num_states: how many of `groups` are states.
    """

    kind: int
    layers: tuple[int, int]
    groups: tuple[KVGroup, ...]
    num_states: int
    schema: RecordSchema


def state_parts(chunk: RecordSchema, kinds: Sequence[Sequence[KVGroup]]) -> tuple[StatePart, ...]:
    """Return the records of a state, in the order of their keys (`kvferry.keys.state_keys`).

    Args:
        chunk: the schema of chunks, whose size the records have.
        kinds: for each kind of layers, the groups of its states, with all layers of the model.

    Raises:
        ConfigError: one layer is larger than a record.
    """
    found = []
    for kind, groups in enumerate(kinds):
        start, num_layers = 0, groups[0].num_layers
        while start < num_layers:
            part = _longest(chunk, kind, groups, start)
            found.append(part)
            start = part.layers[1]
    return tuple(found)


def chunk_tokens_with_states(
    groups: tuple[KVGroup, ...],
    kinds: Sequence[Sequence[KVGroup]],
    block_size: int,
    multiple: int = 1,
) -> int:
    """Return the tokens of a chunk where no option sets them, for a model with states: of the
    divisors of the tokens between two states, at whose ends alone a chunk's key names a state, the
    one next to `default_chunk_tokens` whose records have room for a layer.

    Raises:
        ConfigError: there is none.
    """
    wanted = default_chunk_tokens(groups, multiple)
    usable = [
        size
        for size in range(multiple, block_size + 1, multiple)
        if block_size % size == 0 and _has_room(groups, kinds, size)
    ]
    if not usable:
        token_bytes = sum(_num_bytes(group, group.num_layers) for group in groups)
        raise ConfigError(
            f"no chunk that divides the {block_size} tokens between two states has room for the "
            f"{smallest_payload(kinds)} bytes that one layer keeps; set --block-size of "
            f"{-(-smallest_payload(kinds) // token_bytes)} or more"
        )
    return min(usable, key=lambda size: (abs(size - wanted), size))


def _has_room(
    groups: tuple[KVGroup, ...], kinds: Sequence[Sequence[KVGroup]], chunk_tokens: int
) -> bool:
    try:
        schema = RecordSchema.for_groups(
            namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups
        )
        return bool(state_parts(schema, kinds))
    except ConfigError:
        return False


def smallest_payload(kinds: Sequence[Sequence[KVGroup]]) -> int:
    """Return the bytes of the largest state of one layer: a chunk's must be more."""
    return max(sum(_num_bytes(each, 1) for each in groups) for groups in kinds)


def _longest(chunk: RecordSchema, kind: int, groups: Sequence[KVGroup], start: int) -> StatePart:
    """Return the part that begins at a layer, with as many layers as fit."""
    layer_bytes = sum(_num_bytes(each, 1) for each in groups)
    stop = min(groups[0].num_layers, start + chunk.payload_bytes // layer_bytes)
    while stop > start:
        of_part = tuple(replace(each, num_layers=stop - start) for each in groups)
        filled = _filled(chunk, of_part)
        if filled is not None:
            zeros, schema = filled
            return StatePart(kind, (start, stop), (*of_part, *zeros), len(of_part), schema)
        stop -= 1
    raise ConfigError(
        f"the state of one layer has {layer_bytes} bytes, a record of {chunk.chunk_tokens} tokens "
        f"{chunk.payload_bytes}: use a larger chunk_tokens"
    )


def _filled(
    chunk: RecordSchema, groups: tuple[KVGroup, ...]
) -> tuple[tuple[KVGroup, ...], RecordSchema] | None:
    """Return the zeros behind some groups, and the schema of a record as large as a chunk's; None
    if the groups are too large. The zeros, too, are divided by heads, so that no rank has many."""
    num_heads = max(group.num_kv_heads for group in groups)
    used = sum(_num_bytes(group, group.num_layers) for group in groups)
    left = chunk.payload_bytes - used
    for _ in range(_ROUNDS):
        if left < 0:
            return None
        zeros = tuple(
            KVGroup(
                num_layers=1, num_kv_heads=heads, content_size=size, dtype="uint8", block_size=1
            )
            for heads, size in ((num_heads, left // num_heads), (1, left % num_heads))
            if size
        )
        schema = _schema(chunk, (*groups, *zeros))
        if schema.record_bytes == chunk.record_bytes:
            return zeros, schema
        left -= schema.record_bytes - chunk.record_bytes
    return None


def _schema(chunk: RecordSchema, groups: Sequence[KVGroup]) -> RecordSchema:
    components = tuple(
        Component(
            name=f"{STATE_COMPONENT}.{index}",
            dtype=SAFETENSORS_DTYPE[group.dtype],
            shape=(group.num_layers, group.num_kv_heads, 1, group.content_size),
        )
        for index, group in enumerate(groups)
    )
    return RecordSchema(
        namespace=chunk.namespace, chunk_tokens=chunk.chunk_tokens, components=components
    )


def _num_bytes(group: KVGroup, num_layers: int) -> int:
    item = {"F32": 4, "BF16": 2, "F16": 2, "U8": 1}[SAFETENSORS_DTYPE[group.dtype]]
    return num_layers * group.num_kv_heads * group.content_size * item
