"""vLLM's real geometry, without an engine: each mix of specs is served and byte-equal through the
store and back, or refused by name. None is accepted and never hit."""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm.v1.kv_cache_layout", reason="the allocator is that of 0.32")
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvferry.adapters.vllm import layer_kv, layers
from kvferry.adapters.vllm.kv_specs import KV_SPECS
from kvferry.errors import ConfigError, LayoutError
from kvferry.identity.resolved import Use, describe_spec
from kvferry.keys import Namespace
from kvferry.keys.encoding import canonical

from .geometry import EngineOfVllm, Mix, described, host_config, resolved

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports

BF16, BYTES = torch.bfloat16, torch.uint8
FP8 = {"dtype": BYTES, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
DS_MLA = {**FP8, "head_size": 576, "cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}
TOKENS = [(7 * index) % 251 for index in range(300)]


def attn(number):
    return f"model.layers.{number}.self_attn.attn"


def indexer(number):
    return f"model.layers.{number}.self_attn.indexer.k_cache"


def share(heads, tp):
    return max(1, heads // tp)


def full(tp, heads, **more):
    values = {"block_size": 16, "head_size": 16, "dtype": BF16} | more
    return FullAttentionSpec(num_kv_heads=share(heads, tp), **values)


def window(tp, heads, **more):
    values = {"block_size": 16, "head_size": 16, "dtype": BF16, "sliding_window": 128} | more
    return SlidingWindowSpec(num_kv_heads=share(heads, tp), **values)


def chunked(tp, heads, **more):
    values = {"block_size": 16, "head_size": 16, "dtype": BF16, "attention_chunk_size": 128} | more
    return ChunkedLocalAttentionSpec(num_kv_heads=share(heads, tp), **values)


def llama4(**more):
    """Attention in chunks, and every other layer over all tokens."""
    return two_kinds(
        (lambda tp: chunked(tp, 8), 8),
        (lambda tp: full(tp, 8), 8),
        kinds=("chunked_attention", "full_attention"),
        num_key_value_heads=8,
        attention_chunk_size=128,
    ).but(**more)


def with_scales(spec):
    """What the backend makes of a spec."""
    # It warns when it is imported.
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    return TritonAttentionBackend.customize_spec(spec)


def scaled(heads, mode, dtype, **more):
    """A model whose KV has a scale for each token and head, as its backend describes it."""
    base = plain(heads, dtype=dtype, kv_quant_mode=mode, **more)
    return base.but(
        specs=lambda tp: {name: with_scales(spec) for name, spec in base.specs(tp).items()},
        backends={"attn": "TritonAttentionBackend"},
    )


def nvfp4(heads, **more):
    """A model with keys, their scales, values, and theirs, each apart in a block."""
    base = plain(heads, dtype=BYTES, kv_quant_mode=KVQuantMode.NVFP4)

    def as_its_backend(spec):  # as `FlashInferBackend.customize_spec`
        row = nvfp4_kv_cache_full_dim(spec.head_size)
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=row)

    return base.but(
        specs=lambda tp: {name: as_its_backend(spec) for name, spec in base.specs(tp).items()},
        backends={"attn": "FlashInferBackend"},
        **more,
    )


def compressed(ring=16, ratio=4, **more):
    """Latents, an indexer with a row for some tokens, and a ring of those that have none yet, as in
    GLM-5.3-Flash."""
    return Mix(
        specs=lambda _: {
            name: spec
            for i in range(2)
            for name, spec in (
                (attn(i), mla()),
                (indexer(i), index(tokens_per_state=ratio)),
                (
                    f"model.layers.{i}.self_attn.indexer.tail",
                    CircularBufferSpec(
                        block_size=ring, num_kv_heads=2, head_size=8, head_size_v=0, dtype=BF16
                    ),
                ),
            )
        },
        config={"num_hidden_layers": 2},
        backends={"k_cache": "Glm5NextIndexerBackend", "tail": "KpoolTailBackend"},
        layout="BLNHC",  # else vLLM makes pages of one size, and rings of other sizes
        **more,
    )


def window_of_v4(config, *, replay, block, row, alignment, dtype=BYTES):
    """What DeepSeek V4 keeps of a layer's window."""
    # It warns when it is imported.
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache

    module = SimpleNamespace(
        cache_config=config.cache_config,
        bounded_replay=replay,
        block_size=block,
        head_dim=512,
        dtype=dtype,
        window_size=128,
        packed_bytes_per_token=row,
        packed_page_alignment=alignment,
    )
    return DeepseekV4SWACache.get_kv_cache_spec(module, config)


def indexer_of_v4(module_class, config, ratio, **more):
    module = SimpleNamespace(
        cache_config=config.cache_config,
        head_dim=132,
        dtype=BYTES,
        compress_ratio=ratio,
        **more,
    )
    return module_class.get_kv_cache_spec(module, config)


def deepseek_v4(ratios=(4, 128, 0), cache_dtype="fp8_ds_mla", block=256, **more):
    """Latents of which one row stands for 4 or 128 tokens, windows, and what is not compressed yet,
    as vLLM's own modules describe them."""
    cache = SimpleNamespace(cache_dtype=cache_dtype, block_size=block)
    config = SimpleNamespace(cache_config=cache)
    dtype = BYTES if cache_dtype == "fp8_ds_mla" else BF16

    def specs(_):
        # They warn when they are imported.
        from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
        from vllm.models.deepseek_v4.compressor import CompressorStateCache

        def state(ratio, head_size):
            overlap = 2 if ratio == 4 else 1
            return CompressorStateCache.get_kv_cache_spec(
                SimpleNamespace(
                    block_size=4 if ratio == 4 else 8,
                    state_dim=2 * overlap * head_size,
                    dtype=torch.float32,
                    sliding_window=overlap * ratio,
                ),
                config,
            )

        found = {}
        for number, ratio in enumerate(ratios):
            place = f"model.layers.{number}.attn"
            found[f"{place}.swa_cache"] = window_of_v4(
                config, replay=False, block=64, row=584, alignment=576, dtype=dtype
            )
            if ratio:
                latents = SimpleNamespace(
                    compress_ratio=ratio,
                    kv_cache_dtype=cache_dtype,
                    head_dim=512,
                    kv_cache_torch_dtype=dtype,
                )
                found[place] = DeepseekV4Attention.get_kv_cache_spec(latents, config)
                found[f"{place}.compressor.state_cache"] = state(ratio, 512)
            if ratio == 4:
                found[f"{place}.indexer.k_cache"] = indexer_of_v4(
                    DeepseekV4IndexerCache, config, ratio
                )
                found[f"{place}.indexer.compressor.state_cache"] = state(ratio, 128)
        return found

    return Mix(
        specs=specs,
        config={"num_hidden_layers": len(ratios)},
        backends={
            "state_cache": "CompressorBackend",
            "k_cache": "DeepseekV4IndexerBackend",
            "swa_cache": "DeepseekSparseSWABackend",
            "attn": "DeepseekV4FlashMLABackend",
        },
        layout="BLNHC",
        chunk=256,
        num_blocks=320,
        **more,
    )


def deepseek_v41(cache_dtype="fp8_ds_mla", **more):
    """As V4, with windows that vLLM computes again after a hit, and rings."""
    cache = SimpleNamespace(cache_dtype=cache_dtype, block_size=256)
    config = SimpleNamespace(cache_config=cache)

    def specs(_):
        from vllm.models.deepseek_v41.attention import DeepseekV4Attention, DeepseekV4IndexerCache
        from vllm.models.deepseek_v41.compressor import CompressorStateCache

        found = {}
        for number, ratio in enumerate((0, 1, 2)):
            place = f"model.layers.{number}.attn"
            found[f"{place}.swa_cache"] = window_of_v4(
                config, replay=True, block=32, row=528, alignment=512
            )
            if ratio:
                latents = SimpleNamespace(
                    is_kv_source=True,
                    compress_ratio=ratio,
                    kv_cache_dtype=cache_dtype,
                    head_dim=512,
                    kv_page_alignment=512,
                    compressed_bytes_per_token=288 if cache_dtype == "nvfp4_ds_mla" else 528,
                )
                found[place] = DeepseekV4Attention.get_kv_cache_spec(latents, config)
                found[f"{place}.indexer.k_cache"] = indexer_of_v4(
                    DeepseekV4IndexerCache, config, ratio, sparse_logits=False, rocm_mxfp4=False
                )
            if ratio > 1:
                ring = SimpleNamespace(block_size=8, state_dim=1024, dtype=torch.float32)
                found[f"{place}.compressor.state_cache"] = CompressorStateCache.get_kv_cache_spec(
                    ring, config
                )
        return found

    return deepseek_v4().but(specs=specs, config={"num_hidden_layers": 3}, **more)


def mla(**more):
    values = {"block_size": 64, "head_size": 72, "dtype": BF16, "max_tp_shards": 1} | more
    return MLAAttentionSpec(num_kv_heads=1, **values)


def index(**more):
    values = {"block_size": 64, "head_size": 36, "dtype": BYTES, "max_tp_shards": 1} | more
    return MLAAttentionSpec(num_kv_heads=1, cache_role=SparseCacheRole.INDEXER, **values)


def mamba(shapes=((4, 32), (8, 16)), kind=MambaAttentionBackendEnum.MAMBA2, **more):
    return MambaSpec(block_size=16, shapes=shapes, dtypes=(BF16,) * 2, mamba_type=kind, **more)


def plain(heads, number=2, **more):
    """A model of equal layers of full attention."""
    return Mix(
        specs=lambda tp: {attn(i): full(tp, heads, **more) for i in range(number)},
        heads={attn(i): heads for i in range(number)},
        config={"num_key_value_heads": heads, "num_attention_heads": 64},
    )


def sparse(block=64, **more):
    """Latents and the indexer's keys in one group, as in DeepSeek V3.2 and GLM-5."""
    return Mix(
        specs=lambda _: {
            name: spec
            for i in range(2)
            for name, spec in (
                (attn(i), mla(block_size=block)),
                (indexer(i), index(block_size=block)),
            )
        },
        config={"num_hidden_layers": 2},
        backends={"k_cache": "DeepseekV32IndexerBackend", "attn": "FlashMLASparseBackend"},
        **more,
    )


def two_kinds(first, second, kinds=("sliding_attention", "full_attention"), **config):
    """Layers of two kinds in turn; each is a function of the ranks, and its heads."""
    makes = [first, second, first, second]
    return Mix(
        specs=lambda tp: {attn(i): make(tp) for i, (make, _) in enumerate(makes)},
        heads={attn(i): heads for i, (_, heads) in enumerate(makes)},
        config={"layer_types": list(kinds) * 2, "sliding_window": 128, **config},
    )


def one(spec, **more):
    """A model with one layer, whose spec is not served."""
    return Mix(specs=lambda _: {attn(0): spec}, **more)


def with_draft(name, spec, base=plain(8)):  # noqa: B008  # frozen
    return Mix(
        specs=lambda tp: {**base.specs(tp), name: spec(tp)},
        heads=base.heads,
        config=base.config,
        drafts=(name,),
    )


INDEXED, HALVED, COMPRESSED = sparse(), nvfp4(8), deepseek_v4()
MIXES = {
    "8 heads": plain(8),
    "16 heads in float32": plain(16, dtype=torch.float32),
    "2 heads, copied on 4 ranks and more": plain(2),
    "1 head": plain(1),
    "fp8 with one scale": plain(8, **FP8),
    "keys longer than values": plain(8, head_size=24, head_size_v=16),
    "odd head size": plain(8, head_size=12),
    "blocks of 32": plain(8, block_size=32),
    "gpt-oss": two_kinds(
        (lambda tp: window(tp, 8), 8), (lambda tp: full(tp, 8), 8), num_key_value_heads=8
    ),
    "window longer than a chunk": two_kinds(
        (lambda tp: window(tp, 4, sliding_window=160), 4),
        (lambda tp: full(tp, 4), 4),
        num_key_value_heads=4,
        sliding_window=160,
    ),
    "MiMo-V2: more heads in window layers": two_kinds(
        (lambda tp: window(tp, 8, head_size=24, head_size_v=16), 8),
        (lambda tp: full(tp, 4, head_size=24, head_size_v=16), 4),
        num_key_value_heads=4,
        swa_num_key_value_heads=8,
    ),
    "MiMo-V2, its configuration names no other number": two_kinds(
        (lambda tp: window(tp, 8), 8), (lambda tp: full(tp, 4), 4)
    ),
    "Gemma 4: fewer and longer heads in full layers": two_kinds(
        (lambda tp: window(tp, 16), 16),
        (lambda tp: full(tp, 4, head_size=64), 4),
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
    "Nemotron-NAS: heads differ by layer": Mix(
        specs=lambda tp: {attn(i): full(tp, n) for i, n in enumerate((8, 2, 4, 8))},
        heads={attn(i): n for i, n in enumerate((8, 2, 4, 8))},
        config={
            "num_attention_heads": 64,
            "block_configs": [{"attention": {"n_heads_in_group": 64 // n}} for n in (8, 2, 4, 8)],
        },
    ),
    "some layers in fp8": Mix(
        specs=lambda tp: {attn(i): full(tp, 8, **(FP8 if i % 2 else {})) for i in range(4)},
        heads={attn(i): 8 for i in range(4)},
        config={"num_key_value_heads": 8},
    ),
    "latents": Mix(specs=lambda _: {attn(i): mla() for i in range(2)}),
    "latents in fp8": Mix(specs=lambda _: {attn(i): mla(**FP8) for i in range(2)}),
    "latents of bytes without a mode": Mix(
        specs=lambda _: {attn(i): mla(dtype=BYTES) for i in range(2)}
    ),
    "latents with a window": Mix(
        specs=lambda _: {
            attn(0): SlidingWindowMLASpec(
                block_size=64, num_kv_heads=1, head_size=72, dtype=BF16, sliding_window=64
            ),
            attn(1): mla(),
        },
        config={"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
    ),
    "DeepSeek V3.2: latents and an indexer": sparse(),
    "an indexer whose blocks a chunk cuts": sparse(
        chunk=96, refused="chunk_tokens=96 is no multiple of the block size 64"
    ),
    "an indexer whose blocks are split": sparse(
        block=128, kernel_block=64, refused="set --block-size 64"
    ),
    "MiniMax-M3: heads and an indexer": Mix(
        specs=lambda tp: {
            name: spec
            for i in range(2)
            for name, spec in ((attn(i), full(tp, 8, block_size=64)), (indexer(i), index()))
        },
        heads={attn(i): 8 for i in range(2)},
        config={"num_hidden_layers": 2, "num_key_value_heads": 8},
        backends={"k_cache": "SomeIndexerBackend"},
    ),
    "latents in blocks that are split": Mix(
        specs=lambda _: {attn(i): mla(block_size=128) for i in range(2)}, kernel_block=64
    ),
    "heads in blocks that are split": Mix(
        specs=lambda tp: {attn(i): full(tp, 16, block_size=128) for i in range(2)},
        heads={attn(i): 16 for i in range(2)},
        kernel_block=64,
    ),
    "heads before tokens, in blocks that are split": Mix(
        specs=lambda tp: {attn(i): full(tp, 16, block_size=128) for i in range(2)},
        heads={attn(i): 16 for i in range(2)},
        layout="LBHNC",
        kernel_block=64,
        refused="set --block-size 64",
    ),
    "a backend whose blocks are not known": Mix(
        specs=lambda tp: {attn(i): full(tp, 8) for i in range(2)},
        heads={attn(i): 8 for i in range(2)},
        config={"num_key_value_heads": 8},
        backends={"attn": "RocmAttentionBackend"},
    ),
    "all layers of a block side by side": Mix(
        specs=lambda tp: {attn(i): full(tp, 8) for i in range(2)},
        heads={attn(i): 8 for i in range(2)},
        layout="BLNHC",
    ),
    "a draft layer behind the others": with_draft(attn(2), lambda tp: full(tp, 8)),
    "a draft layer of other heads": with_draft(attn(2), lambda tp: full(tp, 16)),
    "a draft layer with a number of the model's": with_draft(
        "mtp.layers.0.self_attn.attn", lambda tp: full(tp, 8)
    ),
    "a draft model": with_draft("draft_model.model.layers.0.attn", lambda tp: full(tp, 8)),
    "DeepSeek V3 and its MTP layer": with_draft(
        attn(2), lambda _: mla(), Mix(specs=lambda _: {attn(i): mla() for i in range(2)})
    ),
    "a draft layer with a block table of its own": with_draft(
        attn(2), lambda tp: window(tp, 8, sliding_window=64)
    ).but(num_blocks=128),
    "Mamba and attention": Mix(
        specs=lambda tp: {attn(0): full(tp, 8), "model.layers.1.mixer": mamba()},
        refused="mamba_cache_mode='none'.*enable-prefix-caching",
    ),
    "states and no KV": one(
        mamba(shapes=((3, 24), (2, 8, 4)), mamba_cache_mode="align"),
        refused="no KV beside them.*KVFerryTier",
    ),
    "states with speculation": one(
        mamba(num_speculative_blocks=2, mamba_cache_mode="align"),
        refused="num_speculative_blocks=2",
    ),
    "Llama 4": llama4(),
    "Llama 4, all tokens kept": llama4(hybrid=False),
    "attention chunks that a record is cut by": two_kinds(
        (lambda tp: chunked(tp, 8, attention_chunk_size=192), 8),
        (lambda tp: full(tp, 8), 8),
        kinds=("chunked_attention", "full_attention"),
        num_key_value_heads=8,
    ).but(budget=300),
    "attention chunks that are no whole blocks": two_kinds(
        (lambda tp: chunked(tp, 8, attention_chunk_size=200), 8),
        (lambda tp: full(tp, 8), 8),
        kinds=("chunked_attention", "full_attention"),
        num_key_value_heads=8,
    ).but(budget=300),
    "int8 with a scale for each token and head": scaled(
        8, KVQuantMode.INT8_PER_TOKEN_HEAD, torch.int8
    ),
    "fp8 with a scale for each token and head": scaled(8, KVQuantMode.FP8_PER_TOKEN_HEAD, BYTES),
    "int4 with a scale for each token and head": scaled(8, KVQuantMode.INT4_PER_TOKEN_HEAD, BYTES),
    "scales of 2 heads, copied on 4 ranks and more": scaled(
        2, KVQuantMode.FP8_PER_TOKEN_HEAD, BYTES
    ),
    "some layers with scales": Mix(
        specs=lambda tp: {
            attn(i): with_scales(
                full(tp, 8, dtype=BYTES, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD)
            )
            if i % 2
            else full(tp, 8)
            for i in range(4)
        },
        heads={attn(i): 8 for i in range(4)},
        config={"num_key_value_heads": 8},
        backends={"attn": "TritonAttentionBackend"},
    ),
    "DeepSeek V3.2 in fp8_ds_mla": Mix(
        specs=lambda _: {
            name: spec
            for i in range(2)
            for name, spec in ((attn(i), mla(**DS_MLA)), (indexer(i), index()))
        },
        config={"num_hidden_layers": 2},
        backends={"k_cache": "DeepseekV32IndexerBackend", "attn": "FlashMLASparseBackend"},
    ),
    "fp8_ds_mla of a backend that is not known": Mix(
        specs=lambda _: {attn(i): mla(**DS_MLA) for i in range(2)},
        backends={"attn": "SomeBackend"},
    ),
    "GLM-5.3: a row for four tokens, and a ring": compressed(),
    "Qwen 4: keys of a row for four tokens": Mix(
        specs=lambda tp: {
            name: spec
            for i in range(2)
            for name, spec in (
                (attn(i), full(tp, 8)),
                (f"model.layers.{i}.qsa", mla(block_size=16, tokens_per_state=4)),
            )
        },
        heads={attn(i): 8 for i in range(2)},
        config={"num_hidden_layers": 2, "num_key_value_heads": 8},
        layout="BLNHC",
    ),
    "a ring in which a hit would end": compressed(
        ring=128, refused="last 128 tokens as a CircularBufferSpec.*KVFerryTier"
    ),
    "a row for tokens that do not divide its bytes": compressed(ratio=16),
    "a row for tokens that do not divide a block": compressed(
        ratio=48, refused="tokens_per_state=48"
    ),
    "DeepSeek V4": deepseek_v4(),
    "DeepSeek V4 in bfloat16": deepseek_v4(cache_dtype="auto"),
    "DeepSeek V4 in chunks that cut its blocks": deepseek_v4().but(
        chunk=128, refused="chunk_tokens=128 is no multiple of the block size 256"
    ),
    "DeepSeek V4.1": deepseek_v41(),
    "DeepSeek V4.1 in nvfp4": deepseek_v41("nvfp4_ds_mla"),
    "fp8 with a scale for each token": one(
        full(1, 8, dtype=BYTES, kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD),
        refused="FP8_PER_TOKEN_HEAD.*--kv-cache-dtype",
    ),
    "fp8 latents of FlashMLA": one(
        mla(**FP8, state_content_bytes=656), refused="content_bytes=656"
    ),
    "nvfp4": nvfp4(8),
    "nvfp4, heads before tokens": nvfp4(8, layout="LBHNC"),
    "nvfp4 of 2 heads, copied on 4 ranks and more": nvfp4(2),
    "nvfp4 in blocks that are split": nvfp4(8, kernel_block=8, refused="set --block-size 8"),
    "nvfp4 in blocks that a chunk cuts": nvfp4(
        8, chunk=120, refused="chunk_tokens=120 is no multiple of the block size 16"
    ),
    "nvfp4 that a backend does not describe": one(
        full(1, 8, dtype=BYTES, kv_quant_mode=KVQuantMode.NVFP4, state_content_bytes=9),
        refused="NVFP4.*--kv-cache-dtype",
    ),
    "cross attention": one(
        CrossAttentionSpec(block_size=16, num_kv_heads=8, head_size=16, dtype=BF16),
        refused="CrossAttentionSpec",
    ),
    "attention to later tokens": one(full(1, 8, non_causal=True), refused="non_causal=True"),
    "a reference window": one(
        RSWASpec(block_size=16, num_kv_heads=8, head_size=16, dtype=BF16, rswa_window=64),
        refused="RSWASpec",
    ),
    "sinks in the cache": one(
        SinkFullAttentionSpec(block_size=16, num_kv_heads=8, head_size=16, dtype=BF16, sink_len=4),
        refused="SinkFullAttentionSpec",
    ),
}

CELLS = [(name, tp) for name in MIXES for tp in (1, 4, 8)]


@pytest.mark.parametrize(("name", "tp"), CELLS, ids=[f"{name}, TP {tp}" for name, tp in CELLS])
def test_each_mix_is_served_byte_by_byte_or_refused_by_name(name, tp, vllm_config, tmp_path):
    mix = MIXES[name]
    if mix.refused:
        with pytest.raises((ConfigError, LayoutError), match=mix.refused) as caught:
            EngineOfVllm(mix, tp, vllm_config, tmp_path)
        assert "\n" not in str(caught.value)
        return
    hits = []
    for _ in range(2):
        engine = EngineOfVllm(mix, tp, vllm_config, tmp_path)
        try:
            hits += [engine.run(TOKENS, budget=budget) for budget in (mix.budget, 300)]
            counted = engine.counters.pop_all()
            assert [each for each in counted if "hook_failed" in each or "violation" in each] == []
        finally:
            engine.close()
    assert hits == [0, 256, 256, 256]
    if mix.drafts:
        assert engine.stores_drafts is (name not in LEFT_OUT)
        assert (engine.wrong_drafts == 0) is engine.stores_drafts


LEFT_OUT = ("a draft layer of other heads", "a draft layer with a block table of its own")
"""As large as the model, and in blocks that no plan names."""


# Where the halves disagree without vLLM's handshake.
OTHER_VIEWS = [
    "DeepSeek V3.2: latents and an indexer",
    "MiniMax-M3: heads and an indexer",
    "Nemotron-NAS: heads differ by layer",
    "some layers in fp8",
]


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", OTHER_VIEWS)
def test_halves_that_see_different_layers_serve_nothing_and_say_so(
    name, tp, vllm_config, tmp_path, caplog
):
    caplog.set_level(logging.WARNING)
    engine = EngineOfVllm(MIXES[name], tp, vllm_config, tmp_path, told=False)
    try:
        assert [engine.run(TOKENS, budget=300) for _ in range(3)] == [0, 0, 0]
        assert not [each for each in engine.counters.pop_all() if "hook_failed" in each]
    finally:
        engine.close()
    said = [record for record in caplog.records if "another namespace" in record.getMessage()]
    assert len(said) == 1


@pytest.mark.parametrize("tp", [1, 4])
def test_engines_that_keep_an_attention_chunk_or_all_tokens_share_records(
    tp, vllm_config, tmp_path
):
    hits = []
    for hybrid in (True, False, True):
        engine = EngineOfVllm(llama4(hybrid=hybrid), tp, vllm_config, tmp_path)
        hits.append(engine.run(TOKENS, budget=96))
        kept = {part.chunk for part in engine.spec.table_parts}
        assert kept == ({None, 128} if hybrid else {None})
        engine.close()
    assert hits == [0, 256, 256]


def test_hits_end_where_chunks_do_if_records_have_only_the_end_of_a_window(vllm_config, tmp_path):
    tokens, hits = [(7 * index) % 251 for index in range(1100)], []
    for length in (1100, 1100, 1024):
        engine = EngineOfVllm(COMPRESSED.but(chunk=512, num_blocks=900), 1, vllm_config, tmp_path)
        hits.append(engine.run(tokens[:length], budget=96))
        engine.close()
    # The last token is computed. Blocks of 256 tokens would allow 768.
    assert hits == [0, 1024, 512]


PORTABLE = {
    "8 heads": 256,
    "2 heads, copied on 4 ranks and more": 256,
    "gpt-oss": 256,
    "Gemma 4: fewer and longer heads in full layers": 256,
    "latents": 256,
    "DeepSeek V3.2: latents and an indexer": 256,
    "Llama 4": 256,
    "fp8 with a scale for each token and head": 256,
    "scales of 2 heads, copied on 4 ranks and more": 256,
    "DeepSeek V3.2 in fp8_ds_mla": 256,
    "GLM-5.3: a row for four tokens, and a ring": 256,
    "DeepSeek V4": 256,
    # A page of nvfp4 is one of so many heads.
    "nvfp4": 0,
    # With 8 ranks it is not known which layers' heads are copies.
    "MiMo-V2: more heads in window layers": 0,
    "MiMo-V2, its configuration names no other number": 0,
    "Nemotron-NAS: heads differ by layer": 0,
}


@pytest.mark.parametrize("tp", [4, 1])
@pytest.mark.parametrize("name", PORTABLE)
def test_fewer_ranks_read_what_more_ranks_stored_or_compute_it(name, tp, vllm_config, tmp_path):
    hits = []
    for ranks in (8, tp):
        engine = EngineOfVllm(MIXES[name], ranks, vllm_config, tmp_path)
        hits.append(engine.run(TOKENS, budget=300))  # checks every byte
        engine.close()
    assert hits == [0, PORTABLE[name]]


def in_blocks_of(mix, size):
    """The same in blocks of another size."""
    return mix.but(
        specs=lambda tp: {
            name: replace(spec, block_size=size) for name, spec in mix.specs(tp).items()
        }
    )


def by_backend(mix, name):
    return mix.but(backends=dict.fromkeys(mix.backends, name))


OTHER_ENGINES = {
    "indexer, other blocks": (INDEXED, in_blocks_of(INDEXED, 32)),
    "indexer, other backend": (INDEXED, by_backend(INDEXED, "OtherIndexerBackend")),
    "indexer, other platform": (INDEXED, INDEXED.but(platform="rocm")),
    "nvfp4, other blocks": (HALVED, in_blocks_of(HALVED, 32)),
    "nvfp4, other backend": (HALVED, by_backend(HALVED, "OtherBackend")),
    "nvfp4, other platform": (HALVED, HALVED.but(platform="rocm")),
    "nvfp4, other order": (HALVED, HALVED.but(layout="LBHNC")),
    "V4, other blocks": (COMPRESSED, deepseek_v4(block=128)),
    "V4, other backend": (COMPRESSED, by_backend(COMPRESSED, "OtherBackend")),
    "V4, other platform": (COMPRESSED, COMPRESSED.but(platform="xpu")),
    "V4.1 and V4": (COMPRESSED, deepseek_v41()),
}
"""What is stored, and an engine of the same model whose blocks lie otherwise."""


@pytest.mark.parametrize("name", OTHER_ENGINES)
def test_whole_blocks_are_read_only_by_engines_whose_blocks_lie_alike(name, vllm_config, tmp_path):
    mix, other = OTHER_ENGINES[name]
    hits = []
    for each in (mix, other, mix, other):
        engine = EngineOfVllm(each, 1, vllm_config, tmp_path)
        hits.append(engine.run(TOKENS, budget=300))  # checks every byte
        engine.close()
    assert hits == [0, 0, 256, 256]


CHANGED = {
    "block_size": 128,
    "num_kv_heads": 2,
    "head_size": 32,
    "head_size_v": 8,
    "dtype": torch.float32,
    "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD,
    "page_size_padded": 1 << 16,
    "num_head_slots": 4,
    "state_content_bytes": 80,
    "tokens_per_state": 4,
    "max_tp_shards": 2,
    "dcp_sharded": False,
    "block_stride_alignment": 64,
    "sliding_window": 32,
    "attention_chunk_size": 64,
    "non_causal": True,
    "cache_dtype_str": "fp8",
    "alignment": 4096,
    "model_version": "deepseek_v4",
    "cache_role": SparseCacheRole.INDEXER,
    "is_index_group_leader": True,
    "non_causal_multi_token_decode": True,
    "extra_retained_tokens": 2,
    "bounded_replay": True,
}
SERVED = [
    full(1, 8, block_size=64),
    chunked(1, 8, block_size=64),
    window(1, 8, block_size=64),
    mla(),
    SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=72, dtype=BF16, sliding_window=128
    ),
]
EACH_FIELD = [(spec, field.name) for spec in SERVED for field in fields(spec)]
IDS = [f"{type(spec).__name__}.{name}" for spec, name in EACH_FIELD]


def namespace_of(spec):
    """The namespace of a model of a layer with this spec, and one of latents; without modules."""
    mix = one(spec)
    groups = KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([attn(0)], spec), KVCacheGroupSpec([attn(1)], mla())],
    )
    found, _ = described(mix, host_config(mix, 0, 1, {}), groups)
    return Namespace.of(found.identity, found.groups, mix.chunk).digest


@pytest.mark.parametrize(("spec", "name"), EACH_FIELD, ids=IDS)
def test_each_field_makes_another_namespace_or_is_refused_if_it_decides_the_kv_of_a_token(
    spec, name
):
    use = KV_SPECS[type(spec).__name__][name]
    changed = replace(spec, **{name: CHANGED[name]})
    rows = [canonical(describe_spec(each, KV_SPECS, "x")) for each in (spec, changed)]
    assert (rows[0] == rows[1]) is (use is Use.NOTHING)
    try:
        found = namespace_of(changed)
    except ConfigError as error:
        found = str(error)
    if use is Use.UNSERVED and changed.prefix_cacheable:  # else left out
        assert f"{name}={CHANGED[name]!r}" in found
    else:
        assert (found == namespace_of(spec)) is (use in (Use.PAGE, Use.NOTHING))


@pytest.mark.parametrize(("spec", "name"), EACH_FIELD, ids=IDS)
def test_a_field_that_the_table_lacks_refuses_the_model(spec, name, monkeypatch):
    known = KV_SPECS[type(spec).__name__]
    lacking = {type(spec).__name__: {k: use for k, use in known.items() if k != name}}
    for module in (layers, layer_kv):
        monkeypatch.setattr(module, "KV_SPECS", lacking)
    with pytest.raises(ConfigError, match=f"layer {attn(0)} keeps its KV as .* with {name}="):
        namespace_of(spec)


def test_nvfp4_of_a_vllm_that_names_no_layout_is_refused():
    with pytest.raises(ConfigError, match="does not say in which order heads and tokens lie"):
        namespace_of(nvfp4(8).specs(1)[attn(0)])


def test_vllm_groups_layers_of_several_sizes_as_the_mixes_expect(vllm_config):
    for name in OTHER_VIEWS:
        [worker], scheduler = resolved(MIXES[name], 1, vllm_config)
        assert hasattr(worker.kv_cache_groups[0].kv_cache_spec, "kv_cache_specs"), name
        assert not hasattr(scheduler.kv_cache_groups[0].kv_cache_spec, "kv_cache_specs"), name
