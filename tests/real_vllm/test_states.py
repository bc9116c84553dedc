"""Models with recurrent states: a hit is KV of another process, and the state at its end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.damage import by_position
from tests.real_vllm.harness import EngineError, Process, assert_same, kvferry, wait_for_records
from tests.real_vllm.host import RELEASE
from tests.real_vllm.hybrids import BLOCKS, MODELS, options_of, write_hybrid
from tests.real_vllm.test_ranks import TWO_RANKS

pytestmark = pytest.mark.skipif(RELEASE < (0, 32), reason="its host hands off no states")

LENGTHS = (100, 129, 256, 400, 777)

EXACT = 1e-6
"""The bytes of a hit of another process are those of the engine's own, so are its answers."""


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {arch: write_hybrid(root, arch) for arch in MODELS}


def num_records(lengths: Iterable[int], block: int) -> int:
    """A chunk for each whole block, and the state behind it: steps end with blocks."""
    return 2 * sum(length // block for length in lengths)


@pytest.mark.parametrize("arch", MODELS)
def test_a_hybrid_model_goes_on_from_the_states_of_another_process_as_from_its_own(
    arch: str, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, options, block = hybrids[arch], options_of(arch), BLOCKS.get(arch, 128)
    connector = kvferry(tmp_path, chunk_tokens=block)
    prompts = [make_prompt(length) for length in LENGTHS]
    hits = [(length - 1) // block * block for length in LENGTHS]
    with second.engine(model, **options) as engine:
        engine.generate(prompts, max_tokens=1)
        own = engine.generate(prompts)
    assert [answer.cached for answer in own] == hits
    with first.engine(model, connector, **options) as engine:
        cold = engine.generate(prompts)
        wait_for_records(tmp_path, num_records(LENGTHS, block))
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm, EXACT)
    assert [answer.cached for answer in warm] == hits
    assert warm.external == sum(hits)
    assert warm.counted("hook_failed", "failed", "contract") == 0


def test_prompts_that_begin_alike_hit_from_the_third_process_on(
    tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """vLLM keeps the last state of a prompt. The second process asks for one where its prompt and
    that of the first part."""
    model = hybrids["lfm2"]
    at_once = {**options_of("lfm2"), "max_num_batched_tokens": 2048}
    connector = kvferry(tmp_path, chunk_tokens=128)
    shared = make_prompt(300)
    prompts = [make_prompt(700, shared) for _ in range(3)]
    with second.engine(model, **at_once) as engine:
        expected = engine.generate(prompts)
    seen = 0
    for prompt, process, cached, one, new in zip(
        prompts, (first, second, first), (0, 0, 256), expected, (5 + 1, 3 + 2, 0), strict=True
    ):
        with process.engine(model, connector, **at_once) as engine:
            answers = engine.generate([prompt])
            assert answers.external == cached
            assert_same([one], answers)
            seen += new
            wait_for_records(tmp_path, seen)


def test_states_that_decoding_reached_are_gone_on_from(
    tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, options = hybrids["granitemoehybrid"], options_of("granitemoehybrid")
    connector = kvferry(tmp_path, chunk_tokens=128, save_generated=True)
    prompt = make_prompt(100)
    with first.engine(model, connector, **options) as engine:
        [answer] = engine.generate([prompt], max_tokens=300)
        wait_for_records(tmp_path, num_records([399], 128))
    longer = make_prompt(470, [*prompt, *answer.tokens])
    with second.engine(model, **options) as engine:
        expected = engine.generate([longer])
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate([longer])
    assert warm.external == 384
    assert_same(expected, warm)


@pytest.mark.parametrize("num_blocks", [26, 21])
def test_hits_while_blocks_are_short_are_right_and_the_engine_lives(
    num_blocks: int, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, options = hybrids["granitemoehybrid"], options_of("granitemoehybrid")
    connector = kvferry(tmp_path, chunk_tokens=128, save_generated=True)
    prompts = [make_prompt(length) for length in (300, 300, 400, 400)]
    with second.engine(model, **options) as engine:
        expected = engine.generate(prompts, max_tokens=400)
    with first.engine(model, connector, **options) as engine:
        engine.generate(prompts, max_tokens=1)
        wait_for_records(tmp_path, num_records(map(len, prompts), 128))
    few = {**options, "num_gpu_blocks_override": num_blocks, "max_model_len": 1024}
    with second.engine(model, connector, **few) as engine:
        warm = engine.generate(prompts, max_tokens=400, together=True)
        assert_same(expected, warm)
        assert warm.external >= 256 + 256 + 384 + 384
        again = engine.generate(prompts, max_tokens=400, together=True)
        assert_same(expected, again)
        assert again.counted("hook_failed", "load_failed", "contract") == 0


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_damaged_state_is_none(
    policy: str, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, options = hybrids["granitemoehybrid"], options_of("granitemoehybrid")
    connector = kvferry(tmp_path, policy, chunk_tokens=128)
    prompt = make_prompt(777)
    with first.engine(model, connector, **options) as engine:
        expected = engine.generate([prompt])
        files = wait_for_records(tmp_path, num_records([777], 128))
    states = [path for path in files if is_state(path)]
    assert len(states) == 6
    positions = by_position(tmp_path)
    last, before = sorted(states, key=positions.__getitem__, reverse=True)[:2]
    content = bytearray(last.read_bytes())
    content[len(content) // 3] ^= 1
    last.write_bytes(content)
    before.unlink()
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate([prompt])
    assert_same(expected, warm)
    assert warm.external == 512
    assert warm.counted("failed") == 0


def is_state(path: Path) -> bool:
    with path.open("rb") as file:
        return b'"state.0"' in file.read(4096)


REFUSED: dict[str, dict[str, Any]] = {
    "mamba_cache_mode='none'.*enable-prefix-caching": {"enable_prefix_caching": False},
    "num_speculative_blocks=2": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2,
        },
    },
}  # fmt: skip


def test_what_a_prefix_cannot_go_on_from_is_refused_in_a_line(
    tmp_path: Path, hybrids: dict[str, Path], second: Process
) -> None:
    model, options = hybrids["granitemoehybrid"], options_of("granitemoehybrid")
    del options["mamba_cache_mode"]
    for message, more in REFUSED.items():
        with pytest.raises(EngineError, match=message) as refusal:
            second.start(model, kvferry(tmp_path / "store"), **{**options, **more})
        assert len(str(refusal.value).splitlines()) == 1
        second.call("stop", 30)


@pytest.mark.parametrize(
    ("arch", "kv_heads"), [("granitemoehybrid", 2), ("granitemoehybrid", 1), ("nemotron_h", 2)]
)
def test_two_ranks_and_one_go_on_from_each_others_states(
    arch: str, kv_heads: int, tmp_path: Path, make_prompt: MakePrompt,
    first: Process, pool: Pool,
) -> None:  # fmt: skip
    """B and C of the convolution: one group, which both ranks copy, or a group for each. With one
    kv head both ranks hold that, and still other heads of the states."""
    model = write_hybrid(tmp_path, arch, num_key_value_heads=kv_heads)
    options = {**options_of(arch), "block_size": 128}
    prompts = [make_prompt(length) for length in (300, 400)]
    hits = 256 + 384
    ranks = pool.get("ranks")
    for writer, reader in ((ranks, first), (first, ranks)):
        store = tmp_path / ("two" if writer is ranks else "one")
        connector = kvferry(store, chunk_tokens=128)
        of = {ranks.pid: {**options, **TWO_RANKS}, first.pid: options}
        with writer.engine(model, connector, **of[writer.pid]) as engine:
            cold = engine.generate(prompts)
            wait_for_records(store, num_records((300, 400), 128))
        with reader.engine(model, connector, **of[reader.pid]) as engine:
            warm = engine.generate(prompts)
        assert_same(cold, warm)
        assert warm.external == hits
