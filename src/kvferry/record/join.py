"""Joins shards: the rows of a record that ranks on several machines stored apart become the whole
record, which engines of any split read. Copies bytes; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvferry.errors import ConfigError, LayoutError
from kvferry.record.check import RecordInfo
from kvferry.record.checksum import CHECKSUM
from kvferry.record.schema import Component, RecordSchema, RowRange
from kvferry.types import ChunkKey


def joined(shards: Sequence[tuple[RecordInfo, memoryview]]) -> memoryview:
    """Return the whole record that shards make.

    Args:
        shards: header and bytes of each, verified; at least one. They may overlap.

    Raises:
        LayoutError: they are of different records, or lack rows.
    """
    whole = whole_schema([info for info, _ in shards])
    image = memoryview(bytearray(whole.record_bytes))
    table = _table(whole, image)
    for info, record in shards:
        its_table = _table(info.schema, record)
        for rows, its_rows in _runs(info):
            at, of = whole.offset_of(rows), info.schema.offset_of(its_rows)
            size = whole.num_bytes_of(rows)
            image[at : at + size] = record[of : of + size]
            # No leaf crosses a row, so its checksums hold in the whole record as well.
            table[whole.leaf_slice(rows)] = its_table[info.schema.leaf_slice(its_rows)]
    first, _ = shards[0]
    head = whole.encode_head(ChunkKey(first.of), first.first_token, bytes(table), first.mark)
    image[: whole.head_bytes] = head
    return image


def whole_schema(shards: Sequence[RecordInfo]) -> RecordSchema:
    """Return the schema of the record that shards make, given the header of each; at least one.
    Raises as `joined`."""
    try:
        whole = _common_schema(shards)
    except ConfigError as error:
        raise LayoutError(f"its shards make no record: {error}") from error
    _require_all_rows(whole, shards)
    return whole


def _table(schema: RecordSchema, record: memoryview) -> memoryview:
    return record[schema.header_bytes + CHECKSUM.num_bytes : schema.head_bytes]


def _common_schema(shards: Sequence[RecordInfo]) -> RecordSchema:
    """Return the schema of the record that these are shards of. Raises LayoutError if they are not
    of one record, or none has rows of some component, ConfigError if no record has that schema."""
    first = shards[0]
    components: dict[int, Component] = {}
    for shard in shards:
        if _frame(shard) != _frame(first):
            raise LayoutError("its shards have different sizes, positions or salts: remove them")
        for number, component in _components(shard):
            rows = shard.schema.shard[number]
            shape = (rows.num_layers, rows.num_heads, *component.shape[2:])
            whole = replace(component, shape=shape)
            if components.setdefault(number, whole) != whole:
                raise LayoutError(f"its shards have different {component.name}: remove them")
    for number in range(len(first.schema.shard)):
        if number not in components:
            raise LayoutError(f"no shard has a row of component {number}")
    return RecordSchema(
        namespace=first.schema.namespace,
        chunk_tokens=first.schema.chunk_tokens,
        components=tuple(components[number] for number in sorted(components)),
    )


def _frame(shard: RecordInfo) -> tuple[object, ...]:
    """Return what shards of one record have in common."""
    schema = shard.schema
    sizes = [(rows.num_layers, rows.num_heads) for rows in schema.shard]
    place = (shard.of, shard.first_token, shard.mark)
    return schema.namespace, schema.chunk_tokens, sizes, place


def _require_all_rows(whole: RecordSchema, shards: Sequence[RecordInfo]) -> None:
    """Raise LayoutError if a row is in no shard. So a header that lies makes no one allocate more
    than was read."""
    lacking = [bytearray(b"\1") * component.num_rows for component in whole.components]
    for shard in shards:
        for rows, _ in _runs(shard):
            lacking[rows.component][rows.start : rows.stop] = bytes(rows.stop - rows.start)
    for component, each in zip(whole.components, lacking, strict=True):
        if num_lacking := sum(each):
            layer, head = divmod(each.index(1), component.shape[1])
            raise LayoutError(
                f"{num_lacking} of {component.num_rows} rows of {component.name} are in no shard, "
                f"first layer {layer}, head {head}"
            )


def _components(shard: RecordInfo) -> Iterator[tuple[int, Component]]:
    """Yield the components of which a shard has rows, with their numbers in the whole record."""
    numbers = [number for number, rows in enumerate(shard.schema.shard) if not rows.is_empty]
    return zip(numbers, shard.schema.components, strict=True)


def _runs(shard: RecordInfo) -> Iterator[tuple[RowRange, RowRange]]:
    """Yield rows that stand together in the whole record, and where the shard has the same."""
    for index, (number, _) in enumerate(_components(shard)):
        rows = shard.schema.shard[number]
        num_layers, size = rows.shape
        for layer in range(num_layers):
            start = (rows.layers[0] + layer) * rows.num_heads + rows.heads[0]
            whole = RowRange(number, start, start + size)
            yield whole, RowRange(index, layer * size, (layer + 1) * size)
