"""Make a chunk's key and a stored record by docs/format.md alone, without kvferry.

python examples/a_record_by_hand.py record.safetensors
"""

import json
import struct
import sys
from pathlib import Path

from blake3 import blake3
from xxhash import xxh3_128_digest

# Key of the first chunk [5, 6, 7] under a namespace and a salt.
namespace = bytes(range(32))
extra = b"M" + struct.pack("<Q", 1)
extra += b"S" + struct.pack("<Q", 4) + b"salt"
extra += b"S" + struct.pack("<Q", 1) + b"a"
first = blake3(b"kvferry.chunk.1\0" + namespace + struct.pack("<I3I", 3, 5, 6, 7) + extra).digest()
assert first.hex() == "b9b8eab5c1d13a6af29a98e11d27fe1f73670dc63840aad3d1e8f216698a430f"
second = blake3(b"kvferry.chunk.1\0" + first + struct.pack("<I3I", 3, 8, 9, 10) + extra).digest()
assert second.hex() == "36dbc644af2f9b5f1b10993ced34d9f12acde224c68e9a78404e6fc16b9aa113"

# A record: 1 layer, 1 head, 3 tokens, content of 2 elements.
payload = bytes.fromhex("0726456483a2c1e0ff1e3d5c7b9ab9d8f71635547392b1d0")
leaves = xxh3_128_digest(payload)
header = {
    "__metadata__": {
        "format": "kvferry",
        "version": "1",
        "key": bytes(range(100, 132)).hex(),
        "namespace": namespace.hex(),
        "first_token": "0",
        "chunk_tokens": "3",
        "leaf_bytes": "65536",
        "checksum": "xxh3_128",
    },
    "root": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
    "leaves": {"dtype": "U8", "shape": [1, 16], "data_offsets": [16, 32]},
    "kv.0": {"dtype": "F32", "shape": [1, 1, 3, 2], "data_offsets": [32, 56]},
}
text = json.dumps(header, separators=(",", ":")).encode()
size = 4096 - 16 * 2 - 8
prefix = struct.pack("<Q", size) + text.ljust(size)
root = xxh3_128_digest(prefix + leaves)
assert root.hex() == "39cf92b76c8fd124903ee23365bd0839"
record = prefix + root + leaves + payload

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    Path(sys.argv[1]).write_bytes(record)
