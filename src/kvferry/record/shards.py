"""Which rows of a record a shard has, as the header of its own record says it.

A shard is what one rank holds: some layers and heads. Ranks whose memory no process can join write
records of their rows alone. The record of a shard is one like any other, with fewer layers and
heads, and without the components of which it has no rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvferry.errors import ConfigError
from kvferry.types import ShardRows

_ROWS = re.compile(r"(\d{1,9})-(\d{1,9})/(\d{1,9}),(\d{1,9})-(\d{1,9})/(\d{1,9})")


def rows_of_shard(
    layers: tuple[int, int], num_layers: int, heads: tuple[int, int], num_heads: int
) -> ShardRows:
    """Return some rows of a component; without rows, one value whatever the ranges say."""
    rows = ShardRows(layers, num_layers, heads, num_heads)
    return ShardRows((0, 0), num_layers, (0, 0), num_heads) if rows.is_empty else rows


def check_shard(
    shard: Sequence[ShardRows], components: Sequence[tuple[str, tuple[int, ...]]]
) -> None:
    """Raise ConfigError unless records of a shard have these components.

    Args:
        components: name and `[layers, heads]` of each.
    """
    wanted = []
    for number, rows in enumerate(shard):
        is_within = all(
            0 <= start < stop <= size
            for (start, stop), size in (
                (rows.layers, rows.num_layers),
                (rows.heads, rows.num_heads),
            )
        )
        is_none = (rows.layers, rows.heads) == ((0, 0), (0, 0)) and min(rows[1], rows[3]) > 0
        if not (is_within or is_none):
            raise ConfigError(f"a shard cannot have the rows {shard_text([rows])}")
        if is_within:
            wanted.append((str(number), rows.shape))
    found = [(name.rpartition(".")[2], shape) for name, shape in components]
    if found != wanted or all(rows.is_whole for rows in shard):
        raise ConfigError(f"a shard of {shard_text(shard)} has other components than {components}")


def shard_text(shard: Sequence[ShardRows]) -> str:
    """Write the rows of a shard: for each component `layers/of all,heads/of all`, half-open."""
    return " ".join(
        f"{layers[0]}-{layers[1]}/{num_layers},{heads[0]}-{heads[1]}/{num_heads}"
        for layers, num_layers, heads, num_heads in shard
    )


def parse_shard(text: str) -> tuple[ShardRows, ...]:
    """Read what `shard_text` wrote. Raises ConfigError for another text."""
    found = []
    for each in text.split(" "):
        said = _ROWS.fullmatch(each)
        if said is None:
            raise ConfigError(f"{each[:80]!r} names no rows of a shard")
        start, stop, num_layers, first, last, num_heads = map(int, said.groups())
        found.append(ShardRows((start, stop), num_layers, (first, last), num_heads))
    return tuple(found)
