"""Models with recurrent states: a hit is KV of another process, and the state at its end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvferry.store.url import open_one
from kvferry.survey import survey
from tests.real_vllm.conftest import Explain, MakePrompt, Pool
from tests.real_vllm.harness import (
    Answers,
    Engine,
    EngineError,
    Process,
    assert_same,
    kvferry,
    wait_for_records,
)
from tests.real_vllm.host import RELEASE
from tests.real_vllm.hybrids import (
    BLOCKS,
    MODELS,
    NEED_TORCHVISION,
    options_of,
    with_torchvision,
    write_hybrid,
)
from tests.real_vllm.test_handovers import ask, prefill
from tests.real_vllm.test_ranks import TWO_RANKS
from tests.real_vllm.test_sessions import assert_says

pytestmark = pytest.mark.skipif(RELEASE < (0, 32), reason="its host hands off no states")

LENGTHS = (100, 129, 256, 400, 777)

EXACT = 1e-6
"""The bytes of a hit of another process are those of the engine's own, so are its answers."""


@pytest.fixture(scope="session")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {arch: write_hybrid(root, arch) for arch in MODELS}


WITHOUT_ITS_KERNEL = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
"""With vLLM's own rotary kernel for a CPU, LFM2's answers depend on how steps divide a prompt."""


def num_records(lengths: Iterable[int], block: int) -> int:
    """A chunk for each whole block, and the state behind it: steps end with blocks."""
    return 2 * sum(length // block for length in lengths)


def computed(engine: Engine, prompts: Iterable[list[int]]) -> Answers:
    """What the engine answers if it loads nothing and finds nothing of its own."""
    engine.process.call("reset", 30, connector=False)
    alone = {"kvferry": {"load": False, "store": False}}
    answers = engine.generate([ask(prompt, alone) for prompt in prompts])
    assert (answers.local, answers.external) == (0, 0)
    return answers


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=pytest.mark.sweep) if arch in NEED_TORCHVISION else arch
        for arch in MODELS
    ],
)
def test_a_hybrid_model_goes_on_from_the_states_of_another_process_as_from_its_own(
    arch: str, tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process, pool: Pool, explain: Explain,
) -> None:  # fmt: skip
    if arch in NEED_TORCHVISION:
        first, second = with_torchvision(pool, tmp_path / "names")
    model, options, block = hybrids[arch], options_of(arch), BLOCKS.get(arch, 128)
    connector = kvferry(tmp_path / "store", chunk_tokens=block)
    prompts = [make_prompt(length) for length in LENGTHS]
    hits = [(length - 1) // block * block for length in LENGTHS]
    with second.engine(model, **options) as engine:
        engine.generate(prompts, max_tokens=1)
        own = engine.generate(prompts)
    assert [answer.cached for answer in own] == hits
    with first.engine(model, connector, **options) as engine:
        cold = engine.generate(prompts)
        wait_for_records(tmp_path / "store", num_records(LENGTHS, block))
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate(prompts)
    assert_same(own, cold)
    assert_same(own, warm, EXACT)
    assert [answer.cached for answer in warm] == hits
    assert warm.external == sum(hits)
    assert warm.counted("hook_failed", "failed", "contract") == 0
    url, of = (tmp_path / "store").as_uri(), ("--model", str(model), "--block-size", str(block))
    said = explain([url], prompts[-1], *of)
    [found] = said["namespaces"]
    assert (said["hit_tokens"], found["states"]) == (hits[-1], [*range(block, 777, block)])
    loaded = warm.metrics["vllm:kvferry_loaded_state_bytes_total"]
    assert loaded == sum(map(bool, hits)) * found["state_bytes"] > 0
    with open_one(url) as store:
        [held] = survey(store, store.catalogue().described())
    assert held.namespace is not None
    assert f"a recurrent state after every {block} tokens has" in second.log.read_text()
    # Kernels of other platforms keep states in other orders.
    assert held.namespace.description["config"]["states_of"] == "vllm on cpu"


def test_prompts_that_begin_alike_hit_from_the_third_process_on(
    tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """vLLM keeps the last state of a prompt. The second process asks for one where its prompt and
    that of the first part."""
    model = hybrids["lfm2"]
    at_once = {**options_of("lfm2"), "max_num_batched_tokens": 2048, **WITHOUT_ITS_KERNEL}
    connector = kvferry(tmp_path, chunk_tokens=128)
    shared = make_prompt(300)
    prompts = [make_prompt(700, shared) for _ in range(3)]
    seen = 0
    for prompt, process, cached, new in zip(
        prompts, (first, second, first), (0, 0, 256), (5 + 1, 3 + 2, 0), strict=True
    ):
        with process.engine(model, connector, **at_once) as engine:
            answers = engine.generate([prompt])
            assert answers.external == cached
            seen += new
            wait_for_records(tmp_path, seen)
            assert_same(computed(engine, [prompt]), answers)


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
    with second.engine(model, connector, **options) as engine:
        warm = engine.generate([longer])
        assert warm.external == 384
        assert_same(computed(engine, [longer]), warm)


OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 256),
    "weights": ({}, 0),
    "dtype": ({"dtype": "bfloat16"}, 0),
    "dtype of states": ({"mamba_ssm_cache_dtype": "bfloat16"}, 0),
}
"""By what differs: options of an engine, and what it hits."""


def test_a_state_of_another_model_is_anothers(
    tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    model, options = hybrids["granitemoehybrid"], options_of("granitemoehybrid")
    connector = kvferry(tmp_path / "store", chunk_tokens=128)
    prompt = make_prompt(300)
    with first.engine(model, connector, **options) as engine:
        engine.generate([prompt])
        wait_for_records(tmp_path / "store", num_records([300], 128))
    for what, (more, hit) in OTHERS.items():
        of = write_hybrid(tmp_path, "granitemoehybrid", seed=6) if what == "weights" else model
        with second.engine(of, connector, **options, **more) as engine:
            other = engine.generate([prompt])
            assert other.external == hit, what
            assert_same(computed(engine, [prompt]), other)


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
    connector = kvferry(tmp_path / "store", chunk_tokens=128)
    lengths, hits, seen = (300, 400), 256 + 384, set[Path]()
    with (
        pool.get("ranks").engine(model, connector, **options, **TWO_RANKS) as two,
        first.engine(model, connector, **options) as one,
    ):
        for writer, reader in ((two, one), (one, two)):
            prompts = [make_prompt(length) for length in lengths]
            cold = writer.generate(prompts)
            stored = wait_for_records(tmp_path / "store", len(seen) + num_records(lengths, 128))
            reader.wait_until_known(stored - seen)
            warm = reader.generate(prompts)
            assert_same(cold, warm)
            assert warm.external == hits
            seen = stored


def converse(process: Process, pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return process.call("converse", 70, pieces=pieces, preempted=True, deadline=60)


def test_a_day_of_a_hybrid(
    tmp_path: Path, hybrids: dict[str, Path], make_prompt: MakePrompt,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """Prefilled in one engine, decoded in another; then resets, sleep, aborts, and
    sessions that lose their blocks."""
    model, options = hybrids["granitemoehybrid"], options_of("granitemoehybrid")
    (tmp_path / "weights").write_text("of the start")
    connector = kvferry(
        tmp_path / "store", chunk_tokens=128, weights_version_file=str(tmp_path / "weights")
    )
    prompts = [make_prompt(length) for length in (300, 400, 777)]
    pieces = [{"token_ids": make_prompt(150), "max_tokens": 6} for _ in range(3)]
    hits = 256 + 384 + 768
    with second.engine(model, **options) as engine:
        engine.generate(prompts, max_tokens=1)
        own = engine.generate(prompts)
        said = converse(second, pieces)
    with first.engine(model, {**connector, "kv_role": "kv_producer"}, **options) as engine:
        given = prefill(engine, prompts)
        wait_for_records(tmp_path / "store", num_records((300, 400, 777), 128))
    with second.engine(model, connector, **options) as engine:
        blocks = second.call("blocks", 30)
        decoded = engine.generate([ask(*pair) for pair in zip(prompts, given, strict=True)])
        assert_same(own, decoded, EXACT)
        assert decoded.external == hits
        assert decoded.counted("remote_prefills_total") == len(prompts)
        for event in ("reset", "sleep"):
            more = {"connector": False} if event == "reset" else {"level": 1}
            second.call(event, 60, **more)
            again = engine.generate(prompts)
            assert_same(own, again, EXACT)
            assert again.external == hits
            for one, other in zip(own, again, strict=True):
                assert one.steps is not None
                assert other.steps is not None
                assert other.steps <= one.steps + 1 or event == "sleep", "it is in memory"
        second.call("reset", 30, connector=False)
        engine.generate([{"token_ids": prompts[-1], "abort_after": steps} for steps in range(6)])
        assert second.call("blocks", 30) == blocks
        for _ in range(2):
            got = converse(second, pieces)
            assert_says(said, got)
        assert got["hits"] >= 128
        assert second.call("blocks", 30) == blocks
        assert engine.generate(prompts[:1]).counted("hook_failed", "contract", "failed") == 0
