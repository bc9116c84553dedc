"""Two servers that list each other, beside one with the sum of their memory, on one trace."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Engine, Process, kvferry
from tests.servers.process import LOCALHOST, free_ports

CHUNKS_EACH = 36
"""In the memory of a replica; all documents have 120."""

DOCUMENTS, REQUESTS, DOCUMENT_TOKENS = 40, 240, 390
LEAST_SHARE = 0.95
ROOM = 1 << 16
"""Beyond the rows of a slot."""


def memory_for(model: Path, chunks: int) -> int:
    """`memory_bytes` for so many chunks of 128 tokens in float32."""
    config = json.loads((model / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    width = 2 * config["num_key_value_heads"] * head * 4
    return chunks * (128 * config["num_hidden_layers"] * width + ROOM)


def hits_of(
    engines: Sequence[Engine], documents: list[list[int]], trace: list[tuple[int, int]]
) -> int:
    """Tokens of all prompts that were not computed, where each request goes to the engine that the
    trace names."""
    found = 0
    for number, (document, engine) in enumerate(trace):
        [answer] = engines[engine % len(engines)].generate(
            [[*documents[document], 3 + number % 300]], max_tokens=1, logprobs=0
        )
        assert answer.reason == "length"
        found += answer.cached or 0
    return found


def test_two_replicas_hit_what_one_engine_with_the_sum_of_their_memory_hits(
    models: dict[str, Path], make_prompt: MakePrompt, first: Process, second: Process
) -> None:
    model = models["plain"]
    documents = [make_prompt(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    chance = random.Random(31)
    wanted = chance.choices(
        range(DOCUMENTS), [1 / (1 + rank) for rank in range(DOCUMENTS)], k=REQUESTS
    )
    trace = [(document, chance.randrange(2)) for document in wanted]
    # The engine's own prefix cache holds one document or two.
    shape: dict[str, Any] = {"kv_cache_memory_bytes": memory_for(model, 10)}

    def connector(here: int, there: int, chunks: int) -> dict[str, Any]:
        return kvferry(
            f"peer://{LOCALHOST}:{there}",
            serve=f"{LOCALHOST}:{here}",
            memory_bytes=memory_for(model, chunks),
            load_timeout_seconds=60,
        )

    one, other = free_ports(2)
    with ExitStack() as stack:
        pair = [
            stack.enter_context(process.engine(model, connector(here, there, CHUNKS_EACH), **shape))
            for process, here, there in ((first, one, other), (second, other, one))
        ]
        replicas = hits_of(pair, documents, trace)
    [port] = free_ports(1)
    with first.engine(model, connector(port, port, 2 * CHUNKS_EACH), **shape) as engine:
        alone = hits_of([engine], documents, trace)
    share = replicas / alone
    assert alone > REQUESTS * DOCUMENT_TOKENS / 4
    assert share >= LEAST_SHARE
