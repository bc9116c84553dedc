"""Copies between paged KV on a device and record rows: batched over layers and blocks.

`PagedKV` (`layout.ops`) uses these copies by PyTorch's own kernels where the Triton kernels
(`layout.kernels`) do not serve. There is one copy per run of blocks and evenly spaced layers.

Rows are in the host's memory or on the device. Rows of the host cross in one transfer, as fast as
their memory allows (`layout.streams.pinned`), and the device copies between them and the blocks.

All work goes into the current stream. When `scatter` returns, rows of the host have been read; when
`gather` returns, they are complete. With rows on the device both only submit, and do not wait.
Callers have checked all block ids: a kernel never sees a bad one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from kvferry.layout.plan import BlockRun, Segment

INT_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size in bytes. Elements are copied as integers: not every float8 can be indexed."""


def upload(
    table: torch.Tensor, device: torch.device, target: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy a small table to the device, into `target` if that is given, by way of pinned memory.
    From other memory the thread would wait for everything in the stream."""
    if device.type == "cuda":
        table = table.pin_memory()
    if target is not None:
        return target.copy_(table, non_blocking=True)
    return table.to(device, non_blocking=True)


class TorchCopies:
    """Copies by PyTorch's indexing kernels, on any device. The class is a `MakeCopies`."""

    def __init__(self, parts: tuple[Segment, ...], storages: Mapping[int, torch.Tensor]) -> None:
        self._device = next(iter(storages.values())).device
        self._views = [(each, view_of(each, storages)) for each in parts]

    def scatter(
        self, rows: torch.Tensor, layer: int, runs: Sequence[BlockRun], first_token: int
    ) -> None:
        rows = rows.to(self._device)
        for run in runs:
            ids = upload(torch.tensor(run.blocks), self._device)
            for blocks, tokens in self._pairs(rows, layer, run, first_token):
                blocks.index_copy_(1, ids, tokens)

    def gather(
        self, rows: torch.Tensor, layer: int, runs: Sequence[BlockRun], first_token: int
    ) -> None:
        # Begins with the content of the rows, which tokens without a block keep.
        target = rows.to(self._device)
        for run in runs:
            ids = upload(torch.tensor(run.blocks), self._device)
            for blocks, tokens in self._pairs(target, layer, run, first_token):
                tokens.copy_(blocks.index_select(1, ids))
        if target is not rows:
            rows.copy_(target)

    def _pairs(
        self, rows: torch.Tensor, layer: int, run: BlockRun, first_token: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield views for each segment: the run's slots of all blocks, and the run's tokens in the
        rows. Both are `[layers, blocks, heads, slots, size]`."""
        tokens = rows[:, :, run.start - first_token : run.stop - first_token]
        tokens = torch.unflatten(tokens, 2, (len(run.blocks), run.num_slots)).movedim(2, 1)
        for segment, view in self._views:
            low, high = segment.layers_among(layer, rows.shape[0])
            if low >= high:
                continue
            start = segment.part.start
            kv = view[low - segment.first_layer : high - segment.first_layer]
            yield (
                kv[:, :, :, run.first_slot : run.first_slot + run.num_slots],
                tokens[low - layer : high - layer, ..., start : start + view.shape[-1]],
            )


def view_of(segment: Segment, storages: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """View a segment as `[layers, blocks, heads, slots, size]`: integers as long as an element."""
    part, storage = segment.part, storages[segment.part.storage]
    shape = (segment.num_layers, *part.shape)
    strides = (segment.layer_stride, *part.strides)
    whole = torch.empty(0, dtype=INT_OF[segment.item], device=storage.device)
    whole.set_(storage.untyped_storage(), part.offset, shape, strides)
    return whole
