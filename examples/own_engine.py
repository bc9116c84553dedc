"""An engine of one's own around kvferry's two roles: a Transformers model of the Llama kind on
paged KV, one request at a time, float32. docs/engine-authors.md explains the letters A to H.

    python examples/own_engine.py MODEL_DIR STORE_URL     # twice: the second run reads
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvferry.cache.build import PrefixCache
from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.spec import EngineSpec
from kvferry.engine.model import cache_argument
from kvferry.identity import identify
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Counters
from kvferry.types import DEFAULT_OPTIONS, NO_EXTRA_KEYS, KVGroup

BLOCK, NUM_BLOCKS, STEP_TOKENS = 16, 512, 256
PROMPT = "One line of a text that is asked about again and again.\n" * 30 + "In short:"


@dataclass
class Request:  # B: what the scheduler role reads of a request
    request_id: str
    all_token_ids: list[int]
    num_prompt_tokens: int
    extra_keys: object = NO_EXTRA_KEYS
    handover: object = None
    options: object = DEFAULT_OPTIONS
    block_ids: object = ()
    num_computed: int = 0


class Engine:
    def __init__(self, model_dir: Path, store: str, *, strict: bool = False) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        config = self.model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # A: the model, the engine, and the tensors that hold its KV.
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        shape = {"num_layers": layers, "num_kv_heads": heads, "content_size": 2 * dim}
        group = KVGroup(**shape, dtype="float32", block_size=BLOCK)
        identity = identify(model_dir, dtype="float32", deviations={}, name=str(model_dir))
        shard = tensor_parallel_shard((group,), rank=0, world_size=1)
        spec = EngineSpec(identity=identity, groups=(group,), shard=shard, host_recomputes=True)
        self.counters = Counters()
        self.cache = PrefixCache(spec, {"store": store}, self.counters)
        self.cache.wait_ready(10.0)
        self.scheduler = GuardedScheduler(
            self.cache.scheduler(), self.counters, block_size=BLOCK, strict=strict
        )
        self.driver = StepDriver(self.cache.worker(), self.counters, strict=strict)
        pool = (NUM_BLOCKS, heads, BLOCK, 2 * dim)
        self.kv = {f"layer.{layer}": torch.zeros(pool) for layer in range(layers)}
        self.driver.role.register_kv_caches(self.kv)
        self.finished: set[str] = set()

    def generate(self, request_id: str, prompt: list[int], num_tokens: int) -> tuple[int, Request]:
        request = Request(request_id, list(prompt), len(prompt))
        self.scheduler.on_new_request(request)
        # C: ask until there is an answer. The cache reads while steps go on.
        while (hit := self.scheduler.lookup(request, 0).num_tokens) is None:
            self.step(None, 0)
        # D: give it blocks (never block 0), and say so. The hit is loaded in the next step.
        request.block_ids = list(range(1, 1 + -(-(len(prompt) + num_tokens) // BLOCK)))
        request.num_computed = hit
        self.scheduler.update_after_alloc(request, (request.block_ids,), hit)
        while len(request.all_token_ids) < len(prompt) + num_tokens:
            left = len(request.all_token_ids) - request.num_computed
            logits = self.step(request, min(left, STEP_TOKENS))
            if logits is not None and request.num_computed == len(request.all_token_ids):
                request.all_token_ids.append(int(logits.argmax()))
        # G: say that it ended; only then give its blocks to others.
        self.scheduler.request_finished(request, (request.block_ids,))
        self.finished.add(request_id)
        return hit, request

    def step(self, request: Request | None, num_tokens: int) -> torch.Tensor | None:
        """Compute the next tokens of a request, or none. Returns None if a load failed."""
        finished, self.finished = self.finished, set()
        scheduled = request and SimpleNamespace(  # E: what the role reads of a request in a step
            request=request, block_ids=(request.block_ids,),
            num_computed_tokens=request.num_computed, num_scheduled_tokens=num_tokens,
        )  # fmt: skip
        plan = self.scheduler.build_plan(SimpleNamespace(
            scheduled=[scheduled] if request else [],
            preempted_request_ids=set(), finished_request_ids=finished,
        ))  # fmt: skip
        if request is None:
            self.scheduler.update_output(self.driver.no_forward(plan, finished))
            return None
        with self.driver.step(plan, finished) as step:
            logits = self.forward(request, num_tokens)
        request.num_computed += num_tokens
        self.scheduler.update_output(step.output)
        bad = step.output.invalid_block_ids  # F: compute again what could not be loaded
        good = len(list(takewhile(lambda block: block not in bad, request.block_ids)))
        if good * BLOCK < request.num_computed:
            request.num_computed = good * BLOCK
            return None
        return logits

    def forward(self, request: Request, num_tokens: int) -> torch.Tensor:
        start, end = request.num_computed, request.num_computed + num_tokens
        cache, blocks = DynamicCache(), torch.tensor(request.block_ids)
        places = torch.arange(start, end)
        for layer, kv in enumerate(self.kv.values()):
            held = kv[blocks].transpose(0, 1).flatten(1, 2)[:, :start]  # [heads, tokens, content]
            cache.update(*held.unsqueeze(0).chunk(2, dim=-1), layer)
        with torch.inference_mode():
            tokens = torch.tensor([request.all_token_ids[start:end]])
            logits = self.model(tokens, **{cache_argument(self.model): cache}).logits[0, -1]
        for kv, layer in zip(self.kv.values(), cache.layers, strict=True):
            content = torch.cat([layer.keys, layer.values], dim=-1)[0, :, start:end]
            kv[blocks[places // BLOCK], :, places % BLOCK] = content.transpose(0, 1)
        return logits

    def close(self) -> None:  # H: let saves end, then close the roles, then the cache.
        while self.scheduler.has_work():
            self.step(None, 0)
        for part in (self.scheduler, self.driver, self.cache):
            part.close()


def main(model_dir: str, store: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt = tokenizer(PROMPT)["input_ids"]
    engine = Engine(Path(model_dir), store)
    hit, request = engine.generate("request-1", prompt, 8)
    engine.close()
    print(f"{len(prompt)} prompt tokens, {hit} read from the store")
    print(tokenizer.decode(request.all_token_ids[len(prompt) :]))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
