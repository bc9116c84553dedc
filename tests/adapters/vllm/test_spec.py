"""vLLM's groups of layers become components of the model, and tables over them."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from kvferry.adapters.vllm.layers import layers_of, refuse_parallel
from kvferry.adapters.vllm.spec import engine_spec, layer_views
from kvferry.adapters.vllm.states import served_states
from kvferry.cache.build import PrefixCache
from kvferry.contract.spec import Mode
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, Namespace
from kvferry.observe import Counters
from kvferry.record.schema import RecordSchema, leaves_of

from .fakes import (
    FullAttentionSpec,
    Group,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    QuantMode,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    make_config,
    names,
    odd,
    write_model,
)

IDENTITY = ModelIdentity(weights=b"w" * 32, config={})


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", num_hidden_layers=6)


def spec_of(config, *groups):
    cache = KVCacheConfig(list(groups)) if groups else None
    refuse_parallel(config.parallel_config)
    layers = None if cache is None else layers_of(config, cache, "cuda")
    return engine_spec(config, layers, None, 128, lambda: IDENTITY)


def test_one_group_is_one_table(model):
    spec = spec_of(make_config(model), Group(names(1, 0), FullAttentionSpec()))
    (group,), (part,) = spec.groups, spec.table_parts
    assert (group.num_layers, group.num_kv_heads, group.content_size) == (2, 2, 8)
    assert part.layer_names == tuple(names(0, 1))


@pytest.mark.parametrize("said", [{}, {"model_config__is_mm_prefix_lm": False}])
def test_items_are_whole_where_vllm_says_that_they_attend_both_ways(model, said):
    groups = Group(names(0, 1), FullAttentionSpec())
    assert not spec_of(make_config(model, **said), groups).whole_items
    assert spec_of(make_config(model, model_config__is_mm_prefix_lm=True), groups).whole_items


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "values", "not_finite"),
    [
        ("auto", torch.float32, "", b"\x00\x00\x80\x7f"),
        ("fp8", torch.uint8, "float8_e4m3fn", b"\x7f\xff"),
        ("fp8_e4m3", torch.uint8, "float8_e4m3fn", b"\x7f\xff"),
        ("fp8_e5m2", torch.uint8, "float8_e5m2", b"\x7c\xfe"),
        ("int8", torch.uint8, "", b""),
    ],
)
def test_values_that_vllm_keeps_as_bytes_are_known(model, cache_dtype, dtype, values, not_finite):
    config = make_config(model, cache_config__cache_dtype=cache_dtype)
    spec = spec_of(config, Group(names(0, 1), FullAttentionSpec(dtype=dtype)))
    (group,) = spec.groups
    assert group.values == values
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=16, groups=spec.groups)
    (component,) = schema.components
    payload = bytearray(component.num_bytes)
    assert leaves_of(component, memoryview(payload)).are_finite
    payload[-len(not_finite) :] = not_finite
    assert leaves_of(component, memoryview(payload)).are_finite is (not not_finite)
    plain = replace(group, values="")
    assert plain == group
    bare = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=16, groups=(plain,))
    assert bare.components == schema.components


def test_layers_spread_over_groups_are_one_component_in_layer_order(model):
    spec = spec_of(
        make_config(model),
        Group(names(0, 3), SlidingWindowSpec()),
        Group(names(1, 4), SlidingWindowSpec()),
        Group(names(2, 5), FullAttentionSpec(block_size=8)),
    )
    assert [(g.num_layers, g.window) for g in spec.groups] == [(4, 8), (2, None)]
    assert [(p.table, p.group, p.layers) for p in spec.table_parts] == [
        (0, 0, (0, 2)),
        (1, 0, (1, 3)),
        (2, 1, (0, 1)),
    ]
    assert [(p.block_size, p.window) for p in spec.table_parts] == [(4, 8), (4, 8), (8, None)]


def test_a_host_that_keeps_all_tokens_of_sliding_layers_names_the_same_components(tmp_path):
    kinds = ["sliding_attention", "full_attention"]
    model = write_model(tmp_path / "m", layer_types=kinds, sliding_window=8)
    apart = spec_of(
        make_config(model),
        Group(names(0), SlidingWindowSpec()),
        Group(names(1), FullAttentionSpec()),
    )
    # Without the hybrid allocator vLLM merges both kinds into one group, with the window of one.
    merged = spec_of(make_config(model), Group(names(0, 1), FullAttentionSpec(sliding_window=8)))
    spaces = {Namespace.of(IDENTITY, spec.groups, 128).digest for spec in (apart, merged)}
    assert len(spaces) == 1
    assert {part.window for part in merged.table_parts} == {None}


def test_tokens_that_a_drafter_reads_again_widen_the_table_and_not_the_window(model):
    spec = spec_of(make_config(model), Group(names(0), SlidingWindowSpec(extra_retained_tokens=3)))
    assert [group.window for group in spec.groups] == [8]
    assert [part.window for part in spec.table_parts] == [11]


def test_a_uniform_group_may_hold_layers_of_several_kinds(model):
    specs = dict(
        zip(names(0, 1), [FullAttentionSpec(), FullAttentionSpec(head_size=8)], strict=True)
    )
    spec = spec_of(make_config(model), Group(names(0, 1), UniformTypeKVCacheSpecs(specs)))
    assert [group.content_size for group in spec.groups] == [8, 16]
    assert {part.table for part in spec.table_parts} == {0}


@pytest.mark.parametrize(
    ("tp", "rank", "per_rank", "total", "heads"),
    [(1, 0, 2, 2, (0, 2)), (2, 1, 1, 2, (1, 2)), (4, 1, 1, 2, (0, 1)), (2, 1, 4, 8, (4, 8))],
)
def test_heads_are_split_or_repeated_over_ranks(model, tp, rank, per_rank, total, heads):
    config = make_config(
        model, parallel_config__tensor_parallel_size=tp, parallel_config__rank=rank
    )
    config.parallel_config.world_size = tp
    spec = spec_of(config, Group(names(0), FullAttentionSpec(num_kv_heads=per_rank)))
    assert spec.groups[0].num_kv_heads == total
    assert spec.shard.groups[0].heads == heads


def test_a_latent_is_one_head_on_every_rank_and_written_once(model):
    writes = []
    for rank in range(2):
        config = make_config(
            model, parallel_config__tensor_parallel_size=2, parallel_config__rank=rank
        )
        spec = spec_of(config, Group(names(0), MLAAttentionSpec(head_size=20)))
        assert (spec.groups[0].num_kv_heads, spec.groups[0].content_size) == (1, 20)
        writes.append(spec.shard.groups[0].writes)
    assert writes == [True, False]


def test_a_group_that_the_host_would_not_transfer_is_refused_like_any_other(model):
    groups = (
        Group(names(0), odd(FullAttentionSpec, extra_bytes=64), enable_kv_transfer=False),
        Group(names(1), FullAttentionSpec()),
    )
    with pytest.raises(ConfigError, match=f"{names(0)[0]} has .* keys and values alone"):
        spec_of(make_config(model), *groups)


@pytest.mark.parametrize(
    ("role", "mode"),
    [("kv_both", Mode.BOTH), ("kv_producer", Mode.WRITE), ("kv_consumer", Mode.READ)],
)
def test_the_role_says_whether_to_load_and_save(model, role, mode):
    spec = spec_of(make_config(model, kv_role=role), Group(names(0), FullAttentionSpec()))
    assert spec.mode is mode


@pytest.mark.parametrize(
    ("executor", "world_size", "expected"),
    [(None, 1, False), ("uni", 1, False), ("mp", 1, True), ("ray", 1, True), (None, 2, True)],
)
def test_workers_in_other_processes_need_a_store_for_several(model, executor, world_size, expected):
    config = make_config(model, parallel_config__distributed_executor_backend=executor)
    config.parallel_config.world_size = world_size
    assert spec_of(config, Group(names(0), FullAttentionSpec())).multi_process is expected


@pytest.mark.parametrize(
    ("names_of_release", "index"),
    [
        ({}, 0),
        ({"data_parallel_rank": 2}, 2),
        # From 0.14 to 0.32, with a dense model.
        ({"data_parallel_rank": 0, "data_parallel_index": 2}, 2),
    ],
)
def test_an_engine_knows_its_place_in_a_data_parallel_group(model, names_of_release, index):
    config = make_config(model)
    vars(config.parallel_config).update(names_of_release)
    assert spec_of(config).data_parallel_index == index


@pytest.mark.parametrize(
    ("rank", "local", "first"),
    [
        (0, 0, 0),
        (5, 5, 0),
        (8, 0, 8),
        (11, 3, 8),
        (3, 11, 0),  # the second engine of a data-parallel group on one machine
        (11, None, 0),
    ],
)
def test_a_rank_knows_the_first_of_its_machine(model, monkeypatch, rank, local, first):
    config = make_config(model)
    parallel = config.parallel_config
    parallel.rank, parallel.tensor_parallel_size, parallel.world_size = rank, 16, 16

    def get_world_group():
        assert local is not None, "world group is not initialized"
        return SimpleNamespace(local_rank=local)

    state = ModuleType("vllm.distributed.parallel_state")
    state.get_world_group = get_world_group
    monkeypatch.setitem(sys.modules, state.__name__, state)
    for package in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    assert spec_of(config).first_local_rank == first


def short_and_padded():
    spec = odd(FullAttentionSpec, extra_bytes=-64)
    spec.page_size_padded = spec.page_size_bytes
    return spec


@dataclass
class NewSpec(FullAttentionSpec):
    """A class of a later vLLM."""


@dataclass
class NewFieldSpec(FullAttentionSpec):
    """A class that a later vLLM gave another field."""

    swizzle: int = 0


NewFieldSpec.__name__ = "FullAttentionSpec"

REFUSED = {
    "the end of a hit computed again": (
        SlidingWindowMLASpec(bounded_replay=True),
        "bounded_replay=True",
    ),
    "a type of a platform's own": (
        FullAttentionSpec(dtype=torch.uint8, kv_quant_mode=QuantMode.CUSTOM),
        "keeps its KV as CUSTOM",
    ),
    "scales for each token": (
        FullAttentionSpec(dtype=torch.int8, kv_quant_mode=QuantMode.INT8_PER_TOKEN_HEAD),
        "keeps its KV as INT8_PER_TOKEN_HEAD",
    ),
    "more than keys and values": (
        odd(FullAttentionSpec, extra_bytes=64),
        "stores keys and values alone",
    ),
    "a class": (NewSpec(), "keeps its KV as a NewSpec, which kvferry does not know"),
    "a field": (NewFieldSpec(swizzle=2), "FullAttentionSpec with swizzle=2, a field that"),
    "a field at its default": (NewFieldSpec(), "FullAttentionSpec with swizzle=0"),
    "no dataclass": (SimpleNamespace(block_size=4), "as a SimpleNamespace, which"),
    "pages shorter than their content": (
        odd(FullAttentionSpec, extra_bytes=-64),
        "a KV block of .* has 192 bytes, its keys and values 256",
    ),
    "padded pages shorter than their content": (
        short_and_padded(),
        "has 192 bytes, its keys and values 256",
    ),
    "latents of two heads": (
        MLAAttentionSpec(num_kv_heads=2),
        "has 128 bytes, its keys and values 64",
    ),
}


@pytest.mark.parametrize(("kv_spec", "part"), REFUSED.values(), ids=REFUSED.keys())
def test_a_spec_that_is_not_known_or_lies_is_refused_by_name(model, kv_spec, part):
    with pytest.raises(ConfigError, match=part) as caught:
        spec_of(make_config(model), Group(names(0), kv_spec))
    assert names(0)[0] in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", [None, object(), SimpleNamespace(num_kv_heads=1)])
@pytest.mark.parametrize(("named", "total"), [({"num_key_value_heads": 2}, 2), ({}, 4)])
def test_a_module_without_a_total_of_heads_leaves_it_to_the_configuration(
    tmp_path, module, named, total
):
    # Without a number that fits alone, each rank has a head of its own: that is never wrong.
    model = write_model(tmp_path / "m", **{"num_key_value_heads": None, **named})
    config = make_config(model, parallel_config__tensor_parallel_size=4)
    config.parallel_config.world_size = 4
    modules = {} if module is None else {names(0)[0]: module}
    config.compilation_config = SimpleNamespace(static_forward_context=modules)
    spec = spec_of(config, Group(names(0), FullAttentionSpec(num_kv_heads=1)))
    assert spec.groups[0].num_kv_heads == total


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        ({"num_key_value_heads": 4}, 4),
        ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, 8),
        ({"num_key_value_heads": 16, "num_global_key_value_heads": 4}, 4),
        ({"num_key_value_heads": 4, "num_attention_heads": 8}, 8),
        ({"num_key_value_heads": 4, "num_attention_heads": 64, "head_dim": 8}, 4),
        ({"num_key_value_heads": [4, 8]}, 8),
        ({"num_key_value_heads": None, "attn_config": {"kv_n_heads": 2}}, 2),
        (
            {
                "num_key_value_heads": 4,
                "attention_other_setting": {"num_attention_groups": 8},
            },
            8,
        ),
        ({"num_key_value_heads": 3}, 8),
        (
            {
                "num_key_value_heads": None,
                "block_configs": [{"attention": {"n_heads_in_group": 4}}],
            },
            8,
        ),
        ({"num_key_value_heads": 2, "num_kv_shared_layers": 4}, 2),
        ({"num_key_value_heads": True}, 8),
        ({"num_key_value_heads": {"full": 4}}, 4),
        # The one number that fits is of other heads.
        *(
            ({"num_key_value_heads": written, name: 4}, 8)
            for written in (None, 3)
            for name in (
                *("num_attention_heads", "index_n_heads", "mamba_num_heads", "n_mamba_heads"),
                *("linear_num_key_heads", "image_num_key_value_heads", "encoder_attention_heads"),
            )
        ),
        *(
            ({"num_key_value_heads": None, name: 4}, 4)
            for name in (
                *("num_kv_heads", "n_kv_heads", "n_head_kv", "kv_n_heads", "num_query_groups"),
                *("multi_query_group_num", "num_attention_groups", "swa_num_key_value_heads"),
            )
        ),
        ({"num_key_value_heads": None, "kv_config": {"kv_n_heads": 4}}, 4),
    ],
    ids=str,
)
def test_copies_of_heads_need_one_number_that_fits(tmp_path, fields, total):
    model = write_model(tmp_path / "m", **fields)
    config = make_config(model, parallel_config__tensor_parallel_size=8)
    config.parallel_config.world_size = 8
    spec = spec_of(config, Group(names(0), FullAttentionSpec(num_kv_heads=1)))
    assert spec.groups[0].num_kv_heads == total


def test_what_vllm_knows_of_each_layer_comes_first(model):
    config = make_config(model, parallel_config__tensor_parallel_size=8)
    config.parallel_config.world_size = 8

    class Arch(list):
        per_layer_overrides = ({"total_num_kv_heads": 2}, {})

    config.model_config.model_arch_config = Arch(
        SimpleNamespace(total_num_kv_heads=n) for n in (2, 4)
    )
    spec = spec_of(config, Group(names(0, 1), FullAttentionSpec(num_kv_heads=1)))
    assert [group.num_kv_heads for group in spec.groups] == [2, 4]


TARGET = object()
DRAFTER = SimpleNamespace(draft_model_config=object(), target_model_config=TARGET)
NGRAMS = SimpleNamespace(draft_model_config=TARGET, target_model_config=TARGET)
OWN = names(0, 1, 2)
STATES = [f"model.{6 + i}.mixer" for i in range(3)]
"""Falcon-H1's Mamba layers, in a model whose configuration says 6 layers."""
FALCON = [name for pair in zip(OWN, STATES, strict=True) for name in pair]
EAGLE, MTP, MODEL = names(6)[0], "mtp.layers.0.self_attn.attn", "draft_model.model.layers.0.attn"

# What vLLM made, in this order; its speculative configuration; and the drafts among these.
MADE = {
    "nothing but the model": (OWN, None, []),
    "EAGLE": ([*OWN, EAGLE], DRAFTER, [EAGLE]),
    "MTP": ([*OWN, MTP], DRAFTER, [MTP]),
    "a model that drafts": ([*OWN, MODEL], DRAFTER, [MODEL]),
    "two layers": ([*OWN, EAGLE, MTP], DRAFTER, [EAGLE, MTP]),
    "n-grams, and a layer with such a number": ([*OWN, EAGLE], NGRAMS, []),
    "n-grams, and a layer with such a name": ([*OWN, MTP], NGRAMS, []),
    "no speculation, and a layer with such a number": ([*OWN, EAGLE], None, []),
    "no speculation, and a layer with such a name": ([MODEL, *OWN], None, []),
    "numbers like Falcon-H1's": (FALCON, None, []),
}


@pytest.mark.parametrize("seen_by", ["worker", "scheduler"])
@pytest.mark.parametrize("case", MADE)
def test_every_layer_is_named_but_those_that_vllm_made_for_a_drafter(model, case, seen_by):
    made, speculative, drafts = MADE[case]
    modules = {name: object() for name in made} if seen_by == "worker" else {}
    config = make_config(
        model,
        speculative_config=speculative,
        compilation_config=SimpleNamespace(static_forward_context=modules),
    )
    spec = spec_of(config, Group(made, FullAttentionSpec()))
    named = {name for part in spec.table_parts for name in part.layer_names}
    if seen_by == "scheduler" and speculative is DRAFTER:
        # Without modules it sees less than the workers, and takes their description.
        assert named <= set(made) - set(drafts)
    else:
        assert named == set(made) - set(drafts)


@pytest.mark.parametrize("made", [[EAGLE, *OWN], [MTP, *OWN, EAGLE], FALCON, [*FALCON, EAGLE]])
def test_names_and_numbers_that_tell_no_drafts_apart_are_refused(model, made):
    config = make_config(
        model,
        speculative_config=DRAFTER,
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(made, object())),
    )
    with pytest.raises(ConfigError, match="which layers are drafts is not known"):
        spec_of(config, Group(made, FullAttentionSpec()))


@pytest.mark.parametrize("speculative", [None, NGRAMS, DRAFTER], ids=["none", "ngram", "drafter"])
def test_states_beside_attention_are_states_whatever_their_numbers(model, speculative):
    modules = dict.fromkeys([*FALCON, EAGLE][: None if speculative is DRAFTER else -1], object())
    config = make_config(
        model,
        speculative_config=speculative,
        compilation_config=SimpleNamespace(static_forward_context=modules),
    )
    attention = Group([name for name in modules if name not in STATES], FullAttentionSpec())
    how = {"dim_first": False, "hands_off": True}
    cache = KVCacheConfig([attention, Group(STATES, MambaSpec())])
    layers = layers_of(config, cache, "cuda")
    assert not {layer.name for layer in layers} & set(STATES)
    states = served_states(config, cache, layers, **how)
    assert sorted(name for part in states.tables for name in part.layer_names) == sorted(STATES)
    none = KVCacheConfig([attention, Group(STATES, MambaSpec(mamba_cache_mode="none"))])
    with pytest.raises(ConfigError, match=f"layer {STATES[0]} keeps no state at the end of blocks"):
        served_states(config, none, layers, **how)


def test_a_drafter_is_told_by_the_marks_of_its_specs_and_modules(model):
    config = make_config(model)
    marked = names(1)[0]
    config.compilation_config = SimpleNamespace(
        static_forward_context={marked: SimpleNamespace(is_draft_layer=True)}
    )
    spec = spec_of(
        config,
        Group([*names(0), marked], FullAttentionSpec()),
        Group(names(2), odd(FullAttentionSpec, is_draft=True)),
    )
    [part] = spec.table_parts
    assert part.layer_names == tuple(names(0))


def module_of(backend):
    """An attention module whose backend is a class of this name."""
    return SimpleNamespace(get_attn_backend=lambda: type(backend, (), {}))


def described_with(
    model, *, backend="RocmAttentionBackend", block_size=4, platform="rocm", cpu_kernels=None
):
    config = make_config(model)
    config.compilation_config = SimpleNamespace(
        static_forward_context=dict.fromkeys(names(0), module_of(backend))
    )
    cache = KVCacheConfig([Group(names(0), FullAttentionSpec(block_size=block_size))])
    layers = layers_of(config, cache, platform)
    return engine_spec(config, layers, cpu_kernels, None, lambda: IDENTITY)


def digest_with(model, **changes):
    spec = described_with(model, **changes)
    return Namespace.of(spec.identity, spec.groups, 128).digest


def test_blocks_that_are_stored_whole_are_for_their_like_only(model):
    changes = [{}, {"backend": "OtherBackend"}, {"block_size": 8}, {"platform": "xpu"}]
    assert len({digest_with(model, **change) for change in changes}) == len(changes)
    by_token = [{"backend": "FlashAttentionBackend", **change} for change in changes if change]
    by_token[0] = {"backend": "TritonFlashAttentionBackend"}
    assert len({digest_with(model, **change) for change in by_token}) == 1


@pytest.mark.parametrize(
    ("changes", "multiple"),
    [
        ({"block_size": 48}, 48),
        ({"block_size": 48, "backend": "FlashAttentionBackend"}, 1),
        ({"block_size": 48, "platform": "cpu", "cpu_kernels": "amx"}, 48),
        ({"block_size": 48, "platform": "cpu", "cpu_kernels": "vec"}, 1),
    ],
    ids=str,
)
def test_chunks_nobody_sized_are_whole_blocks_where_blocks_are_stored_whole(
    model, changes, multiple
):
    spec = described_with(model, **changes)
    assert spec.chunk_multiple == multiple
    cache = PrefixCache(spec, {"store": "memory://?max_bytes=1GiB"}, Counters())
    cache.close()
    assert cache.schema.chunk_tokens == (144 if multiple == 48 else 128)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize("axes", ["BND", "BHNC", "2BNHD"])
def test_blocks_that_a_backend_splits_are_joined_in_a_view(axes, num_parts):
    blocks, size = 3, 8
    sizes = {"2": 2, "B": blocks * num_parts, "H": 2, "N": size // num_parts, "D": 4, "C": 4}
    memory_order = "2BNHD" if axes == "2BNHD" else "BNHC" if "H" in axes else "BND"
    memory = torch.arange(
        math.prod(sizes[axis] for axis in memory_order), dtype=torch.float32
    ).view([sizes[axis] for axis in memory_order])
    tensor = memory.permute([memory_order.index(axis) for axis in axes])
    [layer] = layers_of(
        SimpleNamespace(
            model_config=SimpleNamespace(hf_config=SimpleNamespace(num_hidden_layers=1)),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        ),
        KVCacheConfig([Group(names(0), FullAttentionSpec(block_size=size))]),
        "cuda",
    )

    class Backend:
        @staticmethod
        def get_kv_cache_shape(num_blocks, block_size, heads, head_size):
            return (2, num_blocks, block_size, heads, head_size)

    modules = {layer.name: SimpleNamespace(get_attn_backend=lambda: Backend)}
    view = layer_views({layer.name: tensor}, modules, [layer], "BHNC|BND|2BNHD")[layer.name]
    block, token = axes.index("B"), axes.index("N")
    assert (view.shape[block], view.shape[token]) == (blocks, size)
    assert view.data_ptr() == tensor.data_ptr()
    for b in range(blocks):
        for n in range(size):
            part, slot = divmod(n, size // num_parts)
            expected = tensor.select(token, slot).select(block, b * num_parts + part)
            assert torch.equal(view.select(token, n).select(block, b), expected)


@pytest.mark.parametrize("mode", [QuantMode.NONE, QuantMode.FP8_PER_TENSOR])
def test_kv_of_one_scale_is_stored_as_it_is(model, mode):
    kv_spec = FullAttentionSpec(dtype=torch.uint8, kv_quant_mode=mode)
    assert spec_of(make_config(model), Group(names(0), kv_spec)).groups[0].dtype == "uint8"


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8])
def test_kv_of_a_type_that_no_record_has_is_refused_in_one_line(model, dtype):
    spec = spec_of(make_config(model), Group(names(0), FullAttentionSpec(dtype=dtype)))
    with pytest.raises(ConfigError, match=r"KV dtype '.*' cannot be stored") as caught:
        PrefixCache(spec, {"store": "memory://?max_bytes=1MiB"}, Counters())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_parallelism_that_is_not_followed_is_refused_by_name(model, name):
    config = make_config(model, **{f"parallel_config__{name}": 2})
    with pytest.raises(ConfigError, match=f"{name}=2"):
        spec_of(config, Group(names(0), FullAttentionSpec()))


def test_without_groups_the_configuration_says_it_all(model):
    spec = spec_of(make_config(model))
    assert spec.groups[0].num_layers == 6
    assert spec.tables is None


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        (("layer",), ("layer",)),
        (("layer_2", "layer_1"), ("layer_1", "layer_2")),
        (("b", "a"), ("b", "a")),
        (("model.layers.3.attn.7", "model.layers.2.attn.9"), None),
    ],
)
def test_names_that_say_no_place_keep_the_order_of_the_host(model, given, ordered):
    (part,) = spec_of(make_config(model), Group(given, FullAttentionSpec())).table_parts
    assert part.layer_names == (ordered or given[::-1])
