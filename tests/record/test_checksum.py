"""Everything that knows the checksum of records reads one object."""

from __future__ import annotations

import subprocess
import sys

ANOTHER = """
from hashlib import blake2b
from kvferry.record import checksum

checksum.CHECKSUM = checksum.Checksum(
    name="blake2b_20", num_bytes=20, of=lambda data: blake2b(data, digest_size=20).digest(),
    library="no_such_library", symbols=("blake2b",), kernel=None,
)

from kvferry.record.check import ReadFault, check_record
from kvferry.record.leaves import native_leaves
from kvferry.record.schema import LEAF_BYTES, Component, RecordSchema, leaf_digests

assert native_leaves() is None
part = Component(name="kv.0", dtype="U8", shape=(2, 1, LEAF_BYTES + 5, 1))
schema = RecordSchema(namespace=bytes(32), chunk_tokens=LEAF_BYTES + 5, components=(part,))
payload = memoryview(bytes(part.num_bytes))
table = leaf_digests(part, payload)
assert len(table) == 4 * 20 == 20 * schema.num_leaves
record = bytearray(schema.encode_head(bytes(32), 0, table) + payload)
assert b'"checksum":"blake2b_20"' in record[:1024]

def check():
    return check_record(schema, bytes(32), memoryview(record), len(record))

assert check() is None
for at in (schema.header_bytes, schema.head_bytes - 1, len(record) - 1):
    record[at] ^= 1
    assert check() is ReadFault.BAD_CHECKSUM
    record[at] ^= 1
print("right")
"""


def test_another_checksum_is_another_object() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "right\n", done.stderr
