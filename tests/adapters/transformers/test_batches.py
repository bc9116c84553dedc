"""Several rows in one cache: batches padded on the left, beams, and several answers to a prompt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvferry.adapters.transformers import StoredKV
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from tests.adapters.transformers.generating import (
    CHUNK,
    assert_same_as_cold,
    batch,
    generate,
    prompt,
    reuse,
)
from tests.transformers_cache import cache_of, with_cache

ARCHITECTURES = [
    *("llama", "qwen3", "mistral", "gpt_neox", "gemma2", "gemma3_text", "deepseek_v2"),
    *("deepseek_v3", "gpt_oss"),
]
WITHIN = 2e-4


def run(model, store_url, rows, *, save: bool = True, **options):
    """Load, generate, save, with a `StoredKV` of its own; compared with a run without a cache.
    Returns the tokens of a row that were loaded, padding included, those saved, and counts."""
    counts = Counters()
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
        num_loaded = cache.get_seq_length()
        sequences, logits = generate(
            model, rows.input_ids, cache, attention_mask=rows.attention_mask, **options
        )
        mask = rows.attention_mask
        num_saved = kv.save(sequences, cache, attention_mask=mask) if save else 0
    cold, expected = generate(model, rows.input_ids, attention_mask=rows.attention_mask, **options)
    assert torch.equal(sequences, cold)
    assert (logits - expected).abs().max() <= WITHIN
    return num_loaded, num_saved, counts


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_ragged_batch_reads_what_every_row_has(model_dir, load_model, store_url, arch):
    model = load_model(model_dir(arch))
    rows = batch(90, 53, 37)
    assert run(model, store_url, rows)[:2] == (0, 80)
    # The shortest row has padding of 53 tokens and two chunks: 85.
    num_loaded, num_saved, counts = run(model, store_url, rows)
    assert (num_loaded, num_saved) == (80, 0)
    assert counts["hits"] == 3
    assert counts["hit_tokens"] == 80 + 43 + 27
    # Each row alone, without padding, reads the same records.
    for length in (90, 53, 37):
        alone = reuse(model, store_url, prompt(length), save=False)
        assert alone.num_loaded == length // CHUNK * CHUNK
        assert_same_as_cold(model, prompt(length), alone, WITHIN)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v3"])
def test_a_batch_reads_what_was_stored_of_single_prompts(model_dir, load_model, store_url, arch):
    model = load_model(model_dir(arch))
    for length, seed in ((70, 1), (33, 2)):
        reuse(model, store_url, prompt(length, seed))
    long, short = prompt(70, 1)[0], prompt(33, 2)[0]
    padded = torch.nn.functional.pad(short, (37, 0), value=7)
    rows = batch(70, 33)._replace(input_ids=torch.stack((long, padded)))
    assert run(model, store_url, rows)[0] == 64


@pytest.mark.parametrize(
    ("lengths", "num_loaded"),
    [((40, 1), 32), ((17, 40, 16), 32), ((33, 33), 32), ((64, 48), 63), ((15, 14), 0), ((1, 1), 0)],
)
def test_rows_of_awkward_lengths(load_model, store_url, lengths, num_loaded):
    model = load_model()
    rows = batch(*lengths)
    run(model, store_url, rows, new_tokens=2)
    assert run(model, store_url, rows, new_tokens=2)[0] == num_loaded


def test_the_row_that_is_stored_least_decides(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(90))
    rows = batch(90, 60)
    other = rows.input_ids.clone()
    other[1, 50:] = prompt(40, seed=5)[0]  # behind 20 tokens that are alike
    num_loaded, _, counts = run(model, store_url, rows._replace(input_ids=other), save=False)
    assert num_loaded == 30 + 16
    assert counts["hits"] == 2
    other[1, 30:] = prompt(60, seed=5)[0]
    num_loaded, _, counts = run(model, store_url, rows._replace(input_ids=other), save=False)
    assert num_loaded == 30
    assert (counts["hits"], counts["requests_missed"]) == (1, 1)


def test_the_mask_of_load_counts_where_save_has_none(load_model, store_url):
    model = load_model()
    rows = batch(50, 33)
    # One padding token that also ends sequences is no sign of padding.
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 7
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
        sequences, _ = generate(model, rows.input_ids, cache, attention_mask=rows.attention_mask)
        assert kv.save(sequences, cache) == 48
    alone = reuse(model, store_url, prompt(33))
    assert alone.num_loaded == 32
    assert_same_as_cold(model, prompt(33), alone)


def test_the_mask_that_was_used_judges_padding_and_not_the_ids(load_model, store_url):
    model = load_model()
    model.generation_config.pad_token_id = 7
    ids = prompt(60)
    ids[0, 20] = 7
    cache = DynamicCache()
    model(ids, **with_cache(cache))
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        assert kv.save(ids, cache) == 16, "without a mask, the padding token ends the prompt"
        assert kv.save(ids, cache, attention_mask=torch.ones_like(ids)) == 32
        assert kv.load(ids).get_seq_length() == 16
        assert kv.load(ids, attention_mask=torch.ones_like(ids)).get_seq_length() == 48


def test_what_a_mask_hides_further_on_ends_the_prompt(load_model, store_url):
    model = load_model()
    ids, counts = prompt(60), Counters()
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[0, 40:45] = 0
    rows = batch(60)._replace(input_ids=ids, attention_mask=mask)
    assert run(model, store_url, rows)[:2] == (0, 32)
    num_loaded, num_saved, counts = run(model, store_url, rows)
    assert (num_loaded, num_saved) == (35, 0)
    assert counts["requests_padded"] == 2


def test_what_may_be_hidden_behind_an_answer_needs_the_mask(load_model, store_url):
    """A batch goes on in one cache: the row that ended first gets padding, which is then hidden."""
    model = load_model()
    rows = batch(50, 33)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = 7
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
        sequences, _ = generate(
            model, rows.input_ids, cache, attention_mask=rows.attention_mask, new_tokens=10
        )
        sequences[1, 54:] = 7
        followed = torch.cat((sequences, prompt(60, seed=5).repeat(2, 1)), dim=1)
        mask = torch.ones_like(followed)
        mask[:, :50] = rows.attention_mask
        mask[1, 55:60] = 0
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
        followed, _ = generate(model, followed, cache, attention_mask=mask)
        kv.save(followed, cache, num_tokens=50)
        assert kv.save(followed, cache) == 64, "of the first row only"
        assert kv.save(followed, cache, attention_mask=mask) == 0
    ends = reuse(model, store_url, followed[1:, 17:])
    assert ends.num_loaded == 32
    assert_same_as_cold(model, followed[1:, 17:], ends)


def test_a_row_without_a_visible_token_stops_nothing(load_model, store_url):
    model = load_model()
    rows = batch(40, 30)
    rows.attention_mask[1] = 0
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(*rows[:1], attention_mask=rows.attention_mask)
        model(**rows._asdict(), **with_cache(cache))
        assert kv.save(rows.input_ids, cache) == 32
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
        assert cache.get_seq_length() == 32


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v3", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_positions_than_those_of_generate_are_not_stored(
    model_dir, load_model, store_url, arch, dtype
):
    model = load_model(model_dir(arch), dtype=dtype)
    rows = batch(53, 90)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        for options in ({}, {"position_ids": torch.arange(90)[None].repeat(2, 1)}):
            # A forward counts positions from the padding on.
            cache = DynamicCache()
            model(**rows._asdict(), **options, **with_cache(cache))
            with pytest.raises(ConfigError, match="37 hidden tokens in front"):
                kv.save(*rows[:1], cache, attention_mask=rows.attention_mask, num_tokens=90)
        # Nothing was hidden.
        cache = DynamicCache()
        positions = (rows.attention_mask.cumsum(-1) - 1).clamp_min(0)
        model(rows.input_ids, position_ids=positions, **with_cache(cache))
        with pytest.raises(ConfigError, match="save it with the attention_mask that was used"):
            kv.save(*rows[:1], cache, attention_mask=rows.attention_mask, num_tokens=90)
        cache = DynamicCache()
        model(**rows._asdict(), position_ids=positions, **with_cache(cache))
        assert kv.save(*rows[:1], cache, attention_mask=rows.attention_mask, num_tokens=90) == 80


def test_half_precision_in_a_batch(model_dir, load_model, store_url):
    for arch in ("llama", "gemma3_text", "deepseek_v3"):
        model = load_model(model_dir(arch), dtype=torch.bfloat16)
        rows = batch(90, 53, 37, seed=3)
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            for num_loaded in (0, 80):
                cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
                assert cache.get_seq_length() == num_loaded
                sequences, _ = generate(
                    model, rows.input_ids, cache, attention_mask=rows.attention_mask
                )
                kv.save(sequences, cache)


def test_a_second_batch_audits_its_longest_row(load_model, store_url):
    model = load_model()
    rows = batch(40, 90)
    run(model, store_url, rows)
    counts = run(model, store_url, rows)[2]
    assert (counts["audits"], counts["audit_mismatch"]) == (1, 0)


def test_records_that_rows_share_are_read_and_written_once(load_model, store_url):
    model = load_model()
    rows = batch(90, 90, 90)
    counts = run(model, store_url, rows)[2]
    assert counts["put_stored"] == 5
    counts = run(model, store_url, rows)[2]
    assert counts["hits"] == 3
    assert counts["fetch_records"] == 0 or counts["fetch_records"] == 5


# ---- several rows for one prompt

SEVERAL = {
    "beams": {"num_beams": 4},
    "beams, all returned": {"num_beams": 4, "num_return_sequences": 4},
    "beams, some returned": {"num_beams": 4, "num_return_sequences": 3},
}


@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_beams_start_from_a_loaded_prompt(model_dir, load_model, store_url, arch, options):
    model = load_model(model_dir(arch))
    for rows, num_loaded, num_saved in ((batch(50), 48, 48), (batch(70, 50), 64, 16)):
        assert run(model, store_url, rows, new_tokens=20, **options)[1] == num_saved
        assert run(model, store_url, rows, new_tokens=20, **options)[:2] == (num_loaded, 0)
    # The answers of beams are not stored; the prompts are right.
    assert_same_as_cold(model, prompt(70), reuse(model, store_url, prompt(70)))


def test_sampled_answers_to_one_prompt_are_all_stored(load_model, store_url):
    model = load_model()
    options = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 20}
    for num_loaded in (0, 48):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            cache = kv.load(prompt(50))
            assert cache.get_seq_length() == num_loaded
            torch.manual_seed(1)
            output = model.generate(prompt(50), **with_cache(cache), min_new_tokens=20, **options)
            assert kv.save(output, cache) == (0 if num_loaded else 48 + 3 * 16)
    for row in output:
        again = reuse(model, store_url, row[None], save=False)
        assert again.num_loaded == 64
        assert_same_as_cold(model, row[None], again)


def test_a_cache_of_several_rows_from_elsewhere_needs_the_prompts_length(load_model, store_url):
    model = load_model()
    options = {"num_beams": 3, "num_return_sequences": 3, "return_dict_in_generate": True}
    output = model.generate(prompt(50), max_new_tokens=20, **options)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        with pytest.raises(ConfigError, match="3 rows and is not from load"):
            kv.save(output.sequences, cache_of(output))
        assert kv.save(output.sequences, cache_of(output), num_tokens=50) == 48
    assert_same_as_cold(model, prompt(50), reuse(model, store_url, prompt(50)))


def test_rows_that_were_picked_by_hand_are_not_stored(load_model, store_url):
    model = load_model()
    rows = batch(50, 50)
    rows.input_ids[1] = prompt(50, seed=4)[0]
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(rows.input_ids)
        model(rows.input_ids, **with_cache(cache))
        cache.batch_select_indices(torch.tensor([1, 0]))
        assert kv.save(rows.input_ids, cache) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones((3, 50)), r"attention_mask is \[3, 50\], and the token ids are \[2, 50\]"),
        (torch.ones((2, 51)), r"attention_mask is \[2, 51\]"),
        (torch.ones((1, 2, 50)), r"attention_mask is \[1, 2, 50\]"),
        (torch.full((2, 50), -1e9), "other values than 0 and 1"),
        ("mask", "attention_mask is a str"),
        ([[1, 1], [1]], "attention_mask is a list"),
    ],
)
def test_what_is_no_mask_of_the_tokens_is_refused(load_model, store_url, given, message):
    rows = batch(50, 40)
    with StoredKV(load_model(), store_url) as kv:
        for use in (kv.load, lambda ids, **mask: kv.save(ids, DynamicCache(), **mask)):
            with pytest.raises(ConfigError, match=message) as refusal:
                use(rows.input_ids, attention_mask=given)
            assert "\n" not in str(refusal.value)


def test_a_mask_may_come_only_with_save(load_model, store_url):
    model = load_model()
    rows = batch(33, 50)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(rows.input_ids)
        sequences, _ = generate(model, rows.input_ids, cache, attention_mask=rows.attention_mask)
        assert kv.save(sequences, cache, attention_mask=rows.attention_mask) == 48
    assert_same_as_cold(model, prompt(50), reuse(model, store_url, prompt(50)))


@pytest.mark.parametrize("is_stored", [False, True])
def test_other_rows_than_were_loaded_are_refused(load_model, store_url, is_stored):
    model = load_model()
    rows = batch(50, 33)
    if is_stored:
        run(model, store_url, rows)
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        cache = kv.load(rows.input_ids, attention_mask=rows.attention_mask)
        sequences, _ = generate(model, rows.input_ids, cache, attention_mask=rows.attention_mask)
        for given, options, message in (
            (sequences.flip(0), {}, "loaded for other tokens"),
            (sequences, {"attention_mask": torch.ones((2, 50))}, "another attention_mask"),
            (sequences[:1], {"attention_mask": torch.ones((1, 50))}, "has 2 rows for 2 prompts"),
            (sequences.repeat(2, 1), {}, "has 2 rows for 2 prompts, and 4 sequences"),
        ):
            with pytest.raises(ConfigError, match=message) as refusal:
                kv.save(given, cache, **options)
            assert "\n" not in str(refusal.value)


READER = """
import sys
import torch
from transformers import AutoModelForCausalLM
from tests.adapters.transformers.generating import batch
from tests.adapters.transformers.test_batches import run

store_url, *paths = sys.argv[1:]
rows = batch(90, 53, 37)
for path in paths:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    print(run(model, store_url, rows)[:2], run(model, store_url, rows, num_beams=3)[:2])
"""


@pytest.mark.slow
def test_another_process_reads_batches_and_beams(model_dir, load_model, store_url):
    paths = [model_dir(arch) for arch in ("llama", "gemma2", "gemma3_text")]
    for path in paths:
        run(load_model(path), store_url, batch(90, 53, 37))
    command = [sys.executable, "-c", READER, store_url, *map(str, paths)]
    root = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.splitlines() == ["(80, 0) (80, 0)"] * len(paths)
