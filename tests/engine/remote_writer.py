"""A script that `test_remote_stores` runs: store a prompt in each of several stores."""

from __future__ import annotations

import json
import sys
from functools import partial

from kvferry.engine import LLM, SamplingParams
from kvferry.store import url
from kvferry.store.tiers.health import Patience
from tests.engine.rank_threads import ThreadedLLM


def main(given: str) -> None:
    """Store the prompts.

    Args:
        given: JSON with `model_dir`, `chunk_tokens` and `writes`; each write has `store`,
            `tensor_parallel_size` and `prompt`.
    """
    # A busy machine may make a write slow, and the store gives a slow write up for good. The
    # engine has no option for that.
    url.Patience = partial(Patience, write_seconds=30.0, close_seconds=60.0)  # type: ignore[misc,assignment]
    work = json.loads(given)
    options = {"connector_options": {"chunk_tokens": work["chunk_tokens"]}}
    for write in work["writes"]:
        size = write["tensor_parallel_size"]
        store = write["store"]
        # Rank processes, which take long to start, only for the store with tiers of several kinds.
        engine = LLM if isinstance(store, list) else ThreadedLLM
        with engine(work["model_dir"], store=store, tensor_parallel_size=size, **options) as llm:
            params = SamplingParams(max_tokens=1, ignore_eos=True)
            (completion,) = llm.generate([write["prompt"]], params)
            assert completion.num_external_tokens == 0, "it was there before"
            assert llm.drain(60.0), "saves did not end"


if __name__ == "__main__":
    main(sys.argv[1])
