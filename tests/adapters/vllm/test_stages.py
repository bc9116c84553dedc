"""Pipeline stages: what their ranks tell each other, and that records are those of one stage."""

from __future__ import annotations

import logging
import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvferry.adapters.vllm import connector as vllm_connector
from kvferry.adapters.vllm.host import exchange_over_stages
from kvferry.adapters.vllm.layers import Layer, layers_of
from kvferry.adapters.vllm.spec import engine_spec, spec_of_workers
from kvferry.adapters.vllm.stages import find_layers, layers_of_all_stages
from kvferry.contract.spec import EngineSpec, Mode
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, Namespace

from . import versioned_config
from .fakes import (
    FullAttentionSpec,
    Group,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    make_config,
    names,
    odd,
    write_model,
)
from .released import Release, number, versions
from .versioned_config import NUM_TOKENS, options, prompt, whole_blocks

IDENTITY = ModelIdentity(weights=b"w" * 32, config={})

AWARE = [version for version in versions() if number(version) >= (0, 24)]
"""Releases whose scheduler hears of each stage."""


@pytest.fixture(params=AWARE)
def release(request):
    return Release(request.param)


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", num_hidden_layers=6)


def together(calls):
    """Call each in a thread of its own, with an exchange between them. Return what each returned or
    raised."""
    said, meeting = [b""] * len(calls), threading.Barrier(len(calls))

    def call(stage):
        def exchange(mine):
            said[stage] = mine
            meeting.wait(20)
            return list(said)

        try:
            return calls[stage](exchange)
        except Exception as error:  # what it raised is what the test asks for
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(call, range(len(calls))))


def config_of(model, rank=0, tp_size=1, stages=2):
    config = make_config(model, parallel_config__tensor_parallel_size=tp_size)
    config.parallel_config.pipeline_parallel_size = stages
    config.parallel_config.rank = rank
    config.parallel_config.world_size = tp_size * stages
    return config


def described(model, stages, tp_size=1, tp_rank=0):
    """Return what the ranks of this number make of the groups of their stages, or raise."""
    calls = []
    for stage, groups in enumerate(stages):
        config = config_of(model, stage * tp_size + tp_rank, tp_size, len(stages))
        calls.append(
            lambda exchange, config=config, groups=groups: engine_spec(
                config,
                find_layers(config, KVCacheConfig(groups), "cuda", exchange, is_worker=True),
                None,
                128,
                lambda: IDENTITY,
            )
        )
    return together(calls)


def specs_of(model, stages, tp_size=1) -> list[EngineSpec]:
    """Return what each rank makes of the groups of its stage."""
    found = [
        each for tp_rank in range(tp_size) for each in described(model, stages, tp_size, tp_rank)
    ]
    for each in found:
        if isinstance(each, Exception):
            raise each
    return sorted(found, key=lambda spec: spec.shard.rank)


def alone(model, *groups) -> EngineSpec:
    config = make_config(model)
    layers = layers_of(config, KVCacheConfig(list(groups)), "cuda")
    return engine_spec(config, layers, None, 128, lambda: IDENTITY)


FULL, SLIDING = FullAttentionSpec(), SlidingWindowSpec()
UNIFORM = UniformTypeKVCacheSpecs(
    dict(zip(names(0, 1, 2), [FULL, FullAttentionSpec(head_size=8), FULL], strict=True))
)

SPLITS = {
    "halves": ([Group(names(0, 1, 2), FULL)], [[names(0, 1)], [names(2)]]),
    "none in the first": ([Group(names(0, 1), FULL)], [[names()], [names(0, 1)]]),
    "none in the last": ([Group(names(0, 1), FULL)], [[names(0, 1)], [names()]]),
    "three stages": ([Group(names(0, 1, 2), FULL)], [[names(0)], [names(1)], [names(2)]]),
    "two tables": (
        [Group(names(0, 3), SLIDING), Group(names(1, 2), FULL)],
        [[names(0), names(1)], [names(3), names(2)]],
    ),
    "a table in one stage": (
        [Group(names(2, 3), SLIDING), Group(names(0, 1), FULL)],
        [[names(), names(0, 1)], [names(2, 3), names()]],
    ),
    "two kinds in one table": ([Group(names(0, 1, 2), UNIFORM)], [[names(0)], [names(1, 2)]]),
    "latents": ([Group(names(0, 1), MLAAttentionSpec())], [[names(0)], [names(1)]]),
}


def split(groups, layer_names):
    return [
        [Group(held, group.kv_cache_spec) for group, held in zip(groups, stage, strict=True)]
        for stage in layer_names
    ]


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("case", SPLITS)
def test_stages_describe_the_model_of_an_engine_without(model, case, tp_size):
    groups, layer_names = SPLITS[case]
    whole = alone(model, *groups)
    specs = specs_of(model, split(groups, layer_names), tp_size)
    if tp_size == 1:
        assert {spec.groups for spec in specs} == {whole.groups}
        assert {Namespace.of(IDENTITY, spec.groups, 128) for spec in specs} == {
            Namespace.of(IDENTITY, whole.groups, 128)
        }
    forms = {tuple((p.table, p.group, p.window) for p in spec.tables) for spec in specs}
    assert len(forms) == 1  # also of tables and groups that only other stages use
    for group in range(len(whole.groups)):
        # Each layer of the model is on one stage, at its place in the group, under its name.
        in_order = {
            layer: name
            for part in whole.tables
            if part.group == group
            for layer, name in zip(part.layers, part.layer_names, strict=True)
        }
        for tp_rank in range(tp_size):
            held = {}
            for spec in specs[tp_rank::tp_size]:
                start, stop = spec.shard.groups[group].layers
                for part in spec.tables:
                    if part.group == group:
                        for layer, name in zip(part.layers, part.layer_names, strict=True):
                            assert start + layer not in held
                            held[start + layer] = name
                            assert start + layer < stop
            assert held == in_order


def test_ranks_of_a_stage_hold_its_layers_and_their_heads(model):
    groups, layer_names = SPLITS["halves"]
    stages = split([Group(groups[0].layer_names, FullAttentionSpec(num_kv_heads=1))], layer_names)
    specs = specs_of(model, stages, tp_size=2)
    held = [(spec.shard.groups[0].layers, spec.shard.groups[0].heads) for spec in specs]
    assert held == [((0, 2), (0, 1)), ((0, 2), (1, 2)), ((2, 3), (0, 1)), ((2, 3), (1, 2))]
    assert [(spec.shard.rank, spec.shard.world_size) for spec in specs] == [
        (rank, 4) for rank in range(4)
    ]


# -- what is refused, on every rank ----------------------------------------------------------------


REFUSED = {
    "a layer that is not served": (
        [[Group(names(0), FULL)], [Group(names(1), odd(FullAttentionSpec, extra_bytes=64))]],
        r"pipeline stage 1: .*layers\.1.* stores keys and values alone",
    ),
    "a recurrent layer": (
        [[Group(names(0), FULL)], [Group(names(1), MambaSpec())]],
        r"pipeline stage 1: layer .*layers\.1.* keeps a recurrent state",
    ),
    "a layer of two stages": (
        [[Group(names(0, 1), FULL)], [Group(names(1, 2), FULL)]],
        r"pipeline stages 0 and 1 both hold layer .*layers\.1",
    ),
    "layers that change places": (
        [[Group(names(0, 3), FULL)], [Group(names(1, 2), FULL)]],
        r"layers\.3.* is in|layers\.2.* is in pipeline stage 1, and .*layers\.3.* in 0",
    ),
    "names without a number that change places": (
        [[Group(["a.attn", "b.attn"], FULL)], [Group(["c.attn"], FULL)]],
        r"layer c\.attn is in pipeline stage 1, and b\.attn, which follows it, in 0",
    ),
    "another block size in one table": (
        [[Group(names(0), FULL)], [Group(names(1), FullAttentionSpec(block_size=8, head_size=8))]],
        "table 0 has two block sizes",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_stage_is_refused_for_all_ranks_say_in_one_line(model, case):
    stages, part = REFUSED[case]
    errors = described(model, stages)
    assert [type(error) for error in errors] == [ConfigError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "\n" not in str(errors[0])
    with pytest.raises(ConfigError, match=part):
        raise errors[0]


def test_a_rank_that_fails_by_a_bug_keeps_none_waiting(model):
    layer = alone(model, Group(names(0), FULL))
    layers = [Layer(name="x.0", number=0, table=0, block_size=4, table_window=None,
                    table_chunk=None, kind=layer.groups[0], whole_blocks=None)]  # fmt: skip

    def broken():
        raise KeyError("a bug")

    bug, told = together(
        [
            lambda exchange: layers_of_all_stages(broken, exchange),
            lambda exchange: layers_of_all_stages(lambda: layers, exchange),
        ]
    )
    assert isinstance(bug, KeyError)
    assert isinstance(told, ConfigError)
    assert str(told) == "pipeline stage 0: it stopped before it knew its layers"


def take_part(folder, rank, says, seconds, results) -> None:
    """One rank, in a process of its own, on the process group that vLLM would have made."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    state = ModuleType("vllm.distributed.parallel_state")
    group = SimpleNamespace(
        cpu_group=torch.distributed.group.WORLD, world_size=2, rank_in_group=rank
    )
    state.get_pp_group = lambda: group
    sys.modules[state.__name__] = state
    try:
        results.put((rank, exchange_over_stages(says, seconds) if says else None))
    except ConfigError as error:
        results.put((rank, str(error)))
    results.close()
    results.join_thread()
    if not says:
        multiprocessing.parent_process().join()  # alive, and silent


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"longer than the other", b""])
def test_ranks_hear_each_other_or_wait_for_so_long(tmp_path, says):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(
            target=take_part,
            args=(tmp_path, rank, each, 60.0 if says else 1.0, results),
            daemon=True,
        )
        for rank, each in enumerate((b"short", says))
    ]
    for rank in ranks:
        rank.start()
    found = dict(results.get(timeout=120) for _ in ranks)
    for rank in ranks:
        rank.kill()
        rank.join()
    if says:
        assert found == {rank: [b"short", says] for rank in (0, 1)}
    else:
        assert found[0].startswith("pipeline stage 0 did not hear from all other stages within 1 s")
        assert "\n" not in found[0]


# -- the scheduler's half --------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_the_scheduler_takes_the_whole_model_from_any_stage(model, missing):
    specs = specs_of(model, split(*SPLITS["two tables"]))
    own = replace(
        alone(model, Group(names(0), SLIDING), Group(names(1), FULL)), mode=Mode.OFF
    )  # of the first stage alone
    heard = [spec for spec in specs if spec.shard.rank != missing]
    taken = spec_of_workers(own, heard)
    assert taken in heard
    assert taken.mode is Mode.BOTH
    assert taken.shard.world_size == 2
    assert spec_of_workers(taken, heard) is None


CHANGES = {
    "weights": {"identity": ModelIdentity(weights=b"x" * 32, config={})},
    "groups": {},
    "tables": {},
    "mode": {"mode": Mode.READ},
}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("change", CHANGES)
def test_a_rank_that_describes_the_model_differently_is_named_whatever_its_stage(
    model, change, rank
):
    specs = specs_of(model, split(*SPLITS["halves"]), tp_size=2)
    spec, changes = specs[rank], dict(CHANGES[change])
    if change == "groups":
        changes["groups"] = (replace(spec.groups[0], content_size=2 * spec.groups[0].content_size),)
    if change == "tables":
        part = spec.tables[0]
        changes["tables"] = (replace(part, layer_names=tuple(f"x.{n}" for n in part.layer_names)),)
    specs[rank] = replace(spec, **changes)
    with pytest.raises(ConfigError, match=r"ranks \d and \d (describe|say)") as caught:
        spec_of_workers(specs[0], specs)
    assert "\n" not in str(caught.value)


# -- whole engines, on the interfaces of releases --------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_stages_and_engines_without_read_what_the_other_stored(engine, world, caplog):
    caplog.set_level(logging.INFO)
    for start, (writer, reader) in enumerate(
        (
            ({"stages": 2, "world": world}, {}),
            ({"world": world}, {"stages": 2, "world": world}),
            ({"stages": 2, "world": world}, {"stages": 2}),
        )
    ):
        first = engine(**writer)
        first.run("cold", prompt(start), budget=7)
        first.settle()
        first.rest_until_saved()
        first.shutdown()
        warm = engine(**reader).run("warm", prompt(start), generate=3)
        assert warm.hit == whole_blocks(NUM_TOKENS)
    said = [each.getMessage() for each in caplog.records if "; namespace " in each.getMessage()]
    assert len(said) == 6  # one line for each start, all of one namespace
    assert len({each.partition("namespace ")[2].split(";")[0] for each in said}) == 1
    assert "is off" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(4))
def test_what_any_rank_of_any_stage_says_in_the_handshake_is_compared(engine, rank):
    host = engine(stages=2, world=2)
    said = {
        divmod(place, 2): worker.get_handshake_metadata()
        for place, worker in enumerate(host.workers)
    }
    at = divmod(rank, 2)
    said[at] = said[at]._replace(spec=replace(said[at].spec, chunk_multiple=3))
    with pytest.raises(ConfigError, match=f"ranks .*{rank or '0'} .*describe the model's KV"):
        host.scheduler.set_xfer_handshake_metadata_pp_aware(said)


@pytest.mark.slow
def test_before_the_handshake_a_scheduler_of_stages_looks_up_nothing(engine):
    host = engine(stages=2, in_multi=True)  # which brings none
    assert host.scheduler._cache.spec.mode is Mode.OFF
    assert host.run("a", prompt()).hit == 0


@pytest.mark.slow
def test_one_of_several_connectors_refuses_stages_where_it_cannot_tell_the_scheduler(
    engine, monkeypatch
):
    host = engine(stages=2)
    monkeypatch.setattr(vllm_connector, "shares_handshake", lambda _: True)
    for worker in host.workers:
        with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .*MultiConnector"):
            worker.get_handshake_metadata()


@pytest.mark.slow
@pytest.mark.parametrize("half", ["SCHEDULER", "WORKER"])
@pytest.mark.parametrize(
    "version", [each for each in versions() if (0, 11, 1) <= number(each) < (0, 24)]
)
def test_a_host_that_hears_of_the_first_stage_only_is_refused(tmp_path, version, half):
    release = Release(version)
    with release.installed() as plugin:
        config = versioned_config.make_config(
            release, versioned_config.make_model(tmp_path / "m"), stages=2, extra=options(tmp_path)
        )
        groups = versioned_config.make_kv_cache_config(release, 8, 1)
        role = release.types["KVConnectorRole"][half]
        with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .*0\.24 or later"):
            plugin.KVFerryConnector(config, role, *release.construction(groups)[-1])
