"""Which draft layers of vLLM are stored beside chunks, and under which drafter."""

from __future__ import annotations

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from kvferry.adapters.vllm.drafts import (
    draft_layers,
    draft_spec,
    drafter_digest,
    views_with_drafts,
)
from kvferry.adapters.vllm.layers import layers_of
from kvferry.adapters.vllm.spec import engine_spec
from kvferry.errors import LayoutError
from kvferry.keys import ModelIdentity

from .fakes import (
    FullAttentionSpec,
    Group,
    KVCacheConfig,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    make_config,
    names,
    write_model,
)

OWN = names(0, 1)
EAGLE, MTP, MODEL = names(2)[0], "mtp.layers.0.self_attn.attn", "draft_model.model.layers.0.attn"
IDENTITY = ModelIdentity(weights=b"w" * 32, config={})


@pytest.fixture
def make(tmp_path):
    target = write_model(tmp_path / "target")
    write_model(tmp_path / "drafter", fill=2.0)

    def make(drafter="drafter", made=(*OWN, EAGLE), backend="FlashAttentionBackend", **changes):
        def module():
            return SimpleNamespace(get_attn_backend=lambda: type(backend, (), {}))

        drafts = make_config(tmp_path / drafter if (tmp_path / drafter).exists() else target)
        drafts.model_config.model = str(tmp_path / drafter)
        config = make_config(
            target,
            speculative_config=SimpleNamespace(
                method="eagle",
                draft_model_config=drafts.model_config,
                target_model_config=object(),
                draft_parallel_config=SimpleNamespace(tensor_parallel_size=1),
            ),
            compilation_config=SimpleNamespace(
                static_forward_context={name: module() for name in made}
            ),
        )
        for name, value in changes.items():
            part, _, field = name.partition("__")
            setattr(getattr(config, part), field, value)
        return config

    return make


def described(config, *groups, platform="cuda"):
    cache = KVCacheConfig(list(groups))
    layers = layers_of(config, cache, platform)
    spec = engine_spec(config, layers, None, 128, lambda: IDENTITY)
    return draft_spec(config, draft_layers(config, cache, layers, platform), spec, None), spec


@pytest.mark.parametrize("name", [EAGLE, MTP, MODEL])
def test_draft_layers_in_a_table_of_the_model_are_stored_beside_it(make, name):
    config = make(made=(*OWN, name))
    drafts, spec = described(config, Group([*OWN, name], FullAttentionSpec()))
    [part], [group] = drafts.tables, drafts.groups
    assert (part.table, part.layer_names, part.block_size) == (0, (name,), 4)
    assert (group.num_layers, group.num_kv_heads, group.content_size) == (1, 2, 8)
    assert drafts.drafter == drafter_digest(config)
    assert spec.drafts is None
    assert {each for part in spec.table_parts for each in part.layer_names} == set(OWN)


def test_a_drafter_may_have_kv_of_another_form(make):
    specs = dict.fromkeys(OWN, FullAttentionSpec()) | {EAGLE: FullAttentionSpec(head_size=8)}
    drafts, _ = described(make(), Group(list(specs), UniformTypeKVCacheSpecs(specs)))
    assert [group.content_size for group in drafts.groups] == [16]


def test_without_a_drafter_there_is_nothing_to_store(make, caplog):
    config = make(made=OWN)
    assert described(config, Group(OWN, FullAttentionSpec()))[0] is None
    config.speculative_config = None
    assert described(config, Group(OWN, FullAttentionSpec()))[0] is None
    assert not caplog.records


TOGETHER = [Group([*OWN, EAGLE], FullAttentionSpec())]
LEFT_OUT = {
    "a table of its own": (
        {}, [Group(OWN, FullAttentionSpec()), Group([EAGLE], FullAttentionSpec())], "block table 1",
    ),
    "a window": (
        {}, [Group(OWN, SlidingWindowSpec()), Group([EAGLE], SlidingWindowSpec())], "block table 1",
    ),
    "a window that the model's table keeps whole": (
        {}, [Group([*OWN, EAGLE], FullAttentionSpec(sliding_window=8))], "a part of",
    ),
    "other ranks": ({"speculative_config__draft_parallel_config": SimpleNamespace(
        tensor_parallel_size=2)}, TOGETHER, "divided over ranks",
    ),
    "stages": ({"parallel_config__pipeline_parallel_size": 2}, TOGETHER, "divided over ranks"),
    "blocks that are stored whole": (
        {"backend": "RocmAttentionBackend"}, TOGETHER, "only be stored whole",
    ),
    "weights that are not here": ({"drafter": "none"}, TOGETHER, "not on this disk"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_cannot_be_stored_is_left_out_and_said(make, case, caplog):
    changes, groups, why = LEFT_OUT[case]
    drafts, spec = described(make(**changes), *groups)
    assert drafts is None
    assert {each for part in spec.table_parts for each in part.layer_names} == set(OWN)
    [record] = caplog.records
    assert "draft layers is not stored" in record.getMessage()
    assert why in record.getMessage()


def test_a_drafter_of_sliding_layers_without_a_window_stops_no_engine(make):
    """They attend to all tokens, as their spec says."""
    config = make()
    model = config.speculative_config.draft_model_config
    model.hf_text_config.layer_types = ["sliding_attention"] * 4
    assert not hasattr(model.hf_text_config, "sliding_window")
    drafts, _ = described(config, *TOGETHER)
    assert drafts.tables[0].layer_names == (EAGLE,)


@pytest.mark.parametrize("split", [EAGLE, *OWN])
def test_a_drafter_whose_backend_splits_blocks_stops_no_engine(make, caplog, split):
    """One of the model's layers does: its hits would be wrong."""
    config, cache = make(), KVCacheConfig(TOGETHER)
    layers = layers_of(config, cache, "cuda")
    drafts = draft_layers(config, cache, layers, "cuda")
    whole, parts = torch.zeros(8, 2, 4, 8), torch.zeros(16, 2, 2, 8)
    caches = {name: parts if name == split else whole for name in (*OWN, EAGLE)}
    if split == EAGLE:
        assert views_with_drafts(caches, {}, layers, drafts, "BHNC") == caches
        assert "splits blocks of 4 tokens into blocks of 2" in caplog.text
    else:
        with pytest.raises(LayoutError, match="splits blocks"):
            views_with_drafts(caches, {}, layers, drafts, "BHNC")


def test_a_vllm_that_saves_before_its_drafter_runs_stores_no_drafts(make, caplog, monkeypatch):
    name = "vllm.v1.worker.kv_connector_model_runner_mixin"
    for does_so in (False, True):
        runner = type("Runner", (), {"finalize_kv_connector": None} if does_so else {})
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(KVConnectorModelRunnerMixin=runner))
        assert (described(make(), *TOGETHER)[0] is not None) is does_so
    assert "before its drafter runs" in caplog.text


def test_ranks_that_share_memory_must_hold_the_same_drafts(make, caplog):
    """Copies of the model's latents, and heads of the drafter that each rank has for itself."""
    four = {"parallel_config__tensor_parallel_size": 4, "parallel_config__world_size": 4}
    four["speculative_config__draft_parallel_config"] = SimpleNamespace(tensor_parallel_size=4)
    config = make(**four)
    specs = dict.fromkeys(OWN, MLAAttentionSpec()) | {EAGLE: MLAAttentionSpec()}
    together, _ = described(config, Group(list(specs), UniformTypeKVCacheSpecs(specs)))
    assert together is not None
    specs[EAGLE] = FullAttentionSpec()
    apart, _ = described(config, Group(list(specs), UniformTypeKVCacheSpecs(specs)))
    assert apart is None
    assert "different parts of them" in caplog.text


CHANGES = {
    "method": lambda config: setattr(config.speculative_config, "method", "eagle3"),
    "dtype": lambda config: setattr(
        config.speculative_config.draft_model_config, "dtype", torch.float16
    ),
    "quantisation": lambda config: setattr(
        config.speculative_config.draft_model_config, "quantization", "fp8"
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_drafter_that_runs_otherwise_is_another(make, change):
    before = drafter_digest(make())
    CHANGES[change](config := make())
    assert drafter_digest(config) != before
    assert len(before) == 16


def test_a_drafter_is_its_weights_and_its_configuration_and_no_path(make, tmp_path):
    digests = [drafter_digest(make())]
    shutil.copytree(tmp_path / "drafter", tmp_path / "copy")
    assert drafter_digest(make("copy")) == digests[0]
    write_model(tmp_path / "tuned", fill=3.0)
    write_model(tmp_path / "longer", fill=2.0, num_hidden_layers=3)
    digests += [drafter_digest(make(name)) for name in ("tuned", "longer")]
    assert len(set(digests)) == 3
