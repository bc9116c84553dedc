"""The cases of vLLM's test_edge_cases.py: prompts of a few blocks, of which the decode has nothing,
all or a part. Chunks are shorter than the prompts, or there would be nothing to hand over."""

from __future__ import annotations

from pathlib import Path

from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Oracle, Process, assert_same, expected_hit, kvferry
from tests.real_vllm.test_handovers import ask, prefill
from tests.servers.process import LOCALHOST, free_ports

CHUNK = BLOCK = 32


def hit(prompt: list[int], local: int = 0) -> int:
    """Tokens that come from the prefill's memory."""
    return max(0, expected_hit(len(prompt), chunk=CHUNK, block=BLOCK) - local)


def test_short_equal_and_partly_known_prompts_are_decoded_as_by_one_engine(
    models: dict[str, Path], make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    short, prompt, equal = make_prompt(3), make_prompt(70), make_prompt(64)
    longer = make_prompt(110, prompt)
    here, there = free_ports(2)
    p_options, d_options = (
        kvferry(
            f"peer://{LOCALHOST}:{other}", serve=f"{LOCALHOST}:{port}", chunk_tokens=CHUNK,
            load_timeout_seconds=60,
        )
        for port, other in ((here, there), (there, here))
    )  # fmt: skip
    model, block = models["plain"], {"block_size": BLOCK}
    with (
        first.engine(model, p_options, **block) as prefiller,
        second.engine(model, d_options, **block) as decoder,
    ):

        def by_the_pair(prompt: list[int], *, external: int) -> float:
            """Tokens from the prefill's memory, for the first of two times."""
            own = oracle([prompt])
            [params] = prefill(prefiller, [prompt])
            assert params["kvferry"]["chunks"] == len(prompt) // CHUNK
            said = decoder.generate([ask(prompt, params)])
            assert_same(own, said)
            assert said.external == external
            assert said.counted("remote_prefills_computed") == 0
            assert said.counted("hook_failed", "contract_violation") == 0
            return said.counted("tier_read_bytes")

        assert by_the_pair(short, external=0) == 0
        # The decode has all of it, in its own prefix cache, and the prefill nothing.
        decoder.generate([prompt])
        by_the_pair(prompt, external=0)
        # It has a part, and the rest comes from the prefill.
        assert by_the_pair(longer, external=hit(longer, hit(prompt))) > 0
        # Whole chunks: the last block is computed. The second time, the decode has all of it.
        assert by_the_pair(equal, external=hit(equal)) > 0
        assert by_the_pair(equal, external=0) == 0
