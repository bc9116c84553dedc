"""Hashes all leaves of a record in one call that does not hold the interpreter's lock, and says
whether their values are finite.

A thread that verifies 64 KiB at a time in Python keeps the lock until its switch interval ends. An
engine's thread launches hundreds of small kernels a step, gives the lock away with each, and would
wait that long to get it back. So `hash_leaves.c` loops over the leaves. It is compiled when kvferry
is installed, and calls the C function that `kvferry.record.checksum` names.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvferry.record.checksum import CHECKSUM


class Leaves(NamedTuple):
    """What was found out about the leaves of some rows."""

    digests: bytes
    """A checksum for each leaf, in order."""
    are_finite: bool
    """False if a value is NaN or infinite. True if values were not looked at."""


def joined(parts: Sequence[Leaves]) -> Leaves:
    """Return the leaves of several parts as those of one."""
    digests = b"".join([each.digests for each in parts])
    return Leaves(digests, all(each.are_finite for each in parts))


class FloatBits(NamedTuple):
    """How to tell values of one kind that are not finite: all bits of the exponent are set. In
    float8_e4m3fn, which has no infinity, those of the mantissa are set, too.
    """

    exponent: int
    num_bytes: int

    @property
    def words(self) -> tuple[int, int]:
        """A word of eight bytes full of such exponents, and one full of their lowest bits. Added to
        what a word has of the first, the second carries only if all bits of an exponent are set."""
        return self._word(self.exponent), self._word(self.exponent & -self.exponent)

    def _word(self, bits: int) -> int:
        repeated = bits.to_bytes(self.num_bytes, "little") * (8 // self.num_bytes)
        return int.from_bytes(repeated, "little")


NO_FLOATS = FloatBits(0, 1)
"""Of integers, and of bytes whose meaning is not known: every value counts as finite."""

FLOAT_BITS = {
    "F32": FloatBits(0x7F80_0000, 4),
    "BF16": FloatBits(0x7F80, 2),
    "F16": FloatBits(0x7C00, 2),
    "F8_E4M3": FloatBits(0x7F, 1),
    "F8_E5M2": FloatBits(0x7C, 1),
}
"""By dtype. The float8 dtypes whose names end in "fnuz" have only 0x80 as NaN; no record has them
under a name."""

_Hash = Callable[[memoryview, int, int, FloatBits], Leaves]


def are_finite(values: memoryview, bits: FloatBits) -> bool:
    """Whether all values are finite, where nothing was compiled."""
    import numpy as np  # loaded only here, as most never come here

    if not bits.exponent:
        return True
    numbers = np.frombuffer(values, f"<u{bits.num_bytes}")
    return not bool((numbers & bits.exponent == bits.exponent).any())


@functools.cache
def native_leaves() -> _Hash | None:
    """Return a function of rows, bytes per row, bytes per leaf, and how values are looked at.

    None where `hash_leaves.c` was not compiled, or no library exports the checksum.
    """
    found = importlib.util.find_spec(CHECKSUM.library)
    try:
        hashes = ctypes.CDLL(None if found is None else found.origin)
        name = next(name for name in CHECKSUM.symbols if hasattr(hashes, name))
        leaves = each_leaf(getattr(hashes, name))
    except (OSError, StopIteration):
        return None
    sample = memoryview(bytes(range(200)))
    parts = (sample[:60], sample[60:100], sample[100:160], sample[160:])
    expected = b"".join(map(CHECKSUM.of, parts))
    return leaves if leaves(sample, 100, 60, NO_FLOATS).digests == expected else None


def each_leaf(function: Callable[..., object]) -> _Hash:
    """Return a function as `native_leaves` does, with another C function as the hash.

    Raises:
        OSError: the library was not compiled, or from another version of `hash_leaves.c`.
    """
    library = ctypes.CDLL(str(Path(__file__).with_name("hash_leaves.so")))
    if not hasattr(library, "kvferry_leaves"):
        raise OSError("hash_leaves.so is of another version")
    in_c = library.kvferry_leaves
    in_c.restype = ctypes.c_int
    in_c.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 3
    in_c.argtypes = [*in_c.argtypes, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]

    def leaves(rows: memoryview, row_bytes: int, leaf_bytes: int, bits: FloatBits) -> Leaves:
        if rows.readonly:  # `ctypes` gives no address of such a buffer
            rows = memoryview(bytearray(rows))
        data = (ctypes.c_char * len(rows)).from_buffer(rows)
        num_rows = len(rows) // row_bytes
        num_leaves = num_rows * -(-row_bytes // leaf_bytes)
        out = ctypes.create_string_buffer(num_leaves * CHECKSUM.num_bytes)
        is_finite = in_c(address, data, num_rows, row_bytes, leaf_bytes, *bits.words, out)
        return Leaves(out.raw, bool(is_finite))

    return leaves
