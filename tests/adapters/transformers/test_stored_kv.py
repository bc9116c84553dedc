"""Reuse through `model.generate`: what is stored, what is read, and that it changes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError, ContractError
from kvferry.keys import Namespace
from kvferry.observe import Counters
from kvferry.store.url import open_store, parse_store_url
from tests.adapters.transformers.generating import (
    CHUNK,
    assert_same_as_cold,
    generate,
    prompt,
    reuse,
)
from tests.transformers_cache import cache_of, with_cache

# Plain, norms on keys, windows, no grouped heads, full and windowed layers in turn, latents.
ARCHITECTURES = [
    *("llama", "qwen3", "mistral", "gpt_neox", "gemma3_text", "deepseek_v2", "deepseek_v3"),
    *("gemma2", "gpt_oss", "olmo2", "phi3", "internlm3", "iquestcoder"),
]


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
    longer = prompt(64)
    reuse(model, store_url, longer)
    input_ids = longer[:, :length]
    again = reuse(model, store_url, input_ids)
    assert again.num_loaded == min(length // CHUNK * CHUNK, length - 1)
    assert_same_as_cold(model, input_ids, again)


@pytest.mark.parametrize("shared", [0, 15, 16, 40, 64])
def test_a_prompt_that_starts_alike_reads_what_is_alike(load_model, store_url, shared):
    model = load_model()
    reuse(model, store_url, prompt(64, seed=1))
    other = torch.cat([prompt(64, seed=1)[:, :shared], prompt(30, seed=2)], dim=1)
    again = reuse(model, store_url, other)
    assert again.num_loaded == shared // CHUNK * CHUNK
    assert_same_as_cold(model, other, again)


def test_answers_are_kept_if_their_tokens_are_given(load_model, store_url):
    model = load_model()
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(prompt(30))
        sequences, _ = generate(model, prompt(30), cache, new_tokens=20)
        assert kv.save(sequences, cache, num_tokens=30) == 16
        assert kv.save(sequences, cache) == 32
        followed = torch.cat([sequences, prompt(9, seed=3)], dim=1)
        cache = kv.load(followed)
        assert cache.get_seq_length() == 48
        sequences, logits = generate(model, followed, cache)
    cold, cold_logits = generate(model, followed)
    assert torch.equal(sequences, cold)
    assert (logits - cold_logits).abs().max() <= 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_embedded_engine_reads_what_transformers_stored(model_dir, store_url, arch):
    path = model_dir(arch)
    stored = reuse(load_by_class(path), store_url, prompt(101), save=True)
    params = SamplingParams(max_tokens=5, ignore_eos=True, return_logits=True)
    options = {"chunk_tokens": 16, "audit": "off"}
    with LLM(path, store=store_url, dtype="float32", connector_options=options) as llm:
        [answer] = llm.generate([prompt(101)[0].tolist()], params)
    assert answer.num_external_tokens == 96
    assert list(answer.token_ids) == stored.token_ids[101:]
    assert abs(torch.tensor(answer.first_logits) - stored.logits[0]).max() <= 1e-4


@pytest.mark.parametrize("arch", ARCHITECTURES)
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
    assert reuse(model, store_url, prompt(40)).num_saved == 32
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(prompt(40))
        own = kv.load(prompt(40, seed=1))
    generate(model, prompt(40), own)
    for loaded, computed in zip(cache.layers, own.layers, strict=True):
        assert loaded.keys.dtype == torch.bfloat16
        assert torch.equal(loaded.keys, computed.keys[:, :, :32])
        assert torch.equal(loaded.values, computed.values[:, :, :32])
    assert reuse(load_model(), store_url, prompt(40)).num_loaded == 0, "read by another dtype"


def test_the_own_cache_of_generate_is_stored_too(load_model, store_url):
    model = load_model()
    output = model.generate(prompt(40), max_new_tokens=3, return_dict_in_generate=True)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        assert kv.save(output.sequences, cache_of(output)) == 32
    assert_same_as_cold(model, prompt(40), reuse(model, store_url, prompt(40)))


def test_of_layers_that_dropped_tokens_only_what_is_left_is_stored(
    model_dir, load_model, store_url
):
    model = load_model(model_dir("mistral", sliding_window=37))
    counts = Counters()
    long = model.generate(prompt(90), max_new_tokens=2, return_dict_in_generate=True)
    short = model.generate(prompt(34, seed=5), max_new_tokens=2, return_dict_in_generate=True)
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        # 91 tokens, of which the last 36 are kept: the chunk from 64 to 80 is the only whole one.
        assert kv.save(long.sequences, cache_of(long)) == 16
        assert counts["save_windowed"] == 1
        # Before the window is full nothing is lost.
        assert kv.save(short.sequences, cache_of(short)) == 32
        assert counts["save_windowed"] == 1
        assert kv.load(prompt(90)).get_seq_length() == 0
    again = reuse(model, store_url, prompt(90))
    assert_same_as_cold(model, prompt(90), again)
    # 64 to 80 is there already, and right: nothing but the rest is stored.
    assert again.num_saved == 64
    again = reuse(model, store_url, prompt(90))
    assert again.num_loaded == 80
    assert_same_as_cold(model, prompt(90), again)


def test_a_prefill_in_pieces_takes_the_cache(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(50))
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(prompt(50)[:, :30])
        assert cache.get_seq_length() == 16
        options = {"max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": 5}
        output = model.generate(prompt(50)[:, :30], **with_cache(cache), **options)
        kv.save(output, cache)
    assert torch.equal(output, model.generate(prompt(50)[:, :30], max_new_tokens=8))
    again = reuse(model, store_url, output)
    assert again.num_loaded == 32
    assert_same_as_cold(model, output, again)


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize("assistant", ["prompt look-up", "a model"])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_assisted_generation_computes_the_prompt_anew(
    model_dir, load_model, store_url, arch, assistant, is_stored
):
    """Transformers computes it on top of any cache, which is therefore emptied."""
    model = load_model(model_dir(arch))
    options = {"max_new_tokens": 20, "do_sample": False}
    if is_stored:
        reuse(model, store_url, prompt(60))
    cold = model.generate(prompt(60), **options)
    help_of = {"prompt look-up": {"prompt_lookup_num_tokens": 3}}
    if assistant not in help_of:
        help_of[assistant] = {"assistant_model": load_model(model_dir(arch, seed=1))}
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(prompt(60))
        assert cache.get_seq_length() == (48 if is_stored else 0)
        output = model.generate(prompt(60), **with_cache(cache), **options, **help_of[assistant])
        kv.save(output, cache)
    assert torch.equal(output, cold)
    again = reuse(model, store_url, output)
    assert again.num_loaded >= 64
    assert_same_as_cold(model, output, again)


def test_assisted_generation_with_a_part_of_the_prompt_is_stopped(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(60))
    with (
        StoredKV(model, store_url, chunk_tokens=CHUNK) as kv,
        pytest.raises(ContractError, match=r"pass generate\(\) all of its tokens"),
    ):
        model.generate(
            prompt(60)[:, 48:],
            attention_mask=torch.ones((1, 60)),
            **with_cache(kv.load(prompt(60))),
            prompt_lookup_num_tokens=3,
            max_new_tokens=9,
        )


def test_a_forward_of_the_whole_prompt_is_stopped(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(60))
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(prompt(60))
        with pytest.raises(ContractError, match="60 tokens are computed on top of 48"):
            model(prompt(60), **with_cache(cache))
        model(prompt(60)[:, 48:], **with_cache(cache))
        assert kv.save(prompt(60), cache) == 0


@pytest.mark.parametrize("run", ["the first run", "the second run"])
def test_a_conversation_goes_on_in_one_cache(load_model, store_url, run):
    """Later messages are longer than the first prompt, which a loaded cache was made for."""
    model = load_model()
    for number in range(1 if run == "the first run" else 2):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            token_ids = prompt(40)
            cache = kv.load(token_ids)
            assert cache.get_seq_length() == (0, 32)[number]
            for turn in range(3):
                sequences, logits = generate(model, token_ids, cache)
                cold_sequences, cold = generate(model, token_ids)
                assert torch.equal(sequences, cold_sequences)
                assert (logits - cold).abs().max() < 1e-4
                kv.save(sequences, cache)
                token_ids = torch.cat((sequences, prompt(70, seed=turn + 1)), dim=1)


CHAT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from kvferry.adapters.transformers import StoredKV
from tests.adapters.transformers.generating import CHUNK, generate, prompt

num_shared, store_url, *paths = sys.argv[1:]
for path in paths:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        token_ids = prompt(int(num_shared))
        cache = kv.load(token_ids)
        print(cache.get_seq_length())
        for turn in range(3):
            token_ids = torch.cat((token_ids, prompt(70, seed=turn + 1)), dim=1)
            sequences, logits = generate(model, token_ids, cache)
            cold_sequences, cold = generate(model, token_ids)
            assert torch.equal(sequences, cold_sequences)
            assert (logits - cold).abs().max() < 1e-4
            kv.save(sequences, cache)
            token_ids = sequences
"""


def chat(paths: list[Path], store_url: str, *, num_shared: int) -> list[int]:
    """Conversations with models in a process of their own and each in a cache of its own, which is
    loaded for the tokens that all conversations share. Returns how many were, for each model."""
    done = subprocess.run(
        [sys.executable, "-c", CHAT, str(num_shared), store_url, *map(str, paths)],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_a_conversation_behind_shared_tokens_runs_again(model_dir, store_url):
    """The first forward then brings more tokens than the cache was loaded for."""
    paths = [model_dir(arch) for arch in ("llama", "gemma3_text")]
    assert chat(paths, store_url, num_shared=40) == [0, 0]
    assert chat(paths, store_url, num_shared=40) == [32, 32]


def test_a_longer_prompt_than_was_loaded_is_generated_from(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(20))
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(prompt(20))
        assert cache.get_seq_length() == 16
        token_ids = torch.cat((prompt(20), prompt(70, seed=1)), dim=1)
        sequences, logits = generate(model, token_ids, cache)
        kv.save(sequences, cache)
    assert (logits - generate(model, token_ids)[1]).abs().max() < 1e-4
    again = reuse(model, store_url, token_ids)
    assert again.num_loaded == 80
    assert_same_as_cold(model, token_ids, again)


def test_eviction_takes_the_ends_of_prompts_first(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(160))
    directory = Path(store_url.removeprefix("file://"))
    size = max(path.stat().st_size for path in directory.glob("records/*/*"))
    shutil.rmtree(directory)
    store_url += f"?max_bytes={10 * size + size // 2}"
    reuse(model, store_url, prompt(160))
    reuse(model, store_url, prompt(80, seed=1))
    assert reuse(model, store_url, prompt(80, seed=1), save=False).num_loaded == 79
    assert reuse(model, store_url, prompt(160), save=False).num_loaded == 80


def test_token_ids_come_as_tensor_or_list(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(40))
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        ids = prompt(40)
        for given in (ids, ids[0], ids.numpy(), ids.tolist(), ids[0].tolist(), tuple(ids[0])):
            assert kv.load(given).get_seq_length() == 32
        assert kv.load([]).get_seq_length() == 0


WRITER = """
import sys
from transformers import AutoModelForCausalLM
from tests.adapters.transformers.generating import prompt, reuse

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print([reuse(model, sys.argv[2], prompt(64, seed=seed)).num_saved for seed in range(4)])
"""


@pytest.mark.slow
def test_two_processes_at_once_store_and_another_reads_all(model_dir, load_model, store_url):
    command = [sys.executable, "-c", WRITER, str(model_dir()), store_url]
    root = Path(__file__).parents[3]
    both = [
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    saved = [eval(process.communicate(timeout=240)[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    # The first one stored it, and none stored it twice.
    assert [sum(each) for each in zip(*saved, strict=True)] == [64] * 4
    model = load_model()
    for seed in range(4):
        read = reuse(model, store_url, prompt(64, seed=seed))
        assert read.num_loaded == 63
        assert_same_as_cold(model, prompt(64, seed=seed), read)


def test_other_options_and_tenants_do_not_meet(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(64))
    for options in ({"chunk_tokens": 8}, {"tenant": "b"}, {"weights_version": "2"}):
        assert reuse(model, store_url, prompt(64), save=False, **options).num_loaded == 0
    assert reuse(model, store_url, prompt(64)).num_loaded == 63


def test_a_closed_one_refuses(load_model, store_url):
    kv = StoredKV(load_model(), store_url)
    kv.close()
    kv.close()
    for use in (lambda: kv.load([5]), lambda: kv.save([5], None)):
        with pytest.raises(ContractError, match="closed"):
            use()


def test_an_unknown_option_names_the_nearest(load_model, store_url):
    with pytest.raises(ConfigError, match="chunk_tokens"):
        StoredKV(load_model(), store_url, chunk_token=16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    reuse(model, store_url, prompt(64))
    with pytest.raises(ConfigError, match="smaller than one chunk"):
        StoredKV(model, store_url + "?max_bytes=1KiB", chunk_tokens=CHUNK)
    assert reuse(model, store_url, prompt(64)).num_loaded == 63


def test_the_store_knows_what_the_model_is_called(model_dir, load_model, store_url):
    reuse(load_model(), store_url, prompt(40))
    with open_store(store_url) as store:
        (digest,) = store.namespaces()
        said = Namespace.from_text(digest, store.describe(digest))
    assert said.model == str(model_dir("llama"))


def test_the_namespace_is_logged_and_known(load_model, store_url, caplog):
    model = load_model()
    reuse(model, store_url, prompt(40))
    with caplog.at_level("INFO"), StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        assert caplog.text.count(kv.namespace) == 1
        with open_store(store_url) as store:
            assert [each.hex() for each in store.namespaces()] == [kv.namespace]


def test_a_read_only_store_gets_no_description(load_model, store_url, tmp_path):
    open_store(store_url).close()
    root = Path(parse_store_url(store_url).path)
    with StoredKV(load_model(), f"{store_url}?read_only=true"):
        pass
    assert not (root / "namespaces").exists()
