"""Asks kvferry's back end in SGLang, by SGLang's own hashes, whether one model gets another's page.

`tests/real_vllm/wrong_model.py` runs this twice, as the first model and as the second, with the
cases as JSON. No server runs: SGLang's own controller attaches the back end to its own host pool.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from examples.cpu.sglang_tiers import PAGE, Engine, start_rank
from kvferry.adapters.sglang import identity
from tests.real_sglang.updates import Updates

NUM_PAGES = 2
TOKENS = list(range(1000, 1000 + NUM_PAGES * PAGE))
LORA = "/adapters/tuned"


@contextmanager
def attached(case: dict[str, Any], overrides: dict[str, Any]) -> Iterator[Engine]:
    """A process of SGLang that serves the model that is at the case's place now."""
    identity.WEIGHTS.have_changed = identity.WEIGHTS.left_old_kv = False  # as they are loaded
    from sglang.srt.runtime_context import get_context

    arguments: dict[str, Any] = {"served_model_name": "served", "device": "cpu"}
    if overrides:
        arguments["json_model_override_args"] = json.dumps(overrides)
    if case["has_adapter"]:
        arguments |= {"enable_lora": True, "lora_paths": [f"tuned={LORA}"]}
    with get_context().override_server_args(model_path=case["model"], **arguments):
        one = Engine("page_first", latent=False)
        one.attach(case["store"])
        try:
            yield one
        finally:
            one.detach()


def keys(case: dict[str, Any]) -> list[str]:
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

    # As --lora-paths names an adapter in every process.
    lora = LoRARef.deterministic_id("tuned", LORA) if case["has_adapter"] else None
    return list(get_hash_str(TOKENS, storage_namespace_seed(lora, None), page_size=PAGE))


def page(one: Engine, number: int, *, is_other: bool) -> torch.Tensor:
    """What a model computes for a page."""
    empty = one.host.get_dummy_flat_data_page()
    return torch.full_like(empty, 1 + number + 10 * is_other)


def write(one: Engine, case: dict[str, Any]) -> None:
    for number in range(NUM_PAGES):
        one.host.set_from_flat_data_page(number * PAGE, page(one, number, is_other=False))
    done = one.controller.storage_backend.batch_set_v1(keys(case), torch.arange(len(TOKENS)))
    assert done == [True] * NUM_PAGES


def verdict(one: Engine, case: dict[str, Any]) -> str:
    one.host.kv_buffer.zero_()
    backend, asked = one.controller.storage_backend, keys(case)
    found = backend.batch_exists(asked)
    if not found:
        return "miss"
    right = backend.batch_get_v1(asked[:found], torch.arange(found * PAGE))
    assert all(right), "a page that is there did not come"
    is_own = all(
        torch.equal(
            one.host.get_data_page(number * PAGE),
            page(one, number, is_other=case["is_other"]),
        )
        for number in range(found)
    )
    return "right" if is_own else "**wrong page**"


def run(case: dict[str, Any], *, is_first: bool) -> str:
    """Return what the second model gets; nothing where that is asked of another process."""
    if not is_first and case["is_updated"]:
        return ""
    with attached(case, {} if is_first else case["overrides"]) as one:
        if not is_first:
            return verdict(one, case)
        write(one, case)
        if not case["is_updated"]:
            return ""
        Updates(one).update(flush_cache=True)
        return verdict(one, case)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        start_rank(Path(scratch) / "rendezvous")
    cases = json.loads(sys.argv[2])
    print(json.dumps([run(case, is_first=sys.argv[1] == "first") for case in cases]))


if __name__ == "__main__":
    main()
