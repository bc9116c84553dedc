"""What audits of hits cost: time to first token of hits that are audited and of hits that are not.

An audit computes part of a hit anew and compares it with the stored KV. The embedded engine runs a
random model in the shape of SmolLM2-135M. The limit is a cold prefill; hits must stay far below.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import Options
from benchmarks.report import Row
from kvferry.engine import LLM, SamplingParams
from kvferry.testing.models import make_tiny_model

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}

ONE_TOKEN = SamplingParams(max_tokens=1)


def run(options: Options) -> Sequence[Row]:
    """Return a row without a store, and one for each value of `audit` with the first hit of an
    engine and the median of later hits. The last row has what a rate of 1 % costs, relative to a
    cold prefill."""
    num_tokens, hits = (300, 1) if options.quick else (2000, 15)
    shape = {**SHAPE, "num_hidden_layers": 2} if options.quick else SHAPE
    model = make_tiny_model(options.directory / "model", seed=options.seed, **shape)
    prompt = random.Random(options.seed).choices(range(3, SHAPE["vocab_size"]), k=num_tokens)
    store = f"file://{options.directory}/store"
    cold = statistics.median(_first_tokens(model, prompt, 3))
    _first_tokens(model, prompt, 1, store=store)
    rows: list[dict[str, str | int | float | None]] = [
        {"audit": "no store", "later_ms": 1e3 * cold}
    ]
    medians = []
    for audit in ("off", "first", 1.0):
        first, *later = _first_tokens(model, prompt, hits + 1, store=store, audit=audit)
        medians.append(statistics.median(later))
        rows.append({"audit": str(audit), "first_ms": 1e3 * first, "later_ms": 1e3 * medians[-1]})
    rows[-1]["rate_of_1_percent"] = 0.01 * (medians[-1] - medians[0]) / cold
    return rows


def _first_tokens(
    model: Path,
    prompt: Sequence[int],
    count: int,
    *,
    store: str | None = None,
    audit: object = "off",
) -> list[float]:
    """Run one prompt `count` times in one engine; return each run's seconds to the first token."""
    options = None if store is None else {"audit": audit}
    config: dict[str, Any] = {"prefix_caching": False, "max_batched_tokens": 4096}
    found = []
    with LLM(model, store=store, connector_options=options, **config) as llm:
        llm.generate([prompt[:3]], ONE_TOKEN)
        for _ in range(count):
            (completion,) = llm.generate([list(prompt)], ONE_TOKEN)
            found.append(completion.ttft_seconds or 0.0)
            llm.drain(10.0)
    return found
