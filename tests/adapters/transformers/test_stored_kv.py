"""`StoredKV.generate` and `prefill`: what is stored, what is read, and that it changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from kvferry.adapters.transformers import StoredKV
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError, ContractError
from kvferry.keys import Namespace
from kvferry.observe import Counters
from kvferry.store.url import open_store, parse_store_url
from tests.adapters.transformers.generating import (
    CHUNK,
    assert_same_as_cold,
    chat_elsewhere,
    generate,
    loaded,
    prompt,
    reuse,
)
from tests.tokenizers import save_tiny_tokenizer
from tests.transformers_cache import cache_of, with_cache

# Plain, norms on keys, windows, no grouped heads, full and windowed layers in turn, latents.
ARCHITECTURES = [
    *("llama", "qwen3", "mistral", "gpt_neox", "gemma3_text", "deepseek_v2", "deepseek_v3"),
    *("gemma2", "gpt_oss", "olmo2", "phi3", "internlm3", "iquestcoder"),
]
SHARED = ["llama", "gemma3_text", "gpt_oss", "deepseek_v3", "internlm3"]
"""Read by another host here; `make test-sweep` has all."""


def load_by_class(path: Path):
    """A model loaded by the class that its config.json names."""
    [name] = json.loads((path / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_second_run_reads_the_first_and_answers_the_same(model_dir, load_model, store_url, arch):
    model = load_model(model_dir(arch))
    input_ids = prompt(101)
    first = reuse(model, store_url, input_ids)
    assert (first.num_loaded, first.num_saved) == (0, 96)
    assert_same_as_cold(model, input_ids, first)
    second = reuse(model, store_url, input_ids)
    assert (second.num_loaded, second.num_saved) == (96, 0)
    assert second.counts["hit_tokens"] == 96
    assert_same_as_cold(model, input_ids, second)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 49])
def test_every_length_around_chunk_edges_keeps_its_last_token(load_model, store_url, length):
    model = load_model()
    longer = prompt(65)
    assert reuse(model, store_url, longer).num_saved == 64
    input_ids = longer[:, :length]
    again = reuse(model, store_url, input_ids)
    assert again.num_loaded == min(length // CHUNK * CHUNK, length - 1)
    assert_same_as_cold(model, input_ids, again)


@pytest.mark.parametrize("call", [StoredKV.prefill, generate])
def test_the_last_token_of_a_prompt_is_not_stored(load_model, store_url, call):
    """`generate` computes it, and kvferry stores what it computed itself."""
    counts = Counters()
    with StoredKV(load_model(), store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        call(kv, prompt(64))
    assert counts["put_stored"] == 3


@pytest.mark.parametrize("shared", [0, 15, 16, 40, 64])
def test_a_prompt_that_starts_alike_reads_what_is_alike(load_model, store_url, shared):
    model = load_model()
    reuse(model, store_url, prompt(65, seed=1))
    other = torch.cat([prompt(64, seed=1)[:, :shared], prompt(30, seed=2)], dim=1)
    again = reuse(model, store_url, other)
    assert again.num_loaded == shared // CHUNK * CHUNK
    assert_same_as_cold(model, other, again)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_loop_of_ones_own_goes_on_from_a_prefill(model_dir, load_model, store_url, arch):
    model, ids = load_model(model_dir(arch)), prompt(70)
    _, cold = generate(model, ids, new_tokens=4)
    for num_loaded in (0, 64):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            cache = kv.prefill(ids)
            assert (cache.get_seq_length(), kv.num_loaded) == (69, num_loaded)
        token, found = ids[:, -1:], []
        for _ in range(4):
            logits = model(token, **with_cache(cache)).logits[:, -1]
            token = logits.argmax(-1, keepdim=True)
            found.append(logits)
        assert (torch.cat(found) - cold).abs().max() <= 1e-4


@pytest.mark.parametrize("arch", SHARED)
def test_the_embedded_engine_reads_what_transformers_stored(model_dir, store_url, arch):
    path = model_dir(arch)
    stored = reuse(load_by_class(path), store_url, prompt(101))
    params = SamplingParams(max_tokens=5, ignore_eos=True, return_logits=True)
    options = {"chunk_tokens": 16, "audit": "off"}
    with LLM(path, store=store_url, dtype="float32", connector_options=options) as llm:
        [answer] = llm.generate([prompt(101)[0].tolist()], params)
    assert answer.num_external_tokens == 96
    assert list(answer.token_ids) == stored.token_ids[101:]
    assert abs(torch.tensor(answer.first_logits) - stored.logits[0]).max() <= 1e-4


@pytest.mark.parametrize("arch", SHARED)
def test_transformers_reads_what_the_embedded_engine_stored(model_dir, store_url, arch):
    path = model_dir(arch)
    with LLM(path, store=store_url, dtype="float32", connector_options={"chunk_tokens": 16}) as llm:
        llm.generate([prompt(101)[0].tolist()], SamplingParams(max_tokens=5, ignore_eos=True))
        assert llm.drain(60.0)
    model = load_by_class(path)
    read = reuse(model, store_url, prompt(101))
    assert read.num_loaded == 96
    assert_same_as_cold(model, prompt(101), read)


def test_a_class_that_reads_other_values_from_the_config_shares_nothing(model_dir, store_url):
    path = model_dir("internlm3")
    config = json.loads((path / "config.json").read_text())
    assert config.pop("rms_norm_eps") == 1e-5
    (path / "config.json").write_text(json.dumps(config))
    reuse(AutoModelForCausalLM.from_pretrained(path), store_url, prompt(40))
    by_class = load_by_class(path)
    assert by_class.config.rms_norm_eps == 1e-6
    assert reuse(by_class, store_url, prompt(40)).num_loaded == 0


def test_half_precision_is_stored_as_it_is(load_model, store_url):
    model = load_model(dtype=torch.bfloat16)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        caches = [kv.prefill(prompt(40)) for _ in range(2)]
        assert kv.num_loaded == 32
    for computed, read in zip(*(cache.layers for cache in caches), strict=True):
        assert read.keys.dtype == torch.bfloat16
        assert torch.equal(read.keys[:, :, :32], computed.keys[:, :, :32])
        assert torch.equal(read.values[:, :, :32], computed.values[:, :, :32])
    assert reuse(load_model(), store_url, prompt(40)).num_loaded == 0, "read by another dtype"


# ---- what callers of `generate` pass


class Streamer:
    """Gets the prompt and then each token."""

    def __init__(self):
        self.put_in, self.ended = [], False

    def put(self, value):
        self.put_in.extend(value.flatten().tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7, "top_k": 20, "max_new_tokens": 6},
        {"generation_config": GenerationConfig(max_new_tokens=6, do_sample=False)},
        {"generation_config": GenerationConfig(max_new_tokens=6, num_beams=3)},
        {"repetition_penalty": 1.5, "bad_words_ids": [[5]], "max_new_tokens": 6},
        {"guidance_scale": 1.5, "max_new_tokens": 6},
        {"logits_processor": [lambda ids, scores: scores.roll(1, -1)], "max_new_tokens": 6},
        {"stopping_criteria": [lambda ids, _: ids[:, -1] >= 0], "max_new_tokens": 6},
        {"prefix_allowed_tokens_fn": lambda *_: [5, 6], "max_new_tokens": 6},
    ],
    ids=", ".join,
)
def test_what_decides_the_answer_works_on_stored_prompts(load_model, store_url, options):
    model, ids = load_model(), prompt(50)

    def answer(by):
        torch.manual_seed(1)
        return by.generate(ids, **options)

    for num_loaded in (0, 48):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            assert torch.equal(answer(kv), answer(model))
            assert kv.num_loaded == num_loaded


def test_a_streamer_gets_what_it_gets_without(load_model, store_url):
    model, ids = load_model(), prompt(50)
    reuse(model, store_url, ids)
    streamers = Streamer(), Streamer()
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        for by, streamer in zip((kv, model), streamers, strict=True):
            by.generate(ids, streamer=streamer, max_new_tokens=6, do_sample=False)
        assert kv.num_loaded == 48
    assert streamers[0].put_in == streamers[1].put_in
    assert streamers[0].ended


def test_what_generate_returns_is_returned(load_model, store_url):
    model, ids = load_model(), prompt(50)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        output = kv.generate(input_ids=ids, **options)
    expected = model.generate(ids, **options)
    assert type(output) is type(expected)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == 4
    assert cache_of(output).get_seq_length() == 53


def scaling_cache(model):
    class OwnCache(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            return super().update(keys, values * 1.2, layer, *args, **kwargs)

    return {**with_cache(OwnCache()), "input_ids": prompt(50)}


def scaling_layers(model):
    from transformers import DynamicLayer

    class OwnLayer(DynamicLayer):
        def update(self, keys, values, *args, **kwargs):
            step = values.abs().amax(-1, keepdim=True) / 7
            return super().update(keys, (values / step).round() * step, *args, **kwargs)

    cache = DynamicCache()
    cache.layers = [OwnLayer() for _ in range(model.config.num_hidden_layers)]
    return {**with_cache(cache), "input_ids": prompt(50)}


def embeddings(model):
    return {"inputs_embeds": model.get_input_embeddings()(prompt(50))}


def embeddings_beside_other_ids(model):
    return {**embeddings(model), "input_ids": prompt(50, seed=9)}


def positions(model):
    return {"input_ids": prompt(50), "position_ids": torch.arange(50)[None] * 2}


def custom(_model, input_ids, **_):
    return torch.cat((input_ids, input_ids[:, :1]), dim=1)


NOT_STORED = {
    "a cache that scales": scaling_cache,
    "layers that round": scaling_layers,
    "an empty cache": lambda model: {**with_cache(DynamicCache()), "input_ids": prompt(50)},
    "embeddings": embeddings,
    "embeddings beside ids": embeddings_beside_other_ids,
    "positions": positions,
    "no cache": lambda model: {"input_ids": prompt(50), "use_cache": False},
    "no cache by config": lambda model: {
        "input_ids": prompt(50),
        "generation_config": GenerationConfig(use_cache=False),
    },
    "a static cache": lambda model: {"input_ids": prompt(50), "cache_implementation": "static"},
    "prompt look-up": lambda model: {"input_ids": prompt(50), "prompt_lookup_num_tokens": 3},
    "an assistant": lambda model: {"input_ids": prompt(50), "assistant_model": model},
    "a prefill in pieces": lambda model: {"input_ids": prompt(50), "prefill_chunk_size": 5},
    "hidden states": lambda model: {"input_ids": prompt(50), "output_hidden_states": True},
    "a function of one's own": lambda model: {"inputs": prompt(50), "custom_generate": custom},
    "no prompt": lambda model: {"bos_token_id": 5},
}


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("make", NOT_STORED.values(), ids=NOT_STORED)
def test_what_may_compute_other_kv_runs_as_without_a_store(
    load_model, store_url, make, is_stored, caplog
):
    model, counts = load_model(), Counters()
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    if is_stored:
        reuse(model, store_url, prompt(50))
    with (
        caplog.at_level("INFO"),
        StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv,
    ):
        output = kv.generate(**make(model), **options)
        assert kv.num_loaded == 0
    expected = model.generate(**make(model), **options)
    found, cold = (each if torch.is_tensor(each) else each.sequences for each in (output, expected))
    assert torch.equal(found, cold)
    assert counts["generated_without_store"] == 1
    assert counts["put_stored"] == counts["hits"] == 0
    assert caplog.text.count("generate() runs without the store: ") == 1


def test_a_cache_that_scales_values_has_no_way_into_the_store(load_model, store_url):
    """Neither by the argument, nor by the cache that a prefill returned."""
    model, ids = load_model(), prompt(50)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        for layer in kv.prefill(ids).layers:
            layer.values.mul_(1.2)
        output = kv.generate(ids, max_new_tokens=2, return_dict_in_generate=True)
        for layer in cache_of(output).layers:
            layer.values.mul_(1.2)
        kv.generate(**scaling_cache(model), max_new_tokens=2)
    assert not hasattr(kv, "save")
    again = reuse(model, store_url, ids, audit="off")
    assert again.num_loaded == 48
    assert_same_as_cold(model, ids, again)


def test_a_generate_that_fails_stores_nothing(load_model, store_url):
    class Abort(Streamer):
        def put(self, value):
            raise InterruptedError

    model, counts = load_model(), Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        with pytest.raises(InterruptedError):
            kv.generate(prompt(50), streamer=Abort())
        assert counts["put_stored"] == 0
        assert_same_as_cold(model, prompt(50), reuse(model, store_url, prompt(50)))


def test_a_pipeline_generates_with_the_store(model_dir, load_model, store_url, tmp_path):
    model, counts = load_model(), Counters()
    save_tiny_tokenizer(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "The clause was executed. " * 20
    options = {"max_new_tokens": 5, "do_sample": False}
    cold = pipe(text, **options)
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        model.generate = kv.generate
        assert [pipe(text, **options) for _ in range(2)] == [cold] * 2
        assert kv.num_loaded > 0
    assert counts["model_changed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_a_conversation_goes_on_in_another_process(model_dir, store_url, arch):
    """Each turn reads the prompt of the turn before it; the second process also reads that of its
    last turns, which the first one had."""
    path = model_dir(arch)
    assert chat_elsewhere(store_url, CHUNK, 2, path) == [0, 32]
    assert chat_elsewhere(store_url, CHUNK, 4, path) == [32, 64, 64, 96]


def test_eviction_takes_the_ends_of_prompts_first(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(161))
    directory = Path(store_url.removeprefix("file://"))
    size = max(path.stat().st_size for path in directory.glob("records/*/*"))
    shutil.rmtree(directory)
    store_url += f"?max_bytes={10 * size + size // 2}"
    reuse(model, store_url, prompt(161))
    reuse(model, store_url, prompt(81, seed=1))
    assert reuse(model, store_url, prompt(81, seed=1)).num_loaded == 80
    assert reuse(model, store_url, prompt(161)).num_loaded == 80


def test_token_ids_come_as_tensor_or_list(load_model, store_url):
    with StoredKV(load_model(), store_url, chunk_tokens=CHUNK) as kv:
        ids = prompt(40)
        loaded(kv, ids)
        for given in (ids, ids[0], ids.numpy(), ids.tolist(), ids[0].tolist(), tuple(ids[0])):
            assert loaded(kv, given) == 32
        assert kv.prefill([]).get_seq_length() == kv.prefill([5]).get_seq_length() == 0


def test_other_options_and_tenants_do_not_meet(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65))
    for options in ({"chunk_tokens": 8}, {"tenant": "b"}, {"weights_version": "2"}):
        assert reuse(model, store_url, prompt(65), **options).num_loaded == 0
    assert reuse(model, store_url, prompt(65)).num_loaded == 64


def test_a_closed_one_refuses(load_model, store_url):
    kv = StoredKV(load_model(), store_url)
    kv.close()
    kv.close()
    for use in (lambda: kv.generate(prompt(5)), lambda: kv.prefill([5])):
        with pytest.raises(ContractError, match="closed"):
            use()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_token": 16}, "did you mean 'chunk_tokens'"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1"),
        ({"io_threads": 0}, "io_threads must be between"),
        ({"load_timeout_seconds": 0}, "load_timeout_seconds must be more than 0"),
        ({"save_timeout_seconds": -1}, "save_timeout_seconds must be more than 0"),
    ],
)
def test_impossible_options_are_refused(load_model, store_url, options, message):
    with pytest.raises(ConfigError, match=message):
        StoredKV(load_model(), store_url, **options)


def test_a_quota_below_one_chunk_is_refused_before_it_evicts(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65))
    with pytest.raises(ConfigError, match="smaller than one chunk"):
        StoredKV(model, store_url + "?max_bytes=1KiB", chunk_tokens=CHUNK)
    assert reuse(model, store_url, prompt(65)).num_loaded == 64


def test_the_namespace_is_logged_known_and_described(model_dir, load_model, store_url, caplog):
    model = load_model()
    reuse(model, store_url, prompt(40))
    with caplog.at_level("INFO"), StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        assert caplog.text.count(kv.namespace) == 1
    with open_store(store_url) as store:
        (digest,) = store.catalogue().namespaces()
        said = Namespace.from_text(digest, store.catalogue().description(digest))
    assert (digest.hex(), said.model) == (kv.namespace, str(model_dir("llama")))


def test_a_read_only_store_gets_no_description(load_model, store_url, tmp_path):
    open_store(store_url).close()
    root = Path(parse_store_url(store_url).path)
    with StoredKV(load_model(), f"{store_url}?read_only=true"):
        pass
    assert not (root / "namespaces").exists()
