"""An engine around the cache's roles whose KV is arithmetic: each token's KV and the tokens that it
samples depend on all KV that its blocks hold. It can make each mistake that an author makes."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace

import torch

from kvferry.cache.build import PrefixCache
from kvferry.cache.config import CacheBounds
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.spec import EngineSpec
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import DEFAULT_OPTIONS, NO_EXTRA_KEYS, KVGroup

BLOCK, NUM_BLOCKS, STEP_TOKENS, CONTENT = 16, 128, 96, 4
GROUP = KVGroup(
    num_layers=1, num_kv_heads=1, content_size=CONTENT, dtype="float32", block_size=BLOCK
)


class ToyEngine:
    """Serves a request at a time. `mistake`: what it does wrong."""

    def __init__(self, store, observer, *, strict, mistake="", **guard):
        self.mistake = mistake
        shard = tensor_parallel_shard((GROUP,), 0, 1)
        identity = ModelIdentity(weights=b"t" * 32, config={"model_type": "toy"})
        spec = EngineSpec(identity=identity, groups=(GROUP,), shard=shard, host_recomputes=True)
        options = {"store": store, "chunk_tokens": 32, "memory_bytes": 1 << 22, "audit": "off"}
        self.cache = PrefixCache(spec, options, observer)
        # Of a plan that never comes to its rank, `close` does not wait long for the saves.
        context = self.cache.context
        self.cache.context = replace(context, bounds=CacheBounds(saves_seconds=0.1))
        assert self.cache.wait_ready(60.0)
        self.scheduler = GuardedScheduler(
            self.cache.scheduler(), observer, block_size=BLOCK, strict=strict, **guard
        )
        self.driver = StepDriver(self.cache.worker(), observer, strict=strict)
        self.kv = torch.zeros(NUM_BLOCKS, 1, BLOCK, CONTENT)
        self.driver.role.register_kv_caches({"0": self.kv})
        self.finished = set()

    def generate(self, request_id, prompt, num_tokens):
        self.kv += 1  # blocks hold what was there before
        request = SimpleNamespace(
            request_id=request_id, all_token_ids=list(prompt), num_prompt_tokens=len(prompt),
            extra_keys=NO_EXTRA_KEYS, handover=None, options=DEFAULT_OPTIONS,
        )  # fmt: skip
        if self.mistake != "is never announced":
            self.scheduler.on_new_request(request)
        while (hit := self.scheduler.lookup(request, 0).num_tokens) is None:
            self.step(None, 0)
        first = 0 if self.mistake == "uses block 0" else 1
        end = len(prompt) + num_tokens
        request.blocks = list(range(first, first + -(-(end + BLOCK) // BLOCK)))
        request.computed = hit
        has_room = hit + BLOCK < len(prompt)
        if self.mistake == "takes more than was promised" and hit and has_room:
            hit = request.computed = hit + BLOCK
        if self.mistake != "says nothing of its blocks" or not hit:
            self.scheduler.update_after_alloc(request, (request.blocks,), hit)
        if self.mistake == "counts a block too much" and has_room:
            request.computed += BLOCK
        while len(request.all_token_ids) < end:
            left = len(request.all_token_ids) - request.computed
            token = self.step(request, min(left, STEP_TOKENS))
            if token is not None and request.computed == len(request.all_token_ids):
                request.all_token_ids.append(token)
        self.scheduler.request_finished(request, (request.blocks,))
        self.finished.add(request_id)
        return request.all_token_ids[len(prompt) :]

    def step(self, request, num_tokens):
        finished, self.finished = self.finished, set()
        items = [] if request is None else [SimpleNamespace(
            request=request, block_ids=(request.blocks,),
            num_computed_tokens=request.computed, num_scheduled_tokens=num_tokens,
        )]  # fmt: skip
        step = SimpleNamespace(
            scheduled=items, preempted_request_ids=(), finished_request_ids=finished
        )
        plan = self.scheduler.build_plan(step)
        if request is None:
            self.scheduler.update_output(self.driver.no_forward(plan, finished))
            return None
        if self.mistake == "plans each step twice":
            plan = self.scheduler.build_plan(step)
        with self.driver.step(plan, finished) as driven:
            token = self.forward(request, num_tokens)
        request.computed += num_tokens
        self.scheduler.update_output(driven.output)
        bad = driven.output.invalid_block_ids
        good = len(list(takewhile(lambda block: block not in bad, request.blocks))) * BLOCK
        if good < request.computed:
            request.computed = good
            return None
        return token

    def forward(self, request, num_tokens):
        blocks = torch.tensor(request.blocks)
        for at in range(request.computed, request.computed + num_tokens):
            before = self.kv[blocks].flatten(0, 2)[:at, 0].double().sum() % 1_000_003
            state = (int(before) * 31 + request.all_token_ids[at] * 7 + at + 1) % 1_000_003
            self.kv[request.blocks[at // BLOCK], 0, at % BLOCK] = state
        return 3 + state % 97

    def close(self):
        while self.scheduler.has_work():
            self.step(None, 0)
        for part in (self.scheduler, self.driver, self.cache):
            part.close()
