"""A connector as a third party writes it for vLLM. It keeps a file per block under the hash of the
token prefix, saves layer by layer, and loads in one go. `test_driven` changes only the package in
its import line.
"""

import hashlib
import os
from dataclasses import dataclass, field

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class BlockOp:
    key: str
    block_id: int


@dataclass
class SampleMetadata(KVConnectorMetadata):
    loads: list[BlockOp] = field(default_factory=list)
    saves: list[BlockOp] = field(default_factory=list)


@dataclass
class Tracked:
    token_ids: list[int]
    block_ids: list[int]


class SampleConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        self.path = self._kv_transfer_config.get_from_extra_config("path", None)
        self.requests = {}  # scheduler: id -> Request, as vLLM handed it over
        self.tracked = {}
        self.to_load = {}
        self.open_saves = {}  # worker: block id -> {layer: tensor}
        self.failed_blocks = set()

    # ---- scheduler

    def key(self, token_ids, end):
        return hashlib.sha256(",".join(map(str, token_ids[:end])).encode()).hexdigest()

    def file(self, key):
        return os.path.join(self.path, f"{key}.pt")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens = list(request.all_token_ids)
        end = num_computed_tokens
        while end + self.block_size <= len(tokens) - 1:
            if not os.path.exists(self.file(self.key(tokens, end + self.block_size))):
                break
            end += self.block_size
        return end - num_computed_tokens, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.requests[request.request_id] = request
        if num_external_tokens > 0:
            self.to_load[request.request_id] = (
                list(request.all_token_ids),
                blocks.get_block_ids()[0],
                num_external_tokens,
            )

    def build_connector_meta(self, scheduler_output):
        meta = SampleMetadata()
        for tokens, block_ids, num in self.to_load.values():
            for index in range(num // self.block_size):
                key = self.key(tokens, (index + 1) * self.block_size)
                meta.loads.append(BlockOp(key, block_ids[index]))
        self.to_load.clear()
        for new in scheduler_output.scheduled_new_reqs:
            self.tracked[new.req_id] = Tracked(list(new.prompt_token_ids), list(new.block_ids[0]))
            self.add_saves(meta, scheduler_output, new.req_id, new.num_computed_tokens)
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            tracked = self.tracked[req_id]
            tracked.token_ids = list(self.requests[req_id].all_token_ids)
            new_block_ids = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                tracked.block_ids = list(new_block_ids[0])
            elif new_block_ids is not None:
                tracked.block_ids.extend(new_block_ids[0])
            self.add_saves(meta, scheduler_output, req_id, cached.num_computed_tokens[i])
        for req_id in scheduler_output.finished_req_ids:
            self.tracked.pop(req_id, None)
            self.requests.pop(req_id, None)
        return meta

    def add_saves(self, meta, scheduler_output, req_id, num_computed):
        tracked = self.tracked[req_id]
        end = num_computed + scheduler_output.num_scheduled_tokens[req_id]
        for index in range(num_computed // self.block_size, end // self.block_size):
            key = self.key(tracked.token_ids, (index + 1) * self.block_size)
            meta.saves.append(BlockOp(key, tracked.block_ids[index]))

    # ---- worker

    def register_kv_caches(self, kv_caches):
        self.kv_caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        for op in self._get_connector_metadata().loads:
            try:
                layers = torch.load(self.file(op.key))
            except (OSError, RuntimeError, EOFError):
                self.failed_blocks.add(op.block_id)
                continue
            for name, layer in forward_context.no_compile_layers.items():
                layer.kv_cache[op.block_id] = layers[name]

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for op in self._get_connector_metadata().saves:
            layers = self.open_saves.setdefault(op.block_id, {})
            layers[layer_name] = kv_layer[op.block_id].clone()

    def wait_for_save(self):
        for op in self._get_connector_metadata().saves:
            torch.save(self.open_saves.pop(op.block_id), self.file(op.key))

    def get_block_ids_with_load_errors(self):
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed
