"""vLLM's `TpKVTopology` under its own name, with the conventions of its 0.14 release.

Replication there means that the tensor-parallel size is *at least* the number of kv heads; later
releases, and `KVPlacement`, mean more than that. Target ranks are all that hold wanted heads, also
where several hold the same. Where vLLM asserts, a `TopologyError` names the two sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import TopologyError

EngineId = str


class AttentionBackend(Protocol):
    """The part of a host's attention backend class that says what its KV tensors look like."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Shape of one layer's KV tensor."""


@dataclass
class TpKVTopology:
    """How the tensor-parallel ranks of a local engine and of remote ones map onto each other.

    Attributes:
        tp_rank: of this worker.
        remote_tp_size: tensor-parallel size by engine, this one included. Engines may be added
            later.
        is_mla: the model has multi-head latent attention: one latent, the same on each rank.
        total_num_kv_heads: of the model, over all ranks.
        attn_backend: the attention backend's class.
        engine_id: of this engine.
        remote_block_size: tokens per block by engine, this one included.
    """

    tp_rank: int
    remote_tp_size: dict[EngineId, int]
    is_mla: bool
    total_num_kv_heads: int
    attn_backend: type[AttentionBackend]
    engine_id: EngineId
    remote_block_size: dict[EngineId, int]

    def __post_init__(self) -> None:
        if self.total_num_kv_heads < 1:
            raise TopologyError(
                f"total_num_kv_heads is {self.total_num_kv_heads}: a model has at least 1, with "
                "MLA exactly 1"
            )
        # One block, so that 1 in front is the block axis and 2 is the axis of K and V.
        shape = self.attn_backend.get_kv_cache_shape(
            num_blocks=1, block_size=16, num_kv_heads=1, head_size=1
        )
        self._is_kv_layout_blocks_first = len(shape) == 5 and shape[0] == 1

    @property
    def is_kv_layout_blocks_first(self) -> bool:
        """True for `[num_blocks, 2, ...]`, False for `[2, num_blocks, ...]` and for MLA."""
        return self._is_kv_layout_blocks_first

    @property
    def split_k_and_v(self) -> bool:
        """Whether K and V are two memory regions per layer."""
        return not (self.is_mla or self.is_kv_layout_blocks_first)

    @property
    def tp_size(self) -> int:
        return _of_engine(self.remote_tp_size, self.engine_id, "tensor-parallel size")

    @property
    def block_size(self) -> int:
        return _of_engine(self.remote_block_size, self.engine_id, "block size")

    def tp_ratio(self, remote_tp_size: int) -> int:
        """Local ranks per remote rank; negative, the number of remote ranks per local rank, where
        the remote engine has more.

        Raises:
            TopologyError: neither size is a multiple of the other.
        """
        local = self.tp_size
        _require_positive(remote_tp_size, "remote tensor-parallel size")
        if local >= remote_tp_size and local % remote_tp_size == 0:
            return local // remote_tp_size
        if local < remote_tp_size and remote_tp_size % local == 0:
            return -(remote_tp_size // local)
        raise TopologyError(
            f"tensor-parallel sizes {local} (local) and {remote_tp_size} (remote) do not divide: "
            "choose sizes of which one is a multiple of the other"
        )

    def block_size_ratio(self, remote_block_size: int) -> int:
        """Remote blocks per local block.

        Raises:
            TopologyError: the local block size is no multiple of the remote one.
        """
        local = self.block_size
        _require_positive(remote_block_size, "remote block size")
        if local % remote_block_size:
            raise TopologyError(
                f"local block size {local} is not a multiple of the remote block size "
                f"{remote_block_size}: choose one that is, or equal ones"
            )
        return local // remote_block_size

    def tp_ratio_from_engine_id(self, remote_engine_id: EngineId) -> int:
        """`tp_ratio` to an engine of `remote_tp_size`."""
        return self.tp_ratio(self._tp_size_of(remote_engine_id))

    def block_size_ratio_from_engine_id(self, remote_engine_id: EngineId) -> int:
        """`block_size_ratio` to an engine of `remote_block_size`."""
        size = _of_engine(self.remote_block_size, remote_engine_id, "block size")
        return self.block_size_ratio(size)

    def is_kv_replicated(self, engine_id: EngineId) -> bool:
        """Whether an engine has at least as many ranks as there are kv heads.

        True also where they are equal and nothing is stored twice: the meaning of vLLM 0.14.
        """
        return self._tp_size_of(engine_id) // self.total_num_kv_heads >= 1

    def replicates_kv_cache(self, remote_engine_id: EngineId) -> bool:
        """`is_kv_replicated`, or MLA, whose latent every rank holds in full."""
        return self.is_mla or self.is_kv_replicated(remote_engine_id)

    def get_target_remote_ranks(self, remote_tp_size: int) -> list[int]:
        """The remote ranks that hold what this rank holds, replicas of one head included.

        Raises:
            TopologyError: sizes that do not divide, or a `tp_rank` outside this engine.
        """
        ratio = self.tp_ratio(remote_tp_size)
        if not 0 <= self.tp_rank < self.tp_size:
            raise TopologyError(
                f"tp_rank is {self.tp_rank}, engine {self.engine_id!r} has {self.tp_size} ranks"
            )
        if ratio > 0:
            return [self.tp_rank // ratio]
        return [self.tp_rank * -ratio + i for i in range(-ratio)]

    def get_target_remote_ranks_from_engine_id(self, remote_engine_id: EngineId) -> list[int]:
        """`get_target_remote_ranks` of an engine of `remote_tp_size`."""
        return self.get_target_remote_ranks(self._tp_size_of(remote_engine_id))

    def _tp_size_of(self, engine_id: EngineId) -> int:
        return _of_engine(self.remote_tp_size, engine_id, "tensor-parallel size")


def _of_engine(sizes: Mapping[EngineId, int], engine_id: EngineId, what: str) -> int:
    if engine_id not in sizes:
        known = ", ".join(map(repr, sizes)) or "none"
        raise TopologyError(f"no {what} of engine {engine_id!r} is known (known: {known})")
    _require_positive(sizes[engine_id], f"{what} of engine {engine_id!r}")
    return sizes[engine_id]


def _require_positive(size: int, what: str) -> None:
    if size < 1:
        raise TopologyError(f"{what} is {size}: it must be at least 1")
