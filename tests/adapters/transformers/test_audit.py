"""A model whose KV differs from that in records under its identity is found at its first hit."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvferry.adapters.transformers import StoredKV, StoredKVConfig, host_model
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from tests.adapters.transformers.generating import (
    CHUNK,
    generate,
    loaded,
    prompt,
    reuse,
)
from tests.model_changes import CHANGES, hook, scale

NAMED = {"weights_version": "switches the identity of weights off"}
LENGTH = 300


@pytest.fixture
def only_the_audit(monkeypatch):
    """Switches the identity of what is in memory off, too."""
    monkeypatch.setattr(host_model, "deviations", lambda *_: {})


@pytest.fixture(scope="module")
def stored(model_dir, tmp_path_factory):
    """The URL of a store that holds 300 tokens of the model as it is."""
    from transformers import AutoModelForCausalLM

    url = (tmp_path_factory.mktemp("audit") / "store").as_uri()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir(max_position_embeddings=4096), dtype=torch.float32
    )
    reuse(model, url, prompt(LENGTH), **NAMED)
    return url


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.usefixtures("only_the_audit")
def test_a_changed_model_is_found_at_its_first_hit(model_dir, load_model, stored, change, caplog):
    model = load_model(model_dir(max_position_embeddings=4096))
    change(model)
    # Else the record that differs is taken out, and the next test finds none.
    found = reuse(model, f"{stored}?read_only=true", prompt(LENGTH), **NAMED)
    assert found.num_loaded == 0
    assert found.counts["audit_mismatch"] == 1
    assert caplog.text.count("KV differs from that in record") == 1


@pytest.mark.usefixtures("only_the_audit")
def test_a_model_that_differs_nearly_enough_is_served_with_a_warning(
    model_dir, load_model, stored, caplog
):
    model = load_model(model_dir(max_position_embeddings=4096))
    scale("v_proj", by=1 + 0.7 * 5e-5 * (128 / CHUNK) ** 0.5)(model)
    for _ in range(2):
        found = reuse(model, f"{stored}?read_only=true", prompt(LENGTH), **NAMED)
        assert found.num_loaded > 0
        assert found.counts["audit_doubtful"] == 1
        assert found.counts["audit_mismatch"] == 0
    assert caplog.text.count("differs more than rounding did") == 2  # once in each `StoredKV`


@pytest.mark.parametrize("change", ["an adapter merged", "frequencies rounded", "a hook"])
@pytest.mark.usefixtures("only_the_audit")
def test_without_the_audit_it_would_be_served(model_dir, load_model, stored, change):
    model = load_model(model_dir(max_position_embeddings=4096))
    CHANGES[change](model)
    found = reuse(model, f"{stored}?read_only=true", prompt(LENGTH), audit="off", **NAMED)
    assert found.num_loaded > 0
    _, cold = generate(model, prompt(LENGTH))
    assert (found.logits - cold).abs().max() > 0.01


def test_a_model_that_was_found_reads_and_writes_nothing_any_more(model_dir, load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65), **NAMED)
    hook(model)
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, **NAMED) as kv:
        for ids in (prompt(65), prompt(65), prompt(100, seed=1)):
            assert loaded(kv, ids) == 0
            sequences, logits = generate(kv, ids)
            cold, expected = generate(model, ids)
            assert torch.equal(sequences, cold)
            assert (logits - expected).abs().max() < 1e-4
    assert counts["audits"] == counts["audit_mismatch"] == 1
    assert counts["generated_without_store"] == 3
    assert counts["put_stored"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v3"])
def test_an_honest_model_is_never_suspected(model_dir, load_model, store_url, arch, dtype):
    model = load_model(model_dir(arch), dtype=dtype)
    lengths = (17, 40, 161)
    for seed, length in enumerate(lengths):
        reuse(model, store_url, prompt(length, seed))
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, audit=1.0) as kv:
        for seed, length in enumerate(lengths):
            tokens = prompt(length, seed)
            for cut in range(CHUNK + 1, length + 1, 9):
                assert loaded(kv, tokens[:, :cut]) > 0
    assert counts["audits"] == counts["hits"] > 18
    assert counts["audit_mismatch"] == 0


@pytest.mark.parametrize(
    ("audit", "num_audits"), [("first", 1), ("off", 0), (0, 1), (0.0, 1), (1, 5), (1.0, 5)]
)
def test_how_often_a_hit_is_checked(load_model, store_url, audit, num_audits):
    model = load_model()
    reuse(model, store_url, prompt(65))
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, audit=audit) as kv:
        for _ in range(5):
            assert loaded(kv, prompt(65)) == 64
    assert (counts["hits"], counts["audits"]) == (5, num_audits)


@pytest.mark.parametrize(
    "audit",
    [
        *("always", "First", "", "nan", "1.5", b"first", None, [0.5], True, False),
        *(-0.1, 1.5, float("nan"), float("inf"), -1, 2, 10**400),
    ],
)
def test_other_values_are_refused(load_model, store_url, audit):
    for make in (StoredKVConfig, partial(StoredKV, load_model(), store_url)):
        if make is not StoredKVConfig and audit == "First":
            continue  # options may come as text in any case
        with pytest.raises(ConfigError, match="audit") as refusal:
            make(audit=audit)
        assert "\n" not in str(refusal.value)


# ---- a model that changes while it is in use


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_in_memory_ends_the_use(load_model, store_url, change):
    model = load_model()
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK) as kv:
        loaded(kv, prompt(65))
        assert loaded(kv, prompt(65)) == 64
        change(model)
        loads = [loaded(kv, prompt(65)) for _ in range(5)]
    assert loads[-1] == 0
    assert counts["model_changed"] >= 1


def test_under_autocast_nothing_is_served_but_afterwards(load_model, store_url):
    model = load_model()
    reuse(model, store_url, prompt(65))
    with StoredKV(model, store_url, chunk_tokens=CHUNK) as kv:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert loaded(kv, prompt(65)) == 0
        assert loaded(kv, prompt(65)) == 64


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("arch", ["llama", "qwen3", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_of_2000_honest_hits_none_is_suspected(model_dir, load_model, store_url, arch, dtype):
    """135 or more of each architecture and dtype; at each, two chunks are compared."""
    model = load_model(model_dir(arch), dtype=dtype)
    for seed in range(9):
        reuse(model, store_url, prompt(161, seed))
    counts = Counters()
    with StoredKV(model, store_url, observer=counts, chunk_tokens=CHUNK, audit=1.0) as kv:
        for seed in range(9):
            for cut in range(CHUNK + 1, 162, 9):
                assert loaded(kv, prompt(161, seed)[:, :cut]) > 0
    assert counts["audits"] == counts["hits"] >= 135
    assert counts["audit_mismatch"] == 0
