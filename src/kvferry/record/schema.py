"""The layout of a record, which is one stored chunk: a safetensors file with a fixed layout.

    0        8              8 + n  + 16     + 16 * num_leaves = head_bytes, a multiple of 4096
    | n: u64 | JSON header  | root | leaves | component 0 | component 1 | ...

A leaf is up to 64 KiB of the payload; the leaf table has the digest of each. `root` is a digest of
header and leaf table. Root and leaf table are tensors like the components, so any safetensors
reader opens the file. Sizes, offsets, headers and digests only: no I/O, no tensors.
`docs/format.md` is the normative text; the golden files in `tests/record` hold this code to it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvferry.errors import ConfigError, ContractError
from kvferry.record.checksum import CHECKSUM
from kvferry.record.leaves import (
    FLOAT_BITS,
    NO_FLOATS,
    FloatBits,
    Leaves,
    are_finite,
    native_leaves,
)
from kvferry.record.shards import check_shard, rows_of_shard, shard_text
from kvferry.types import FORMAT_VERSION, ChunkKey, GroupShard, KVGroup, ShardRows

FORMAT_NAME = "kvferry"
LEAF_BYTES = 64 * 1024
ALIGN = 4096
"""The payload begins at a multiple of this: enough for O_DIRECT on every common file system."""

MAX_HEADER_BYTES = 64 * 1024
"""Size of the longest JSON header that is made or read, without its length prefix. It bounds what
parsing an untrusted header can allocate."""

MAX_LEAVES = 1 << 22
"""A leaf table of 64 MiB; a record that claims more is hostile."""

MAX_PAYLOAD_BYTES = 1 << 40
"""Size of the largest component. This bound and `MAX_LEAVES` keep numbers small; nothing is ever
allocated because a header claims it."""

MARK_BYTES = 16
MARKED_VERSION = 2
"""Version of a record with a mark. Its header has the mark in the place of two fields that are the
same in every record, and so is no longer; all else is as in version 1."""

SHARD_VERSION = 3
"""Version of a record that has a shard's rows alone. Its header says of which record, and which
rows these are; all else is as in the other versions, with a mark or without."""

_FIXED = f',"leaf_bytes":"{LEAF_BYTES}","checksum":"{CHECKSUM.name}"'.encode()
_MARK = b',"mark":"%s"'
_MARKED = b'"version":"%d"' % MARKED_VERSION

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
SAFETENSORS_DTYPE = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}

_VALUES = SAFETENSORS_DTYPE | {"float8_e5m2": "F8_E5M2"}
"""Dtypes that bytes may be, too."""

OPAQUE_COMPONENT = "row"

STATE_COMPONENT = "state"
"""The component of a record that holds a part of a state, as bytes; the first part of the names of
those that hold it by layers and heads (`kvferry.record.state_parts`)."""

CHUNK_BYTES = 8 << 20
"""Most KV of a chunk whose size is not set: above it, records are read and written no faster."""

_FEWEST_TOKENS, _MOST_TOKENS = 16, 128

_NAME = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_DRAFT = re.compile(r"draft\.([0-9a-f]{32})\.\d+")
_RESERVED = frozenset({"root", "leaves"})


def default_chunk_tokens(groups: tuple[KVGroup, ...], multiple: int = 1) -> int:
    """Return the tokens of a chunk where no option sets them: the largest power of two from 16 to
    128 with at most `CHUNK_BYTES` of KV, rounded up to a multiple of `multiple`.

    All that share a store must return the same, so this depends on the geometry of the whole model,
    and on nothing of a rank, an engine or a machine.
    """
    one = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=1, groups=groups)
    tokens = _MOST_TOKENS
    while tokens > _FEWEST_TOKENS and tokens * one.payload_bytes > CHUNK_BYTES:
        tokens //= 2
    return -(-tokens // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One named tensor of a record, `[layers, kv heads, tokens, content]` in C order.

    A *row* is one head of one layer: `tokens * content` contiguous elements.

    Attributes:
        values: dtype of the values that the bytes are, for this process alone: no record says it.
            Empty: `dtype`.

    Raises:
        ConfigError: a name, dtype or shape that no record can have.
    """

    name: str
    dtype: str
    shape: tuple[int, int, int, int]
    values: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name in _RESERVED:
            raise ConfigError(
                f"component name {self.name!r} must be 1 to 64 of a-z, 0-9, _ and ., start with a "
                f"letter, and be none of {', '.join(sorted(_RESERVED))}"
            )
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"component {self.name!r} has dtype {self.dtype!r}; a record holds one of "
                f"{', '.join(ITEM_BYTES)}"
            )
        if min(self.shape) < 1:
            raise ConfigError(f"component {self.name!r} has an empty shape {self.shape}")
        if max(self.shape) > MAX_PAYLOAD_BYTES or self.num_bytes > MAX_PAYLOAD_BYTES:
            raise ConfigError(
                f"component {self.name!r} would have more than {MAX_PAYLOAD_BYTES} bytes"
            )

    @property
    def num_rows(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def row_bytes(self) -> int:
        return self.shape[2] * self.shape[3] * ITEM_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    @property
    def leaves_per_row(self) -> int:
        return -(-self.row_bytes // LEAF_BYTES)

    @property
    def float_bits(self) -> FloatBits:
        """How to tell values that are not finite."""
        return FLOAT_BITS.get(self.values or self.dtype, NO_FLOATS)


class RowRange(NamedTuple):
    """Rows of one component: runs of `stop - start`, the first at `start`, one each `stride`."""

    component: int
    start: int
    stop: int
    num_runs: int = 1
    stride: int = 0


class RecordSchema:
    """All sizes and offsets of the records of one namespace, computed once. `components` are in
    file order. Raises ConfigError for sizes or components that no record can have.

    Args:
        shard: of records that have a shard's rows alone: the rows of each component of the whole
            record, also of those that have none here. Empty: the records are whole.
    """

    def __init__(
        self,
        *,
        namespace: bytes,
        chunk_tokens: int,
        components: tuple[Component, ...],
        shard: tuple[ShardRows, ...] = (),
    ) -> None:
        if len(namespace) != 32:
            raise ConfigError(f"a namespace digest has 32 bytes, not {len(namespace)}")
        if not 1 <= chunk_tokens < 2**32:
            raise ConfigError(f"chunk_tokens must be from 1 to 2**32 - 1, not {chunk_tokens}")
        if not components or len({component.name for component in components}) < len(components):
            raise ConfigError("a record needs at least one component, each under its own name")
        self.namespace = namespace
        self.chunk_tokens = chunk_tokens
        self.components = components
        self.shard = shard
        if shard:
            check_shard(shard, [(each.name, each.shape[:2]) for each in components])
        first_leaf, offsets = [], []
        self.num_leaves = self.payload_bytes = 0
        for component in components:
            first_leaf.append(self.num_leaves)
            offsets.append(self.payload_bytes)
            self.num_leaves += component.num_rows * component.leaves_per_row
            self.payload_bytes += component.num_bytes
        self.first_leaf = tuple(first_leaf)
        if self.num_leaves > MAX_LEAVES:
            raise ConfigError(
                f"a record of {self.num_leaves} leaves is above the bound of {MAX_LEAVES}: "
                "use smaller chunks"
            )
        self._header_parts = self._split_header()
        table_bytes = CHECKSUM.num_bytes * (1 + self.num_leaves)  # the root is one more digest
        # The head has room for the longest header of this schema, so that all its records have one
        # size. Then it is padded so that the payload is aligned.
        num_keys = 2 if shard else 1
        longest = sum(map(len, self._header_parts)) + len(str(2**63 - 1))
        longest += num_keys * len(bytes(32).hex())
        self.head_bytes = math.ceil((8 + longest + table_bytes) / ALIGN) * ALIGN
        self.header_bytes = self.head_bytes - table_bytes
        if self.header_bytes - 8 > MAX_HEADER_BYTES:
            raise ConfigError(
                f"{len(components)} components need a header of {self.header_bytes - 8} bytes, "
                f"above the bound of {MAX_HEADER_BYTES}"
            )
        self.component_offsets = tuple(self.head_bytes + offset for offset in offsets)
        self.record_bytes = self.head_bytes + self.payload_bytes

    @classmethod
    def for_groups(
        cls, *, namespace: bytes, chunk_tokens: int, groups: tuple[KVGroup, ...]
    ) -> RecordSchema:
        """Make the schema of a model's KV, with component `kv.<i>` for group i."""
        components = []
        for index, group in enumerate(groups):
            if group.dtype not in SAFETENSORS_DTYPE:
                raise ConfigError(
                    f"KV dtype {group.dtype!r} cannot be stored; "
                    f"use one of {', '.join(SAFETENSORS_DTYPE)}"
                )
            dtype = SAFETENSORS_DTYPE[group.dtype]
            num_tokens = min(chunk_tokens, group.tail or chunk_tokens)
            num_rows = -(-num_tokens // group.row_tokens)
            shape = (group.num_layers, group.num_kv_heads, num_rows, group.content_size)
            values = _VALUES.get(group.values, "")
            components.append(
                Component(name=f"kv.{index}", dtype=dtype, shape=shape, values=values)
            )
        return cls(namespace=namespace, chunk_tokens=chunk_tokens, components=tuple(components))

    @classmethod
    def for_rows(
        cls, *, namespace: bytes, chunk_tokens: int, row_bytes: int, values: str = ""
    ) -> RecordSchema:
        """Make the schema of opaque records: one component of bytes that only a host can read.
        `values` is the dtype of all that they are, as `KVGroup` names it; empty if not known."""
        row = Component(
            name=OPAQUE_COMPONENT,
            dtype="U8",
            shape=(1, 1, 1, row_bytes),
            values=_VALUES.get(values, ""),
        )
        return cls(namespace=namespace, chunk_tokens=chunk_tokens, components=(row,))

    def of_state_parts(self) -> RecordSchema:
        """Make the schema of the parts of states in this namespace: records of the same size as
        those of chunks, with one component of bytes.

        Raises:
            ConfigError: no payload makes a record of that size.
        """
        num_bytes = self.record_bytes - ALIGN
        while num_bytes > 0:
            part = Component(name=STATE_COMPONENT, dtype="U8", shape=(1, 1, 1, num_bytes))
            schema = RecordSchema(
                namespace=self.namespace, chunk_tokens=self.chunk_tokens, components=(part,)
            )
            if schema.record_bytes == self.record_bytes:
                return schema
            if schema.record_bytes < self.record_bytes:
                break
            num_bytes -= schema.record_bytes - self.record_bytes
        raise ConfigError(
            f"no part of a state takes {self.record_bytes} bytes, as a chunk does: use another "
            "chunk_tokens"
        )

    @property
    def is_of_state(self) -> bool:
        """Whether records of this schema are parts of a state."""
        return self.components[0].name.partition(".")[0] == STATE_COMPONENT

    @property
    def drafter(self) -> bytes:
        """Digest of the drafter whose KV records of this schema have (`kvferry.record.drafts`);
        empty if they have none."""
        found = _DRAFT.fullmatch(self.components[0].name)
        return b"" if found is None or not self.shard else bytes.fromhex(found[1])

    def with_namespace(self, namespace: bytes) -> RecordSchema:
        """Make the same schema for another namespace; all sizes and offsets stay."""
        return RecordSchema(
            namespace=namespace,
            chunk_tokens=self.chunk_tokens,
            components=self.components,
            shard=self.shard,
        )

    def of_shard(self, held: Sequence[GroupShard]) -> RecordSchema | None:
        """Make the schema of records that have some layers and heads alone, by component of this
        one. If these are all, that is this schema; None if they are none."""
        rows = [
            rows_of_shard(each.layers, component.shape[0], each.heads, component.shape[1])
            for each, component in zip(held, self.components, strict=True)
        ]
        if all(each.is_whole for each in rows):
            return self
        components = tuple(
            replace(component, shape=(*each.shape, *component.shape[2:]))
            for component, each in zip(self.components, rows, strict=True)
            if not each.is_empty
        )
        if not components:
            return None
        return RecordSchema(
            namespace=self.namespace,
            chunk_tokens=self.chunk_tokens,
            components=components,
            shard=tuple(rows),
        )

    def _split_header(self) -> tuple[bytes, ...]:
        """Split the JSON header around its variable values: key, first token and, of a shard, the
        key of the whole record. It is encoded once per schema, because every check of a record
        needs it."""
        metadata = {
            "format": FORMAT_NAME,
            "version": str(SHARD_VERSION if self.shard else FORMAT_VERSION),
            "key": "<",
            "namespace": self.namespace.hex(),
            "first_token": "<",
            "chunk_tokens": str(self.chunk_tokens),
            "leaf_bytes": str(LEAF_BYTES),
            "checksum": CHECKSUM.name,
        }
        if self.shard:
            metadata |= {"of": "<", "shard": shard_text(self.shard)}
        tensors: dict[str, object] = {"__metadata__": metadata}
        end = 0

        def place(name: str, dtype: str, shape: list[int], num_bytes: int) -> None:
            nonlocal end
            start, end = end, end + num_bytes
            tensors[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

        place("root", "U8", [CHECKSUM.num_bytes], CHECKSUM.num_bytes)
        table_bytes = CHECKSUM.num_bytes * self.num_leaves
        place("leaves", "U8", [self.num_leaves, CHECKSUM.num_bytes], table_bytes)
        for component in self.components:
            place(component.name, component.dtype, list(component.shape), component.num_bytes)
        # No name or value in the header can hold the mark "<".
        return tuple(json.dumps(tensors, separators=(",", ":")).encode().split(b"<"))

    def encode_header(
        self, key: ChunkKey, first_token: int, mark: bytes = b"", of: bytes = b""
    ) -> bytes:
        """Return length prefix and padded JSON header, `header_bytes` long.

        There is one encoding per set of arguments, so a reader that knows the schema compares
        headers byte for byte instead of parsing them.

        Args:
            mark: `kvferry.keys.salt_mark` of the record's salt; empty if it has none.
            of: of a shard, the key of the whole record; else empty.

        Raises:
            ContractError: a key that is not 32 bytes, a position outside 0 to 2**63 - 1, or a mark
                of another size.
        """
        if len(of) != (32 if self.shard else 0):
            raise ContractError(f"{len(of)} bytes are no key of the record that this is a shard of")
        if len(mark) not in (0, MARK_BYTES):
            raise ContractError(f"a mark has {MARK_BYTES} bytes, not {len(mark)}")
        if len(key) != 32 or not 0 <= first_token < 2**63:
            raise ContractError(
                f"a record needs a key of 32 bytes and a position from 0 to 2**63 - 1, "
                f"not {len(key)} bytes and {first_token}"
            )
        before, between, after, *last = self._header_parts
        position = str(first_token).encode()
        text = b"".join((before, key.hex().encode(), between, position, after))
        if last:
            text = b"".join((text, of.hex().encode(), *last))
        if mark:
            # No value before them can hold these texts: keys and digests are hexadecimal.
            text = text.replace(b'"version":"%d"' % FORMAT_VERSION, _MARKED, 1)
            text = text.replace(_FIXED, _MARK % mark.hex().encode(), 1)
        size = self.header_bytes - 8
        return size.to_bytes(8, "little") + text.ljust(size, b" ")

    def encode_head(
        self,
        key: ChunkKey,
        first_token: int,
        leaf_table: bytes,
        mark: bytes = b"",
        of: bytes = b"",
    ) -> bytes:
        """Return everything before the payload, `head_bytes` long.

        Raises:
            ContractError: a leaf table that is not `16 * num_leaves` bytes; or as `encode_header`.
        """
        if len(leaf_table) != CHECKSUM.num_bytes * self.num_leaves:
            raise ContractError(
                f"leaf table has {len(leaf_table)} bytes, "
                f"the schema needs {CHECKSUM.num_bytes * self.num_leaves}"
            )
        header = self.encode_header(key, first_token, mark, of)
        return header + CHECKSUM.of(header + leaf_table) + leaf_table

    def offset_of(self, rows: RowRange) -> int:
        """Return the file offset of the first byte of `rows`."""
        component = self.components[rows.component]
        return self.component_offsets[rows.component] + rows.start * component.row_bytes

    def num_bytes_of(self, rows: RowRange) -> int:
        """Return the size of `rows` in bytes."""
        num_rows = (rows.stop - rows.start) * rows.num_runs
        return num_rows * self.components[rows.component].row_bytes

    def runs_of(self, rows: RowRange) -> list[tuple[RowRange, int, int]]:
        """Return each run, and where it starts and stops in a buffer that holds only `rows`."""
        component, start, stop, num_runs, stride = rows
        firsts = range(start, start + num_runs * stride, stride) if stride else (start,)
        num_rows, size = stop - start, (stop - start) * self.components[component].row_bytes
        return [
            (RowRange(component, first, first + num_rows), at * size, (at + 1) * size)
            for at, first in enumerate(firsts)
        ]

    def leaf_slice(self, rows: RowRange) -> slice:
        """Return where the digests of `rows`, one run, stand in the leaf table, in bytes."""
        per_row = self.components[rows.component].leaves_per_row * CHECKSUM.num_bytes
        base = self.first_leaf[rows.component] * CHECKSUM.num_bytes
        return slice(base + rows.start * per_row, base + rows.stop * per_row)


def leaf_spans(component: Component, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each leaf in a buffer that holds `num_rows` rows of `component`. No
    leaf crosses a row, so any range of rows can be verified alone."""
    return _spans(num_rows, component.row_bytes)


def _spans(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    for row in range(0, num_rows * row_bytes, row_bytes):
        for start in range(row, row + row_bytes, LEAF_BYTES):
            yield start, min(start + LEAF_BYTES, row + row_bytes)


def leaf_digests(component: Component, payload: memoryview) -> bytes:
    """Return the part of the leaf table for `payload`, a whole number of rows of `component`.

    Raises:
        ContractError: `payload` ends inside a row: its last bytes would go unverified.
    """
    return _leaves(component, payload, component.row_bytes, NO_FLOATS).digests


def leaves_of(component: Component, payload: memoryview) -> Leaves:
    """Return the same with whether all values are finite: for what is about to be stored, and for
    checks of what is. Raises as `leaf_digests`."""
    return _leaves(component, payload, component.row_bytes, component.float_bits)


def one_leaf(component: Component, leaf: memoryview) -> Leaves:
    """Return the same of a single leaf of `component`."""
    return _leaves(component, leaf, len(leaf), component.float_bits)


def _leaves(component: Component, payload: memoryview, row_bytes: int, bits: FloatBits) -> Leaves:
    num_rows, rest = divmod(len(payload), row_bytes)
    if rest:
        raise ContractError(
            f"{len(payload)} bytes are no whole number of rows of {row_bytes} bytes "
            f"of component {component.name!r}"
        )
    native = native_leaves()
    if native is not None and num_rows:
        return native(payload, row_bytes, LEAF_BYTES, bits)
    leaves = [payload[start:stop] for start, stop in _spans(num_rows, row_bytes)]
    digests = b"".join([CHECKSUM.of(leaf) for leaf in leaves])
    return Leaves(digests, all(are_finite(leaf, bits) for leaf in leaves))
