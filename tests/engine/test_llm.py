"""The front end with real (tiny) models and a real (small) connector."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.cache.memory import SlotMemory
from kvferry.contract.promises import Reports
from kvferry.engine import LLM, SamplingParams
from kvferry.engine import llm as llm_module
from kvferry.engine.llm import READY_SECONDS
from kvferry.engine.model import PagedModel
from kvferry.engine.request import FinishReason
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Counters
from tests.contract.dict_roles import DictWorker, dict_roles
from tests.engine.integrity import check_scheduler
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ARCHITECTURES = [
    "llama",
    "qwen3",
    "mistral",
    "gpt_neox",
    # Scores scaled by a number of the config; capped scores; sinks.
    "gemma3_text",
    "gemma2",
    "gpt_oss",
    "deepseek_v3",
    "deepseek_v2",
]
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_logits=True, logprobs=2)
LENGTHS = (1, 15, 16, 17, 37, 101)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (length,), generator=generator).tolist()


@contextmanager
def engine(path, **kwargs):
    """An LLM whose books are checked after every step."""
    with LLM(path, **kwargs) as llm:
        step = llm.step

        def checked():
            step()
            check_scheduler(llm.scheduler)

        llm.step = checked
        yield llm
        llm.drain(5.0)
        pool = llm.scheduler.pool
        assert pool.num_free == pool.num_usable, "blocks leaked"


def own_generation(path, prompts, count: int):
    """First logits and greedy tokens of the model's own, unpaged generation."""
    model = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, attn_implementation="eager"
    )
    result = []
    for token_ids in prompts:
        ids, first = list(token_ids), None
        for _ in range(count):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            first = logits.numpy() if first is None else first
            ids.append(int(logits.argmax()))
        result.append((first, tuple(ids[len(token_ids) :])))
    return result


def assert_same(completions, expected) -> None:
    for completion, (first, token_ids) in zip(completions, expected, strict=True):
        assert np.abs(completion.first_logits - first).max() <= 1e-4
        assert completion.token_ids == token_ids


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_batches_and_odd_chunks_agree_with_transformers(model_dir, arch):
    path = model_dir(arch)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    expected = own_generation(path, prompts, 6)
    for budget, block_size in ((2048, 16), (23, 5)):
        with engine(path, max_batched_tokens=budget, block_size=block_size) as llm:
            assert_same(llm.generate(prompts, GREEDY), expected)
            # The second time most of it is in the engine's own prefix cache.
            again = llm.generate(prompts, GREEDY)
            assert_same(again, expected)
            assert again[-1].num_cached_tokens == 100 // block_size * block_size


def test_preempted_and_resumed_requests_agree_with_transformers(model_dir):
    path = model_dir()
    prompts = [prompt(40, seed=seed) for seed in range(3)]
    observer = Counters()
    params = SamplingParams(max_tokens=24, ignore_eos=True, return_logits=True)
    with engine(
        path, num_blocks=11, prefix_caching=False, max_batched_tokens=32, observer=observer
    ) as llm:
        assert_same(llm.generate(prompts, params), own_generation(path, prompts, 24))
    assert observer["preempted"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_async": True},
        {"ask_again": 4},
        {"is_async": True, "ask_again": 2, "delay_free": True},
    ],
    ids=["sync", "async", "ask-again", "all"],
)
def test_a_restarted_engine_reads_what_the_last_one_computed(model_dir, options):
    path = model_dir()
    store: dict = {}
    prompts = [prompt(length, seed=9) for length in LENGTHS]
    expected = own_generation(path, prompts, 6)
    first, second = dict_roles(store, **options), dict_roles(store, **options)
    first.worker.steps_per_free = second.worker.steps_per_load = 3
    with engine(path, roles=first, max_batched_tokens=50) as llm:
        # One after the other: prompts of a batch do not see each other's KV.
        assert_same([llm.generate([each], GREEDY)[0] for each in prompts], expected)
    assert first.scheduler.closed == ["worker", "scheduler"]
    with engine(path, roles=second) as llm:
        completions = llm.generate(prompts, GREEDY)
        assert_same(completions, expected)
    for completion, length in zip(completions, LENGTHS, strict=True):
        whole = length if options.get("is_async") else length - 1
        # While the connector answers "ask again" for one request, another of the batch may compute
        # their common prefix.
        hit = completion.num_external_tokens + completion.num_cached_tokens
        assert hit == whole // 16 * 16
    assert completions[-1].num_external_tokens >= 64
    if options.get("delay_free"):
        assert completions[-1].params == {"blocks": 7}


def test_a_store_is_read_by_the_next_engine_and_by_no_other_model(model_dir, tmp_path):
    url = f"file://{tmp_path}/store?max_bytes=64MiB"
    options = {"store": url, "connector_options": {"chunk_tokens": 32, "audit": "off"}}
    path, other = model_dir(), model_dir(seed=1)
    expected = own_generation(path, [prompt(101)], 6)
    with engine(path, **options) as llm:
        assert_same(llm.generate([prompt(101)], GREEDY), expected)
        assert llm.drain(60.0)
    # Another block size, to show that it is no part of what is stored.
    with engine(path, block_size=5, **options) as llm:
        completions = llm.generate([prompt(101)], GREEDY)
        assert_same(completions, expected)
        assert completions[0].num_external_tokens == 95
    with engine(other, **options) as llm:
        completions = llm.generate([prompt(101)], GREEDY)
        assert_same(completions, own_generation(other, [prompt(101)], 6))
        assert completions[0].num_external_tokens == 0


def test_halves_of_which_one_has_no_async_rules_are_refused(model_dir):
    roles = dict_roles()
    roles.worker.rules = Reports
    with pytest.raises(ConfigError, match="DictWorker name `rules` that do not belong together"):
        LLM(model_dir(), roles=roles)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fail_whole", [False, True])
def test_a_failed_load_changes_nothing_but_time(model_dir, is_async, fail_whole):
    path, lost = model_dir(), 2
    prompts = [prompt(101), prompt(101)[:70]]
    expected = own_generation(path, prompts, 6)
    roles = dict_roles(is_async=is_async)
    roles.worker.fail_whole = fail_whole
    with engine(path, roles=roles) as llm:
        llm.generate(prompts[:1], GREEDY)
        roles.worker.lose.add(tuple(prompts[0][: 16 * (lost + 1)]))
        llm.reset_prefix_cache()
        completions = llm.generate(prompts, GREEDY)
        assert_same(completions, expected)
        assert completions[0].num_external_tokens <= lost * 16
        roles.worker.lose.clear()
        llm.reset_prefix_cache()
        assert_same(llm.generate(prompts, GREEDY), expected)


@pytest.mark.parametrize("hook", ["start_load", "build_plan"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_connector_that_raises_costs_its_hits_and_nothing_else(model_dir, hook, is_async):
    path, roles = model_dir(), dict_roles(is_async=is_async)
    expected = own_generation(path, [prompt(70)], 6)

    def fail(*_arguments):
        raise RuntimeError("told to")

    with engine(path, roles=roles) as llm:
        llm.generate([prompt(70)], GREEDY)
        llm.reset_prefix_cache()
        setattr(roles.worker if hook == "start_load" else roles.scheduler, hook, fail)
        completions = llm.generate([prompt(70)], GREEDY)
        assert_same(completions, expected)
        assert completions[0].num_external_tokens == 0


class LayerwiseWorker(DictWorker):
    """Loads around each layer instead, and checks the calls for saves."""

    def start_load(self):
        self.seen: list[str] = []

    def wait_for_layer_load(self, layer_name):
        self.seen.append(layer_name)
        layer = list(self.kv).index(layer_name)
        for key, block in self.plan.loads:
            self.kv[layer_name][block] = self.store[key][layer]

    def save_layer(self, layer_name, kv_layer, attn_metadata):
        assert kv_layer is self.kv[layer_name]
        self.seen.append(layer_name)

    def save(self):
        assert self.seen in ([], [name for name in self.kv for _ in range(2)])
        super().save()


def test_layer_hooks_run_around_every_layer(model_dir):
    path = model_dir()
    expected = own_generation(path, [prompt(70)], 6)
    with engine(path, roles=dict_roles(worker=LayerwiseWorker)) as llm:
        assert_same(llm.generate([prompt(70)], GREEDY), expected)
        llm.reset_prefix_cache()
        completions = llm.generate([prompt(70)], GREEDY)
        assert completions[0].num_external_tokens == 64
        assert_same(completions, expected)


# ---- sampling


def test_seeded_samples_do_not_depend_on_the_batch(model_dir):
    params = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    others = [prompt(length, seed=length) for length in (3, 50, 21)]
    with engine(model_dir(), prefix_caching=False, max_batched_tokens=30) as llm:
        (alone,) = llm.generate([prompt(40)], params)
        batched = llm.generate([*others, prompt(40)], params)[-1]
        (other_seed,) = llm.generate(
            [prompt(40)], SamplingParams(max_tokens=12, temperature=1.0, seed=8, ignore_eos=True)
        )
    assert alone.token_ids == batched.token_ids
    assert alone.token_ids != other_seed.token_ids


def test_logprobs_name_the_chosen_and_the_best(model_dir):
    with engine(model_dir()) as llm:
        (completion,) = llm.generate([prompt(20)], GREEDY)
    assert len(completion.logprobs) == 6
    expected = torch.log_softmax(torch.from_numpy(completion.first_logits), -1)
    first = completion.logprobs[0]
    assert first.chosen == pytest.approx(float(expected.max()), abs=1e-5)
    assert list(first.top) == expected.topk(2).indices.tolist()


def test_stop_tokens_and_end_of_text(model_dir):
    path = model_dir()
    with engine(path) as llm:
        (free,) = llm.generate([prompt(20)], SamplingParams(max_tokens=20, ignore_eos=True))
        stop = free.token_ids[3]
        (stopped,) = llm.generate(
            [prompt(20)], SamplingParams(max_tokens=20, stop_token_ids=(stop,), ignore_eos=True)
        )
    assert stopped.finish_reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    ends = model_dir(eos_token_id=stop)
    with engine(ends) as llm:
        (ended,) = llm.generate([prompt(20)], SamplingParams(max_tokens=20))
    assert ended.token_ids == stopped.token_ids


# ---- streams


def test_a_stream_gives_the_tokens_of_generate(model_dir):
    with engine(model_dir()) as llm:
        (completion,) = llm.generate([prompt(20)], GREEDY)
        events = list(llm.stream(prompt(20), GREEDY))
    assert tuple(event.token_id for event in events) == completion.token_ids
    assert [event.finish_reason for event in events] == [None] * 5 + [FinishReason.LENGTH]
    assert events[0].logprobs.chosen == pytest.approx(completion.logprobs[0].chosen, abs=1e-4)


def test_a_stream_closed_early_aborts_its_request(model_dir):
    with engine(model_dir()) as llm:
        stream = llm.stream(prompt(20), SamplingParams(max_tokens=500, ignore_eos=True))
        next(stream)
        assert [request.request_id for request in llm.scheduler.requests] == ["request-0"]
        stream.close()
        assert not llm.scheduler.requests
        never_started = llm.stream(prompt(20))
        never_started.close()
        assert list(llm.stream(prompt(20), SamplingParams(max_tokens=2, ignore_eos=True)))


def test_streams_and_batches_run_side_by_side(model_dir):
    with engine(model_dir()) as llm:
        (alone,) = llm.generate([prompt(20)], GREEDY)
        first, second = llm.stream(prompt(20), GREEDY), llm.stream(prompt(30), GREEDY)
        tokens = [next(first).token_id]
        next(second)
        llm.generate([prompt(9)], GREEDY)
        tokens += [event.token_id for event in first]
        assert tuple(tokens) == alone.token_ids
        assert len(list(second)) == 5


@pytest.fixture(scope="module")
def text_model(model_dir, tmp_path_factory):
    """A tiny model with a tokenizer of one token per byte, ids 3 to 258."""
    path = shutil.copytree(model_dir(vocab_size=259), tmp_path_factory.mktemp("text") / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index + 3 for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return path


def test_text_goes_in_and_comes_out_whole_or_in_pieces(text_model):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    with engine(text_model) as llm:
        (completion,) = llm.generate(["h\u00e9llo"], params)
        assert len(completion.prompt_token_ids) == len("h\u00e9llo".encode())
        assert completion.text == llm.tokenizer.decode(
            list(completion.token_ids), skip_special_tokens=True
        )
        assert completion.prompt_token_ids == tuple(llm.encode("h\u00e9llo"))
        pieces = [event.text for event in llm.stream("h\u00e9llo", params)]
    assert len(pieces) == 40
    assert "".join(pieces) == completion.text


# ---- faults and ends


def test_a_forward_that_raises_aborts_its_requests_and_leaves_the_engine_usable(model_dir):
    path = model_dir()
    with engine(path, roles=dict_roles(delay_free=True)) as llm:
        (before,) = llm.generate([prompt(70)], GREEDY)
        llm.reset_prefix_cache()
        with pytest.MonkeyPatch.context() as patch:
            forward = PagedModel.forward

            def interrupted(*args):
                forward(*args)
                raise KeyboardInterrupt

            patch.setattr(PagedModel, "forward", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt(70), prompt(30)], GREEDY)
        check_scheduler(llm.scheduler)
        (after,) = llm.generate([prompt(70)], GREEDY)
    assert after.token_ids == before.token_ids


def test_close_is_idempotent_leaves_no_thread_and_ends_streams(model_dir):
    threads, roles = set(threading.enumerate()), dict_roles()
    llm = LLM(model_dir(), roles=roles)
    stream = llm.stream(prompt(20), SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    assert roles.scheduler.closed == ["worker", "scheduler"]
    assert list(stream) == []
    assert set(threading.enumerate()) <= threads
    with pytest.raises(ContractError, match="closed"):
        llm.generate([prompt(3)])


def test_an_engine_that_ended_gives_its_memory_back_at_once(model_dir, tmp_path, monkeypatch):
    """A pool has a GiB or more. In a cycle it would stay until the collector comes by."""
    begin, pools = SlotMemory.__init__, []

    def note(self, *arguments, **options):
        begin(self, *arguments, **options)
        pools.append(weakref.ref(self))

    monkeypatch.setattr(SlotMemory, "__init__", note)
    gc.disable()
    try:
        llm = LLM(model_dir("llama"), store=(tmp_path / "store").as_uri())
        llm.generate([prompt(40)], SamplingParams(max_tokens=1))
        llm.close()
        del llm
        assert [pool() for pool in pools] == [None]
    finally:
        gc.enable()


def test_roles_are_closed_when_the_model_cannot_be_loaded(model_dir, tmp_path):
    source = model_dir()
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    roles = dict_roles()
    with pytest.raises(ConfigError, match="cannot load the weights"):
        LLM(tmp_path, roles=roles)
    assert roles.scheduler.closed == ["worker", "scheduler"]


# ---- bad input


def test_weights_that_change_between_hashing_and_loading_are_refused(
    model_dir, tmp_path, monkeypatch
):
    model = tmp_path / "model"
    shutil.copytree(model_dir(), model)
    load = llm_module.PagedModel

    def after_a_sync(*arguments):
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes())
        return load(*arguments)

    monkeypatch.setattr(llm_module, "PagedModel", after_a_sync)
    with pytest.raises(ConfigError, match="changed while they were loaded"):
        LLM(model, store=f"file://{tmp_path}/store")
    LLM(model).close()  # without a store nothing depends on it


def test_prompts_that_cannot_be_served_are_refused_by_number(model_dir):
    path = model_dir()
    with engine(path) as llm:
        with pytest.raises(ConfigError, match="1024 tokens, the model's context holds 1024"):
            llm.generate([prompt(1024)])
        with pytest.raises(ConfigError, match="no tokens"):
            llm.generate([[]])
        with pytest.raises(ConfigError, match="no tokenizer"):
            llm.generate(["text"])
        with pytest.raises(ConfigError, match="one text"):
            llm.generate("text")
        with pytest.raises(ConfigError, match="2 prompts but 1 sampling"):
            llm.generate([[5], [6]], [SamplingParams()])
        with pytest.raises(ConfigError, match="token id 320"):
            llm.generate([[5, 320]])
        with pytest.raises(ConfigError, match="token id -1"):
            llm.generate([[-1]])
        (last,) = llm.generate([prompt(1023)], SamplingParams(ignore_eos=True))
        assert len(last.token_ids) == 1
    with (
        engine(path, num_blocks=4) as llm,
        pytest.raises(ConfigError, match="48 tokens, the KV pool holds 48"),
    ):
        llm.generate([prompt(48)])


def test_options_that_cannot_be_used_are_refused(model_dir, tmp_path):
    path = model_dir()
    with pytest.raises(ConfigError, match="block_size"):
        LLM(path, block_sise=16)
    with pytest.raises(
        ConfigError, match="unknown option 'memory_byte'; did you mean 'memory_bytes'"
    ):
        LLM(path, store=f"file://{tmp_path}/store", connector_options={"memory_byte": 0})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="not a model directory"):
        LLM(tmp_path)
    with pytest.raises(ConfigError, match="not a directory"):
        LLM(tmp_path / "absent")
    with pytest.raises(ConfigError, match="one connector"):
        LLM(path, store="memory://x", roles=dict_roles())
    with pytest.raises(ConfigError, match="two blocks of this model are"):
        LLM(path, kv_cache_bytes="1KiB")


@pytest.mark.parametrize("bad", [None, [1.5], ["a"], 7])
def test_what_is_no_prompt_is_refused_before_anything_runs(model_dir, bad):
    with LLM(model_dir()) as llm:
        with pytest.raises(ConfigError, match="neither a text nor a list of token ids"):
            llm.generate([prompt(5), bad], GREEDY)
        assert not llm.scheduler.has_work()


def test_token_ids_of_numpy_and_torch_are_taken(model_dir):
    with LLM(model_dir()) as llm:
        ids = prompt(9)
        answers = llm.generate([ids, np.array(ids), torch.tensor(ids)], GREEDY)
    assert answers[0].token_ids == answers[1].token_ids == answers[2].token_ids
    assert answers[1].prompt_token_ids == tuple(ids)


def test_drain_waits_until_what_was_saved_is_visible(model_dir, tmp_path):
    with LLM(model_dir(), store=f"file://{tmp_path}/s", connector_options={"chunk_tokens": 8}) as a:
        a.generate([prompt(200)], SamplingParams(max_tokens=1))
        assert a.drain(60.0)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 25


def test_the_engine_opens_when_a_small_store_is_known_and_waits_little_for_a_large_one(
    model_dir, monkeypatch
):
    monkeypatch.setattr(llm_module, "READY_SECONDS", READY_SECONDS)  # as it is outside of tests
    waits: list[float] = []
    roles = dict_roles()
    with LLM(model_dir(), roles=replace(roles, wait_ready=lambda t: bool(waits.append(t)))) as llm:
        assert len(waits) == 1
        assert 0 < waits[0] <= 0.5
        llm.generate([prompt(5)], GREEDY)
    assert len(waits) == 1


def test_the_first_prompt_after_opening_finds_all_that_a_store_holds(model_dir, tmp_path):
    options = {
        "store": f"file://{tmp_path}/s",
        "connector_options": {"chunk_tokens": 1, "audit": "off"},
        "block_size": 1,
    }
    with LLM(model_dir(), **options) as llm:
        llm.generate([prompt(150, seed=seed) for seed in range(3)], SamplingParams(max_tokens=1))
    with LLM(model_dir(), **options) as llm:
        (first,) = llm.generate([prompt(150, seed=2)], SamplingParams(max_tokens=1))
    assert first.num_external_tokens == 149
