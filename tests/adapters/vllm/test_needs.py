"""Engines that need every token of a prompt computed load nothing; some models are not cached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.adapters.vllm.host import needs_all_tokens

from .fakes import make_config, write_model
from .released import Release
from .versioned_config import (
    NUM_TOKENS,
    make_kv_cache_config,
    options,
    prompt,
    whole_blocks,
)
from .versioned_config import make_config as make_released_config
from .versioned_host import VersionedHost

POOLER = SimpleNamespace(seq_pooling_type="MEAN")

# Parts of vLLM's configuration, and a word of what is said of them; empty: hits are used.
ENGINES = {
    "plain": ({}, ""),
    "experts are returned": ({"aux_output_config": SimpleNamespace(enabled=True)}, "experts"),
    "experts are not returned": ({"aux_output_config": SimpleNamespace(enabled=False)}, ""),
    "experts, before 0.32": ({"model_config__enable_return_routed_experts": True}, "experts"),
    "hidden states are returned": (
        {"speculative_config": SimpleNamespace(method="extract_hidden_states")},
        "hidden states",
    ),
    "n-grams": ({"speculative_config": SimpleNamespace(method="ngram")}, ""),
    "a mean of vectors": (
        {"model_config__pooler_config": POOLER, "model_config__is_prefix_caching_supported": False},
        "pooling",
    ),
    "the last vector": (
        {"model_config__pooler_config": POOLER, "model_config__is_prefix_caching_supported": True},
        "",
    ),
    "pooling, in a release that does not say": (
        {"model_config__pooler_config": POOLER, "cache_config__enable_prefix_caching": False},
        "pooling",
    ),
    "a generator whose own cache is off": ({"cache_config__enable_prefix_caching": False}, ""),
}


@pytest.mark.parametrize("name", ENGINES)
def test_each_option_that_needs_every_token_is_known(name, tmp_path):
    changes, word = ENGINES[name]
    said = needs_all_tokens(make_config(write_model(tmp_path / "model"), **changes))
    assert word in said
    assert bool(said) is bool(word)


@pytest.fixture(params=["0.14.0", "0.32.0", "0.33.0"])
def release(request):
    return Release(request.param)


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_an_engine_that_needs_every_token_loads_nothing_and_stores(
    release, plugin, model, tmp_path, role, caplog
):
    def run(name, number, **parts):
        config = make_released_config(
            release, model, extra=options(tmp_path), kv_transfer_config__kv_role=role
        )
        vars(config).update(parts)
        host = VersionedHost(release, plugin.KVFerryConnector, config)
        try:
            hit = host.run(name, prompt(number)).hit
            host.settle()
            host.rest_until_saved()
            return hit
        finally:
            host.shutdown()

    needs = {"aux_output_config": SimpleNamespace(enabled=True)}
    stored = whole_blocks(NUM_TOKENS) if role == "kv_both" else 0
    assert [run("cold", 1), run("warm", 1)] == [0, stored]
    assert [run("needs", 1, **needs), run("needs", 2, **needs)] == [0, 0]
    assert run("of those that it computed", 2) == stored
    assert caplog.text.count("only stores, and loads nothing: it returns the experts") == 2


def test_a_diffusion_model_is_neither_stored_nor_loaded(release, plugin, model, tmp_path, caplog):
    config = make_released_config(release, model, extra=options(tmp_path))
    config.model_config.is_diffusion = True
    host = VersionedHost(release, plugin.KVFerryConnector, config)
    try:
        assert [host.run(f"{turn}", prompt()).hit for turn in range(2)] == [0, 0]
    finally:
        host.shutdown()
    assert caplog.text.count("kvferry is off for this model: a diffusion model") == 1


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_a_model_that_keeps_no_kv_is_served_and_one_line_says_so(
    release, plugin, model, tmp_path, role, caplog
):
    groups = make_kv_cache_config(release, 8, 1)
    if groups is None:
        return
    groups.kv_cache_groups = []
    config = make_released_config(release, model, extra=options(tmp_path))
    config.compilation_config = SimpleNamespace(static_forward_context={})
    half = plugin.KVFerryConnector(
        config, release.types["KVConnectorRole"][role], *release.construction(groups)[-1]
    )
    try:
        if role == "WORKER":
            half.register_kv_caches({})
            assert not any(half.get_finished(set()))
    finally:
        half.shutdown()
    said = "it keeps no KV (as encoders and most embedders do), so there is nothing to do"
    assert caplog.text.count(said) == (role == "SCHEDULER")
