"""Asks SGLang's file back end, by SGLang's own hashes, whether one model gets another one's page.

`wrong_model.py` runs it with SGLang on Python's path. It imports nothing of this project, and no
server runs. It makes the back end as a server does, once for each model, with the name that both
models are served under.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PAGE_TOKENS = 64
TOKENS = range(1000, 1000 + 2 * PAGE_TOKENS)


def verdict(case: dict[str, Any]) -> str:
    import torch
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    def opened() -> Any:
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=False, enable_storage_metrics=False, is_page_first_layout=True,
            model_name="served",
        )  # fmt: skip
        return HiCacheFile(config, case["directory"])

    # As --lora-paths names an adapter in every process.
    lora = LoRARef.deterministic_id("tuned", "/adapters/tuned") if case["has_adapter"] else None
    keys = get_hash_str(list(TOKENS), storage_namespace_seed(lora, None), page_size=PAGE_TOKENS)
    pages = {
        name: [torch.full((4096,), 10 * model + page) for page in range(len(keys))]
        for model, name in enumerate(("first", "second"))
    }
    assert opened().batch_set(keys, pages["first"])
    own = pages["second" if case["is_other"] else "first"]
    second = opened()
    found = second.batch_exists(keys)
    if not found:
        return "miss"
    room = [torch.empty_like(page) for page in own[:found]]
    assert all(page is not None for page in second.batch_get(keys[:found], room))
    is_own = all(torch.equal(got, page) for got, page in zip(room, own, strict=False))
    return "right" if is_own else "**wrong page**"


if __name__ == "__main__":
    print(json.dumps([verdict(case) for case in json.loads(sys.argv[1])]))
