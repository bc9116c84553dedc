"""Hashes all leaves of a record in one call that does not hold the interpreter's lock.

A thread that verifies 64 KiB at a time in Python keeps the lock until its switch interval ends. An
engine's thread launches hundreds of small kernels a step, gives the lock away with each, and would
wait that long to get it back. So `hash_leaves.c` loops over the leaves. It is compiled when kvferry
is installed, and calls the hash function of the xxhash package's own library.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

import xxhash

_Hash = Callable[[memoryview, int, int], bytes]

_NAMES = ("XXH3_128bits_dispatch", "XXH3_128bits")
"""The hash in the xxhash package's library; the first chooses by the processor's instructions."""

_DIGEST_BYTES = xxhash.xxh3_128().digest_size


@functools.cache
def native_leaves() -> _Hash | None:
    """Return a function of rows, bytes per row and bytes per leaf, which returns their digests.

    None where `hash_leaves.c` was not compiled, or the xxhash package exports no functions.
    """
    found = importlib.util.find_spec("xxhash._xxhash")
    try:
        hashes = ctypes.CDLL(None if found is None else found.origin)
        name = next(name for name in _NAMES if hasattr(hashes, name))
        digests = each_leaf(getattr(hashes, name))
    except (OSError, StopIteration):
        return None
    sample = memoryview(bytes(range(200)))
    parts = (sample[:60], sample[60:100], sample[100:160], sample[160:])
    expected = b"".join(map(xxhash.xxh3_128_digest, parts))
    return digests if digests(sample, 100, 60) == expected else None


def each_leaf(function: Callable[..., object]) -> _Hash:
    """Return a function as `native_leaves` does, with another C function as the hash.

    Raises:
        OSError: the library was not compiled.
    """
    library = ctypes.CDLL(str(Path(__file__).with_name("hash_leaves.so")))
    hash_leaves = library.kvferry_hash_leaves
    hash_leaves.restype = None
    hash_leaves.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 3 + [ctypes.c_void_p]
    address = ctypes.cast(function, ctypes.c_void_p)  # type: ignore[arg-type]

    def digests(rows: memoryview, row_bytes: int, leaf_bytes: int) -> bytes:
        if rows.readonly:  # `ctypes` gives no address of such a buffer
            rows = memoryview(bytearray(rows))
        data = (ctypes.c_char * len(rows)).from_buffer(rows)
        num_rows = len(rows) // row_bytes
        out = ctypes.create_string_buffer(num_rows * -(-row_bytes // leaf_bytes) * _DIGEST_BYTES)
        hash_leaves(address, data, num_rows, row_bytes, leaf_bytes, out)
        return out.raw

    return digests
