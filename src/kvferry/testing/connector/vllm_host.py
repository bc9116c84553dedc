"""VLLM's own scheduler, block pool and rank aggregation around a V1 connector, without a model.

Import it only where vLLM is installed. The order of hooks in a step is that of vLLM's
`KVConnectorModelRunnerMixin`.
"""

# ruff: noqa: ANN401 - objects are the host's

from __future__ import annotations

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
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvferry.testing.connector.content import (
    HEAD_DIM,
    HEADS,
    LAYER_NAMES,
    STATE,
    STATE_SHAPE,
    Ask,
    Part,
    Setup,
)
from kvferry.testing.connector.host import CaseEnd, KitHost
from kvferry.v1.driven import V1Plan
from kvferry.v1.types import to_v1_output

_MANY = 1 << 20


def _transfer_config(connector: type[Any], options: dict[str, Any]) -> configs.KVTransferConfig:
    # Two options are vLLM's, not the connector's own.
    fields = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return configs.KVTransferConfig(
        kv_connector=connector.__name__,
        kv_connector_module_path=connector.__module__,
        kv_connector_extra_config={k: v for k, v in options.items() if k not in fields},
        **{name: options.get(name, usual) for name, usual in fields.items()},
    )


def _vllm_config(transfer: configs.KVTransferConfig, setup: Setup) -> configs.VllmConfig:
    model = configs.ModelConfig(
        setup.directory, dtype=setup.dtype, seed=0, skip_tokenizer_init=True
    )
    cache = configs.CacheConfig(block_size=setup.block_size, enable_prefix_caching=True)
    cache.kv_cache_layout = "LBHNC"
    cache.num_gpu_blocks = setup.num_blocks
    if STATE in setup.windows:
        cache.mamba_cache_mode = "align"
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
    groups, tensors = [], []
    for window, layers in setup.groups.items():
        names = [LAYER_NAMES[layer] for layer in layers]
        kind = kv.FullAttentionSpec if window is None else kv.SlidingWindowSpec
        spec = kind(
            block_size=setup.block_size,
            num_kv_heads=HEADS // setup.ranks,
            head_size=HEAD_DIM,
            dtype=getattr(torch, setup.dtype),
            **({} if window is None else {"sliding_window": window}),
        )
        if window == STATE:
            spec = _state_spec(setup, spec.page_size_bytes)
        groups.append(kv.KVCacheGroupSpec(names, spec))
        page = spec.page_size_bytes
        size = page * setup.num_blocks
        tensors += [kv.KVCacheTensor(size, [name], size, page) for name in names]
    return kv.KVCacheConfig(setup.num_blocks, tensors, groups, kv_cache_layout="LBHNC")


def _state_spec(setup: Setup, page: int) -> kv.MambaSpec:
    """The states of a layer, in pages of this size."""
    taps, channels = STATE_SHAPE
    return kv.MambaSpec(
        block_size=setup.block_size,
        shapes=((taps, channels // setup.ranks),),
        dtypes=(getattr(torch, setup.dtype),),
        page_size_padded=page,
        mamba_type=MambaAttentionBackendEnum.SHORT_CONV,
        mamba_cache_mode="align",
    )


class VllmHost(KitHost):
    """See the module."""

    keys_across = current_platform.is_cpu()

    def _build(self, connector: type[Any], options: dict[str, Any]) -> None:
        setup, transfer = self.setup, _transfer_config(connector, options)
        if len(setup.groups) > 1 and not KVConnectorFactory.supports_hma_config(transfer):
            raise CaseEnd(
                "not run", "the class is no SupportsHMA: vLLM gives it one group of layers"
            )
        init_none_hash(sha256)
        config, groups = _vllm_config(transfer, setup), _kv_cache_config(setup)
        self._scheduler = (AsyncScheduler if setup.in_flight > 1 else Scheduler)(
            config, groups, StructuredOutputManager(config), setup.block_size, log_stats=True
        )
        self._scheduler.use_v2_model_runner = setup.runner == 2
        self._scheduler.max_num_encoder_input_tokens = _MANY
        self._scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=_MANY)
        self.scheduler_half = self._scheduler.connector
        for rank in range(setup.ranks):
            of_rank = deepcopy(config)
            of_rank.parallel_config.rank = rank
            self._be_rank(rank)
            self.worker_halves.append(
                KVConnectorFactory.create_connector(of_rank, KVConnectorRole.WORKER, groups)
            )
        self._aggregator = KVOutputAggregator.from_connector(self.scheduler_half, setup.ranks)
        self._hasher = get_request_block_hasher(setup.block_size, sha256)
        self._in_flight: deque[tuple[Any, Any]] = deque()

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
            raise CaseEnd("not run", "vLLM's prefix cache is in use")

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
        names = [part.row.ask.name for part in parts]
        places = {name: i for i, name in enumerate(names)}
        sampled = [self._sample(part) for part in parts]
        plan = V1Plan(
            metadata=output.kv_connector_metadata,
            has_tokens=bool(parts) and self.setup.attention_metadata,
            recving=self._starting,
        )
        made = [
            ModelRunnerOutput(names, places, sampled, kv_connector_output=to_v1_output(report))
            for report in self.step_ranks(
                parts, plan, output.finished_req_ids, late=not output.has_sync_kv_loads
            )
        ]
        merged = self._aggregator.aggregate(made)
        report = merged.kv_connector_output
        self.end_step(parts, report.finished_recving or (), report.kv_connector_stats)
        self._in_flight.append((output, merged))
        while len(self._in_flight) >= (self.setup.in_flight if parts else 1):
            self._learn()
        return bool(parts)

    def _learn(self) -> None:
        """Give the oldest step's results to the scheduler."""
        output, merged = self._in_flight.popleft()
        for made in self._scheduler.update_from_output(output, merged).values():
            for each in made.outputs:
                row = self.rows[each.request_id]
                row.said += each.new_token_ids
                if each.finish_reason is not None:
                    row.reason = row.reason or str(each.finish_reason)

    def _parts(self, output: Any) -> list[Part]:
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
            parts.append(Part(self.rows[name], starts[name], starts[name] + count))
        return parts

    def _sample(self, part: Part) -> list[int]:
        is_chunk = self._scheduler.requests[part.row.ask.name].is_prefill_chunk
        return [] if is_chunk else [part.row.next_token(part.stop)]
