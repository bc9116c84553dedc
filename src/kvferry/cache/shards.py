"""How the shards of a rank are named, where ranks are on several machines."""

from __future__ import annotations

from kvferry.blocks.rows import RankRecords
from kvferry.keys import ShardKeys
from kvferry.types import ShardRows


def shard_keys(records: RankRecords) -> dict[int, ShardKeys]:
    """Return how a rank's shards are named, by what `RankRecords.of` takes, -1 for chunks; without
    those of which it has no rows. Equal ones are one object."""
    made: dict[tuple[ShardRows, ...], ShardKeys] = {}
    found = {}
    for number in (*range(len(records.parts)), -1):
        own = records.of(number).own
        if own is not None:
            found[number] = made.setdefault(own.shard, ShardKeys(own.shard))
    return found
