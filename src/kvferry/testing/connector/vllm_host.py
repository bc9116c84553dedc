"""VLLM's own scheduler, block pool and rank aggregation around a V1 connector, without a model.

Import it only where vLLM is installed. The order of hooks in a step is that of vLLM's
`KVConnectorModelRunnerMixin`.
"""

# ruff: noqa: ANN401 - objects are the host's

from __future__ import annotations

import pickle
from collections import deque
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm import config as configs
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.platforms import current_platform
from vllm.utils.hashing import sha256
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.testing.connector.content import ComputedPart, Memory, layer_name
from kvferry.testing.connector.host import (
    HEAD_DIM,
    HEADS,
    Ask,
    KitHost,
    LookupWatch,
    NotHereError,
    RefusedError,
    Setup,
    describe,
)

_MANY = 1 << 20
_CONFIG_FIELDS = ("kv_role", "kv_load_failure_policy")
"""Options that are fields of vLLM's `KVTransferConfig`, not the connector's own."""


def _transfer_config(connector: type[Any], options: dict[str, Any]) -> configs.KVTransferConfig:
    own = {name: value for name, value in options.items() if name not in _CONFIG_FIELDS}
    return configs.KVTransferConfig(
        kv_connector=connector.__name__,
        kv_connector_module_path=connector.__module__,
        kv_role=options.get("kv_role", "kv_both"),
        kv_load_failure_policy=options.get("kv_load_failure_policy", "recompute"),
        kv_connector_extra_config=own,
    )


def _vllm_config(transfer: configs.KVTransferConfig, setup: Setup) -> configs.VllmConfig:
    model = configs.ModelConfig(
        setup.directory, dtype=setup.dtype, seed=0, skip_tokenizer_init=True
    )
    cache = configs.CacheConfig(block_size=setup.block_size, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    cache.num_gpu_blocks = setup.num_blocks
    return configs.VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=configs.DeviceConfig("cpu"),
        parallel_config=configs.ParallelConfig(tensor_parallel_size=setup.ranks),
        scheduler_config=configs.SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=setup.budget,
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            async_scheduling=setup.in_flight > 1,
            disable_hybrid_kv_cache_manager=not KVConnectorFactory.supports_hma_config(transfer),
        ),
        kv_transfer_config=transfer,
    )


def _kv_cache_config(setup: Setup) -> kv.KVCacheConfig:
    shape, dtype = setup.shape(), getattr(torch, setup.dtype)
    groups, tensors = [], []
    for group in shape.groups:
        names = [layer_name(layer) for layer in group.layers]
        sizes = {"block_size": setup.block_size, "num_kv_heads": shape.num_heads}
        sizes |= {"head_size": HEAD_DIM, "dtype": dtype}
        if group.window is None:
            spec = kv.FullAttentionSpec(**sizes)
        else:
            spec = kv.SlidingWindowSpec(sliding_window=group.window, **sizes)
        groups.append(kv.KVCacheGroupSpec(names, spec))
        page = spec.page_size_bytes
        size = page * setup.num_blocks
        tensors += [kv.KVCacheTensor(size, [name], size, page) for name in names]
    return kv.KVCacheConfig(setup.num_blocks, tensors, groups, kv_cache_layout="LBHNC")


class VllmHost(KitHost):
    """See the module."""

    keys_across = current_platform.is_cpu()

    def __init__(self, connector: type[Any], options: dict[str, Any], setup: Setup) -> None:
        """Build both halves.

        Raises:
            NotHereError: vLLM does not run this class so.
            RefusedError: the class, or vLLM for it, raised.
        """
        transfer = _transfer_config(connector, options)
        if len(setup.shape().groups) > 1 and not KVConnectorFactory.supports_hma_config(transfer):
            raise NotHereError("the class is no SupportsHMA: vLLM gives it one group of layers")
        piecewise = connector.requires_piecewise_for_cudagraph(options)
        super().__init__(setup, has_hooks=piecewise or setup.hooks)
        init_none_hash(sha256)
        try:
            config = _vllm_config(transfer, setup)
            groups = _kv_cache_config(setup)
            self._scheduler = (AsyncScheduler if setup.in_flight > 1 else Scheduler)(
                config, groups, StructuredOutputManager(config), setup.block_size, log_stats=True
            )
            self.scheduler_half = self._scheduler.connector
            self._make_workers(config, groups)
        except Exception as error:
            raise RefusedError(describe(error)) from error
        self._scheduler.use_v2_model_runner = setup.runner == 2
        self._scheduler.max_num_encoder_input_tokens = _MANY
        self._scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=_MANY)
        self.watch = LookupWatch(self.scheduler_half, self)
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler_half, setup.ranks)
        self._hasher = get_request_block_hasher(setup.block_size, sha256)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._late: deque[tuple[Any, Any]] = deque([(None, None)] * setup.late_rank)

    def _make_workers(self, config: configs.VllmConfig, groups: kv.KVCacheConfig) -> None:
        for memory in self.memories:
            of_rank = deepcopy(config)
            of_rank.parallel_config.rank = memory.rank
            self._be_rank(memory.rank)
            half = KVConnectorFactory.create_connector(of_rank, KVConnectorRole.WORKER, groups)
            half.register_kv_caches(dict(memory.tensors))
            self.worker_halves.append(half)
        handshake = {
            (0, rank): metadata
            for rank, half in enumerate(self.worker_halves)
            if (metadata := half.get_handshake_metadata()) is not None
        }
        if handshake:
            self.scheduler_half.set_xfer_handshake_metadata_pp_aware(handshake)

    def _be_rank(self, rank: int) -> None:
        """Connectors ask vLLM's process groups which rank they are."""
        size = self.setup.ranks
        parallel_state._TP = SimpleNamespace(rank_in_group=rank, rank=rank, world_size=size)
        parallel_state._PP = SimpleNamespace(rank_in_group=0, rank=0, world_size=1)

    def is_busy(self) -> bool:
        return bool(self._in_flight) or self._scheduler.has_requests()

    def free_blocks(self) -> set[int]:
        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        return {block.block_id for block in blocks if not block.ref_cnt and not block.is_null}

    def forget(self) -> None:
        if not self._scheduler.reset_prefix_cache():
            raise NotHereError("vLLM's prefix cache is in use")

    def _preempt(self) -> None:
        while self._in_flight:
            self._learn()
        self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def _add(self, ask: Ask) -> None:
        lora = ask.adapter and LoRARequest(ask.adapter.name, ask.adapter.number, ask.adapter.path)
        embeds = None
        if ask.embeds is not None:
            source = torch.Generator().manual_seed(ask.embeds)
            embeds = torch.rand(len(ask.tokens), 2 * HEADS * HEAD_DIM, generator=source)
        request = Request(
            request_id=ask.name,
            prompt_token_ids=list(ask.tokens) if embeds is None else None,
            prompt_embeds=embeds,
            sampling_params=SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=[
                MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
                for name, offset, length in ask.items
            ],
            lora_request=lora,
            cache_salt=ask.salt,
            block_hasher=self._hasher,
            resumable=ask.grows,
        )
        self._scheduler.add_request(request)

    def _abort(self, name: str) -> None:
        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _step(self) -> bool:
        output = self._scheduler.schedule()
        parts = self._parts(output)
        names = [part.row.name for part in parts]
        sampled = [self._sample(part) for part in parts]
        found: list[str] = []
        outputs = []
        for half, memory in zip(self.worker_halves, self.memories, strict=True):
            self._be_rank(memory.rank)
            made = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
            made.kv_connector_output = self._run_rank(half, memory, output, parts, found)
            outputs.append(made)
        if self._late:  # the last rank's ended transfers
            last = outputs[-1].kv_connector_output
            self._late.append((last.finished_sending, last.finished_recving))
            last.finished_sending, last.finished_recving = self._late.popleft()
        merged = self._aggregator.aggregate(outputs)
        report = merged.kv_connector_output
        self.judge(found, set(report.invalid_block_ids))
        self.end_step({*names, *(report.finished_recving or ())}, report.kv_connector_stats)
        self._in_flight.append((output, merged))
        while len(self._in_flight) >= (self.setup.in_flight if parts else 1):
            self._learn()
        return bool(parts)

    def _learn(self) -> None:
        """Give the oldest step's results to the scheduler."""
        output, merged = self._in_flight.popleft()
        for made in self._scheduler.update_from_output(output, merged).values():
            for each in made.outputs:
                answer = self.answers[each.request_id]
                answer.tokens += each.new_token_ids
                if each.finish_reason is not None:
                    answer.reason = answer.reason or str(each.finish_reason)

    def _parts(self, output: Any) -> list[ComputedPart]:
        """Bring the rows up to date, as a model runner does; return what the step computes."""
        starts = {}
        for new in output.scheduled_new_reqs:
            starts[new.req_id] = new.num_computed_tokens
            self.rows[new.req_id].tables = tuple(list(group) for group in new.block_ids)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            row, added = self.rows[name], cached.new_block_ids[i]
            starts[name] = cached.num_computed_tokens[i]
            before = [[] for _ in row.tables] if name in cached.resumed_req_ids else row.tables
            if added is not None:
                row.tables = tuple([*have, *new] for have, new in zip(before, added, strict=True))
        parts = []
        for name, count in output.num_scheduled_tokens.items():
            if self.setup.in_flight == 1:
                self.rows[name].update(self._scheduler.requests[name].all_token_ids)
            parts.append(ComputedPart(self.rows[name], starts[name], starts[name] + count))
        return parts

    def _sample(self, part: ComputedPart) -> list[int]:
        is_chunk = self._scheduler.requests[part.row.name].is_prefill_chunk
        return [] if is_chunk else [part.row.next_token(part.stop)]

    def _run_rank(
        self, half: Any, memory: Memory, output: Any, parts: list[ComputedPart], found: list[str]
    ) -> KVConnectorOutput:
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        attention = {name: SimpleNamespace() for name in memory.tensors}
        context = SimpleNamespace(
            no_compile_layers={
                name: SimpleNamespace(kv_cache=tensor) for name, tensor in memory.tensors.items()
            },
            attn_metadata=attention if parts and self.setup.attention_metadata else None,
        )
        memory.mark(self.marked)
        half.handle_preemptions(metadata)
        half.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            half.start_load_kv(context)
        found += self.forward(
            memory,
            parts,
            half.wait_for_layer_load,
            lambda name, tensor: half.save_kv_layer(name, tensor, attention[name]),
        )
        if not output.has_sync_kv_loads:
            half.start_load_kv(context)
        half.wait_for_save()
        results = half.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=half.get_block_ids_with_load_errors(),
            kv_connector_stats=half.get_kv_connector_stats(),
            kv_cache_events=half.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=half.build_connector_worker_meta(),
        )
        half.clear_connector_metadata()
        return made
