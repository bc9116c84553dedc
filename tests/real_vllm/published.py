"""Recurrent states and KV of published models, as vLLM 0.32 divides them over ranks."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

BF16, F32 = torch.bfloat16, torch.float32

# By name: vLLM's kind, its shapes for a number of ranks, dtypes, columns of the convolution and
# those that every rank copies (as in test_state_geometry.py); then KV heads (0: latents), the size
# of one and the layers with KV; and the tokens of a block that vLLM makes for 1, 4 and 8 ranks.
PUBLISHED = {
    "Qwen3-Next-80B-A3B": (
        Kind.GDN_ATTN, lambda tp: Shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4),
        (BF16, BF16), ((16, 128), (16, 128), (32, 128)), (), (2, 256, 12), (544, 272, 144),
    ),
    "Qwen3.5-35B-A3B": (
        Kind.GDN_ATTN, lambda tp: Shapes.gated_delta_net_state_shape(tp, 16, 32, 128, 128, 4),
        (BF16, F32), ((16, 128), (16, 128), (32, 128)), (), (2, 256, 10), (1056, 528, 272),
    ),
    "Qwen3.5-397B-A17B": (
        Kind.GDN_ATTN, lambda tp: Shapes.gated_delta_net_state_shape(tp, 16, 64, 128, 128, 4),
        (BF16, F32), ((16, 128), (16, 128), (64, 128)), (), (2, 256, 15), (2096, 1056, 528),
    ),
    "Nemotron-H-8B": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 8192, 8, 128, 64, 128, 4),
        (BF16, F32), ((128, 64), (8, 128), (8, 128)), (), (8, 128, 4), (1040, 1040, 1040),
    ),
    "Nemotron-3-Nano-30B": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 4096, 8, 64, 64, 128, 4),
        (BF16, F32), ((64, 64), (8, 128), (8, 128)), (), (2, 128, 6), (2096, 1056, 528),
    ),
    "Granite-4-H-Small": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 8192, 1, 128, 64, 128, 4),
        (BF16, BF16), ((128, 64), (1, 128), (1, 128)), (1, 2), (8, 128, 4), (528, 528, 528),
    ),
    "Granite-4-H-Tiny": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 3072, 1, 48, 64, 128, 4),
        (BF16, BF16), ((48, 64), (1, 128), (1, 128)), (1, 2), (4, 128, 4), (400, 400, 208),
    ),
    "Falcon-H1-34B": (
        Kind.MAMBA2, lambda tp: Shapes.mamba2_state_shape(tp, 4096, 2, 32, 128, 256, 4),
        (BF16, BF16), lambda tp: ((32, 128), (max(2, tp), 256), (max(2, tp), 256)), (),
        (4, 128, 72), (1040, 1056, 528),
    ),
    "Kimi-Linear-48B-A3B": (
        Kind.GDN_ATTN, lambda tp: Shapes.kda_state_shape(tp, 32, 128),
        (BF16, F32), ((32, 128), (32, 128), (32, 128)), (), (0, 576, 7), (1920, 512, 256),
    ),
    "Jamba-1.5-Mini": (
        Kind.MAMBA1, lambda tp: Shapes.mamba1_state_shape(tp, 8192, 16, 4),
        (BF16, BF16), ((8192, 1),), (), (8, 128, 4), (80, 80, 80),
    ),
    "LFM2-8B-A1B": (
        Kind.SHORT_CONV, lambda tp: Shapes.short_conv_state_shape(tp, 2048, 3),
        (BF16,), ((2048, 1),), (), (8, 64, 6), (16, 16, 16),
    ),
}  # fmt: skip
RANKS = (1, 4, 8)
COPIED_GROUPS = {("Falcon-H1-34B", 4), ("Falcon-H1-34B", 8)}
"""More ranks than groups of B and C, of which there are several: only as many ranks share."""


def attention_of(name, tp, block_size):
    """The KV of a layer of a published model. Latents are whole on each rank."""
    heads, size, _ = PUBLISHED[name][5]
    if not heads:
        return MLAAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=size, dtype=BF16, max_tp_shards=1
        )
    return FullAttentionSpec(
        block_size=block_size, num_kv_heads=max(1, heads // tp), head_size=size, dtype=BF16
    )
