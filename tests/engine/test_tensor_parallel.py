"""Several ranks: split models in threads of this process, whole engines in processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from kvferry.cache.deciding import rank_slots
from kvferry.engine import LLM, SamplingParams
from kvferry.engine.config import EngineConfig
from kvferry.engine.model import PagedModel
from kvferry.engine.model_config import ModelConfig
from kvferry.engine.tensor_parallel import RankGroup
from kvferry.errors import ConfigError, KVError, RankError, TransferError
from kvferry.observe import Counters
from tests.contract.dict_roles import dict_roles
from tests.engine.test_llm import assert_same, own_generation, prompt
from tests.engine.test_paged_attention import paged_logits, random_tokens

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_logits=True)


def on_ranks(size: int, rendezvous: Path, body):
    """Results of `body(group)` on `size` ranks, each a thread."""

    def run(rank: int):
        group = RankGroup(rank, size, rendezvous, torch.device("cpu"))
        return body(group)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


# ---- splitting


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "arch", ["llama", "qwen3", "mistral", "gpt_neox", "gemma3_text", "deepseek_v3"]
)
def test_split_models_compute_the_same_logits_on_every_rank(model_dir, tmp_path, arch, size):
    config = ModelConfig(model_dir(arch), EngineConfig())
    token_ids, chunks = random_tokens(60), [11, 1, 30, 18]
    whole = PagedModel(config, "cpu")
    expected = paged_logits(whole, token_ids, chunks)
    models = [PagedModel(config, "cpu") for _ in range(size)]

    def body(group):
        models[group.rank].split(group)
        return paged_logits(models[group.rank], token_ids, chunks)

    logits = on_ranks(size, tmp_path / "meet", body)
    assert all(torch.equal(each, logits[0]) for each in logits)
    assert (logits[0] - expected).abs().max() < 1e-3
    # Fewer kv heads than ranks are replicated, one each.
    kv_heads = whole.geometry.num_kv_heads
    assert [model.num_kv_heads for model in models] == [max(1, kv_heads // size)] * size


def test_ranks_hold_their_share_of_the_weights(model_dir, tmp_path):
    config = ModelConfig(model_dir(), EngineConfig())
    models = [PagedModel(config, "cpu") for _ in range(2)]
    on_ranks(2, tmp_path / "meet", lambda group: models[group.rank].split(group))
    layer = models[1].model.model.layers[0]
    assert tuple(layer.self_attn.q_proj.weight.shape) == (32, 64)
    assert tuple(layer.self_attn.k_proj.weight.shape) == (16, 64)
    assert tuple(layer.self_attn.o_proj.weight.shape) == (64, 32)
    assert tuple(layer.mlp.down_proj.weight.shape) == (64, 48)


@pytest.mark.parametrize(
    ("arch", "size", "reason"),
    [
        # Norms over all query heads: half of them are not half of the norm.
        ("olmo2", 2, "does not run split over 2 ranks"),
        ("phi3", 2, "projection 'qkv_proj' that the engine cannot split"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_on_every_rank(
    model_dir, tmp_path, arch, size, reason
):
    config = ModelConfig(model_dir(arch), EngineConfig())
    models = [PagedModel(config, "cpu") for _ in range(size)]

    def body(group):
        with pytest.raises(ConfigError, match=reason) as refusal:
            models[group.rank].split(group)
        assert "\n" not in str(refusal.value)

    on_ranks(size, tmp_path / "meet", body)


def test_heads_that_do_not_divide_are_refused_before_there_are_ranks(model_dir):
    with pytest.raises(ConfigError, match="8 attention heads cannot be split over") as refusal:
        ModelConfig(model_dir(), EngineConfig(tensor_parallel_size=3))
    assert "tensor_parallel_size=3" in str(refusal.value)


def test_a_split_that_changes_the_logits_is_refused(model_dir, tmp_path):
    """An MLP whose gate looks at all of its width at once, which no name shows."""

    class Normed(torch.nn.SiLU):
        def forward(self, hidden):
            return super().forward(hidden) * hidden.abs().sum(-1, keepdim=True)

    config = ModelConfig(model_dir(), EngineConfig())
    models = [PagedModel(config, "cpu") for _ in range(2)]
    for model in models:
        for layer in model.model.model.layers:
            layer.mlp.act_fn = Normed()

    def body(group):
        with pytest.raises(ConfigError, match="other logits when split over 2 ranks"):
            models[group.rank].split(group)

    on_ranks(2, tmp_path / "meet", body)


def test_a_rank_whose_peer_never_comes_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr("kvferry.engine.tensor_parallel.RANK_TIMEOUT_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(RankError, match="rank 0 of 2 cannot reach the others"):
        RankGroup(0, 2, tmp_path / "meet", torch.device("cpu"))
    assert time.monotonic() - started < 60


# ---- engines in processes


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def children() -> set[int]:
    """Processes of this one that still exist, those that died and were not waited for included."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return {int(pid) for pid in listed.split()}


def test_two_processes_generate_what_one_does_and_share_its_records(model_dir, stores):
    path = model_dir()
    options = {
        "store": f"file://{stores}/shared?max_bytes=64MiB",
        "connector_options": {"chunk_tokens": 16, "audit": "off"},
    }
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 37, 101)]
    expected = own_generation(path, prompts, 6)
    before = children()
    with LLM(path, block_size=8, **options) as llm:
        llm.generate(prompts[4:], GREEDY)
        assert llm.drain(60.0)
    observer = Counters()
    small = {"max_batched_tokens": 50, "observer": observer}
    with LLM(path, tensor_parallel_size=2, **small, **options) as llm:
        assert len(children() - before) == 1
        completions = llm.generate(prompts, GREEDY)
        assert_same(completions, expected)
        assert completions[4].num_external_tokens == 96  # stored by one rank
        assert observer["hook_failed"] == 0
        assert llm.drain(60.0)
        llm.reset_prefix_cache()
        again = llm.generate(prompts[3:4], GREEDY)
        assert_same(again, expected[3:4])
        assert again[0].num_external_tokens >= 16  # stored by both
    assert children() == before
    with LLM(path, **options) as llm:
        completions = llm.generate(prompts, GREEDY)
    assert_same(completions, expected)
    assert completions[3].num_external_tokens >= 16  # stored by two ranks, read by one


def test_processes_as_on_two_machines_store_shards_and_read_them(model_dir, tmp_path, monkeypatch):
    def elsewhere(*_where):
        raise TransferError("no such process on this machine")

    monkeypatch.setattr(rank_slots, "open_slots", elsewhere)
    path, prompts = model_dir(), [prompt(101, seed=1), prompt(60, seed=2)]
    options = {
        "store": f"file://{tmp_path}/store?max_bytes=64MiB",
        "connector_options": {"chunk_tokens": 16, "audit": "off"},
    }
    expected = own_generation(path, prompts, 6)
    for hits in ([0, 0], [96, 48]):
        with LLM(path, tensor_parallel_size=2, **options) as llm:
            llm.generate([prompt(40, seed=3)], GREEDY)  # its reports say where the ranks are
            completions = llm.generate(prompts, GREEDY)
            assert_same(completions, expected)
            assert [each.num_external_tokens for each in completions] == hits
            assert llm.drain(60.0)


@pytest.mark.parametrize("when", ["idle", "busy"])
def test_a_rank_that_dies_is_named_and_nothing_hangs(model_dir, when):
    before = children()
    llm = LLM(model_dir(), tensor_parallel_size=2)
    (rank,) = children() - before
    started = time.monotonic()
    if when == "busy":
        stream = llm.stream(prompt(20), SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank 1 died \(exit status -9\)"):
        list(stream) if when == "busy" else llm.generate([prompt(20)], GREEDY)
    with pytest.raises(RankError, match="open a new one"):
        llm.generate([prompt(20)], GREEDY)
    llm.close()
    assert time.monotonic() - started < 60
    assert children() == before


def test_a_step_that_fails_here_ends_the_other_ranks(model_dir):
    before = children()
    with LLM(model_dir(), tensor_parallel_size=2) as llm:
        with pytest.MonkeyPatch.context() as patch:
            forward = PagedModel.forward  # of this process; the other rank is another

            def interrupted(*args):
                forward(*args)
                raise KeyboardInterrupt

            patch.setattr(PagedModel, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt(20)], GREEDY)
        with pytest.raises(RankError, match=r"KeyboardInterrupt.*open a new one"):
            llm.generate([prompt(20)], GREEDY)
    assert children() == before


def test_what_cannot_run_on_ranks_is_refused_and_leaves_no_process(model_dir, tmp_path):
    before = children()
    for arguments, error, reason in (
        ({"roles": dict_roles()}, ConfigError, "roles serve one rank"),
        ({"store": f"file://{tmp_path}", "tensor_parallel_size": 3}, ConfigError, "cannot be"),
        ({"tensor_parallel_size": 0}, ConfigError, "tensor_parallel_size is 0"),
    ):
        options = {"tensor_parallel_size": 2, **arguments}
        with pytest.raises(KVError, match=reason) as refusal:
            LLM(model_dir(), **options)
        assert isinstance(refusal.value, error)
    assert children() == before


@pytest.mark.slow
def test_ranks_end_when_the_first_process_is_killed(model_dir):
    code = (
        "import os, sys\n"
        "from kvferry.engine import LLM\n"
        f"llm = LLM({str(model_dir())!r}, tensor_parallel_size=2)\n"
        "print(open(f'/proc/self/task/{os.getpid()}/children').read(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with first:
        rank = os.pidfd_open(int(first.stdout.readline()))
        first.kill()
    ended, _, _ = select.select([rank], [], [], 60)
    os.close(rank)
    assert ended, "the rank outlived its engine"
