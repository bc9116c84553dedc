"""The specs by which vLLM describes KV, of the releases 0.11 to 0.33, and what each field decides.

A class or a field that is not here is refused: a new one may decide bytes.
"""

from __future__ import annotations

from typing import Any

from kvferry.identity.resolved import SpecTable, Use, describe_spec
from kvferry.keys import JsonValue

_CONTENT, _PAGE, _UNSERVED, _NOTHING = Use.CONTENT, Use.PAGE, Use.UNSERVED, Use.NOTHING

_ANY = {
    "block_size": _PAGE,
    "page_size_bytes": _PAGE,  # a property, of some kinds more than their fields say
    "dcp_sharded": _PAGE,
    "is_draft": _PAGE,
    "block_stride_alignment": _NOTHING,
}

_ATTENTION = _ANY | {
    "num_kv_heads": _CONTENT,
    "head_size": _CONTENT,
    "head_size_v": _CONTENT,
    "dtype": _CONTENT,
    "kv_quant_mode": _CONTENT,
    "page_size_padded": _PAGE,
    "num_head_slots": _UNSERVED,
    "state_content_bytes": _CONTENT,
    "tokens_per_state": _UNSERVED,
    "max_tp_shards": _NOTHING,
    "indexes_kv_by_block_stride": _NOTHING,
}

_FULL = _ATTENTION | {
    "sliding_window": _CONTENT,
    "attention_chunk_size": _CONTENT,
    # Such layers read tokens that come later, so a prefix has no KV of its own.
    "non_causal": _UNSERVED,
}

_LATENT = {
    "cache_dtype_str": _PAGE,
    "alignment": _PAGE,
    "storage_block_size": _PAGE,
    "compress_ratio": _UNSERVED,
    "model_version": _CONTENT,
}

_MLA = (
    _FULL
    | _LATENT
    | {
        "cache_role": _CONTENT,
        "tokens_per_state": _CONTENT,
        "is_index_group_leader": _PAGE,
        "non_causal_multi_token_decode": _PAGE,
        "topk_buffer_width": _PAGE,
    }
)

_SLIDING = _ATTENTION | {"sliding_window": _CONTENT, "extra_retained_tokens": _NOTHING}

KV_SPECS: SpecTable = {
    "FullAttentionSpec": _FULL,
    "MLAAttentionSpec": _MLA,
    "HiddenStateCacheSpec": _MLA,
    "SinkFullAttentionSpec": _FULL | {"sink_len": _CONTENT},
    "RSWASpec": _FULL | {"rswa_window": _CONTENT},
    "TQFullAttentionSpec": _FULL | {"tq_slot_size": _UNSERVED},
    "SlidingWindowSpec": _SLIDING,
    "SlidingWindowMLASpec": _SLIDING | _LATENT | {"bounded_replay": _UNSERVED},
    "KpoolTailSpec": _SLIDING,
    "ChunkedLocalAttentionSpec": _ATTENTION | {"attention_chunk_size": _CONTENT},
    "CircularBufferSpec": _ATTENTION,
    "EncoderOnlyAttentionSpec": _ATTENTION,
    "CrossAttentionSpec": _ATTENTION,
    "HiSparseHotSpec": _ANY | {"page_size": _PAGE, "blocks_per_request": _PAGE},
    "HiSparseResidentSpec": _ANY | {"page_size": _PAGE},
    "MambaSpec": _ANY
    | {
        "shapes": _CONTENT,
        "dtypes": _CONTENT,
        "mamba_type": _CONTENT,
        "page_size_padded": _PAGE,
        "mamba_cache_mode": _PAGE,
        "num_speculative_blocks": _PAGE,
        "num_prefill_checkpoint_blocks": _PAGE,
        "prefill_checkpoint_alignment": _PAGE,
        "num_heads": _PAGE,
        "tokens_per_state": _PAGE,
        "tp_replicated": _PAGE,
    },
    # One spec for each layer. vLLM's scheduler gets the first of them for all layers.
    "UniformTypeKVCacheSpecs": _ANY | {"kv_cache_specs": _CONTENT},
}


def describe_groups(kv_cache_config: Any) -> list[JsonValue]:  # noqa: ANN401 - the host's
    """Describe all KV groups of a `KVCacheConfig`, for stores of whole blocks.

    Raises:
        ConfigError: a spec that is not known.
    """
    return [
        {
            "layers": [str(name) for name in group.layer_names],
            # A stage of a pipeline may have no layer of a group.
            "spec": describe_spec(group.kv_cache_spec, KV_SPECS, f"group {group.layer_names[:1]}"),
        }
        for group in kv_cache_config.kv_cache_groups
    ]
