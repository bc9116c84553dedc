"""One engine prefills, another decodes, over a directory that both share or from memory to memory;
the parameters are those of vLLM's toy_proxy_server.py."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.cache.deciding.policy import RETRY_SLOW_SECONDS
from kvferry.testing.models import make_tiny_model
from tests.real_vllm.conftest import MakePrompt, Pool
from tests.real_vllm.harness import (
    Answer,
    Engine,
    Oracle,
    Process,
    assert_same,
    expected_hit,
    kvferry,
    records,
    total,
    wait_for_records,
)
from tests.real_vllm.host import RELEASE
from tests.real_vllm.test_models import APART, SHAPE, WINDOWED, own_answers
from tests.servers.process import LOCALHOST, free_ports

TOY_PROXY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

WRITTEN_BY_CLIENTS: list[Any] = [
    {"do_remote_prefill": True, "remote_block_ids": []},
    {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": [1]},
    {"do_remote_prefill": True, "do_remote_decode": True, "remote_num_tokens": "9"},
    {"do_remote_prefill": True, "kvferry": {"v": 7}},
    {"remote_kv_source": {"remote_host": 5}},
]
"""Some of these stop an engine with NixlConnector."""

CHILDREN = {"n": 2, "temperature": 1.0, "top_k": 1}
"""Of a request with two sequences. vLLM refuses them at temperature 0; these are as greedy."""

SHAPES = {
    "llama": {"num_hidden_layers": 4, **SHAPE},
    "gemma3_text": {**SHAPE, "sliding_window": 150, **WINDOWED["gemma3_text"]},
}

MOVED = "of 777 tokens 768 from peer"

NUM_TRIES = 4
"""An engine that has computed before cuts a fetch short that takes longer, so a busy machine may
need as many prompts. After that it reads from there once in `RETRY_SLOW_SECONDS`."""


def ask(prompt: list[int], params: Any, **more: Any) -> dict[str, Any]:
    extra = {"extra_args": {"kv_transfer_params": params}}
    return {"token_ids": prompt, "sampling": {**extra, **more}}


def prefill(engine: Engine, prompts: list[list[int]]) -> list[Any]:
    """The parameters of the answers."""
    answers = engine.generate([ask(prompt, TOY_PROXY) for prompt in prompts], max_tokens=1)
    assert [answer.reason for answer in answers] == ["length"] * len(prompts)
    step_on(engine)
    return [answer.params for answer in answers]


def step_on(engine: Engine) -> None:
    """Have an engine hear what became of its last saves: an idle 0.14 takes no step."""
    if RELEASE < (0, 24):
        engine.generate([[7, 8, 9]])


def test_a_prompt_prefilled_in_one_engine_is_decoded_in_another_as_by_one(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    prompts = [make_prompt(n) for n in (50, 300, 385, 777)]
    other = make_prompt(300)
    own, [own_other] = oracle(prompts), oracle([other])
    model, store = models["plain"], kvferry(tmp_path)
    with first.engine(model, {**store, "kv_role": "kv_producer"}) as prefiller:
        given = prefill(prefiller, prompts)
        assert [params["kvferry"]["chunks"] for params in given] == [0, 2, 3, 6]
        assert prefill(prefiller, prompts[:1])[0]["do_remote_prefill"] is True
    num_stored = len(wait_for_records(tmp_path, 11))
    with second.engine(model, {**store, "kv_role": "kv_consumer"}, block_size=32) as decoder:
        pairs = list(zip(prompts, given, strict=True))
        warm = decoder.generate([ask(*pair) for pair in pairs])
        assert_same(own, warm)
        hits = [expected_hit(len(prompt), block=32) for prompt in prompts]
        # What vLLM reports as cached is, after a remote prefill, what the prefill found cached.
        assert warm.external == sum(hits)
        assert warm.counted("remote_prefills_total") == len(prompts)
        assert warm.counted("remote_prefills_computed") == 0
        assert len(records(tmp_path)) == num_stored, "a consumer stores nothing of its own"
        # Nothing ever comes of the first: it is computed after the deadline.
        strange = [{"do_remote_prefill": True}, *WRITTEN_BY_CLIENTS]
        said = decoder.generate([ask([*other, n], params) for n, params in enumerate(strange)])
        assert all(answer.reason == "length" for answer in said)
        assert said.counted("remote_prefills_computed") == 1
        [alone] = decoder.generate([other])
        assert_same([own_other], [alone])
        gone = ask(make_prompt(300), {"do_remote_prefill": True})
        decoder.generate([{**gone, "abort_after": steps} for steps in (0, 3)])
        assert decoder.metrics()["vllm:kv_cache_usage_perc"] == 0
        for answers in warm, said:
            assert answers.counted("hook_failed", "contract_violation") == 0
    log = second.log.read_text(errors="replace")
    assert "prefilled by another engine" in log
    assert "not_produced" in log


def test_two_engines_of_one_user_need_nothing_but_their_roles(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, oracle: Oracle
) -> None:
    """They find each other in the store of the user. All is as it is by default, so the first hits
    are audited."""
    prompts = [make_prompt(n) for n in (300, 385, 777)]
    own, home = oracle(prompts), {"XDG_CACHE_HOME": str(tmp_path)}
    with ExitStack() as stack:
        engines = []
        for role in ("kv_producer", "kv_consumer"):
            process = stack.enter_context(Process(tmp_path / f"{role}.log", home))
            connector = {"kv_connector": "KVFerryConnector", "kv_role": role}
            engines.append(stack.enter_context(process.engine(models["plain"], connector)))
        prefiller, decoder = engines
        given = prefill(prefiller, prompts)
        warm = decoder.generate([ask(*pair) for pair in zip(prompts, given, strict=True)])
        assert_same(own, warm)
        assert warm.counted("remote_prefills_total") == len(prompts)
        decoder.wait_counted(lambda found: total(found, "audits_total") > 0, "a hit is compared")
        assert warm.external > 0
    assert len(records(tmp_path / "kvferry" / "kv")) == 11


def test_engines_that_list_each_other_read_each_others_memory_until_one_dies(
    models: dict[str, Path], make_prompt: MakePrompt, oracle: Oracle,
    first: Process, second: Process,
) -> None:  # fmt: skip
    """No store but the other one's memory."""
    prompts, late, twice = [make_prompt(n) for n in (50, 300, 777)], make_prompt(), make_prompt(400)
    own, [own_late, own_twice] = oracle(prompts), oracle([late, twice])
    own_children = oracle([twice], **CHILDREN)
    here, there = free_ports(2)
    both = [
        kvferry(f"peer://{LOCALHOST}:{other}", serve=f"{LOCALHOST}:{port}", load_timeout_seconds=30)
        for port, other in ((here, there), (there, here))
    ]
    first.start(models["plain"], both[0])
    prefiller = Engine(first)
    with second.engine(models["plain"], both[1], block_size=32) as decoder:
        given = prefill(prefiller, prompts)
        assert [params["kvferry"]["chunks"] for params in given] == [0, 2, 6]
        assert {(params["remote_host"], params["remote_port"]) for params in given} == {
            (LOCALHOST, here)
        }
        warm = decoder.generate([ask(*pair) for pair in zip(prompts, given, strict=True)])
        assert_same(own, warm)
        assert warm.external == sum(expected_hit(len(prompt), block=32) for prompt in prompts)
        assert warm.counted("remote_prefills_total") == len(prompts)
        assert warm.counted("remote_prefills_computed") == 0
        children = decoder.generate([ask(twice, *prefill(prefiller, [twice]), **CHILDREN)])
        for answers in own_children, children:
            assert_same([own_twice] * 2, answers)
        assert children.counted("fetch_seconds_count") == 3, "one fetch of each chunk serves both"
        assert children.counted("remote_prefills_total") == 2
        assert children.counted("remote_prefills_computed") == 0
        [lost] = prefill(prefiller, [late])
        first.kill()
        alone = decoder.generate([ask(late, lost), prompts[2]], deadline=60)
        assert_same([own_late, own[2]], alone)
        assert alone.counted("remote_prefills_computed") == 1
        for answers in warm, children, alone:
            assert answers.counted("hook_failed", "contract_violation") == 0
    log = second.log.read_text(errors="replace")
    assert f"another engine at {LOCALHOST}:{here}, as the parameters say: {MOVED}" in log


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        pytest.param("llama", {}, marks=pytest.mark.sweep),
        pytest.param(
            "gemma3_text",
            APART,
            marks=pytest.mark.skipif(
                RELEASE < (0, 24),
                reason="an idle 0.14 takes no step, so the last save is reported too late",
            ),
        ),
    ],
)
@pytest.mark.parametrize("ranks", [(2, 1), pytest.param((1, 2), marks=pytest.mark.sweep)])
def test_ranks_of_other_numbers(
    ranks: tuple[int, int], arch: str, options: dict[str, Any], tmp_path: Path,
    make_prompt: MakePrompt, pool: Pool,
) -> None:  # fmt: skip
    """From memory to memory, with other blocks."""
    model = make_tiny_model(tmp_path / "model", arch, seed=3, **SHAPES[arch])
    prompts, back = ([make_prompt(n) for n in some] for some in ((350, 777), NUM_TRIES * (400,)))
    with pool.get("first").engine(model, **options, block_size=64) as engine:
        own, own_back = own_answers(engine, prompts), own_answers(engine, back)
    ports = free_ports(2)
    with ExitStack() as stack:
        engines = []
        for number, count in enumerate(ranks):
            connector = kvferry(
                f"peer://{LOCALHOST}:{ports[1 - number]}",
                serve=f"{LOCALHOST}:{ports[number]}",
                load_timeout_seconds=60,
            )
            shape = {"block_size": (64, 32)[number], **options}
            if count > 1:
                shape |= {"tensor_parallel_size": count, "distributed_executor_backend": "mp"}
            process = pool.get("ranks" if count > 1 else "first")
            engines.append(stack.enter_context(process.engine(model, connector, **shape)))
        there_and_back(engines, (prompts, own), (back, own_back), 256 + 768)


def there_and_back(
    engines: list[Engine], there: tuple[list[list[int]], Iterable[Answer]],
    back: tuple[list[list[int]], Iterable[Answer]], hits: int,
) -> list[Any]:  # fmt: skip
    """Some prompts go over from the first engine, and one of 400 tokens comes back. The parameters
    of the first engine's answers."""
    prefiller, decoder = engines
    prompts, own = there
    given = prefill(prefiller, prompts)
    warm = decoder.generate([ask(*pair) for pair in zip(prompts, given, strict=True)])
    assert_same(own, warm)
    assert warm.external == hits
    assert warm.counted("remote_prefills_computed") == 0
    for prompt, answer in zip(*back, strict=True):
        [returned] = prefill(decoder, [prompt])
        said = prefiller.generate([ask(prompt, returned)])
        assert_same([answer], said)
        if said.external == 384:
            break
        time.sleep(RETRY_SLOW_SECONDS)
    assert said.external == 384
    assert said.counted("remote_prefills_computed") == 0
    return given
