"""What each rank of `versioned_host` holds, and how ranks of several pipeline stages start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from .versioned_kv import HEADS, LAYERS, LayerKV, layer_names

MEETING_SECONDS = 20.0


@dataclass
class RankKV:
    """The KV of one rank: heads, and layers by their number in the model."""

    heads: range
    layers: dict[int, LayerKV]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {layer_names()[number]: kv.tensor for number, kv in self.layers.items()}


def ranks_of(num_stages: int, tp_size: int, make_layer: Callable[[int], LayerKV]) -> list[RankKV]:
    """Return what each rank holds, given what makes a layer of so many heads."""
    heads = HEADS // tp_size
    return [
        RankKV(
            range(rank * heads, (rank + 1) * heads),
            {number: make_layer(heads) for number in layers_of_stage(stage, num_stages)},
        )
        for stage in range(num_stages)
        for rank in range(tp_size)
    ]


def layers_of_stage(stage: int, num_stages: int) -> range:
    return range(stage * LAYERS // num_stages, (stage + 1) * LAYERS // num_stages)


def start_ranks(
    connector_class: type[Any], num_stages: int, starts: Sequence[Callable[[], Any]]
) -> list[Any]:
    """Call what constructs the worker of each rank, all at a time, as processes of their own would.
    Return the workers; raise what the first one raised that did."""
    tp_size = len(starts) // num_stages
    said = [b""] * len(starts)
    meetings = [threading.Barrier(num_stages) for _ in range(tp_size)]
    here = threading.local()

    def exchange(mine: bytes) -> list[bytes]:
        said[here.rank] = mine
        meetings[here.rank % tp_size].wait(MEETING_SECONDS)
        return said[here.rank % tp_size :: tp_size]

    def start(rank: int) -> Any:
        here.rank = rank
        return starts[rank]()

    if num_stages == 1:
        return [each() for each in starts]
    if connector_class.host.exchange is not None:
        connector_class.host = replace(connector_class.host, exchange=exchange)
    with ThreadPoolExecutor(len(starts)) as threads:
        return [each.result() for each in [threads.submit(start, i) for i in range(len(starts))]]
