"""Recurrent states in the pages that vLLM's own allocator makes: read and written by head, with any
number of ranks, as vLLM's layers see them."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch

from kvferry.adapters.vllm.states import served_states, state_components, states_of
from kvferry.blocks.rows import RankRows
from kvferry.blocks.states import PagedStates
from kvferry.errors import ConfigError
from kvferry.layout.ops import NumpyCopies, PagedKV, strided
from kvferry.layout.plan import BlockRun
from kvferry.layout.shards import heads_of_rank, tensor_parallel_shard
from kvferry.layout.states import page_parts
from kvferry.record.schema import RecordSchema
from kvferry.record.state_parts import chunk_tokens_with_states, state_parts
from kvferry.types import KVGroup, StateKind

pytest.importorskip("vllm.v1.kv_cache_layout", reason="the allocator is that of 0.32")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what vLLM imports
    from vllm.config.mamba import MambaBackendEnum
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from tests.real_vllm.published import COPIED_GROUPS, PUBLISHED, RANKS, attention_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16
LAYERS, BLOCK, NUM_BLOCKS = 3, 5, 8
RUN = [BlockRun((BLOCK,), 0, 1, 0, 1)]
WORDS = {4: torch.int32, 2: torch.int16}

# By name: vLLM's kind, its shapes for a number of ranks, dtypes, and the columns of the convolution
# (heads of the model, width), with those that every rank copies. Sizes as in the models, smaller.
MODELS = {
    "Granite 4 (Mamba-2, one group)": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 384, 1, 24, 16, 32, 4),
        (BF16, BF16), ((24, 16), (1, 32), (1, 32)), (1, 2),
    ),
    "Nemotron-H (Mamba-2, 8 groups, float32)": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 256, 8, 16, 16, 32, 4),
        (BF16, F32), ((16, 16), (8, 32), (8, 32)), (),
    ),
    "Qwen3-Next (gated delta net)": (
        Kind.GDN_ATTN, lambda tp: Shapes.gated_delta_net_state_shape(tp, 8, 16, 32, 16, 4),
        (BF16, F32), ((8, 32), (8, 32), (16, 16)), (),
    ),
    "Kimi-Linear (delta attention)": (
        Kind.GDN_ATTN, lambda tp: Shapes.kda_state_shape(tp, 8, 32),
        (BF16, F32), ((8, 32), (8, 32), (8, 32)), (),
    ),
    "Jamba (Mamba-1)": (
        Kind.MAMBA1, lambda tp: Shapes.mamba1_state_shape(tp, 256, 16, 4),
        (F16, F16), ((256, 1),), (),
    ),
    "LFM2 (short convolution)": (
        Kind.SHORT_CONV, lambda tp: Shapes.short_conv_state_shape(tp, 512, 3),
        (BF16,), ((512, 1),), (),
    ),
    "MiniMax-Text (linear attention)": (
        Kind.LINEAR, lambda tp: Shapes.linear_attention_state_shape(8, tp, 32), (F32,), (), (),
    ),
}  # fmt: skip


KINDS = MODELS | {name: row[:5] for name, row in PUBLISHED.items()}


@pytest.fixture(params=["SD", "DS"])
def order(request, monkeypatch):
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield request.param
    monkeypatch.undo()
    get_conv_state_layout.cache_clear()


def spec_of(name, tp, **more):
    kind, shapes, dtypes, _, _ = KINDS[name]
    values = {"block_size": 64, "mamba_cache_mode": "align"} | more
    return MambaSpec(shapes=shapes(tp), dtypes=dtypes, mamba_type=kind, **values)


def config_of(name):
    return SimpleNamespace(**({"mamba_n_groups": 1} if KINDS[name][4] else {"n_groups": 8}))


def components(name, tp, order, config=None, **more):
    config = config or config_of(name)
    spec = spec_of(name, tp, **more)
    return state_components(spec, config, tp, dim_first=order == "DS", where="layer 1")


class Rank:
    """The pages of one rank, beside those of attention, as vLLM allocates and shows them."""

    def __init__(self, name, tp, rank, vllm_config):
        if name in PUBLISHED:
            attention = attention_of(name, tp, PUBLISHED[name][6][RANKS.index(tp)])
            page = attention.page_size_bytes
        else:
            page = max(4096, 1 << (spec_of(name, tp).page_size_bytes - 1).bit_length())
            attention = FullAttentionSpec(
                block_size=64, num_kv_heads=page // 64 // 2 // 16 // 2, head_size=16, dtype=BF16
            )
            assert attention.page_size_bytes == page
        spec = spec_of(name, tp, page_size_padded=page, block_size=attention.block_size)
        specs = {f"model.layers.{i}.self_attn.attn": attention for i in range(LAYERS)}
        self.names = [f"model.layers.{i + LAYERS}.mixer" for i in range(LAYERS)]
        specs |= dict.fromkeys(self.names, spec)
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(vllm_config.cache_config)
        config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
        config.cache_config.kv_cache_layout = "LBNHC"
        config.cache_config.mamba_cache_mode = "align"
        config.model_config = copy.copy(vllm_config.model_config)
        config.model_config.max_model_len = 64
        [self.groups] = get_kv_cache_configs(config, [specs], [1 << 30])
        sizes = [group.kv_cache_spec.block_size for group in self.groups.kv_cache_groups]
        layout = KVCacheLayout["LBNHC"]
        self.caches = allocate_kv_cache(self.groups, torch.device("cpu"), layout, sizes)
        self.pages = [self.caches[each] for each in self.names]
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.memory.set_(self.pages[0].untyped_storage())
        self.memory.fill_(0xA5)
        self.name, self.tp, self.rank, self.spec = name, tp, rank, spec

    def arrays(self, layer):
        """What vLLM's layer sees of a block: its arrays, and what a model would write there."""
        seen = SimpleNamespace(
            get_state_shape=lambda: self.spec.shapes, get_state_dtype=lambda: self.spec.dtypes
        )
        MambaBase.bind_kv_cache(seen, self.pages[layer])
        _, _, _, columns, copied = KINDS[self.name]
        columns = columns(self.tp) if callable(columns) else columns
        for number, array in enumerate(seen.kv_cache):
            view = array[BLOCK].view(WORDS[array.itemsize])
            is_convolution = bool(columns) and number == 0
            of_model = self.conv(columns, copied) if is_convolution else self.ssm(view)
            if is_convolution and get_conv_state_layout() == "DS":
                of_model = of_model.t()
            wanted = of_model.reshape(view.shape) * 31 + layer * 1009 + number * 127
            yield view, (wanted % 30_011).to(view.dtype)

    def conv(self, columns, copied):
        channels, before = [], 0
        for at, (heads, width) in enumerate(columns):
            of_all, share = torch.arange(before, before + heads * width), heads * width // self.tp
            own = of_all[self.rank * share : (self.rank + 1) * share]
            channels.append(of_all if at in copied else own)
            before += heads * width
        kernel = min(self.spec.shapes[0])
        return torch.cat(channels) + torch.arange(kernel).view(-1, 1) * before

    def ssm(self, view):
        return torch.arange(view.numel()) + self.rank * view.numel()

    def bound(self, order):
        found = components(self.name, self.tp, order)
        return [
            PagedKV.of_parts(
                self.pages,
                [page_parts(each, strided(page)) for page in self.pages],
                4 if each.dtype == "float32" else 2,
                each.content_size,
                copies=NumpyCopies,
            )
            for each in found
        ]


def rows_of(each, tp):
    shape = (LAYERS, each.num_heads // tp if each.num_heads >= tp else 1, 1, each.content_size)
    return torch.zeros(shape, dtype=WORDS[4 if each.dtype == "float32" else 2])


def stored(name, tp, order, vllm_config):
    """What all ranks together make of a state: one array for each component, by head."""
    parts = components(name, tp, order)
    records = [
        torch.zeros(LAYERS, each.num_heads, 1, each.content_size, dtype=torch.int64)
        for each in parts
    ]
    for rank in range(tp):
        host = Rank(name, tp, rank, vllm_config)
        for layer in range(LAYERS):
            for view, wanted in host.arrays(layer):
                view.copy_(wanted)
        for record, each, paged in zip(records, parts, host.bound(order), strict=True):
            rows = rows_of(each, tp)
            paged.gather(rows.numpy(), 0, RUN, 0)
            start, stop = heads_of_rank(each.num_heads, rank, tp)
            record[:, start:stop] = rows
    return records


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_state_of_any_ranks_is_that_of_one_rank_and_comes_back_into_pages_of_vllm(
    name, tp, order, vllm_config
):
    records = stored(name, tp, order, vllm_config)
    alone = stored(name, 1, order, vllm_config)
    assert all(torch.equal(a, b) for a, b in zip(alone, records, strict=True))
    for rank in range(tp):
        host = Rank(name, tp, rank, vllm_config)
        parts = components(name, tp, order)
        for record, each, paged in zip(records, parts, host.bound(order), strict=True):
            rows = rows_of(each, tp)
            start, stop = heads_of_rank(each.num_heads, rank, tp)
            rows.copy_(record[:, start:stop])
            paged.scatter(rows.numpy(), 0, RUN, 0)
        written = 0
        for layer in range(LAYERS):
            for view, wanted in host.arrays(layer):
                assert torch.equal(view, wanted)
                written += view.numel() * view.itemsize
        changed = int((host.memory != 0xA5).sum())
        assert written * 0.9 < changed <= written, "other blocks, layers or padding"


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_blocks_of_vllms_size_and_comes_back_with_any_ranks(
    name, vllm_config
):
    heads, size, num_layers = PUBLISHED[name][5]
    alone = stored(name, 1, "SD", vllm_config)
    content = {"num_kv_heads": heads, "content_size": 2 * size} if heads else {
        "num_kv_heads": 1, "content_size": size}  # fmt: skip
    kv = KVGroup(num_layers=num_layers, dtype="bfloat16", block_size=1, **content)
    for tp, block in zip(RANKS, PUBLISHED[name][6], strict=True):
        token = attention_of(name, tp, 1).page_size_bytes
        multiple = 16 if heads else 128
        assert -(-spec_of(name, tp).page_size_bytes // (multiple * token)) * multiple == block
        groups = StateKind(num_layers=LAYERS, components=components(name, tp, "SD")).groups
        if (name, tp) == ("Kimi-Linear-48B-A3B", 8):  # latents that each rank has whole
            with pytest.raises(ConfigError, match=r"--block-size of 270 or more"):
                chunk_tokens_with_states((kv,), (groups,), block)
        else:
            assert block % chunk_tokens_with_states((kv,), (groups,), block) == 0
        records = stored(name, tp, "SD", vllm_config)
        is_shared = all(torch.equal(a, b) for a, b in zip(alone, records, strict=True))
        assert is_shared == ((name, tp) not in COPIED_GROUPS)
        host = Rank(name, tp, tp - 1, vllm_config)
        for record, each, paged in zip(
            records, components(name, tp, "SD"), host.bound("SD"), strict=True
        ):
            start, stop = heads_of_rank(each.num_heads, tp - 1, tp)
            rows = rows_of(each, tp)
            rows.copy_(record[:, start:stop])
            paged.scatter(rows.numpy(), 0, RUN, 0)
        for layer in range(LAYERS):
            for view, wanted in host.arrays(layer):
                assert torch.equal(view, wanted)


def host_config(name, tp):
    config = config_of(name)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp),
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config),
    )


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_described_as_vllm_groups_it_and_its_parts_fill_its_pages(
    name, tp, order, vllm_config
):
    hosts = [Rank(name, tp, tp - 1, vllm_config) for _ in range(2)]
    states = states_of(host_config(name, tp), hosts[0].groups, dim_first=order == "DS")
    kind = StateKind(num_layers=LAYERS, components=components(name, tp, order))
    assert states.kinds == (kind,)
    assert states.block_size == 64
    for part in states.tables:
        group = hosts[0].groups.kv_cache_groups[part.table]
        assert set(part.layer_names) <= set(group.layer_names)
        assert [hosts[0].names[layer] for layer in part.layers] == list(part.layer_names)
    kv = KVGroup(num_layers=8, num_kv_heads=16, content_size=64, dtype="bfloat16", block_size=64)
    tokens = chunk_tokens_with_states((kv,), states.groups, states.block_size)
    chunk = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=tokens, groups=(kv,))
    parts = state_parts(chunk, states.groups)
    rows = [
        RankRows(part.groups, tensor_parallel_shard(part.groups, tp - 1, tp), part.schema)
        for part in parts
    ]
    blocks = {part.table: BLOCK for part in states.tables}
    for layer in range(LAYERS):
        for view, wanted in hosts[0].arrays(layer):
            view.copy_(wanted)
    for number, each in enumerate(rows):
        slot = memoryview(bytearray(each.slot_bytes))
        for host, way in zip(hosts, ("gather", "scatter"), strict=True):
            paged = PagedStates(states.kinds, states.tables, list(zip(parts, rows, strict=True)))
            paged.register(host.caches)
            getattr(paged, way)(number, slot, blocks)
    for layer in range(LAYERS):
        for view, wanted in hosts[1].arrays(layer):
            assert torch.equal(view, wanted)


def test_a_model_of_two_kinds_has_both_and_one_without_states_has_none():
    specs = {
        "model.layers.1.mixer": spec_of("Granite 4 (Mamba-2, one group)", 1),
        "model.layers.2.conv": spec_of("LFM2 (short convolution)", 1),
        "model.layers.0.mixer": spec_of("Granite 4 (Mamba-2, one group)", 1),
    }
    attention = FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=16, dtype=BF16)
    config = host_config("Granite 4 (Mamba-2, one group)", 1)

    def groups(*several):
        return SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in several
            ]
        )

    found = states_of(
        config,
        groups(
            (["model.layers.3.attn"], attention), *(([name], spec) for name, spec in specs.items())
        ),
        dim_first=False,
    )
    assert [kind.num_layers for kind in found.kinds] == [2, 1]
    assert [(part.table, part.group, part.layers) for part in found.tables] == [
        (1, 0, (1,)),
        (3, 0, (0,)),
        (2, 1, (0,)),
    ]
    assert states_of(config, groups((["model.layers.3.attn"], attention)), dim_first=False) is None
    with pytest.raises(ConfigError, match=r"blocks of \[32, 64\] tokens"):
        states_of(
            config,
            groups(
                (["a.0"], spec_of("LFM2 (short convolution)", 1)),
                (["a.1"], spec_of("LFM2 (short convolution)", 1, block_size=32)),
            ),
            dim_first=False,
        )


def test_groups_are_taken_for_one_only_if_the_configuration_says_so(order):
    name = "Granite 4 (Mamba-2, one group)"
    for config, heads in (
        ({"mamba_n_groups": 1}, 1),
        ({"mamba_n_groups": 4}, 4),
        ({"hidden_size": 1}, 4),
        ({"n_groups": 1, "mamba_n_groups": 4}, 4),
    ):
        _, b, c, _ = components(name, 4, order, SimpleNamespace(**config))
        assert b.num_heads == c.num_heads == heads


REFUSED = {
    "no prefix caching": ({"mamba_cache_mode": "none"}, "mamba_cache_mode='none'.*prefix-caching"),
    "drafts": ({"num_speculative_blocks": 2}, "num_speculative_blocks=2"),
    "copies on each rank": ({"tp_replicated": True}, "tp_replicated=True"),
}


@pytest.mark.parametrize("why", REFUSED)
@pytest.mark.parametrize("name", MODELS)
def test_states_that_no_prefix_goes_on_from_are_refused_by_name(name, why):
    more, message = REFUSED[why]
    with pytest.raises(ConfigError, match=message) as refused:
        components(name, 1, "SD", **more)
    said = str(refused.value)
    assert "\n" not in said
    assert ("KVFerryTier" in said) != ("--enable-prefix-caching" in said)


def test_rings_of_inputs_behind_a_state_are_refused(order):
    name = "Nemotron-H (Mamba-2, 8 groups, float32)"
    spec = spec_of(name, 1)
    shapes = Shapes.append_replayssm_ring(spec.shapes, 8, 1, 16, MambaBackendEnum.TRITON)
    ring = MambaSpec(
        block_size=64,
        shapes=shapes,
        dtypes=(BF16, F32, BF16, F32, BF16),
        mamba_type=Kind.MAMBA2,
        mamba_cache_mode="align",
    )
    with pytest.raises(ConfigError, match=r"states of MAMBA2: .*other arrays"):
        state_components(
            ring, SimpleNamespace(n_groups=8), 1, dim_first=order == "DS", where="layer 1"
        )


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_is_served_where_a_prefix_can_be_named_and_found(name):
    config = host_config(name, 1)
    groups = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["layers.1"], kv_cache_spec=spec_of(name, 1))]
    )

    def served(layers=("one with KV",), **how):
        return served_states(config, groups, layers, dim_first=False, **{"hands_off": True, **how})

    assert served() == states_of(config, groups, dim_first=False)
    for how, message in (
        ({"hands_off": False}, "does not say where they are"), ({"layers": ()}, "no KV beside")
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message) as refused:
            served(**how)
        assert "\n" not in str(refused.value)


def test_a_cpu_keeps_the_state_of_a_delta_net_in_another_order_than_its_page_says():
    """Why engines on other platforms do not share states."""
    from vllm import _custom_ops as ops

    keys, values = 128, 64
    page = torch.zeros(2, 1, values, keys)  # vLLM's shape of a state: [value, key]
    state = page.view(2, 1, keys, values)  # as its CPU kernels see it (ops/cpu/gdn_attention.py)
    key = torch.zeros(1, 1, 1, keys, dtype=BF16)
    key[..., 5] = 1
    value = torch.ones(1, 1, 1, values, dtype=BF16)
    ops.fused_sigmoid_gating_delta_rule_update_cpu(
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(1, dtype=BF16),
        q=key,
        k=key,
        v=value,
        a=torch.zeros(1, 1, dtype=BF16),
        b=torch.zeros(1, 1, dtype=BF16),
        initial_state_source=state,
        initial_state_indices=torch.tensor([1], dtype=torch.int32),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    written = page[1].flatten().nonzero().flatten()
    assert written.tolist() == list(range(5 * values, 6 * values))
