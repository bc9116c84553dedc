"""A host whose KV lies as real vLLM lays it out: its specs, its grouping, its tensors, its ranks.

What a rank writes follows from the model (which heads it really has), not from what kvferry made of
vLLM's configuration. So a head that kvferry takes for another one is wrong KV here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.host import HostRequest
from kvferry.adapters.vllm.drafts import draft_layers, draft_spec
from kvferry.adapters.vllm.layers import layers_of, refuse_parallel
from kvferry.adapters.vllm.spec import (
    engine_spec,
    layer_views,
    spec_of_workers,
)
from kvferry.adapters.vllm.states import served_states
from kvferry.cache.build import PrefixCache
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.spec import EngineSpec
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters
from kvferry.types import NULL_BLOCK
from tests.host_tables import HostTable, kv_values
from tests.simulated_host import SimulatedHost, prefix_seeds

CHUNK = 128
GARBAGE = 0xA5
GOLDEN = Path(__file__).parents[1] / "record" / "golden"
"""Any files that may be weights of a drafter."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """A model as vLLM describes it.

    Attributes:
        specs: given the number of ranks, the spec of each layer on one rank.
        heads: kv heads of layers over all ranks, by name; other layers have as many as their spec
            says times the ranks. Latents are one head on all ranks.
        config: fields of the model's configuration.
        backends: class of the attention backend, by the end of a layer's name.
        kernel_block: tokens per block of the kernels, if the backend splits blocks.
        layout: vLLM's name of the order in memory.
        chunk: tokens of a record.
        refused: what the message says, with these numbers of ranks; empty: served.
        drafts: layers of a drafter.
        hybrid: whether each kind of layer has a block table of its own.
        budget: tokens of the steps that store a prompt.
        platform: vLLM's name of the device.
        num_blocks: of all tables together.
    """

    specs: Callable[[int], Mapping[str, Any]]
    heads: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    backends: Mapping[str, str] = field(default_factory=dict)
    kernel_block: int | None = None
    layout: str = "LBNHC"
    chunk: int = CHUNK
    refused: str = ""
    drafts: Collection[str] = ()
    hybrid: bool = True
    budget: int = 96
    platform: str = "cuda"
    num_blocks: int = 64

    def but(self, **more: Any) -> Mix:
        """The same with other values."""
        return replace(self, **more)

    def heads_of(self, name: str, spec: Any, rank: int, tp: int) -> range:
        """The heads that a rank really has of a layer."""
        if "MLA" in type(spec).__name__:
            return range(1)
        total = self.heads.get(name, spec.num_kv_heads * tp)
        start = rank * total // tp
        return range(start, start + max(1, total // tp))


def resolved(mix: Mix, tp: int, vllm_config: Any) -> tuple[list[Any], Any]:
    """Have vLLM group the layers: the `KVCacheConfig` of each worker, and the scheduler's."""
    from vllm.v1.core.kv_cache_utils import (
        generate_scheduler_kv_cache_config,
        get_kv_cache_configs,
    )

    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.model_config = copy.copy(vllm_config.model_config)
    config.scheduler_config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_config.max_num_encoder_input_tokens = 64
    config.scheduler_config.disable_hybrid_kv_cache_manager = not mix.hybrid
    config.cache_config.num_gpu_blocks_override = mix.num_blocks
    config.cache_config.kv_cache_layout = mix.layout
    config.model_config.max_model_len = 320
    specs = dict(mix.specs(tp))
    found = get_kv_cache_configs(config, [dict(specs) for _ in range(tp)], [1 << 34] * tp)
    for each in found:  # as the engine's core does
        each.kv_cache_layout = mix.layout
    return found, generate_scheduler_kv_cache_config(found)


def host_config(mix: Mix, rank: int, tp: int, modules: Mapping[str, Any]) -> Any:
    """A `VllmConfig`, as far as kvferry's description reads it."""
    layers = len({name for name in mix.specs(tp) if name not in mix.drafts})
    fields = {"num_hidden_layers": layers, **mix.config}
    model = SimpleNamespace(**fields)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
            rank=rank,
            world_size=tp,
            distributed_executor_backend="uni" if tp == 1 else "mp",
            data_parallel_rank=0,
        ),
        model_config=SimpleNamespace(hf_config=model, hf_text_config=model),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        compilation_config=SimpleNamespace(static_forward_context=modules),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        speculative_config=SimpleNamespace(
            method="mtp",
            draft_model_config=SimpleNamespace(
                model=str(GOLDEN),
                revision=None,
                dtype=torch.bfloat16,
                hf_config=model,
                hf_text_config=model,
            ),
            target_model_config=None,
        )
        if mix.drafts
        else None,
    )


def modules_of(mix: Mix, specs: Mapping[str, Any]) -> dict[str, Any]:
    """The attention modules of a worker, in the order in which they were made: they know their
    backend, and no total of heads."""

    def backend(name: str) -> str:
        for end, found in mix.backends.items():
            if name.endswith(end):
                return found
        latent = "MLA" in type(specs[name]).__name__
        return "FlashMLABackend" if latent else "FlashAttentionBackend"

    return {
        name: SimpleNamespace(get_attn_backend=lambda name=name: type(backend(name), (), {}))
        for name in specs
    }


def described(
    mix: Mix, config: Any, groups: Any, *, is_worker: bool = True
) -> tuple[EngineSpec, list[Any]]:
    """What one half of the connector makes of its configuration, and the layers that it copies."""
    refuse_parallel(config.parallel_config)
    layers = layers_of(config, groups, mix.platform)
    states = served_states(config, groups, layers, dim_first=False, hands_off=True)
    identity = ModelIdentity(weights=b"w" * 32, config={})
    spec = engine_spec(config, layers, None, mix.chunk, lambda: identity, states)
    drafts = draft_layers(config, groups, layers, mix.platform) if is_worker else []
    spec = replace(spec, drafts=draft_spec(config, drafts, spec, None))
    return spec, [*layers, *drafts]


class RankOfVllm:
    """One rank: tensors by vLLM's own allocator, and what the model writes into them."""

    def __init__(
        self, mix: Mix, tp: int, rank: int, groups: Any, vllm_layout: Any, driver: StepDriver
    ) -> None:
        from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
        from vllm.v1.worker.utils import allocate_kv_cache

        self.worker, self.driver = driver.role, driver
        self._mix, self._groups = mix, groups.kv_cache_groups
        sizes = [mix.kernel_block or group.kv_cache_spec.block_size for group in self._groups]
        self.caches = allocate_kv_cache(groups, torch.device("cpu"), vllm_layout, sizes)
        self.memory = next(iter(self.caches.values())).untyped_storage()
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self.memory)
        self._bytes.fill_(GARBAGE)
        self._layers: list[list[tuple[str, Any, range]]] = []
        self._drafts: list[list[tuple[str, Any, range]]] = []
        for group in self._groups:
            uniform = isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
            specs = {
                name: group.kv_cache_spec.kv_cache_specs[name] if uniform else group.kv_cache_spec
                for name in group.layer_names
            }
            specs = {n: s for n, s in specs.items() if s.prefix_cacheable}
            found = [
                (name, spec, mix.heads_of(name, spec, rank, tp)) for name, spec in specs.items()
            ]
            self._layers.append([each for each in found if each[0] not in mix.drafts])
            self._drafts.append([each for each in found if each[0] in mix.drafts])

    def compute(self, request: HostRequest, seeds: Sequence[int], start: int, stop: int) -> None:
        start = max(start, request.num_external_tokens)  # what is computed again is not written
        for layers in (self._layers, self._drafts):
            for cells, values in self._kv(layers, request, seeds, start, stop):
                cells(values)

    def wrong_tokens(self, request: HostRequest, seeds: Sequence[int], stop: int) -> int:
        return self._wrong(self._layers, request, seeds, stop)

    def wrong_drafts(self, request: HostRequest, seeds: Sequence[int], stop: int) -> int:
        """As `wrong_tokens`, of the layers of a drafter."""
        return self._wrong(self._drafts, request, seeds, stop)

    def _wrong(
        self, layers: Sequence[Any], request: HostRequest, seeds: Sequence[int], stop: int
    ) -> int:
        return sum(
            int((cells(None) != values).flatten(1).any(1).sum())
            for cells, values in self._kv(layers, request, seeds, 0, stop)
        )

    def _kv(
        self,
        of_groups: Sequence[Any],
        request: HostRequest,
        seeds: Sequence[int],
        start: int,
        stop: int,
    ) -> Iterator[tuple[Callable[[Any], Any], torch.Tensor]]:
        """Yield for each layer a function that reads or writes the tokens that have a block, and
        their right bytes, `[tokens, heads of this rank, bytes]`. Where a row stands for several
        tokens, it is written with the last of them."""
        for group, ids, layers in zip(self._groups, request.block_ids, of_groups, strict=True):
            size = group.kv_cache_spec.block_size
            held = [
                token
                for token in range(start, min(stop, len(ids) * size))
                if ids[token // size] != NULL_BLOCK
            ]
            if not held:
                continue
            for name, spec, heads in layers:
                last = [token for token in held if (token + 1) % spec.tokens_per_state == 0]
                blocks = torch.tensor([ids[token // size] for token in last], dtype=torch.int64)
                places = torch.tensor(last, dtype=torch.int64) % size
                values = self._values(name, spec, heads, [seeds[token] for token in last])
                yield self._cells(name, spec, blocks, places // spec.tokens_per_state), values

    def _values(self, name: str, spec: Any, heads: range, seeds: list[int]) -> torch.Tensor:
        cache = self.caches[name]
        size = cache.shape[3] * cache.itemsize * (2 if is_nvfp4(spec) else 1)
        return (kv_values(seeds, sum(name.encode()), heads, size) % 251).to(torch.uint8)

    def _cells(
        self, name: str, spec: Any, blocks: torch.Tensor, rows: torch.Tensor
    ) -> Callable[[Any], Any]:
        cache = self.caches[name].view(torch.uint8)
        kernel = cache.shape[2]
        at = blocks * (spec.num_states // kernel) + rows // kernel, rows % kernel
        if is_nvfp4(spec):
            parts = nvfp4_parts(cache, spec.num_kv_heads)

            def by_half(values: torch.Tensor | None) -> torch.Tensor | None:
                if values is None:
                    return torch.cat([part[at[0], :, at[1]] for part in parts], dim=-1)
                sizes = [part.shape[-1] for part in parts]
                for part, each in zip(parts, values.split(sizes, dim=-1), strict=True):
                    part[at[0], :, at[1]] = each
                return None

            return by_half
        scales = self._scales_apart(name, spec)
        if not scales:

            def by_token(values: torch.Tensor | None) -> torch.Tensor | None:
                if values is None:
                    return cache[at[0], :, at[1]]
                cache[at[0], :, at[1]] = values
                return None

            return by_token
        # All keys of a block are before all scales.
        size = cache.shape[-1]
        flat = cache.as_strided((cache.shape[0], kernel * size), (cache.stride(0), 1))
        keys = size - scales
        offsets = torch.cat(
            [
                (at[1] * keys).view(-1, 1) + torch.arange(keys),
                (kernel * keys + at[1] * scales).view(-1, 1) + torch.arange(scales),
            ],
            dim=1,
        )

        def by_block(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None:
                return flat[at[0].view(-1, 1), offsets].unsqueeze(1)
            flat[at[0].view(-1, 1), offsets] = values[:, 0]
            return None

        return by_block

    @staticmethod
    def _scales_apart(name: str, spec: Any) -> int:
        """Bytes of a row's scales, if its kernel keeps them behind all keys of the block."""
        if name.endswith("k_cache"):
            return 4
        is_packed = spec.state_content_bytes is not None
        return 8 if is_packed and getattr(spec, "model_version", None) else 0

    def move_states(self, moves: Collection[Any]) -> None:
        assert not moves, "these models have no states"

    def poison(self, blocks: Collection[int]) -> None:
        for layers in (*self._layers, *self._drafts):
            for name, spec, _ in layers:
                cache = self.caches[name].view(torch.uint8)
                parts = spec.num_states // cache.shape[2]
                for block in blocks:
                    cache[block * parts : (block + 1) * parts] = GARBAGE

    def check_null_block(self) -> None:
        for layers in (*self._layers, *self._drafts):
            for name, spec, _ in layers:
                cache = self.caches[name].view(torch.uint8)
                parts = spec.num_states // cache.shape[2]
                if not bool((cache[:parts] == GARBAGE).all()):
                    raise AssertionError("the null block was written")


def is_nvfp4(spec: Any) -> bool:
    return getattr(getattr(spec, "kv_quant_mode", None), "name", "") == "NVFP4"


def nvfp4_parts(cache: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """What FlashInfer's kernels fill, `[block, head, token, bytes]` each: keys, their scales,
    values, theirs. It can be imported only beside its kernels; `nvfp4_split_data_scale` is vLLM's.
    """
    from vllm.utils.torch_utils import nvfp4_split_data_scale

    blocks, _, tokens, size = cache.shape
    is_by_head = cache.stride(1) > cache.stride(2)
    axes = (heads, tokens) if is_by_head else (tokens, heads)
    found = []
    for side in range(2):
        half = cache.as_strided(
            (blocks, *axes, size),
            (cache.stride(0), axes[1] * size, size, 1),
            cache.storage_offset() + side * heads * tokens * size,
        )
        for part in nvfp4_split_data_scale(half):
            by_bytes = part.view(torch.uint8)
            found.append(by_bytes if is_by_head else by_bytes.transpose(1, 2))
    return found


def kept(group: Any) -> int | None:
    """How many tokens vLLM keeps of a group that no part names, if it does not keep all."""
    spec = getattr(group.kv_cache_spec, "first_spec", group.kv_cache_spec)
    if type(spec).__name__ == "CircularBufferSpec":
        return int(spec.block_size)
    return getattr(spec, "sliding_window", None)


class EngineOfVllm:
    """An engine over kvferry's roles, on the description of its own halves.

    Args:
        told: whether the scheduler's half takes the workers' description, as in vLLM's handshake.

    Raises:
        ConfigError, LayoutError: the mix is refused.
    """

    def __init__(
        self, mix: Mix, tp: int, vllm_config: Any, store: Path, *, told: bool = True
    ) -> None:
        from vllm.v1.kv_cache_layout import KVCacheLayout

        workers, scheduler = resolved(mix, tp, vllm_config)
        modules = modules_of(mix, mix.specs(tp))
        halves = [
            described(mix, host_config(mix, rank, tp, modules), groups)
            for rank, groups in enumerate(workers)
        ]
        view = host_config(mix, 0, tp, modules if tp == 1 else {})
        own, _ = described(mix, view, scheduler, is_worker=False)
        adopted = spec_of_workers(own, [spec for spec, _ in halves])
        self.spec = adopted if told and adopted is not None else own
        self.wrong_drafts = 0
        self.counters = Counters()
        options = {
            "store": f"file://{store}?max_bytes=256MiB",
            "chunk_tokens": mix.chunk,
            "audit": "off",
            "memory_bytes": 16 << 20,
        }
        self._caches = [PrefixCache(self.spec, options, self.counters)]
        role = GuardedScheduler(
            self._caches[0].scheduler(),
            self.counters,
            block_size=self._caches[0].block_multiple,
        )
        layout, ranks = KVCacheLayout[mix.layout], []
        for rank, ((spec, layers), groups) in enumerate(zip(halves, workers, strict=True)):
            cache = PrefixCache(spec, options, self.counters, has_scheduler=False)
            self._caches.append(cache)
            driver = StepDriver(cache.worker(), self.counters, strict=True)
            ranks.append(RankOfVllm(mix, tp, rank, groups, layout, driver))
            views = layer_views(ranks[rank].caches, modules, layers, spec.kv_layout)
            driver.role.register_kv_caches(views)
        self.stores_drafts = all(rank.worker._drafts is not None for rank in ranks)
        tables = [
            HostTable(
                block_size=group.kv_cache_spec.block_size,
                window=next((p.window for p in spec.table_parts if p.table == index), kept(group)),
                chunk=next((p.chunk for p in spec.table_parts if p.table == index), None),
                layers=tuple((p.group, p.layers) for p in spec.table_parts if p.table == index),
            )
            for index, group in enumerate(workers[0].kv_cache_groups)
            for spec in [halves[0][0]]
        ]
        self.host = SimulatedHost(role, [], num_blocks=mix.num_blocks, tables=tables, num_ranks=tp)
        self.host.ranks = ranks
        # Of a hit, vLLM's scheduler computes these at its end again, as of its own.
        groups = workers[0].kv_cache_groups
        self._replayed = max(group.kv_cache_spec.prefix_replay_tokens for group in groups)
        self._caches[0].wait_ready(10)

    def run(self, tokens: Sequence[int], budget: int) -> int:
        """Run a request, check every byte, and return how many tokens were hit."""
        request = self.host.add(f"r{self.host.num_steps}", tokens)
        hit = self.host.admit(request)
        request.num_computed_tokens -= min(hit, self._replayed)
        self.host.prefill(request, budget=budget)
        seeds = prefix_seeds(request)
        for rank in self.host.ranks:
            self.wrong_drafts += rank.wrong_drafts(request, seeds, len(tokens))
        self.host.finish(request)
        self.host.settle()
        return int(request.num_external_tokens)

    def close(self) -> None:
        self.host.close()
        for cache in self._caches:
            cache.close()
