"""A stand-in for SGLang 0.5.23 in tests without SGLang: the modules that the storage back end
imports, host pools in all layouts, and a driver that calls it as SGLang's controller does."""

from __future__ import annotations

import enum
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.adapters.vllm import fakes

LAYERS, HEADS, DIM, PAGE, NUM_PAGES = 2, 3, 4, 8, 6
RELEASE = "0.5.23"
"""Most pages of one call."""


ARGUMENTS = {
    "quantization": None,
    "load_format": "auto",
    "model_loader_extra_config": "{}",
    "download_dir": None,
    "trust_remote_code": False,
    "kv_cache_dtype": None,
    "custom_weight_loader": None,
    "enable_quant_communications": None,
    "model_impl": None,
    "modelopt_quant": None,
    "prefill_kv_cache_dequant_dtype": None,
    "qsa_indexer_dtype": None,
    "quantization_param_path": None,
    "quantize_and_serve": None,
    "rl_quant_profile": None,
    "speculative_algorithm": None,
    "speculative_draft_model_path": None,
    "speculative_draft_model_revision": None,
    "device": "cuda",
}
"""Server arguments as they are if nobody sets them."""


class Running:
    """The server arguments and model of this process, as SGLang's `runtime_context` tells them."""

    arguments: dict[str, Any] | None = None

    def resolved_server_args_dict(self) -> dict[str, Any]:
        if self.arguments is None:
            raise ValueError("Global server args is not set yet!")
        return ARGUMENTS | self.arguments

    def model_config(self) -> Any:
        path = Path(self.resolved_server_args_dict()["model_path"])
        written = fakes.load_config(path).to_dict() if path.exists() else dict(fakes.CONFIG)
        written.update(self.arguments["overrides"])
        return SimpleNamespace(
            model_path=str(path),
            revision=None,
            dtype=torch.bfloat16,
            hf_config=fakes.HFConfig(written),
            context_len=1024,
        )


RUNNING = Running()


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


class PoolName(enum.StrEnum):
    KV = "kv"
    MAMBA = "mamba"
    INDEXER = "indexer"


class PoolHitPolicy(enum.StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = None

    @classmethod
    def empty(cls):
        return cls(0, {})


@dataclass
class StorageMetrics:
    prefetch_pgs: list[int] = field(default_factory=list)
    backup_pgs: list[int] = field(default_factory=list)
    prefetch_bandwidth: list[float] = field(default_factory=list)
    backup_bandwidth: list[float] = field(default_factory=list)


class WeightUpdater:
    """The methods of SGLang's model runners that every update of weights calls."""

    def _write(self, *_arguments):
        return True, "said"

    begin_weight_update = load_weights_from_distributed = _write
    update_weights_from_disk = update_weights_from_ipc = update_weights_from_tensor = _write


class HiCacheController:
    def reset(self):
        """The end of every flush: threads that store have ended, and nothing is queued."""


@contextmanager
def installed() -> Iterator[None]:
    """Put stand-in modules where `kvferry.adapters.sglang` imports them from. They are removed at
    the end of the block, so that no other test finds them."""
    names = {
        "sglang.version": {"__version__": RELEASE},
        "sglang.srt.runtime_context": {
            "get_context": lambda: RUNNING,
            "process_model_config": RUNNING.model_config,
        },
        "sglang.srt.utils.hf_transformers_utils": {"get_config": fakes.load_config},
        "sglang.srt.mem_cache.hicache_storage": {
            each.__name__: each
            for each in (HiCacheStorage, PoolHitPolicy, PoolTransfer, PoolTransferResult)
        },
        "sglang.srt.observability.metrics_collector": {"StorageMetrics": StorageMetrics},
        "sglang.srt.managers.cache_controller": {"HiCacheController": HiCacheController},
        "sglang.srt.model_executor.model_runner_components.weight_updater": {
            "WeightUpdater": WeightUpdater
        },
    }
    for path, contents in names.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sys.modules.setdefault(name, ModuleType(name))
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[name])
        vars(sys.modules[path]).update(contents)
    try:
        yield
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
            del sys.modules[name]


def storage_config(extra: dict[str, Any], **changes: Any) -> Any:
    return SimpleNamespace(
        **{
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_cp_rank": 0,
            "attn_cp_size": 1,
            "dp_rank": 0,
            "dcp_rank": 0,
            "dcp_size": 1,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "model_name": "served",
            "extra_config": {
                "backend_name": "kvferry",
                "module_path": "kvferry.adapters.sglang",
                "class_name": "KVFerryStorage",
                "interface_v1": 1,
                **extra,
            },
            **changes,
        }
    )


SHAPES = {
    # For K and for V: the shape, the axis along which pages lie, and the length of a page there.
    "layer_first": ((LAYERS, NUM_PAGES * PAGE, HEADS, DIM), 1, PAGE),
    "page_first": ((NUM_PAGES * PAGE, LAYERS, HEADS, DIM), 0, PAGE),
    "page_first_direct": ((NUM_PAGES, LAYERS, PAGE, HEADS, DIM), 0, 1),
    "page_head": ((NUM_PAGES, HEADS, PAGE, LAYERS, DIM), 0, 1),
}


class Places:
    """What every host pool says of its places, and of what it holds."""

    page_size = PAGE
    device = "cpu"
    size = NUM_PAGES * PAGE
    page_num = NUM_PAGES
    dtype = torch.bfloat16


class HostPool(Places):
    """A host pool of K and V, or of latents."""

    def __init__(
        self, layout: str = "page_first", *, latent: bool = False, page_size: int = PAGE
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        shape, _, _ = SHAPES[layout]
        parts = () if latent else (2,)
        self.kv_buffer = torch.zeros((*parts, *shape), dtype=self.dtype)

    def _page(self, index: int) -> torch.Tensor:
        shape, axis, step = SHAPES[self.layout]
        axis += self.kv_buffer.dim() - len(shape)
        step = min(step, self.page_size)
        return self.kv_buffer.narrow(axis, index // PAGE if step == 1 else index, step)

    def get_data_page(self, index, flat=True):
        page = self._page(int(index))
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self):
        return torch.zeros(self._page(0).numel(), dtype=self.dtype)

    def set_from_flat_data_page(self, index, data_page):
        page = self._page(int(index))
        page.copy_(data_page.reshape(page.shape))

    def fill(self, page: int, seed: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(seed)
        target = self._page(page * PAGE)
        target.copy_(torch.randn(target.shape, generator=made))
        return target.clone()

    def page(self, page: int) -> torch.Tensor:
        return self._page(page * PAGE).clone()


class UnequalPool(Places):
    """A host pool whose K and V differ in size, so that it can give pages only in pieces."""

    layout = "page_first"

    def __init__(self) -> None:
        self.k_buffer = torch.zeros((NUM_PAGES * PAGE, 5), dtype=self.dtype)
        self.v_buffer = torch.zeros((NUM_PAGES * PAGE, 3), dtype=self.dtype)

    def get_dummy_flat_data_page(self):
        raise NotImplementedError("unequal")

    get_data_page = set_from_flat_data_page = get_dummy_flat_data_page

    def get_page_buffer_meta(self, indices):
        pages = [self.each(int(at) // PAGE) for at in indices[::PAGE]]
        pieces = [piece for page in pages for piece in page]
        return [piece.data_ptr() for piece in pieces], [piece.nbytes for piece in pieces]

    def each(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(
            part[page * PAGE : (page + 1) * PAGE] for part in (self.k_buffer, self.v_buffer)
        )

    def fill(self, page: int, seed: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(seed)
        for part in self.each(page):
            part.copy_(torch.randn(part.shape, generator=made))
        return self.page(page)

    def page(self, page: int) -> torch.Tensor:
        return torch.cat([part.flatten() for part in self.each(page)])


def chain(num_pages: int, prompt: int = 0) -> list[str]:
    """Return the keys of a prompt's pages as SGLang makes them: each hash includes the previous."""
    keys, parent = [], prompt.to_bytes(32, "big")
    for page in range(num_pages):
        parent = hashlib.sha256(parent + page.to_bytes(4, "little")).digest()
        keys.append(parent.hex())
    return keys


def indices(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Controller:
    """Calls a back end as SGLang's controller does: asks what exists, then reads it in a batch."""

    def __init__(self, backend: Any, pool: Any) -> None:
        self.backend, self.pool = backend, pool
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)

    def backup(self, keys: list[str], pages: list[int]) -> bool:
        return all(self.backend.batch_set_v1(keys, indices(pages), None))

    def prefetch(self, keys: list[str], pages: list[int]) -> int:
        """Read what exists of the pages; return how many leading pages came."""
        hits = self.backend.batch_exists(keys, None)
        if not hits:
            return 0
        found = self.backend.batch_get_v1(keys[:hits], indices(pages[:hits]), None)
        return found.index(False) if False in found else len(found)
