"""The compiled loop over leaves: equal to one hash a leaf, and without the interpreter's lock. It
finds every value that is not finite, and so does what runs where nothing was compiled."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys

import pytest
import torch
import xxhash

from kvferry.record import schema
from kvferry.record.leaves import FLOAT_BITS, NO_FLOATS, are_finite, native_leaves

ENOUGH_SECONDS = 120


def in_python(rows: memoryview, row_bytes: int, leaf_bytes: int) -> bytes:
    found = []
    for row in range(0, len(rows), row_bytes):
        for start in range(row, row + row_bytes, leaf_bytes):
            stop = min(start + leaf_bytes, row + row_bytes)
            found.append(xxhash.xxh3_128_digest(rows[start:stop]))
    return b"".join(found)


def test_the_library_is_there_where_a_compiler_is() -> None:
    assert (native_leaves() is not None) == (shutil.which("cc") is not None)


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize(
    ("row_bytes", "leaf_bytes"),
    [
        (1, 64),
        (63, 64),
        (64, 64),
        (65, 64),
        (200, 64),
        (192, 64),
        (262_144, 65_536),
        (70_001, 65_536),
    ],
)
def test_digests_are_those_of_each_leaf_in_order(
    num_rows: int, row_bytes: int, leaf_bytes: int
) -> None:
    native = native_leaves()
    assert native is not None
    rows = random.Random(row_bytes).randbytes(num_rows * row_bytes)
    expected = in_python(memoryview(rows), row_bytes, leaf_bytes)
    for kind in (bytes, bytearray):
        found = native(memoryview(kind(rows)), row_bytes, leaf_bytes, NO_FLOATS)
        assert found == (expected, True)


@pytest.mark.parametrize("row_bytes", [1, 65_535, 65_536, 65_537, 150_001])
def test_digests_are_the_same_where_nothing_was_compiled(
    row_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = schema.Component(name="kv.0", dtype="U8", shape=(3, 1, row_bytes, 1))
    rows = memoryview(random.Random(row_bytes).randbytes(part.num_bytes))
    for native in (native_leaves, lambda: None):
        monkeypatch.setattr(schema, "native_leaves", native)
        found = schema.leaf_digests(part, rows)
        assert found == in_python(rows, row_bytes, schema.LEAF_BYTES)


# ---- values

TORCH = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def looked_at(values: bytes, dtype: str) -> bool:
    """Whether values are finite, as both ways to look say."""
    bits = FLOAT_BITS.get(dtype, NO_FLOATS)
    native = native_leaves()
    assert native is not None
    found = native(memoryview(values), len(values), schema.LEAF_BYTES, bits).are_finite
    assert are_finite(memoryview(values), bits) == found
    return found


def test_every_kind_of_value_is_known() -> None:
    assert TORCH.keys() == FLOAT_BITS.keys()
    assert schema.ITEM_BYTES.keys() <= FLOAT_BITS.keys() | {"U8"}


@pytest.mark.parametrize("dtype", TORCH)
def test_values_are_finite_if_torch_says_so(dtype: str) -> None:
    """All values of a byte or two; of four bytes, all values of the upper half."""
    size = TORCH[dtype].itemsize
    every = torch.arange(256 ** min(size, 2), dtype=torch.int64)
    for low in (0, 1, 0xFFFF) if size == 4 else (0,):
        bits = (every << 16 | low) if size == 4 else every
        raw = b"".join(int(each).to_bytes(size, "little") for each in bits)
        expected = torch.frombuffer(bytearray(raw), dtype=TORCH[dtype]).float().isfinite()
        neighbours = bytes(size), raw[:size]
        for at in range(0, len(raw), size) if size < 4 else range(0, len(raw), 61 * size):
            values = neighbours[0] + raw[at : at + size] + neighbours[1]
            assert looked_at(values, dtype) == bool(expected[at // size]), values.hex()


@pytest.mark.parametrize("dtype", [*TORCH, "U8"])
def test_bytes_that_are_no_floats_are_always_finite(dtype: str) -> None:
    assert looked_at(b"\xff" * 24, dtype) == (dtype == "U8")


@pytest.mark.parametrize("num_values", [1, 3, 4, 7, 8, 32_769, 98_305])
def test_one_value_anywhere_is_seen(num_values: int) -> None:
    """In each place of a word, in the last bytes of a leaf, and in the last leaf."""
    values = torch.zeros(num_values, dtype=torch.float16)
    for at in {0, 1, 2, 3, num_values // 2, num_values - 2, num_values - 1}:
        if 0 <= at < num_values:
            for value in (torch.nan, torch.inf, -torch.inf):
                values[at] = value
                assert not looked_at(values.view(torch.uint8).numpy().tobytes(), "F16")
                values[at] = 65504.0
                assert looked_at(values.view(torch.uint8).numpy().tobytes(), "F16")


WAITS_IN_C = """
import ctypes, sys, threading
from kvferry.record.leaves import NO_FLOATS, each_leaf

libc = ctypes.CDLL(None)
semaphore = bytearray(64)
address = ctypes.addressof((ctypes.c_char * 64).from_buffer(semaphore))
libc.sem_init(ctypes.c_void_p(address), 0, 0)
leaves = each_leaf(libc.sem_wait)  # "hashes" a leaf when another thread says so
# No thread takes the lock from another: it must be given away.
sys.setswitchinterval(1000)
called = threading.Event()

def hash_leaf():
    called.set()
    leaves(memoryview(semaphore), 64, 64, NO_FLOATS)

thread = threading.Thread(target=hash_leaf)
thread.start()
called.wait()
libc.sem_post(ctypes.c_void_p(address))
thread.join()
print("both ran")
"""


def test_other_threads_run_while_leaves_are_hashed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WAITS_IN_C],
        capture_output=True,
        text=True,
        timeout=ENOUGH_SECONDS,
        check=False,
    )
    assert done.stdout == "both ran\n", done.stderr
