"""Who reads what from whom, when the KV of one engine moves to an engine of another shape."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import lcm
from typing import NamedTuple

from kvferry.errors import TopologyError
from kvferry.topology.placement import KVPlacement, RankId


class TokenRuns(NamedTuple):
    """Token positions that repeat: each `[start, stop)` of `runs`, plus any multiple of `period`.

    All tokens are `TokenRuns(1, ((0, 1),))`.
    """

    period: int
    runs: tuple[tuple[int, int], ...]

    def clip(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The runs of positions in `[start, stop)`, in order; adjacent ones are joined."""
        begin = end = start
        for base in range(start - start % self.period, stop, self.period):
            for low, high in self.runs:
                first, last = max(base + low, start), min(base + high, stop)
                if first >= last:
                    continue
                if first > end:
                    if begin < end:
                        yield begin, end
                    begin = first
                end = last
        if begin < end:
            yield begin, end


class RemoteRead(NamedTuple):
    """A box of KV to read from one remote rank: layers x heads x tokens."""

    rank: RankId
    """The remote rank."""
    layers: tuple[int, int]
    """`[start, stop)` of the model's layers of the group."""
    heads: tuple[int, int]
    """`[start, stop)` of the model's kv heads."""
    tokens: TokenRuns
    """Positions in the request."""
    remote_layer: int
    """Index of the first layer in the remote rank's tensors."""
    remote_head: int
    """Index of the first head in the remote rank's tensors."""
    local_layer: int
    """Index of the first layer in the reader's tensors."""
    local_head: int
    """Index of the first head in the reader's tensors."""


def read_plan(local: KVPlacement, rank: RankId, remote: KVPlacement) -> tuple[RemoteRead, ...]:
    """What a rank reads to have all it holds: each layer, head and token exactly once.

    Of remote ranks that hold the same, readers that differ take different ones where they can.

    Args:
        local: the reader's engine.
        rank: the reader.
        remote: the engine that has the KV.

    Raises:
        TopologyError: `rank` is not in `local`, or the two are not of one model.
    """
    local.check_rank(rank)
    for what in ("num_kv_heads", "num_layers"):
        ours, theirs = getattr(local, what), getattr(remote, what)
        if ours != theirs:
            raise TopologyError(
                f"{what} is {ours} here and {theirs} there: the engines serve different models"
            )
    return tuple(
        RemoteRead(
            rank=source,
            layers=layers,
            heads=heads,
            tokens=tokens,
            remote_layer=layers[0] - remote.layers_of(source)[0],
            remote_head=heads[0] - remote.heads_of(source)[0],
            local_layer=layers[0] - local.layers_of(rank)[0],
            local_head=heads[0] - local.heads_of(rank)[0],
        )
        for pp, layers in _stages(local.layers_of(rank), remote)
        for shard, tokens in _token_shards(local, rank, remote)
        for source, heads in _holders(local, rank, remote, pp, shard)
    )


def readers(local: KVPlacement, remote: KVPlacement, rank: RankId) -> tuple[RankId, ...]:
    """The local ranks that read from a remote rank, none if others serve all that it holds.

    A producer that keeps blocks until they were read waits for exactly these.

    Raises:
        TopologyError: `rank` is not in `remote`, or the two are not of one model.
    """
    remote.check_rank(rank)
    return tuple(
        reader
        for reader in local.ranks()
        if any(read.rank == rank for read in read_plan(local, reader, remote))
    )


def _stages(layers: tuple[int, int], remote: KVPlacement) -> Iterator[tuple[int, tuple[int, int]]]:
    """Remote pipeline stages with the part of `layers` that each has."""
    for pp in range(len(remote.layers)):
        start, stop = remote.layers_of(RankId(pp=pp))
        start, stop = max(start, layers[0]), min(stop, layers[1])
        if start < stop:
            yield pp, (start, stop)


def _token_shards(
    local: KVPlacement, rank: RankId, remote: KVPlacement
) -> Iterator[tuple[int, TokenRuns]]:
    """Remote parts of the tokens with those of their positions that the reader holds."""
    if local.num_token_shards == remote.num_token_shards == 1:
        yield 0, TokenRuns(1, ((0, 1),))
        return
    mine = local.token_shard_of(rank)
    period = lcm(
        local.num_token_shards * local.interleave, remote.num_token_shards * remote.interleave
    )
    runs: dict[int, list[tuple[int, int]]] = {}
    owners = ((local.token_shard(t) == mine, remote.token_shard(t)) for t in range(period))
    position = 0
    for (is_mine, shard), tokens in groupby(owners):
        start, position = position, position + sum(1 for _ in tokens)
        if is_mine:
            runs.setdefault(shard, []).append((start, position))
    for shard in sorted(runs):
        yield shard, TokenRuns(period, tuple(runs[shard]))


def _holders(
    local: KVPlacement, rank: RankId, remote: KVPlacement, pp: int, shard: int
) -> Iterator[tuple[RankId, tuple[int, int]]]:
    """Remote ranks of a stage and a part of the tokens, with the heads to read from each."""
    pcp, dcp = divmod(shard, remote.dcp_size)
    # Where this reader's share begins among the remote ranks: readers of replicas start apart.
    preferred = rank.tp * remote.tp_size // local.tp_size
    start, stop = local.heads_of(rank)
    for tp, heads in groupby(
        range(start, stop), lambda head: _holder(remote, head, dcp, preferred)
    ):
        taken = tuple(heads)
        yield RankId(tp=tp, pp=pp, pcp=pcp), (taken[0], taken[-1] + 1)


def _holder(remote: KVPlacement, head: int, dcp: int, preferred: int) -> int:
    """The tensor-parallel rank to read a head from: the first from `preferred` on, or the first."""
    first = head * remote.tp_size // remote.num_kv_heads
    if not remote.replicates_heads:
        return first
    candidates = range(first + dcp, first + remote.replicas_of_heads, remote.dcp_size)
    return next((tp for tp in candidates if tp >= preferred), candidates[0])
