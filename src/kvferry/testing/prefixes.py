"""Seeds of tokens, from which simulated hosts make KV that checks itself.

Each depends on all tokens up to its own, and on what else decides their KV. So KV that was shifted,
left out or taken from another request differs from then on.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from kvferry.types import ExtraKeys

_MASK = (1 << 63) - 1  # an int64 holds them


def extend_seeds(
    seeds: list[int], tokens: Sequence[int], weights: object, extra: ExtraKeys
) -> None:
    """Append the seeds of the tokens that have none, of a model with these `weights`."""
    if seeds:
        seed = seeds[-1]
    else:
        decides = (weights, extra.cache_salt, extra.lora, extra.embeds_digest)
        seed = zlib.crc32(repr(decides).encode()) + 1
    for place in range(len(seeds), len(tokens)):
        shown = tokens[place]
        for item in extra.items:
            if item.offset <= place < item.offset + item.length:
                shown += zlib.crc32(f"{item.digest} {place - item.offset}".encode())
        seed = (seed * 6364136223846793005 + shown * 1442695040888963407 + 1) & _MASK
        seeds.append(seed)
