"""Two processes of SGLang's HiCache on a CPU get one prompt: the second reads what the first wrote.
`make demo-tier ENGINE=sglang` runs this.

    .venv-sglang/bin/python examples/cpu/sglang_tiers.py MODEL_DIR STORE_URL

SGLang's server needs a GPU. Here the controller, device and host pools of SGLang 0.5.23 run without
it. The kernels that copy between device and host need a GPU, so the two classes of host pools copy
by indexing instead. No model runs: noise stands for the KV on the device. The tests use latent KV
(MLA) and the other layouts.
"""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Transformers looks for torchvision at import, and must not find the stand-in.
from transformers import AutoProcessor  # noqa: F401


class NoTorchvision:
    """An import hook that stands in for torchvision. SGLang imports it, but no build fits the CPU
    build of torch, and nothing here uses it."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        def missing(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

        module.__getattr__ = missing


sys.meta_path.insert(0, NoTorchvision())
warnings.simplefilter("ignore")  # of SGLang and torch, as they are imported
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host import base as pool_host
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

PAGE, LAYERS, HEADS, DIM, NUM_TOKENS = 8, 2, 3, 4, 128
SECONDS = 120.0


def rows(buffer: torch.Tensor, layout: str, layer: int, tokens: torch.Tensor) -> Any:
    """Return the index of the tokens of one layer in the K, V or latents of a host pool."""
    page, place = tokens // PAGE, tokens % PAGE
    return {
        "layer_first": (layer, tokens),
        "page_first": (tokens, layer),
        "page_first_direct": (page, layer, place),
        "page_head": (page, slice(None), place, layer),
    }[layout]


class Copies:
    """Copies between device and host by indexing; `pairs` yields the device and host buffers."""

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


def start_rank(rendezvous: Path) -> None:
    """Make the process groups and ranks that SGLang's scheduler has before it makes its cache."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=rendezvous.as_uri(), rank=0, world_size=1)
    get_parallel().override_permanently(tp_rank=0, pp_rank=0, attn_dcp_rank=0)


class Engine:
    """The parts of HiCache that SGLang's scheduler has, empty as after a start."""

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

    def attach(self, store: str, **extra: Any) -> Any:
        """Attach the back end as SGLang does at its start and through its API; return it."""
        self.controller.attach_storage_backend(
            "dynamic",
            prefetch_threshold=PAGE,
            model_name="served",
            storage_backend_extra_config={
                "backend_name": "kvferry",
                "module_path": "kvferry.adapters.sglang",
                "class_name": "KVFerryStorage",
                "interface_v1": 1,
                "store": store,
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
        """Put the KV of a prompt on the device; return its slots there."""
        indices = self.allocator.alloc(len(tokens))
        made = torch.Generator().manual_seed(sum(tokens))
        for buffer in self.buffers:
            shape = buffer[indices].shape
            buffer[indices] = torch.randn(shape, generator=made).to(buffer.dtype)
        return indices

    def kv(self, indices: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[indices].clone() for buffer in self.buffers]

    def write(self, tokens: list[int], indices: torch.Tensor) -> int:
        """Copy KV to the host and to storage, then evict it from the host; count stored tokens."""
        host = self.controller.write(indices, node_id=1)
        hashes = get_storage_hash_str(tokens, None, page_size=PAGE)
        self.controller.write_storage(host, tokens, hash_value=hashes)
        ended = self.controller.ack_backup_queue.get(timeout=SECONDS)
        self.controller.evict_host(host)
        self.host.kv_buffer.zero_()
        return ended.completed_tokens

    def restore(self, tokens: list[int]) -> torch.Tensor:
        """Bring KV from storage to the device; return the slots of the tokens that came."""
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


def refuse_short_memory() -> None:
    """Exit if SGLang would make no host pool, however small."""
    missing = -pool_host.host_memory_budget_bytes()
    if missing > 0:
        sys.exit(
            f"SGLang leaves {pool_host.HICACHE_HOST_MEMORY_RESERVE_BYTES / 1e9:.1f} GB of memory "
            f"free, and {missing / 1e9:.1f} GB of them are in use: end other programs first"
        )


def ask(model_dir: str, store: str) -> None:
    refuse_short_memory()
    with tempfile.TemporaryDirectory() as scratch:
        start_rank(Path(scratch) / "rendezvous")
    prompt = list(range(100, 100 + 6 * PAGE))
    with get_context().override_server_args(model_path=model_dir, device="cpu"):
        engine = Engine("page_first", latent=False)
        engine.attach(store)
        get_storage_hash_str(prompt, None, page_size=PAGE)  # SGLang compiles it at the first call
        started = time.perf_counter()
        restored = engine.restore([*prompt, 7])  # the last token is computed in any case
        milliseconds = (time.perf_counter() - started) * 1e3
        computed = engine.compute(prompt)
        pairs = zip(engine.kv(restored), engine.kv(computed), strict=True)
        if not all(torch.equal(back, made[: len(back)]) for back, made in pairs):
            sys.exit("what came back is not what was written")
        written = engine.write(prompt, computed) if len(restored) < len(prompt) else 0
        print(
            f"{len(prompt) // PAGE} pages, {len(restored) // PAGE} read from the store in "
            f"{milliseconds:.1f} ms{', equal byte for byte' if len(restored) else ''}; "
            f"{written // PAGE} written"
        )
        engine.detach()


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] == "--ask":
        return ask(sys.argv[2], sys.argv[3])
    if len(sys.argv) != 3 or not Path(sys.argv[1]).is_dir():
        sys.exit(__doc__)
    for number in (1, 2):
        print(f"process {number} of 2: SGLang starts", file=sys.stderr, flush=True)
        again = [sys.executable, __file__, "--ask", *sys.argv[1:]]
        if subprocess.run(again, check=False).returncode:
            sys.exit("SGLang failed; the first error above says why")
    return None


if __name__ == "__main__":
    main()
