"""Device and host pools of SGLang 0.5.23 on a CPU, and its own HiCache controller over them.

Only the kernels that copy between device and host are not there without a GPU: the two classes of
pools here copy by indexing.
"""

from __future__ import annotations

import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGE, LAYERS, HEADS, DIM, NUM_TOKENS = 8, 2, 3, 4, 64
SECONDS = 120.0


def rows(buffer: torch.Tensor, layout: str, layer: int, tokens: torch.Tensor) -> Any:
    """An index of the tokens of one layer in K, V or latents of a host pool."""
    page, place = tokens // PAGE, tokens % PAGE
    return {
        "layer_first": (layer, tokens),
        "page_first": (tokens, layer),
        "page_first_direct": (page, layer, place),
        "page_head": (page, slice(None), place, layer),
    }[layout]


class Copies:
    """Copies by indexing, for host pools of any kind; `pairs` are device and host buffers."""

    def backup_from_device_all_layer(self, device_pool, host_indices, device_indices, io_backend):
        for layer in range(LAYERS):
            for device, host in self.pairs(device_pool, layer):
                host[rows(host, self.layout, layer, host_indices)] = device[device_indices]

    def load_to_device_per_layer(
        self, device_pool, host_indices, device_indices, layer_id, io_backend, *, is_draft=False
    ):
        for device, host in self.pairs(device_pool, layer_id):
            device[device_indices] = host[rows(host, self.layout, layer_id, host_indices)]


class HostKV(Copies, MHATokenToKVPoolHost):
    def pairs(self, device_pool, layer):
        return (
            (device_pool.k_buffer[layer], self.kv_buffer[0]),
            (device_pool.v_buffer[layer], self.kv_buffer[1]),
        )


class HostLatents(Copies, MLATokenToKVPoolHost):
    def pairs(self, device_pool, layer):
        return ((device_pool.kv_buffer[layer], self.kv_buffer),)


class Engine:
    """What a scheduler has of HiCache, new as after a start."""

    def __init__(self, layout: str, *, latent: bool) -> None:
        dtype = torch.bfloat16
        options = {"pin_memory": False, "device": "cpu", "start_layer": 0, "end_layer": LAYERS}
        if latent:
            self.device = MLATokenToKVPool(
                NUM_TOKENS, PAGE, dtype, 8, DIM, LAYERS, "cpu", enable_memory_saver=False
            )
            host, options["target_layer_num"] = HostLatents, LAYERS
        else:
            self.device = MHATokenToKVPool(
                NUM_TOKENS, PAGE, dtype, HEADS, DIM, LAYERS, "cpu", enable_memory_saver=False
            )
            host = HostKV
        info = self.device.get_device_pool_infos()[0].buffer_info
        self.host = host(info, 2.0, 0, PAGE, layout, device_capacity_tokens=NUM_TOKENS, **options)
        self.allocator = PagedTokenToKVPoolAllocator(
            NUM_TOKENS, PAGE, dtype, "cpu", self.device, need_sort=False
        )
        entry = PoolEntry(
            name=PoolName.KV,
            host_pool=self.host,
            device_pool=self.device,
            layer_mapper=lambda layer: layer,
            is_primary_index_anchor=True,
        )
        self.controller = HybridCacheController(
            self.allocator,
            HostPoolGroup([entry]),
            PAGE,
            dist.group.WORLD,
            load_cache_event=Event(),
            write_policy="write_through",
            io_backend="kernel",
            transfer_layer_id_max=LAYERS,
        )

    def attach(self, store: Path, **extra: Any) -> Any:
        """Attach the back end as SGLang does at its start and by its API; returns it."""
        self.controller.attach_storage_backend(
            "dynamic",
            prefetch_threshold=PAGE,
            model_name="served",
            storage_backend_extra_config={
                "backend_name": "kvferry",
                "module_path": "kvferry.adapters.sglang",
                "class_name": "KVFerryStorage",
                "interface_v1": 1,
                "store": store.as_uri(),
                "load_timeout_seconds": SECONDS,
                **extra,
            },
            host_pools=self.controller.mem_pool_host.entries,
        )
        return self.controller.storage_backend

    def detach(self) -> None:
        self.controller.detach_storage_backend()

    @property
    def buffers(self) -> list[torch.Tensor]:
        if isinstance(self.device, MLATokenToKVPool):
            return list(self.device.kv_buffer)
        return [*self.device.k_buffer, *self.device.v_buffer]

    def compute(self, tokens: list[int]) -> torch.Tensor:
        """KV of a prompt on the device: where."""
        indices = self.allocator.alloc(len(tokens))
        made = torch.Generator().manual_seed(sum(tokens))
        for buffer in self.buffers:
            shape = buffer[indices].shape
            buffer[indices] = torch.randn(shape, generator=made).to(buffer.dtype)
        return indices

    def kv(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[indices].clone() for buffer in self.buffers]

    def write(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Device to host to storage, and out of both; how many tokens were stored."""
        host = self.controller.write(indices, node_id=1)
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        self.controller.write_storage(host, tokens, hash_value=hashes)
        ended = self.controller.ack_backup_queue.get(timeout=SECONDS)
        self.controller.evict_host(host)
        self.host.kv_buffer.zero_()
        return ended.completed_tokens

    def restore(self, tokens: list[int]) -> torch.Tensor:
        """Storage to host to device; where on the device, of as many tokens as came."""
        controller = self.controller
        controller.prefetch(SimpleNamespace(rid="request"), tokens)
        operation = controller.prefetch_hit_queue.get(timeout=SECONDS)
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        controller.prefetch_buffer.put(operation)
        done = 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            ack = controller.ack_prefetch_queue.get(timeout=SECONDS)
            done = done if ack.completed_tokens is None else ack.completed_tokens
            if ack.completed_req:
                break
        if not done:
            return torch.empty(0, dtype=torch.int64)
        indices = controller.load(operation.host_indices[:done])
        controller.start_loading()
        return indices
