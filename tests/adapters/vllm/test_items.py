"""A multimodal item is known by its content and by how the engine reads it, or not at all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.adapters.vllm.request_identity import ItemIdentities

from .fakes import make_config, write_model


def identities(model, *, prefix_caching=True, source=None, **multimodal):
    config = make_config(model)
    config.cache_config.enable_prefix_caching = prefix_caching
    settings = {"mm_processor_cache_gb": 4, "mm_processor_kwargs": None, **multimodal}
    config.model_config.multimodal_config = SimpleNamespace(**settings)
    return ItemIdentities(config, source)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def test_an_item_is_what_its_hash_says(model):
    assert identities(model)("hash") == "hash"


@pytest.mark.parametrize(
    ("prefix_caching", "cache_gb", "is_hashed"),
    [(True, 0, True), (False, 4, True), (False, 0, False)],
)
def test_items_that_vllm_only_numbers_have_no_identity(model, prefix_caching, cache_gb, is_hashed):
    asked = identities(model, prefix_caching=prefix_caching, mm_processor_cache_gb=cache_gb)
    assert (asked("renderer0-mm-1-image-0") is not None) == is_hashed


@pytest.mark.parametrize(
    "settings",
    [
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"mm_encoder_attn_dtype": "fp8"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_the_same_item_read_otherwise_is_another(model, settings):
    assert identities(model, **settings)("hash") != identities(model)("hash")
    assert identities(model, **settings)("hash") == identities(model, **settings)("hash")


def test_what_reads_videos_and_the_scales_of_the_encoder_count(model, tmp_path, monkeypatch):
    path = tmp_path / "scales.json"
    path.write_text("{}")
    scaled = {"mm_encoder_fp8_scale_path": str(path)}
    found = {identities(model)("hash"), identities(model, **scaled)("hash")}
    path.write_text('{"layer": 2}')  # at the same path
    found.add(identities(model, **scaled)("hash"))
    for reader in ("opencv", "identity"):
        monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", reader)
        found.add(identities(model)("hash"))
    assert len(found) == 5


@pytest.mark.parametrize(("rate", "is_known"), [(None, True), (0.0, True), (0.25, False)])
def test_items_that_are_pruned_have_no_identity(model, rate, is_known):
    pruned = identities(model, video_pruning_rate=rate, video_pruning_method="evs")
    assert (pruned("hash") is not None) == is_known


def test_the_model_says_in_a_file_how_items_are_read(model):
    path = model / "preprocessor_config.json"
    found = {identities(model, source=model)("hash")}
    for text in ("{}", '{"image_mean": [0, 0, 0]}'):
        path.write_text(text)
        found.add(identities(model, source=model)("hash"))
    assert len(found) == 3
    assert identities(model, source=model)("one") != identities(model, source=model)("other")
