"""The checksum of records: all that another checksum would change. Golden files hold it.

Another one needs another `kvferry.types.FORMAT_VERSION`, which records and namespaces share: then
no reader takes records of one for records of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import xxhash


class Checksum(NamedTuple):
    """A hash function, as each place that computes it finds it."""

    name: str
    """As the header of a record has it."""
    num_bytes: int
    """Size of a digest."""
    of: Callable[[bytes | bytearray | memoryview], bytes]
    """The digest of bytes, on the host."""
    library: str
    """The extension module whose library exports it to C."""
    symbols: tuple[str, ...]
    """Its names there; the first that the library has is called. It takes an address and a size,
    and returns two words, the low one first, which `hash_leaves.c` stores high word first."""
    kernel: str | None
    """Its name in `kvferry.layout.kernels`; None: devices do not compute it."""


CHECKSUM = Checksum(
    name="xxh3_128",
    num_bytes=16,
    of=xxhash.xxh3_128_digest,  # canonical: big endian
    library="xxhash._xxhash",
    # The first chooses by the processor's instructions.
    symbols=("XXH3_128bits_dispatch", "XXH3_128bits"),
    kernel="xxh3_128",
)
