"""What the blocks of one layer of vLLM hold of its tokens, from its spec; a kind that is not known
is refused."""

# ruff: noqa: ANN401 - configurations and specs are the host's

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvferry.adapters.vllm.kv_specs import KV_SPECS
from kvferry.errors import ConfigError
from kvferry.identity.resolved import unserved_fields
from kvferry.types import KVGroup

_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
SLIDING = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
CHUNKED = frozenset({"ChunkedLocalAttentionSpec"})
SERVED = _FULL | SLIDING | CHUNKED
_FLOAT8 = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""By `--kv-cache-dtype`."""
_MLA = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
_SCALED = {
    "INT4_PER_TOKEN_HEAD": 2,
    "INT8_PER_TOKEN_HEAD": 1,
    "FP8_PER_TOKEN_HEAD": 1,
}
"""By mode with a float32 scale behind the keys, and behind the values, of each token and head: how
many values share a byte."""

_PACKED = "NVFP4_DS_MLA"
"""Mode of latents whose data and scales lie apart in a block, in an order of the kernels."""

_LATENT_BYTES = {"fp8_ds_mla": 656}
"""By dtype of latents: the bytes of a token, with its scales, where they lie token by token."""

_BY_TOKEN = re.compile(
    r"((Triton)?Flash(Attention|Infer)|(Flash|Triton)AttentionDiffKV|(Triton|Flex|Tree)Attention"
    r"|(FlashAttn|Flash|FlashInfer|Triton|Cutlass|Tokenspeed)MLA"
    r"|(FlashAttn|Flash|FlashInfer)MLASparse(FA4|TRTLLM|SM120|SM90)?)Backend"
)
"""Attention backends (their classes) that keep the KV of each token as the axes of their tensors
say. Those of others lie in an order of their own, or one that is not known."""

_NUMBER_OF_HEADS = re.compile(
    r"(?=.*(head|kv|key_value|attention_group|query_group))"
    # Query heads of a kv head, and layers that share KV, are counted, too.
    r"(?!.*(dim|in_group|per_(group|kv|key)|(kv|key_value)_group|shared))"
)
_KV_HEADS = re.compile(
    r"(swa_)?num_(global_)?(key_value|kv)_heads|n_(kv_heads|head_kv)|kv_n_heads"
    r"|multi_query_group_num|num_(attention|query)_groups"
)
"""Names that models use for the number of kv heads of their text layers."""

TIER = "serve it with KVFerryTier behind vLLM's OffloadingConnector, or without kvferry"


def text_config(model: Any) -> Any:
    return getattr(model, "hf_text_config", None) or model.hf_config


def kind_of(name: str, number: int, spec: Any, model: Any, tp: int) -> KVGroup:
    """Return the form of a layer's KV, without window; block size 0: all sizes are stored alike."""
    kind, where = type(spec).__name__, f"layer {name}"
    if kind in KV_SPECS.keys() - SERVED:
        raise ConfigError(
            f"{where} keeps its KV as a {kind}, which kvferry's connector does not store; {TIER}"
        )
    is_halved = _is_halved(spec)
    unserved = [
        f"{field}={value!r}"
        for field, value in unserved_fields(spec, KV_SPECS, where).items()
        if field != "num_head_slots" or not is_halved
    ]
    if unserved:
        fields = ", ".join(unserved)
        raise ConfigError(f"{where} has {fields}, which kvferry's connector does not store; {TIER}")
    content, row_tokens, dtype = _content_of(spec, where)
    heads = 1 if kind in _MLA or is_halved else spec.num_kv_heads
    num_bytes = content * heads * (1 if dtype == "uint8" else spec.dtype.itemsize)
    size = num_bytes * spec.block_size // row_tokens
    padded = getattr(spec, "page_size_padded", None)
    if spec.page_size_bytes < size or (padded is None and spec.page_size_bytes != size):
        raise ConfigError(
            f"a KV block of {where} has {spec.page_size_bytes} bytes, its keys and values {size}; "
            f"kvferry's connector stores keys and values alone: {TIER}"
        )
    total = 1 if kind in _MLA else _total_heads(spec.num_kv_heads, number, model, tp)
    return KVGroup(
        num_layers=1,
        # Nothing divides a halved page, so all that a rank holds counts as one head.
        num_kv_heads=total // spec.num_kv_heads if is_halved else total,
        content_size=content,
        dtype=dtype,
        block_size=0,
        row_tokens=row_tokens,
    )


def _content_of(spec: Any, where: str) -> tuple[int, int, str]:
    """Return how many elements a head has of a token, or of how many tokens, and of which dtype:
    bytes, if scales stand among the values."""
    mode, is_v4 = _mode_of(spec), _is_of_deepseek_v4(spec)
    if _is_halved(spec):
        return spec.num_head_slots * spec.state_content_bytes, 1, "uint8"
    # Other modes have scales elsewhere in the blocks or beside them, or belong to one platform.
    if mode not in ("NONE", "FP8_PER_TENSOR", *_SCALED) and not (is_v4 and mode == _PACKED):
        raise ConfigError(
            f"{where} keeps its KV as {mode}, which kvferry's connector does not store; set "
            f"another --kv-cache-dtype, or {TIER}"
        )
    sizes = [spec.head_size]
    if type(spec).__name__ not in _MLA:
        sizes.append(getattr(spec, "head_size_v", None) or spec.head_size)
    dtype = str(spec.dtype).removeprefix("torch.")
    packed, ratio = getattr(spec, "state_content_bytes", None), _tokens_per_row(spec)
    if (packed is not None or mode in _SCALED) and not is_v4:
        return _packed_bytes(spec, mode, sizes, where), 1, "uint8"
    if ratio == 1 and packed is None:
        return sum(sizes), 1, dtype
    # Blocks are stored whole, as if each token, or the fewest that have whole bytes, had a part.
    if ratio < 1 or ratio % 1 or spec.block_size % ratio:
        raise ConfigError(
            f"{where} has tokens_per_state={ratio}, which does not divide its {spec.block_size} "
            f"tokens; {TIER}"
        )
    row = sizes[0] * spec.dtype.itemsize if packed is None else packed
    parts = math.gcd(row, int(ratio))
    return row // parts, int(ratio) // parts, "uint8"


def _packed_bytes(spec: Any, mode: str, sizes: list[int], where: str) -> int:
    """Return the bytes of a token and head that has its scales beside it."""
    packed: int | None = getattr(spec, "state_content_bytes", None)
    expected = _LATENT_BYTES.get(getattr(spec, "cache_dtype_str", None) or "")
    if mode in _SCALED:
        expected = sum(size // _SCALED[mode] for size in sizes) + 2 * 4
    is_of_tokens = spec.dtype.itemsize == 1 and _tokens_per_row(spec) == 1
    if packed is None or packed != expected or not is_of_tokens:
        raise ConfigError(
            f"{where} has state_content_bytes={packed} and keeps its KV as {mode}, which "
            f"kvferry's connector does not store; set another --kv-cache-dtype, or {TIER}"
        )
    return packed


def _mode_of(spec: Any) -> str:
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))


def _is_of_deepseek_v4(spec: Any) -> bool:
    return getattr(spec, "model_version", None) == "deepseek_v4"


def _is_halved(spec: Any) -> bool:
    """Whether each page of a rank has all keys, their scales, all values, and theirs."""
    slots, row = getattr(spec, "num_head_slots", None), getattr(spec, "state_content_bytes", None)
    is_known = slots == 2 * getattr(spec, "num_kv_heads", 0) and row is not None
    is_of_bytes = is_known and spec.dtype.itemsize == 1 and _tokens_per_row(spec) == 1
    return _mode_of(spec) == "NVFP4" and is_of_bytes and type(spec).__name__ not in _MLA


def order_of_heads(kv_cache_config: Any) -> str:
    """Return which of heads (H), tokens (N) and content (C) lie outermost in a block; "" if the
    host does not say."""
    return str(getattr(kv_cache_config, "kv_cache_layout", None) or "").strip("LB")


def _tokens_per_row(spec: Any) -> Any:
    """Return how many tokens a row of a layer stands for: a whole number, or part of one."""
    found = getattr(spec, "tokens_per_state", None)
    return 1 if found is None else found


def values_of(spec: Any, cache_dtype: str, platform: str) -> str:
    """Return the dtype of values that vLLM keeps as bytes; empty if they are not, or not known: an
    indexer's bytes hold scales, too, and devices of AMD may have a float8 of their own."""
    is_plain = type(spec).__name__ in SERVED - _MLA
    is_known = is_plain and str(spec.dtype) == "torch.uint8" and platform != "rocm"
    return _FLOAT8.get(cache_dtype, "") if is_known else ""


def whole_blocks_of(spec: Any, module: Any, platform: str, order: str) -> str | None:
    """Say how the blocks of a layer lie, if not token by token; None if they do.

    The indexer of sparse attention keeps all keys of a block before all scales, in another order on
    each platform; latents of bytes without a mode may do the same. So may backends that are not
    known. (On a CPU, the kernels decide: see `spec.engine_spec`.) Rows for several tokens cannot be
    divided by tokens, nor can pages that keep scales apart.
    """
    is_compressed, is_halved = _tokens_per_row(spec) != 1, _is_halved(spec)
    if platform == "cpu" and not is_compressed and not is_halved:
        return None
    ask = getattr(module, "get_attn_backend", None)
    backend = None if ask is None else str(ask().__name__)
    mode = _mode_of(spec)
    role = getattr(getattr(spec, "cache_role", None), "name", None)
    of_bytes = str(spec.dtype).endswith("int8") and mode == "NONE"
    by_token = backend is None or _BY_TOKEN.fullmatch(backend) is not None
    is_latent = type(spec).__name__ in _MLA
    where = f"{backend or role} of {spec.block_size} tokens on {platform}"
    if is_halved and not order:
        raise ConfigError(
            f"this vLLM does not say in which order heads and tokens lie, on which blocks of "
            f"{mode} depend; set another --kv-cache-dtype, or {TIER}"
        )
    if is_halved:
        return f"{where}, as {order}"
    is_apart = role == "INDEXER" or (of_bytes and is_latent) or _is_of_deepseek_v4(spec)
    return None if by_token and not is_compressed and not is_apart else where


# --- kv heads of all ranks ------------------------------------------------------------------------


def _total_heads(per_rank: int, number: int, model: Any, tp: int) -> int:
    """Return the distinct kv heads of a layer over all ranks.

    With one head per rank, ranks may hold copies, and neither vLLM's specs nor its modules say so.
    Ranks count as copies only if one number alone that the model's configuration names for heads
    fits, and if that name is one for kv heads. Otherwise each rank has a head of its own: that is
    never wrong, but such records are read only with as many ranks.
    """
    if per_rank > 1 or tp == 1:
        return per_rank * tp
    named = _numbers_of_heads(model, number)
    fitting = {each for _, each in named if 0 < each <= tp and tp % each == 0}
    is_named_so = any(_KV_HEADS.fullmatch(name) for name, each in named if each in fitting)
    return fitting.pop() if len(fitting) == 1 and is_named_so else tp


def _numbers_of_heads(model: Any, number: int) -> list[tuple[str, int]]:
    arch = getattr(model, "model_arch_config", None)
    by_layer = getattr(arch, "per_layer_overrides", None) or ()
    if number < len(by_layer) and any("total_num_kv_heads" in each for each in by_layer):
        assert arch is not None, "it has layers"
        return [("num_kv_heads", int(arch[number].total_num_kv_heads))]
    config = text_config(model)
    return list(_numbers(config.to_dict() if hasattr(config, "to_dict") else vars(config)))


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """Yield the integers in a configuration whose name, or the name of what holds them, is one for
    a number of heads; and that name."""
    if isinstance(value, Mapping):
        for inner, each in value.items():
            is_closer = _NUMBER_OF_HEADS.match(str(inner)) or not _NUMBER_OF_HEADS.match(name)
            yield from _numbers(each, str(inner) if is_closer else name)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _numbers(each, name)
    elif _NUMBER_OF_HEADS.match(name) and isinstance(value, int) and not isinstance(value, bool):
        yield name, value
