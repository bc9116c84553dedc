"""Open a stored record with nothing but safetensors, and print what is in it.

    python examples/open_a_record.py /var/cache/kvferry/records/0a/0a1b....safetensors

The payload is `[layer, kv head, token, K|V content]`: the first half of the last axis is K, the
second half V.
"""

from __future__ import annotations

import sys

import numpy as np
from safetensors import safe_open


def main(path: str) -> None:
    with safe_open(path, framework="numpy") as record:
        metadata = record.metadata()
        print(f"record format {metadata['version']}, key {metadata['key'][:16]}...")
        first = int(metadata["first_token"])
        print(f"tokens {first} to {first + int(metadata['chunk_tokens']) - 1} of a prompt")
        for name in record.keys():  # noqa: SIM118 - a handle, not a mapping
            if name in ("root", "leaves"):
                continue
            part = record.get_slice(name)
            layers, heads, tokens, content = part.get_shape()
            print(f"{name}: {part.get_dtype()} [{layers}, {heads}, {tokens}, {content}]")
            if part.get_dtype() == "BF16":
                print("  numpy has no bfloat16; open it with framework='torch' to see values")
                continue
            for layer in range(min(layers, 4)):
                keys, values = np.split(part[layer].astype(np.float32), 2, axis=-1)
                print(f"  layer {layer}: rms of K {_rms(keys):.3f}, of V {_rms(values):.3f}")


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
