"""Records as others see them: an operator, or a writer that is not the kvferry under test."""

from __future__ import annotations

import math
import random
import struct

from kvferry.record.check import ReadFault, check_record, mark_of, parse_head
from kvferry.record.schema import leaves_of
from kvferry.store.recordio import seal_record
from kvferry.types import ChunkKey

_NAN = struct.pack("<f", math.nan)


def with_nan(key: ChunkKey, value: bytes, rng: random.Random) -> bytes | None:
    """A record of the same chunk that has one NaN, sealed as releases did that stored NaN. None:
    the value is no sound record with this key."""
    info, size = parse_head(memoryview(value), len(value)), len(value)
    if isinstance(info, ReadFault) or check_record(info.schema, key, memoryview(value), size):
        return None
    schema, image = info.schema, memoryview(bytearray(value))
    at = rng.randrange(schema.head_bytes, len(image), len(_NAN))
    image[at : at + len(_NAN)] = _NAN
    table, start = b"", schema.head_bytes
    for component in schema.components:
        table += leaves_of(component, image[start : start + component.num_bytes]).digests
        start += component.num_bytes
    seal_record(schema, info.key, info.first_token, table, image, info.mark)
    return bytes(image)


def has_mark(value: bytes, mark: bytes) -> bool:
    """Whether a value names this mark, of a salt in a namespace, as a record's head does."""
    return mark_of(value) == mark
