"""One KV tensor over all layers, in which a block's KV of every layer can lie together.

A transfer of a block is then one copy instead of one per layer. Names, conditions and shapes are
those of vLLM 0.12 to 0.14; a `LayoutError` replaces vLLM's assertions. The stride order of the
attention backend decides where the layer axis lies in memory, so the layers of a block need not be
contiguous.

Runs in: worker, when a model runner with the mixin (`mixin`) sets up KV memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from kvferry.errors import LayoutError

logger = logging.getLogger(__name__)


@runtime_checkable
class AttentionSpec(Protocol):
    """A host's spec of an attention layer's KV. Specs of other layers lack some of the members."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    page_size_bytes: int
    """Bytes of one layer's block, padding included."""


AttentionGroups = Sequence[Sequence[Any]]
"""A host's groups of layers with one `backend`, an attention backend class, and one
`kv_cache_spec`, by KV cache group."""


class UniformKVCaches(NamedTuple):
    """The tensor over all layers, and its parts by layer."""

    kv_caches: dict[str, torch.Tensor]
    """Layer name to a view of the shape that the backend wants."""
    cross_layers_kv_cache: torch.Tensor
    """The whole tensor, contiguous: its axes are in memory order."""
    attn_backend: Any


def use_uniform_kv_cache(
    attn_groups: AttentionGroups, cache_dtype: str, *, connector: object | None
) -> bool:
    """Whether all of these hold: the connector has `prefer_cross_layer_blocks`, the model has one
    group of attention layers, blocks have no padding, and the backend's stride order includes the
    layers.

    Args:
        attn_groups: the model's.
        cache_dtype: the host's name of the KV dtype.
        connector: the worker's connector, or None.
    """
    if not getattr(connector, "prefer_cross_layer_blocks", False):
        return False
    try:
        group, spec = _only_group(attn_groups)
    except LayoutError:
        return False
    shape = _shape_of_layer(group.backend, spec, 1, spec.block_size, cache_dtype)
    if prod(shape) * spec.dtype.itemsize != spec.page_size_bytes:
        return False  # padded pages: no stride order accounts for them
    stride_order = _stride_order(group.backend)
    return stride_order is not None and len(stride_order) == len(shape) + 1


def allocate_uniform_kv_caches(
    kv_cache_config: Any,  # noqa: ANN401 - the host's
    attn_groups: AttentionGroups,
    cache_dtype: str,
    device: torch.device | str,
    kernel_block_sizes: Sequence[int],
) -> UniformKVCaches:
    """Allocate KV for all layers at once, zeroed. For models that `use_uniform_kv_cache` accepts.

    Args:
        kv_cache_config: its `kv_cache_tensors` are those that the host planned, equal in `size`
            (bytes); `shared_by` names the layers of each.
        attn_groups: one group with one attention group.
        cache_dtype: the host's name of the KV dtype.
        device: device of the tensor.
        kernel_block_sizes: one number, the tokens per block of the attention kernel and of the
            views. It divides the block size.

    Raises:
        LayoutError: plans that are not uniform, or sizes that do not divide; nothing is allocated.
    """
    group, spec = _only_group(attn_groups)
    num_layers = len(kv_cache_config.kv_cache_tensors)
    num_blocks, block_size = _kernel_blocks(kv_cache_config, spec, kernel_block_sizes)
    layer_shape = _shape_of_layer(group.backend, spec, num_blocks, block_size, cache_dtype)
    shape = (num_layers, *layer_shape)
    stride_order = _stride_order(group.backend) or tuple(range(len(shape)))
    if sorted(stride_order) != list(range(len(shape))):
        raise LayoutError(
            f"stride order {stride_order} does not order the {len(shape)} axes of {shape}"
        )
    num_bytes = num_layers * kv_cache_config.kv_cache_tensors[0].size
    if prod(shape) * spec.dtype.itemsize != num_bytes:
        raise LayoutError(
            f"{shape} of {spec.dtype} takes {prod(shape) * spec.dtype.itemsize} bytes, the host "
            f"planned {num_bytes}: padded pages are not supported"
        )
    in_memory = tuple(shape[axis] for axis in stride_order)
    logger.info("Allocating KV of %d layers as one tensor of shape %s", num_layers, in_memory)
    buffer = torch.zeros(num_bytes, dtype=torch.int8, device=device)
    cross_layers = buffer.view(spec.dtype).view(in_memory)
    by_layer = cross_layers.permute(*(stride_order.index(axis) for axis in range(len(shape))))
    kv_caches = {
        name: by_layer[index]
        for index, planned in enumerate(kv_cache_config.kv_cache_tensors)
        for name in planned.shared_by
    }
    return UniformKVCaches(kv_caches, cross_layers, group.backend)


def _only_group(
    attn_groups: AttentionGroups,
) -> tuple[Any, AttentionSpec]:
    if len(attn_groups) != 1 or len(attn_groups[0]) != 1:
        counts = [len(groups) for groups in attn_groups]
        raise LayoutError(
            f"one tensor needs one KV group with one attention group; there are {counts}"
        )
    group = attn_groups[0][0]
    spec = group.kv_cache_spec
    if not isinstance(spec, AttentionSpec):
        raise LayoutError(f"one tensor is for attention layers, not for {type(spec).__name__}")
    return group, spec


def _kernel_blocks(
    kv_cache_config: Any,  # noqa: ANN401 - the host's
    spec: AttentionSpec,
    kernel_block_sizes: Sequence[int],
) -> tuple[int, int]:
    """Return the number of blocks that the kernel sees, and their size in tokens."""
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) != 1:
        raise LayoutError(f"one tensor needs layers of one size; planned are {sorted(sizes)} bytes")
    size = sizes.pop()
    if size < 1 or size % spec.page_size_bytes:
        raise LayoutError(f"{size} bytes are not whole blocks of {spec.page_size_bytes} bytes")
    if len(kernel_block_sizes) != 1:
        raise LayoutError(f"one KV group has one kernel block size, not {list(kernel_block_sizes)}")
    kernel_size = kernel_block_sizes[0]
    if kernel_size < 1 or spec.block_size % kernel_size:
        raise LayoutError(
            f"kernel block size {kernel_size} does not divide the block size {spec.block_size}"
        )
    return size // spec.page_size_bytes * (spec.block_size // kernel_size), kernel_size


def _shape_of_layer(
    backend: Any,  # noqa: ANN401 - the host's
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int,
    cache_dtype: str,
) -> tuple[int, ...]:
    shape: Any = backend.get_kv_cache_shape(
        num_blocks, block_size, spec.num_kv_heads, spec.head_size, cache_dtype_str=cache_dtype
    )
    return tuple(shape)


def _stride_order(backend: Any) -> tuple[int, ...] | None:  # noqa: ANN401 - the host's
    """Return the backend's stride order with the layer axis; None if the backend has none."""
    try:
        return tuple(backend.get_kv_cache_stride_order(include_num_layers_dimension=True))
    except (AttributeError, NotImplementedError, TypeError):
        return None  # TypeError: a backend that is older than the argument
