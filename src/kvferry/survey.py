"""Which namespaces a store has, what they hold, and how they differ: for all commands alike."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from kvferry.errors import Fault, FaultKind, StoreError
from kvferry.keys import HOST_FIELDS, JsonValue, ModelIdentity, Namespace
from kvferry.record.check import RecordInfo
from kvferry.record.schema import RecordSchema
from kvferry.store import maintenance
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry
from kvferry.types import ChunkKey, KVGroup

UNREADABLE = "(unreadable)"
"""Shown instead of a model's name if its namespace has no readable description."""

DESCRIBE_SECONDS = 10.0
"""Time for reading descriptions of namespaces."""

Differences = dict[str, tuple[JsonValue, JsonValue]]
"""The two values of each field that differs, by dotted path; None for a missing field."""

_OF_BLOCKS = frozenset({"chunk_tokens", "states.state_parts"})

_NO_COUNTS: Mapping[bytes, tuple[int, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Holding:
    """What a store holds of a namespace.

    Attributes:
        digest: of the namespace; empty for records whose namespace the store does not know yet.
        is_described: whether the store has a description, sound or not.
        namespace: what the description says; None without a sound one of this digest.
        fault: why it is not known whether there is a description, and what it says: it could not be
            read, or there was no time.
    """

    digest: bytes
    num_records: int
    num_bytes: int
    is_described: bool
    namespace: Namespace | None = None
    fault: Fault | None = None

    @property
    def title(self) -> str | None:
        """The model's name, or `UNREADABLE`; None without a description."""
        if self.namespace is None:
            return UNREADABLE if self.is_described else None
        return self.namespace.title

    @property
    def tenant(self) -> str:
        tenant = None if self.namespace is None else self.namespace.description.get("tenant")
        return tenant if isinstance(tenant, str) else ""

    @property
    def dtype(self) -> str | None:
        """Of the model as it ran; None without a description that says so."""
        config = None if self.namespace is None else self.namespace.description.get("config")
        dtype = config.get("dtype") if isinstance(config, Mapping) else None
        return dtype if isinstance(dtype, str) else None

    def row(self) -> dict[str, JsonValue]:
        """Return a row of a table of namespaces."""
        return {
            "namespace": self.digest.hex() or None,
            "model": self.title,
            "dtype": self.dtype,
            "num_records": self.num_records,
            "num_bytes": self.num_bytes,
        }


def survey(
    store: Store,
    digests: Iterable[bytes],
    counts: Mapping[bytes, tuple[int, int]] = _NO_COUNTS,
    *,
    seconds: float = DESCRIBE_SECONDS,
) -> list[Holding]:
    """Return what a store holds of these namespaces, the largest first. Each is returned once.

    Args:
        counts: the numbers of records and of bytes by namespace, as `Store.namespaces` has them.
        seconds: time for reading descriptions; those of later namespaces are not known.
    """
    until = time.monotonic() + seconds
    found = []
    for digest in sorted(dict.fromkeys(digests), key=lambda each: -counts.get(each, (0, 0))[1]):
        text = fault = None
        if digest and time.monotonic() >= until:
            fault = Fault(FaultKind.LATE, f"not read within {seconds:g} s")
        elif digest:
            try:
                text = store.catalogue().description(digest)
            except StoreError as error:
                fault = error.fault
        namespace = None if text is None else Namespace.from_text(digest, text)
        count = counts.get(digest, (0, 0))
        found.append(Holding(digest, *count, text is not None, namespace, fault))
    return found


def unread(holdings: Iterable[Holding]) -> Fault | None:
    """Say how many descriptions are not known, and why the first is not; None if all are."""
    faults = [each.fault for each in holdings if each.fault is not None]
    if not faults:
        return None
    kind, text = faults[0]
    return Fault(kind, f"{len(faults)} descriptions of namespaces are not known: {text}")


def chunk_tokens_of(namespace: Namespace) -> int | None:
    """Return the tokens of a chunk; None if the namespace's keys do not follow from tokens."""
    if namespace.is_opaque:
        return None
    size = namespace.description.get("chunk_tokens")
    return size if isinstance(size, int) and 1 <= size < 1 << 32 else None


def shards_of(
    store: Store,
    listing: Iterable[Entry],
    keys: Collection[tuple[bytes, ChunkKey]],
    spaces: Iterable[Namespace],
) -> Iterator[tuple[Entry, RecordInfo]]:
    """Yield the shards of some records, and what drafters stored beside them. Their headers name
    the record, from whose key alone theirs do not follow: of all that a store lists and that is
    smaller than a whole record, the headers are read. Where no namespace can have shards, nothing
    is listed.

    Args:
        keys: namespaces and keys of the whole records, in `spaces`.
    """
    whole = {space.digest: _record_bytes(space) for space in spaces}
    if not any(whole.values()):
        return
    for entry in listing:
        if entry.stored_bytes < whole.get(entry.namespace, 0):
            info = maintenance.inspect(store, entry)
            if isinstance(info, RecordInfo) and (entry.namespace, info.of) in keys:
                yield entry, info


def _record_bytes(space: Namespace) -> float:
    """Size of a chunk's record in a namespace of KV groups; 0 in another, which has no shards.
    Infinite if this release does not know groups of that description."""
    described: Any = space.description.get("groups")
    size = chunk_tokens_of(space)
    if described is None or size is None:
        return 0
    try:
        groups = tuple(KVGroup(**group, block_size=1) for group in described)
        schema = RecordSchema.for_groups(namespace=space.digest, chunk_tokens=size, groups=groups)
    except (TypeError, ValueError, ArithmeticError):  # a later release wrote it, or an enemy
        return math.inf
    return schema.record_bytes


def differences(there: JsonValue, here: JsonValue) -> Differences:
    """Return the fields that differ between two descriptions, by dotted path. Not recursive, so a
    deeply nested description costs no stack."""
    found: Differences = {}
    open_pairs: list[tuple[str, JsonValue, JsonValue]] = [("", there, here)]
    while open_pairs:
        path, left, right = open_pairs.pop()
        if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
            left, right = dict(_numbered(left)), dict(_numbered(right))
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            names = sorted({*left, *right}, reverse=True)
            prefix = f"{path}." if path else ""
            open_pairs += [(f"{prefix}{name}", left.get(name), right.get(name)) for name in names]
        elif left != right:
            found[path] = (left, right)
    return found


def _numbered(values: Sequence[JsonValue]) -> Iterator[tuple[str, JsonValue]]:
    return ((str(number), value) for number, value in enumerate(values))


def differences_of_model(namespace: Namespace, identity: ModelIdentity) -> Differences:
    """Return how a namespace differs from a model directory, in what a directory decides: the
    weights and the config."""
    there = {name: namespace.description.get(name) for name in ("weights", "config")}
    known = [each.hex() for each in (identity.weights, *identity.other_weights)]
    weights = there["weights"] if there["weights"] in known else known[0]
    return differences(there, {"weights": weights, "config": identity.config})


def has_states_in_blocks(space: Namespace) -> bool:
    """Whether chunks divide the blocks of an engine, since it keeps recurrent states there
    (docs/vllm.md, "Recurrent states")."""
    return "states" in space.description


def are_of_blocks(space: Namespace, differs: Iterable[str]) -> bool:
    """Whether the fields, by dotted path, follow from the size of such blocks alone."""
    return has_states_in_blocks(space) and {*differs} <= _OF_BLOCKS


def of_hosts(differs: Iterable[str]) -> list[str]:
    """Return those of the fields, by dotted path, that no option sets: kernels of a host decide."""
    return [name for name in differs if HOST_FIELDS & {*name.split(".")[1:2]}]
