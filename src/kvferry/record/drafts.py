"""The record of a drafter's KV beside that of a chunk: what draft layers (EAGLE, MTP, a draft
model) computed of its tokens.

It has the form of a shard (`kvferry.record.shards`), of the components of the model, of which it
has no rows, and those of the drafter behind them. So its header says to which chunk it belongs, and
whatever erases or lists a chunk finds it as it finds shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvferry.record.schema import ALIGN, RecordSchema
from kvferry.record.shards import rows_of_shard
from kvferry.types import KVGroup, RankShard, ShardRows


def draft_schema(
    chunk: RecordSchema, drafter: bytes, groups: tuple[KVGroup, ...], shard: RankShard
) -> RecordSchema | None:
    """Make the schema of the records beside those of `chunk`.

    Args:
        drafter: digest of the drafter, of 16 bytes.
        groups: those of the drafter.
        shard: what a rank holds of them.

    Returns:
        None if the rank holds nothing of them, or if such records might be no smaller than the
        chunk's, by which commands know that they are none.
    """
    alone = RecordSchema.for_groups(
        namespace=chunk.namespace, chunk_tokens=chunk.chunk_tokens, groups=groups
    )
    none = [
        rows_of_shard((0, 0), each.shape[0], (0, 0), each.shape[1]) for each in chunk.components
    ]

    def with_rows(held: Sequence[ShardRows]) -> RecordSchema:
        return RecordSchema(
            namespace=chunk.namespace,
            chunk_tokens=chunk.chunk_tokens,
            components=tuple(
                replace(
                    each,
                    name=f"draft.{drafter.hex()}.{number}",
                    shape=(*rows.shape, *each.shape[2:]),
                )
                for number, (each, rows) in enumerate(
                    zip(alone.components, held, strict=True), len(none)
                )
                if not rows.is_empty
            ),
            shard=(*none, *held),
        )

    held = [
        rows_of_shard(of.layers, each.shape[0], of.heads, each.shape[1])
        for of, each in zip(shard.groups, alone.components, strict=True)
    ]
    if all(rows.is_empty for rows in held):
        return None
    every = [((0, each.shape[0]), (0, each.shape[1])) for each in alone.components]
    largest = with_rows(
        [rows_of_shard(layers, layers[1], heads, heads[1]) for layers, heads in every]
    )
    # Ranges of a rank may be written in a few more digits. All ranks must decide alike.
    is_smaller = largest.record_bytes + ALIGN < chunk.record_bytes
    return with_rows(held) if is_smaller else None
