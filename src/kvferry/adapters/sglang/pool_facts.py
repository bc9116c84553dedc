"""What a host pool of SGLang holds: what says how the bytes of its pages are to be read.

SGLang makes pools of options, variables, model and device. So no option is looked at here, but what
came of it: the attributes of the pool, and dtype and shape of the tensors in which its pages lie.
Each attribute is in one of the lists below, those of SGLang 0.5.23. Another is refused by its name:
it may decide bytes, or count something that differs at every start.
"""

# ruff: noqa: ANN401 - pools are the host's

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from kvferry.errors import ConfigError
from kvferry.identity.resolved import describe_value
from kvferry.keys import JsonValue

_COUNTS = ("size", "page_num", "num_host_pages", "indexer_page_num")
"""Attributes that count a pool's places. One of them is an axis of each tensor that holds pages."""

OF_THIS_START = frozenset(
    {
        *_COUNTS,
        "device_capacity_tokens",
        "device_num_pages",
        "device_slots",
        "fd",
        "free_slots",
        "mem_state",
        "num_release_slots",
        "release_slots",
        "slot_used",
        "staging_page_capacity",
        "staging_token_capacity",
    }
)
"""Attributes that say how much memory this start has, and what of it is in use."""

_FACTS = """
_buffer_device _buffer_index_by_layer _buffer_infos _conv_can_use_jit _destroyed _device_layer_num
_device_page_buffer _device_to_host_layer _draft_indexer_skip_warned _draft_kv_skip_warned
_draft_layer_num _host_layer_by_controller _host_page_buffer_view _host_stride _is_dummy
_layer_shard_enabled _live_target_layers _native_buffers _native_infos _page_row_layer_tables
_page_row_tables _shared_backing _size_per_token _slots _strided_device_row_bytes
_target_layer_indices _temporal_can_use_jit _transfer_device allocator anchor_entry buffer_info
can_use_jit can_use_write_back_jit conv_buffer conv_device_layers conv_device_ptrs conv_dtype
conv_staging_buffers conv_state_elem_sizes conv_state_shapes data_ptrs data_refs dcp_rank dcp_size
decl device device_buffers device_data_ptrs device_k_buffers device_k_data_ptrs device_kv_buffers
device_page_views device_pool device_ptrs device_rows device_slab device_v_buffers
device_v_data_ptrs dsa_kv_cache_store_fp8 dtype element_dim end_layer entries entry_map gpu_device
head_dim head_group_num head_num host_kv_data_refs host_pool index_k_buffer index_k_data_ptrs
index_k_data_refs index_k_device_ptrs index_k_scale_buffer index_k_with_scale_buffer indexer_dtype
indexer_layout_dim indexer_page_stride_size item_bytes k_buffer k_data_ptrs k_data_refs
k_device_ptrs k_scale_device_ptrs k_scale_device_rows k_scale_host k_scale_host_layers
k_scale_staging k_sf_page_bytes kv_buffer kv_cache_dim kv_lora_rank layer_num layout layout_dim
lock logical_size mtp_draft_buffer_infos mtp_draft_device_pools num_mamba_layers
override_kv_cache_dim packed_device_index_buffers page_aligned_only page_size page_unified_layout
pin_memory placement pool_label pool_name qk_rope_head_dim ring_size row_bytes shard_rank
shard_size size_per_token slot_page_size slot_state_buffers slot_state_device_tensors
staging_buffer staging_k_buffer staging_v_buffer start_layer state_page_bytes state_pools
supports_per_pool_backup_indices swa_page_size target_layer_num temporal_buffer
temporal_device_layers temporal_device_ptrs temporal_dtype temporal_staging_buffer
temporal_state_elem_size temporal_state_shape token_stride_size v_buffer v_data_ptrs v_data_refs
v_head_dim v_scale_device_ptrs v_scale_device_rows v_scale_host v_scale_host_layers
v_scale_staging v_sf_page_bytes
"""
FACTS = frozenset(_FACTS.split())
"""Attributes of pools that decide what the bytes of a page are, or on what device a pool was made:
all that are equal at every start."""

_FIELDS = """
buffer_info buffers bytes_per_token_per_layer conv data_ptrs device device_alloc_fn
device_evict_fn device_free_fn device_layer_num device_pool dtype extra_checkpoint_buffers
head_dim head_group_num head_num hit_policy host_evict_fn host_pool host_pool_builder index_k
index_layer_indices index_scales index_width indices_from_pool is_mla is_primary_index_anchor
itemsize k k_data_ptrs k_width kv_cache_dim kv_lora_rank layer_ids layer_indices layer_mapper
layer_num layout layout_source name native_buffers num_pages owned_device_layers
packed_draft_device_pools packed_fp8 page_size pool_name qk_rope_head_dim row_bytes rows scales
slab storage_info temporal transfer_buffers v v_data_ptrs v_head_dim v_width
"""
FIELDS = frozenset(_FIELDS.split())
"""As `FACTS`, of the structures that pools hold."""


def pool_facts(pool: Any, page_bytes: int) -> JsonValue:
    """Return what a pool holds, but for the number of its places.

    Raises:
        ConfigError: an attribute that is not known, or tensors that are not found here hold a part
            of each page.
    """
    facts = _Facts(pool)
    described = facts.of_pool(pool)
    if facts.page_bytes < page_bytes:
        raise ConfigError(
            f"kvferry finds {facts.page_bytes} of the {page_bytes} bytes of a page in the tensors "
            f"of {type(pool).__name__}, so it cannot say what the pages hold; use a release of "
            "kvferry that knows this SGLang's pools, or another storage back end"
        )
    return described


class _Facts:
    """Describes a pool, and counts the bytes of a page in the tensors on its way."""

    def __init__(self, pool: Any) -> None:
        self._device = torch.device(pool.device).type
        # Of a length of an axis of places, how many belong to a page.
        self._places = {int(getattr(pool, each)): 1 for each in _COUNTS[1:] if hasattr(pool, each)}
        self._places[int(pool.size)] = int(pool.page_size)
        self._held: dict[int, int] = {}

    @property
    def page_bytes(self) -> int:
        return sum(self._held.values())

    def of_pool(self, pool: Any) -> JsonValue:
        names = sorted(vars(pool).keys() - OF_THIS_START)
        _refuse_unknown(pool, names, FACTS)
        attributes = {name: self._described(getattr(pool, name)) for name in names}
        return {"class": type(pool).__name__, **attributes}

    def _described(self, value: Any) -> JsonValue:
        """Return a value as plain values. Of objects that only hold memory or move bytes, such as
        allocators and pools of the device, the class is all that counts."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, Mapping):
            return {str(name): self._described(each) for name, each in value.items()}
        if isinstance(value, Sequence) and not isinstance(value, str):
            items = [self._described(each) for each in value]
            is_long = len(items) > 2 and all(each == items[0] for each in items)
            return {"each": items[0], "count": len(items)} if is_long else items
        if hasattr(value, "get_data_page"):  # a pool within a pool
            return self.of_pool(value)
        if names := _fields(value):
            _refuse_unknown(value, names, FIELDS)
            return {name: self._described(getattr(value, name)) for name in names}
        try:
            return describe_value(value, "")
        except ConfigError:
            return type(value).__name__

    def _tensor(self, value: torch.Tensor) -> str:
        shape: list[Any] = list(value.shape)
        axes = [at for at, length in enumerate(shape) if length in self._places]
        if not axes or value.device.type != self._device:
            return str(value.dtype)  # addresses, or memory of the device
        num_bytes = min(value.nbytes // shape[at] * self._places[shape[at]] for at in axes)
        storage = value.untyped_storage().data_ptr()
        self._held[storage] = max(num_bytes, self._held.get(storage, 0))  # others are its parts
        if len(axes) == 1:  # else any may be that of the places: all lengths count
            shape[axes[0]] = "places"
        return f"{value.dtype} {shape}"


def _refuse_unknown(held: Any, names: Sequence[str], known: frozenset[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{type(held).__name__} of this SGLang has {name!r}, which kvferry does not know "
                "and which may decide what pages hold; use a release of kvferry that knows this "
                "SGLang's pools, or another storage back end"
            )


def _fields(value: Any) -> tuple[str, ...]:
    """The fields of a structure; none of another value."""
    if is_dataclass(value):
        return tuple(field.name for field in fields(value))
    return tuple(getattr(value, "__struct_fields__", ()))
