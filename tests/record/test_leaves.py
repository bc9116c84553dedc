"""The compiled loop over leaves: equal to one hash a leaf, and without the interpreter's lock."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys

import pytest
import xxhash

from kvferry.record import schema
from kvferry.record.leaves import native_leaves

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
    digests = native_leaves()
    assert digests is not None
    rows = random.Random(row_bytes).randbytes(num_rows * row_bytes)
    expected = in_python(memoryview(rows), row_bytes, leaf_bytes)
    assert digests(memoryview(rows), row_bytes, leaf_bytes) == expected
    assert digests(memoryview(bytearray(rows)), row_bytes, leaf_bytes) == expected


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


WAITS_IN_C = """
import ctypes, sys, threading
from kvferry.record.leaves import each_leaf

libc = ctypes.CDLL(None)
semaphore = bytearray(64)
address = ctypes.addressof((ctypes.c_char * 64).from_buffer(semaphore))
libc.sem_init(ctypes.c_void_p(address), 0, 0)
digests = each_leaf(libc.sem_wait)  # "hashes" a leaf when another thread says so
# No thread takes the lock from another: it must be given away.
sys.setswitchinterval(1000)
called = threading.Event()

def hash_leaf():
    called.set()
    digests(memoryview(semaphore), 64, 64)

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
