"""Both halves of a connector describe the model in the same way, or nothing is loaded or saved."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvferry.adapters.vllm import host as vllm_host
from kvferry.adapters.vllm.spec import spec_of_workers
from kvferry.contract.spec import EngineSpec, Mode
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.types import KVGroup, TablePart

from .released import Release, number, versions
from .versioned_config import (
    NUM_TOKENS,
    make_config,
    make_kv_cache_config,
    options,
    prompt,
    whole_blocks,
)
from .versioned_kv import layer_names, make_layer

pytestmark = pytest.mark.slow


@pytest.fixture(
    params=[
        version
        for version in versions()
        if number(version) >= (0, 11, 1)
        and make_kv_cache_config(Release(version), 8, 1) is not None
    ]
)
def release(request):
    return Release(request.param)


@pytest.mark.parametrize("world", [1, 2])
def test_the_scheduler_takes_what_the_workers_see_of_layers_that_differ(engine, world, caplog):
    caplog.set_level(logging.INFO)
    first = engine(world=world, is_uniform=True)
    assert len(first.scheduler._cache.spec.groups) == 2
    first.run("cold", prompt())
    first.settle()
    first.rest_until_saved()
    assert first.run("again", prompt()).hit == whole_blocks(NUM_TOKENS)
    first.shutdown()
    assert engine(world=world, is_uniform=True).run("warm", prompt()).hit == whole_blocks(
        NUM_TOKENS
    )
    assert "another namespace" not in caplog.text


@pytest.mark.parametrize("world", [1, 2])
def test_halves_that_disagree_say_so_once_and_serve_nothing(engine, world, caplog):
    for _ in range(2):
        host = engine(world=world, is_uniform=True, in_multi=True)
        hits = [host.run(f"{number_}", prompt()).hit for number_ in range(3)]
        host.settle()
        assert hits == [0, 0, 0]
        assert not [name for name in host.counters if "hook_failed" in name]
        host.shutdown()
    said = [record.getMessage() for record in caplog.records if "namespace" in record.getMessage()]
    assert len(said) == 2  # one for each engine
    assert "Nothing is loaded or saved" in said[0]
    assert "\n" not in said[0]


def test_a_half_that_sees_all_is_not_opened_again(engine):
    host = engine(world=2)
    cache = host.scheduler._cache
    host._shake_hands()
    assert host.scheduler._cache is cache


def test_metadata_of_another_connector_is_none_of_ours(engine):
    host = engine()
    host.scheduler.set_xfer_handshake_metadata({0: object()})
    assert host.run("a", prompt()).hit == 0


def test_one_of_several_connectors_says_nothing_in_the_handshake(monkeypatch):
    # `MultiConnector` gives the first child's metadata to all, and NIXL ends the engine on ours.
    mine, multi = object(), object()
    transfer = type("T", (), {"has_kv_transfer_group": staticmethod(lambda: True)})
    monkeypatch.setattr(vllm_host, "_module", lambda _: transfer)
    transfer.get_kv_transfer_group = staticmethod(lambda: mine)
    assert vllm_host.shares_handshake(mine) is False
    transfer.get_kv_transfer_group = staticmethod(lambda: multi)
    assert vllm_host.shares_handshake(mine) is True
    monkeypatch.setattr(vllm_host, "_module", lambda _: None)
    assert vllm_host.shares_handshake(mine) is False


def unserved(groups):
    [group] = groups.kv_cache_groups
    spec = group.kv_cache_spec
    group.kv_cache_spec = type("RSWASpec", (type(spec),), {})()
    return groups


EARLY = {
    "context ranks": (
        {"parallel_config__decode_context_parallel_size": 2},
        "decode_context_parallel_size=2",
    ),
    "unserved attention": ({}, "RSWASpec"),
    "a chunk that cuts blocks": ({"chunk": 6}, "no multiple of the block size"),
}


@pytest.mark.parametrize("half", ["SCHEDULER", "WORKER"])
@pytest.mark.parametrize("case", EARLY)
def test_what_the_configuration_alone_tells_is_refused_before_weights_are_read(
    plugin, release, model, tmp_path, case, half
):
    changes, part = EARLY[case]
    chunk = {"chunk_tokens": changes["chunk"]} if "chunk" in changes else {}
    config = make_config(
        release,
        model,
        extra=options(tmp_path, **chunk),
        **{name: value for name, value in changes.items() if name != "chunk"},
    )
    (model / "model.safetensors").unlink()  # reading them would fail first
    groups = make_kv_cache_config(release, 64, 1)
    if case == "unserved attention":
        groups = unserved(groups)
    layer = make_layer("RocmAttentionBackend" if chunk else "FlashAttentionBackend", "BHNC")
    config.compilation_config = SimpleNamespace(
        static_forward_context=dict.fromkeys(layer_names(), layer)
    )
    role = release.types["KVConnectorRole"][half]
    with pytest.raises(ConfigError, match=part) as caught:
        plugin.KVFerryConnector(config, role, *release.construction(groups)[-1])
    assert "weights" not in str(caught.value)
    assert chunk or "KVFerryTier" in str(caught.value)


GROUP = KVGroup(num_layers=2, num_kv_heads=2, content_size=8, dtype="float32", block_size=4)
OWN = EngineSpec(
    identity=ModelIdentity(weights=b"w" * 32, config={}),
    groups=(GROUP,),
    shard=tensor_parallel_shard((GROUP,), 0, 1),
    tables=(TablePart(table=0, group=0, layers=(0, 1), layer_names=("a", "b"), block_size=4),),
)

CHANGES = {
    "identity": ModelIdentity(weights=b"w" * 32, config={"whole_blocks": ["x"]}),
    "weights": ModelIdentity(weights=b"x" * 32, config={}),
    "groups": (replace(GROUP, dtype="uint8"),),
    "tables": (replace(OWN.tables[0], block_size=8),),
    "kv_layout": "NHD",
    "chunk_multiple": 64,
    "mode": Mode.OFF,
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_part_of_the_description_is_compared(name):
    field = "identity" if name == "weights" else name
    other = replace(OWN, **{field: CHANGES[name]})
    assert spec_of_workers(OWN, [OWN]) is None
    assert spec_of_workers(OWN, []) is None
    assert spec_of_workers(OWN, [other]) is other
    ranks = [
        replace(spec, shard=replace(spec.shard, rank=rank, world_size=2))
        for rank, spec in enumerate((OWN, other))
    ]
    what = "say that they run other weights" if name == "weights" else "describe the model's KV"
    with pytest.raises(ConfigError, match=f"ranks 0 and 1 {what}"):
        spec_of_workers(OWN, ranks)
