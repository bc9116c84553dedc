"""Several rows in one cache: batches padded on the left, beams, and several answers to a prompt."""

from __future__ import annotations

import pytest
import torch

from kvferry.adapters.transformers import StoredKV
from kvferry.errors import ConfigError
from kvferry.journal import read_journal
from kvferry.observe import Counters
from kvferry.readings import read_days
from tests.adapters.transformers.generating import (
    CHUNK,
    assert_same_as_cold,
    batch,
    generate,
    loaded,
    prompt,
    reuse,
    run_elsewhere,
)

ARCHITECTURES = [
    *("llama", "qwen3", "mistral", "gpt_neox", "gemma2", "gemma3_text", "deepseek_v2"),
    *("deepseek_v3", "gpt_oss"),
]
WITHIN = 2e-4


def run(model, store_url, rows, **options):
    """Generate with a `StoredKV` of its own; compared with a run without. Returns the tokens of a
    row that were loaded, padding included, those saved, and counts."""
    counts = Counters()
    options["attention_mask"] = rows.attention_mask
    with StoredKV(model, store_url, chunk_tokens=CHUNK, observer=counts) as kv:
        sequences, logits = generate(kv, rows.input_ids, **options)
    cold, expected = generate(model, rows.input_ids, **options)
    assert torch.equal(sequences, cold)
    assert (logits - expected).abs().max() <= WITHIN
    return kv.num_loaded, counts["put_stored"] * CHUNK, counts


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
        alone = reuse(model, store_url, prompt(length))
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
    [((40, 1), 32), ((17, 40, 16), 32), ((33, 33), 32), ((65, 49), 64), ((15, 14), 0), ((1, 1), 0)],
)
def test_rows_of_awkward_lengths(load_model, store_url, lengths, num_loaded):
    model = load_model()
    rows = batch(*lengths)
    run(model, store_url, rows, new_tokens=2)
    assert run(model, store_url, rows, new_tokens=2)[0] == num_loaded


def test_the_row_that_is_stored_least_decides(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(90))
    url = f"{store_url}?read_only=true"
    rows = batch(90, 60)
    other = rows.input_ids.clone()
    other[1, 50:] = prompt(40, seed=5)[0]  # behind 20 tokens that are alike
    num_loaded, _, counts = run(model, url, rows._replace(input_ids=other))
    assert num_loaded == 30 + 16
    assert counts["hits"] == 2
    other[1, 30:] = prompt(60, seed=5)[0]
    num_loaded, _, counts = run(model, url, rows._replace(input_ids=other))
    assert num_loaded == 30
    assert (counts["hits"], counts["requests_missed"]) == (1, 1)


def test_the_mask_judges_padding_and_not_the_ids(load_model, store_url):
    model, ids = load_model(), prompt(60)
    model.generation_config.pad_token_id = 7
    ids[0, 20] = 7
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        for options in ({}, {"pad_token_id": 5}, {"eos_token_id": [2, 7]}):
            output = kv.generate(ids, max_new_tokens=2, do_sample=False, **options)
            cold = model.generate(ids, max_new_tokens=2, do_sample=False, **options)
            assert torch.equal(output, cold)
        loaded(kv, ids)
        # Without a mask, the padding token is hidden, and ends what is stored.
        assert loaded(kv, ids) == 16
        loaded(kv, ids, torch.ones_like(ids))
        assert loaded(kv, ids, torch.ones_like(ids)) == 48


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_padding_without_a_mask_is_what_generate_takes_for_it(
    model_dir, load_model, store_url, arch
):
    model, rows = load_model(model_dir(arch)), batch(50, 33)
    model.generation_config.pad_token_id = 7
    assert not (rows.input_ids[rows.attention_mask == 1] == 7).any()
    options = {"max_new_tokens": 5, "do_sample": False}
    cold = model.generate(**rows._asdict(), **options)
    for num_loaded in (0, 48):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            assert torch.equal(kv.generate(rows.input_ids, **options), cold)
            assert kv.num_loaded == num_loaded
    assert_same_as_cold(model, prompt(33), reuse(model, store_url, prompt(33)))


def test_what_a_mask_hides_further_on_ends_the_prompt(load_model, store_url):
    model, ids = load_model(), prompt(60)
    mask = torch.ones_like(ids)
    mask[0, :3] = mask[0, 40:45] = 0
    rows = batch(60)._replace(input_ids=ids, attention_mask=mask)
    assert run(model, store_url, rows)[:2] == (0, 32)
    num_loaded, num_saved, counts = run(model, store_url, rows)
    assert (num_loaded, num_saved) == (35, 0)
    assert counts["requests_padded"] == 1


def test_a_row_without_a_visible_token_stops_nothing(load_model, store_url):
    model, rows = load_model(), batch(40, 30)
    rows.attention_mask[1] = 0
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        assert loaded(kv, *rows) == 0
        assert loaded(kv, *rows) == 32
    assert_same_as_cold(model, prompt(40), reuse(model, store_url, prompt(40)))


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v3"])
def test_half_precision_in_a_batch(model_dir, load_model, store_url, arch):
    model = load_model(model_dir(arch), dtype=torch.bfloat16)
    rows = batch(90, 53, 37, seed=3)
    for num_loaded in (0, 80):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            generate(kv, rows.input_ids, attention_mask=rows.attention_mask)
            assert kv.num_loaded == num_loaded


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


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("llama", {"num_beams": 4, "num_return_sequences": 4}),
        ("llama", {"num_beams": 4, "num_return_sequences": 3}),
        ("gemma3_text", {"num_beams": 4}),
    ],
)
def test_beams_start_from_a_loaded_prompt(model_dir, load_model, store_url, arch, options):
    model = load_model(model_dir(arch))
    other = batch(70, 50, seed=1)
    other.input_ids[1, 20:] = prompt(50, seed=2)[0]
    for rows, num_loaded, num_saved in ((batch(50), 48, 48), (other, 64, 64 + 48)):
        assert run(model, store_url, rows, new_tokens=20, **options)[:2] == (0, num_saved)
        assert run(model, store_url, rows, new_tokens=20, **options)[:2] == (num_loaded, 0)
    for length, seed in ((50, 0), (70, 1), (50, 2)):
        again = reuse(model, store_url, prompt(length, seed))
        assert again.num_loaded == length // CHUNK * CHUNK
        assert_same_as_cold(model, prompt(length, seed), again)


def test_several_answers_are_sampled_from_one_prompt(load_model, store_url):
    model = load_model()
    options = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 20}
    for num_loaded in (0, 48):
        with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
            outputs = []
            for by in (kv, model):
                torch.manual_seed(1)
                outputs.append(by.generate(prompt(50), **options))
            assert torch.equal(*outputs)
            assert kv.num_loaded == num_loaded
    assert_same_as_cold(model, prompt(50), reuse(model, store_url, prompt(50)))


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
        for use in (kv.generate, kv.prefill):
            with pytest.raises(ConfigError, match=message) as refusal:
                use(rows.input_ids, attention_mask=given)
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
    assert run_elsewhere(READER, store_url, *paths) == ["(80, 0) (80, 0)"] * len(paths)


def test_the_journal_has_a_line_for_each_row(model_dir, load_model, store_url, tmp_path):
    """Its tokens add up: each of a row was loaded from a tier, or missed for a reason."""
    model, rows, record = load_model(model_dir("llama")), batch(90, 53, 37), tmp_path / "journal"
    with StoredKV(model, store_url, chunk_tokens=CHUNK, record=str(record)) as kv:
        for _ in range(2):
            loaded(kv, rows.input_ids, rows.attention_mask)
        kv.generate(rows.input_ids, attention_mask=rows.attention_mask, use_cache=False,
                    max_new_tokens=1)  # fmt: skip
    lines = read_journal(record, None, 100)
    assert [line.num_tokens for line in lines] == 2 * [90, 53, 37]
    for line in lines:
        assert sum(line.hits.values()) + sum(line.misses.values()) == line.num_tokens
        assert len(line.keys) == line.num_tokens // CHUNK
    assert [line.misses for line in lines[:3]] == [
        {"absent": 80, "partial": 10}, {"absent": 48, "partial": 5}, {"absent": 32, "partial": 5}
    ]  # fmt: skip
    assert [line.hits for line in lines[3:]] == [{"file": 80}, {"file": 43}, {"file": 27}]
    assert [line.compute_rate > 0 for line in lines] == 3 * [False] + 3 * [True]
    [day] = read_days(record)
    assert (day.num_requests, day.loaded, day.untimed) == (6, 150, 0)
    assert day.seconds > 0
    with pytest.raises(ConfigError, match="cannot record requests in"):
        StoredKV(model, store_url, record=str(tmp_path / "none" / "journal"))
