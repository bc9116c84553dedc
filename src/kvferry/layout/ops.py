"""Copies tokens between paged KV tensors and canonical record rows, as `layout.plan` splits them.

Runs in: worker. The host names the layout of its tensors, which is checked, never guessed. On a CPU
numpy makes the copies, here; on a device, `layout.device` or `layout.kernels`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from kvferry.errors import LayoutError
from kvferry.layout.device import INT_OF, TorchCopies, view_of
from kvferry.layout.plan import BlockRun, Segment, block_runs, check_block_ids, segments
from kvferry.layout.spec import ContentPart, Strided, layer_parts
from kvferry.types import GroupShard, KVGroup

Array = np.ndarray[Any, Any]

_MAX_SPAN = 1 << 30  # the largest element that numpy can have is just below twice that


class Copies(Protocol):
    """Copies between the blocks of one cache and rows; `PagedKV` has checked the arguments. Classes
    that can hash on the device have `digests_later`, too."""

    def scatter(self, rows: Any, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        """See `PagedKV.scatter`."""

    def gather(self, rows: Any, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        """See `PagedKV.gather`."""


MakeCopies = Callable[[tuple[Segment, ...], Mapping[int, torch.Tensor]], Copies]
"""Makes `Copies` from the parts of a cache and their memory: tensors of bytes by address."""


def device_copies(parts: tuple[Segment, ...], storages: Mapping[int, torch.Tensor]) -> Copies:
    """Make the fastest copies that this device can run. A `MakeCopies`."""
    on_cuda = next(iter(storages.values())).is_cuda
    if on_cuda and importlib.util.find_spec("triton") is not None:
        from kvferry.layout.kernels import TritonCopies

        if TritonCopies.serves(parts):
            return TritonCopies(parts, storages)
    return TorchCopies(parts, storages)


class PagedKV:
    """The paged KV of one group on one rank. It reads and writes every block: callers refuse the
    null block of their host.

    Args:
        tensors, group, shard, layout: see `kvferry.layout.spec.layer_parts`, which checks them.
        copies: makes the `Copies`; None for the fastest on the tensors' device.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        group: KVGroup,
        shard: GroupShard,
        layout: str,
        *,
        copies: MakeCopies | None = None,
    ) -> None:
        layers = layer_parts([strided(tensor) for tensor in tensors], group, shard, layout)
        self._bind(tensors, layers, tensors[0].element_size(), group.content_size, copies)

    @classmethod
    def of_parts(
        cls,
        tensors: Sequence[torch.Tensor],
        layers: Sequence[tuple[ContentPart, ...]],
        item_bytes: int,
        content_size: int,
        *,
        copies: MakeCopies | None = None,
    ) -> PagedKV:
        """Make one of parts that the caller describes.

        Args:
            tensors: the memory, one for each layer, of any dtype.
            layers: the content parts of each layer, in elements of `item_bytes`.
        """
        paged = cls.__new__(cls)
        paged._bind(tensors, layers, item_bytes, content_size, copies)
        return paged

    def _bind(
        self,
        tensors: Sequence[torch.Tensor],
        layers: Sequence[tuple[ContentPart, ...]],
        item_bytes: int,
        content_size: int,
        copies: MakeCopies | None,
    ) -> None:
        devices = {tensor.device for tensor in tensors}
        if len(devices) > 1:
            raise LayoutError(f"KV tensors on {len(devices)} devices: {sorted(map(str, devices))}")
        self.num_blocks, self.num_heads, self.block_size, _ = layers[0][0].shape
        self.num_layers = len(layers)
        self.content_size = content_size
        self.device = tensors[0].device
        self.item_bytes = item_bytes
        parts = segments(layers, self.item_bytes)
        storages = {
            memory.data_ptr(): torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory)
            for memory in (tensor.untyped_storage() for tensor in tensors)
        }
        make = copies or (NumpyCopies if self.device.type == "cpu" else device_copies)
        self._copies = make(parts, storages)
        self._is_numpy = make is NumpyCopies
        self._digests_later = getattr(self._copies, "digests_later", None)

    def check_blocks(self, block_ids: Sequence[int]) -> None:
        """Raise LayoutError for an id that is not a block of this cache."""
        check_block_ids(block_ids, self.num_blocks)

    def runs(self, block_ids: Sequence[int], start: int, stop: int) -> list[BlockRun]:
        """See `block_runs`. Raises LayoutError also for an id that is not a block of this cache."""
        self.check_blocks(block_ids)
        return block_runs(block_ids, start, stop, self.block_size)

    def as_rows(self, buffer: memoryview | torch.Tensor, shape: tuple[int, int, int, int]) -> Any:
        """View `buffer` as record rows `[layers, heads, tokens, content]`, in the form that this
        cache copies: a numpy array or a tensor. `buffer` is writable memory in C order, exactly as
        long as `shape` says, or a tensor of integers that has the shape already."""
        if isinstance(buffer, torch.Tensor):
            return buffer.numpy() if self._is_numpy else buffer
        if self._is_numpy:
            return np.frombuffer(buffer, dtype=f"i{self.item_bytes}").reshape(shape)
        return torch.frombuffer(buffer, dtype=INT_OF[self.item_bytes]).view(shape)

    def scatter(self, rows: Any, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        """Copy record rows into blocks.

        Args:
            rows: from `as_rows`, with all heads.
            layer: first layer of `rows`, counted within this rank's shard.
            runs: from `runs` of this object, or of one with no more blocks: that checks the ids.
            first_token: token position of index 0 of the token axis of `rows`.

        Raises:
            LayoutError: the rows do not fit this cache or the runs; nothing was written.
        """
        self._check(rows, layer, runs, first_token)
        self._copies.scatter(rows, layer, runs, first_token)

    def gather(self, rows: Any, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        """Copy blocks into record rows; arguments and errors as `scatter`."""
        self._check(rows, layer, runs, first_token)
        self._copies.gather(rows, layer, runs, first_token)

    def digests_later(
        self, rows: Any, leaf_bytes: int, kernel: str | None, exponent: int, lowest: int
    ) -> Callable[[], tuple[bytes, bool]] | None:
        """Have the device compute checksums of rows (from `as_rows`, on the device), after the work
        in the current stream. Each row has leaves of `leaf_bytes`; the last may be shorter.

        Args:
            kernel: names the checksum; None: the device has none.
            exponent: a word of eight bytes with the bits that are all set only in values that are
                not finite; 0: no value is looked at.
            lowest: the same with the lowest of these bits alone.

        Returns:
            A function to call once the stream has done this. It returns the checksum of each leaf,
            in the order of the rows; and whether all values are finite. None: the caller must hash.
        """
        if self._digests_later is None or kernel is None:
            return None
        later: Callable[[], tuple[bytes, bool]] | None
        later = self._digests_later(rows, leaf_bytes, kernel, exponent, lowest)
        return later

    def _check(self, rows: Any, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        num_layers, num_heads, num_tokens, content = rows.shape
        if not (rows.is_contiguous() if torch.is_tensor(rows) else rows.flags.c_contiguous):
            raise LayoutError("rows are not contiguous: copy whole pieces of a record")
        if content != self.content_size or rows.itemsize != self.item_bytes:
            raise LayoutError(
                f"rows have {content} elements of {rows.itemsize} bytes per token and head, the "
                f"cache {self.content_size} of {self.item_bytes}"
            )
        if not 0 <= layer <= layer + num_layers <= self.num_layers:
            raise LayoutError(
                f"layers {layer} to {layer + num_layers} of a shard of {self.num_layers}"
            )
        if num_heads != self.num_heads:
            raise LayoutError(f"rows of {num_heads} heads for a shard of {self.num_heads}")
        if runs and not first_token <= runs[0].start <= runs[-1].stop <= first_token + num_tokens:
            raise LayoutError(
                f"tokens {runs[0].start} to {runs[-1].stop} are not in rows of tokens "
                f"{first_token} to {first_token + num_tokens}"
            )


def strided(tensor: torch.Tensor) -> Strided:
    """Describe a tensor without its elements. Raises LayoutError for what is none."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"a {type(tensor).__name__} is no torch.Tensor: use torch.from_numpy")
    return Strided(
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
        offset=int(tensor.storage_offset()),
        storage=tensor.untyped_storage().data_ptr(),
        dtype=str(tensor.dtype).removeprefix("torch."),
    )


class _Spans(NamedTuple):
    """The part of a segment that is in some rows, as numpy copies it: in spans. A span is a run of
    bytes that is contiguous in both, and one element of the arrays."""

    blocks: Array
    """`[num_blocks, layers, heads, slots, elements]`, less the last axes, which make up a span."""
    row_offset: int
    row_strides: tuple[int, ...]
    """Strides of the same axes in rows, in bytes."""

    def of_rows(self, rows: Array, start: int, num_blocks: int) -> Array:
        """View `rows` with the axes of `blocks`, from token `start` of the rows on."""
        offset = self.row_offset + start * rows.strides[2]
        shape = (num_blocks, *self.blocks.shape[1:])
        return np.ndarray(shape, self.blocks.dtype, rows, offset, self.row_strides)


def _spans_of(
    views: Sequence[tuple[Segment, Array]],
    layer: int,
    shape: tuple[int, int, int, int],
    first_slot: int,
    num_slots: int,
) -> tuple[_Spans, ...]:
    found = []
    for segment, view in views:
        low, high = segment.layers_among(layer, shape[0])
        if low >= high:
            continue
        token = shape[3] * segment.item
        head = shape[2] * token
        per_layer = shape[1] * head
        offset = (low - layer) * per_layer + segment.part.start * segment.item
        strides: tuple[int, ...] = (num_slots * token, per_layer, head, token, segment.item)
        layers = slice(low - segment.first_layer, high - segment.first_layer)
        blocks = view[layers, :, :, first_slot : first_slot + num_slots].swapaxes(0, 1)
        span = segment.item
        while len(strides) > 1 and (
            blocks.shape[-1] == 1 or blocks.strides[-1] == strides[-1] == span
        ):
            span *= blocks.shape[-1]
            if span > _MAX_SPAN:
                break
            blocks, strides = blocks.view((np.void, span))[..., 0], strides[:-1]
        found.append(_Spans(blocks, offset, strides))
    return tuple(found)


class NumpyCopies:
    """Copies in the host's memory by numpy, which releases the GIL and starts no threads.
    Thread-safe. The class is a `MakeCopies`."""

    def __init__(self, parts: tuple[Segment, ...], storages: Mapping[int, torch.Tensor]) -> None:
        views = [(each, view_of(each, storages).numpy()) for each in parts]
        # Room for all keys of a geometry: pieces of a record, times slots of partial blocks. A
        # method in its place would keep the device's memory until the next collection.
        self._spans = lru_cache(maxsize=4096)(partial(_spans_of, views))

    def scatter(self, rows: Array, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        for run in runs:
            index = _index(run.blocks)
            for spans in self._spans(layer, rows.shape, run.first_slot, run.num_slots):
                source = spans.of_rows(rows, run.start - first_token, len(run.blocks))
                spans.blocks[index] = source

    def gather(self, rows: Array, layer: int, runs: Sequence[BlockRun], first_token: int) -> None:
        for run in runs:
            for spans in self._spans(layer, rows.shape, run.first_slot, run.num_slots):
                target = spans.of_rows(rows, run.start - first_token, len(run.blocks))
                if isinstance(run.blocks, range):
                    target[...] = spans.blocks[_index(run.blocks)]
                    continue
                # Block by block: reading through an index array would copy twice.
                for position, block in enumerate(run.blocks):
                    target[position : position + 1] = spans.blocks[block : block + 1]


def _index(blocks: range | tuple[int, ...]) -> slice | Array:
    """Return the index that picks these blocks from a first axis."""
    if isinstance(blocks, range):
        return slice(blocks.start, blocks.stop)
    return np.array(blocks, dtype=np.intp)
