"""Where an engine keeps the KV of one group: layers by pipeline stage, kv heads by tensor-parallel
rank, tokens by context-parallel rank.

    layers   stage 0 has [0, layers[0]), stage 1 the next layers[1], and so on
    heads    with fewer ranks than heads each has an equal share; with more, consecutive ranks
             replicate one head, and there are `replicas` of it
    tokens   the ranks that would hold the same head share its tokens if there is context
             parallelism: token t belongs to shard (t // interleave) % num_token_shards

Decode context parallelism spreads tokens over replicas, that is over ranks of one tensor-parallel
group; prefill context parallelism multiplies the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from kvferry.errors import TopologyError
from kvferry.topology.shards import heads_of_rank
from kvferry.types import GroupShard


class RankId(NamedTuple):
    """A rank of an engine by its coordinates."""

    tp: int = 0
    pp: int = 0
    pcp: int = 0
    """Prefill context parallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlacement:
    """How one engine spreads the KV of one group over its ranks.

    Attributes:
        num_kv_heads: distinct kv heads of the whole model; 1 for MLA.
        layers: layers of the group on each pipeline stage, in order; a stage may have none.
        tp_size: tensor-parallel size.
        dcp_size: decode context parallel size; divides `replicas_of_heads`.
        pcp_size: prefill context parallel size.
        interleave: consecutive tokens that stay on one context-parallel rank.

    Raises:
        TopologyError: sizes that cannot be mapped onto each other.
    """

    num_kv_heads: int
    layers: tuple[int, ...]
    tp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    interleave: int = 1

    def __post_init__(self) -> None:
        sizes = (self.num_kv_heads, self.tp_size, self.dcp_size, self.pcp_size, self.interleave)
        if min(sizes) < 1 or not self.layers or min(self.layers) < 0:
            raise TopologyError(f"sizes must be at least 1, layers at least 0: {self!r}")
        heads_of_rank(self.num_kv_heads, 0, self.tp_size)
        if self.replicas_of_heads % self.dcp_size:
            raise TopologyError(
                f"decode context parallel size {self.dcp_size} does not divide the "
                f"{self.replicas_of_heads} ranks that share a kv head ({self.num_kv_heads} heads "
                f"on {self.tp_size} ranks)"
            )

    @property
    def num_layers(self) -> int:
        """Layers of the group in the whole model."""
        return sum(self.layers)

    @property
    def replicates_heads(self) -> bool:
        """Whether some head is on more than one tensor-parallel rank: more ranks than heads.

        The meaning of vLLM since `TransferTopology`; its `TpKVTopology` counted equality too.
        """
        return self.tp_size > self.num_kv_heads

    @property
    def replicas_of_heads(self) -> int:
        """Tensor-parallel ranks that share one head, at least 1."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def num_token_shards(self) -> int:
        """Parts into which the tokens of a request are spread."""
        return self.dcp_size * self.pcp_size

    def ranks(self) -> Iterator[RankId]:
        """All ranks, tensor-parallel rank fastest."""
        sizes = range(len(self.layers)), range(self.pcp_size), range(self.tp_size)
        for pp, pcp, tp in product(*sizes):
            yield RankId(tp=tp, pp=pp, pcp=pcp)

    def check_rank(self, rank: RankId) -> None:
        """Raises TopologyError for a rank that this engine does not have."""
        limits = RankId(tp=self.tp_size, pp=len(self.layers), pcp=self.pcp_size)
        if any(not 0 <= index < limit for index, limit in zip(rank, limits, strict=True)):
            raise TopologyError(f"{rank} is not a rank of an engine of {limits}")

    def layers_of(self, rank: RankId) -> tuple[int, int]:
        """Layers `[start, stop)` of a rank, counted over the whole model's group."""
        bounds = (0, *accumulate(self.layers))
        return bounds[rank.pp], bounds[rank.pp + 1]

    def heads_of(self, rank: RankId) -> tuple[int, int]:
        """Heads `[start, stop)` of a rank, counted over the whole model."""
        return heads_of_rank(self.num_kv_heads, rank.tp, self.tp_size)

    def shard_of(self, rank: RankId) -> GroupShard:
        """Layers and heads of a rank as a value."""
        return GroupShard(layers=self.layers_of(rank), heads=self.heads_of(rank))

    def token_shard_of(self, rank: RankId) -> int:
        """Which of the `num_token_shards` parts of the tokens a rank holds."""
        return rank.pcp * self.dcp_size + rank.tp % self.dcp_size

    def token_shard(self, token: int) -> int:
        """The part that a token position belongs to."""
        return token // self.interleave % self.num_token_shards

    def token_index(self, token: int) -> int:
        """Where a token stands among the tokens of its part: what its rank's blocks count."""
        turn, offset = divmod(token, self.interleave)
        return turn // self.num_token_shards * self.interleave + offset

    def writes(self, rank: RankId) -> bool:
        """True for one of the ranks that hold the same layers, heads and tokens: the first."""
        return rank.tp % self.replicas_of_heads < self.dcp_size
