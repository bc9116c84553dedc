"""The ranks of one engine, as one of them sees them: who it is, and how it adds up with the others.

Process groups are made directly and handed around, not through torch's process-wide default group:
an application may have one of its own, and a process may hold several engines.
"""

# ruff: noqa: ANN401 - torch's stubs know these classes by halves.

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvferry.errors import RankError

RANK_TIMEOUT_SECONDS = 60.0
"""How long one rank waits for another that should be at the same place: a sum, an answer."""


class RankGroup:
    """One rank's end of a tensor-parallel group.

    Runs in: every rank, on the model runner's thread.

    Attributes:
        rank: in `[0, size)`.
        size: number of ranks.
    """

    def __init__(self, rank: int, size: int, process_group: Any) -> None:
        self.rank = rank
        self.size = size
        self._process_group = process_group

    @classmethod
    def connect(
        cls,
        rank: int,
        size: int,
        rendezvous: Path,
        device: torch.device,
        *,
        timeout_seconds: float = RANK_TIMEOUT_SECONDS,
    ) -> RankGroup:
        """Meet the other ranks, all of which call this with the same `rendezvous`.

        Args:
            rank: in `[0, size)`.
            size: number of ranks.
            rendezvous: a file that does not exist yet, in a directory of our own.
            device: where tensors live: NCCL on CUDA, gloo elsewhere.
            timeout_seconds: for this and for every sum.

        Raises:
            RankError: the others did not come.
        """
        timeout = timedelta(seconds=timeout_seconds)
        distributed: Any = dist
        try:
            store = distributed.FileStore(str(rendezvous), size)
            store.set_timeout(timeout)
            group = (_nccl if device.type == "cuda" else _gloo)(store, rank, size, timeout)
        except RuntimeError as error:
            raise RankError(f"rank {rank} of {size} cannot reach the others: {error}") from error
        return cls(rank, size, group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, equal to the bit on all of them; added up in float32. May write
        into `tensor`.

        Raises:
            RankError: another rank is gone, or did not come in time.
        """
        total = tensor.float().contiguous()
        try:
            self._process_group.allreduce([total]).wait()
        except RuntimeError as error:
            raise RankError(f"rank {self.rank} of {self.size} lost another: {error}") from error
        return total.to(tensor.dtype)


def device_of_rank(device: str, rank: int) -> str:
    """On "cuda" each rank has the device of its number; others are shared."""
    return f"cuda:{rank}" if device == "cuda" else device


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()  # torch has no public name for it
    options._timeout = timeout
    # All ranks are on this machine; its name need not resolve.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    return nccl(store, rank, size, options)
