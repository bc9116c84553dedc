"""What each layer of vLLM keeps, from its spec, and the models that a connector of tokens refuses.

vLLM's scheduler sees less than its workers: for a group of layers of several sizes it gets the spec
of the first layer, and no modules. So the two halves may describe a model differently;
`connector.py` has the scheduler's half adopt what the workers' halves say.
"""

# ruff: noqa: ANN401 - configurations and specs are the host's

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

from kvferry.adapters.vllm.kv_specs import KV_SPECS
from kvferry.errors import ConfigError
from kvferry.identity.resolved import unserved_fields
from kvferry.types import KVGroup

_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_SLIDING = frozenset({"SlidingWindowSpec", "SlidingWindowMLASpec"})
_CHUNKED = frozenset({"ChunkedLocalAttentionSpec"})
_SERVED = _FULL | _SLIDING | _CHUNKED
_FLOAT8 = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""By `--kv-cache-dtype`."""
_MLA = frozenset({"MLAAttentionSpec", "SlidingWindowMLASpec"})
_RING = "CircularBufferSpec"

_SCALED = {
    "INT4_PER_TOKEN_HEAD": 2,
    "INT8_PER_TOKEN_HEAD": 1,
    "FP8_PER_TOKEN_HEAD": 1,
}
"""By mode with a float32 scale behind the keys, and behind the values, of each token and head: how
many values share a byte."""

_LATENT_BYTES = {"fp8_ds_mla": 656}
"""By dtype of latents: the bytes of a token, with its scales, where they lie token by token."""

_BY_TOKEN = re.compile(
    r"((Triton)?Flash(Attention|Infer)|(Flash|Triton)AttentionDiffKV|(Triton|Flex|Tree)Attention"
    r"|(FlashAttn|Flash|FlashInfer|Triton|Cutlass|Tokenspeed)MLA"
    r"|(FlashAttn|Flash|FlashInfer)MLASparse(FA4|TRTLLM|SM120|SM90)?)Backend"
)
"""Attention backends (their classes) that keep the KV of each token as the axes of their tensors
say. Those of others lie in an order of their own, or one that is not known."""

_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")
_ANY_NUMBER = re.compile(r"(\d+)")
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

_TIER = "serve it with KVFerryTier behind vLLM's OffloadingConnector, or without kvferry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention layer of the model that this vLLM runs.

    Attributes:
        name: vLLM's name of the layer.
        number: position in the model.
        table: index of its KV group in vLLM, and so of its block table.
        block_size: tokens per block of that table.
        table_window: tokens that the table keeps (with a drafter, more than the window); None: all.
        table_chunk: tokens of the attention chunks of which the table keeps the last; None: all.
        kind: the form of its KV, as a group of one layer; layers of one kind make a record's group.
        whole_blocks: how its blocks lie, if they can only be stored whole; None: token by token.
        stage: the pipeline stage that holds it.
    """

    name: str
    number: int
    table: int
    block_size: int
    table_window: int | None
    table_chunk: int | None
    kind: KVGroup
    whole_blocks: str | None
    stage: int = 0


def refuse_parallel(parallel: Any) -> None:
    """Raise ConfigError for a split of KV that is not served."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if isinstance(size, int) and size != 1:
            raise ConfigError(
                f"{name}={size} is not served by kvferry's connector; set it to 1, or {_TIER}"
            )


def stages_of(parallel: Any) -> int:
    """Return the number of pipeline stages."""
    return int(getattr(parallel, "pipeline_parallel_size", 1))


def refuse_stages_beside_others(parallel: Any) -> None:
    """Raise ConfigError if a connector among several would have to tell the scheduler of stages."""
    if stages_of(parallel) > 1:
        raise ConfigError(
            f"pipeline_parallel_size={stages_of(parallel)} is not served inside a MultiConnector, "
            "where vLLM's scheduler hears of one child alone: make kvferry the only connector"
        )


def layers_of(vllm_config: Any, kv_cache_config: Any, platform: str) -> list[Layer]:
    """Return every layer of every group, in any order: a hit would leave any other as it was. Only
    draft layers of speculative decoding are left out: their KV depends on another model, and a
    wrong draft only costs time. So are rings, which are empty where a hit ends, and recurrent
    layers, which keep no KV.

    Args:
        kv_cache_config: the host's groups.
        platform: name of the device that vLLM runs on.

    Raises:
        ConfigError: a kind of layer that is not served, whether or not the host would transfer it.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    compilation = getattr(vllm_config, "compilation_config", None)
    modules = getattr(compilation, "static_forward_context", {})
    drafts = _drafts(vllm_config, kv_cache_config, modules)
    found, rings, place = [], {}, 0
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in specs_of(group):
            number = number_of(name, place)
            place += 1
            if name in drafts or is_recurrent(spec):
                continue
            if _is_ring(spec):
                unserved_fields(spec, KV_SPECS, f"layer {name}")
                rings[name] = int(spec.block_size)
                continue
            order = _order_of_heads(kv_cache_config)
            kind = _kind_of(name, number, spec, model, parallel.tensor_parallel_size)
            values = _values_of(spec, vllm_config.cache_config.cache_dtype, platform)
            found.append(
                Layer(
                    name=name,
                    number=number,
                    table=table,
                    block_size=group.kv_cache_spec.block_size,
                    table_window=_table_window(spec),
                    table_chunk=_chunk_of(number, spec, model) if _is_chunked(spec) else None,
                    kind=replace(
                        kind,
                        window=_window_of(number, spec, model),
                        chunk=_chunk_of(number, spec, model),
                        values=values,
                    ),
                    whole_blocks=_whole_blocks(spec, modules.get(name), platform, order),
                )
            )
    _check_rings(rings, {layer.block_size for layer in found})
    return found


def is_recurrent(spec: Any) -> bool:
    """Whether a layer keeps a recurrent state (`states.states_of`), and no KV of tokens."""
    return type(spec).__name__ == "MambaSpec"


def _is_ring(spec: Any) -> bool:
    """Whether a layer keeps tokens that are not compressed yet; vLLM's own hits do without them."""
    return type(spec).__name__ == _RING and getattr(spec, "prefix_cacheable", True) is False


def _check_rings(rings: Mapping[str, int], block_sizes: Collection[int]) -> None:
    """Raise ConfigError if a hit might end where a layer's ring holds tokens: it is empty at
    multiples of its size."""
    for name, size in rings.items():
        if math.lcm(1, *block_sizes) % size:
            raise ConfigError(
                f"layer {name} keeps its last {size} tokens as a {_RING}, and blocks of "
                f"{', '.join(map(str, sorted(block_sizes)))} tokens end within them; {_TIER}"
            )


def num_target_layers(model: Any) -> int:
    """The number of layers of the model itself, without drafts; huge if it is not said."""
    config = text_config(model)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        number = getattr(config, name, None)
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return 1 << 30


def text_config(model: Any) -> Any:
    return getattr(model, "hf_text_config", None) or model.hf_config


def number_of(name: str, place: int) -> int:
    """Return the position in the model: the first number in the name, or the host's order."""
    match = _NUMBER.search(name) or _ANY_NUMBER.search(name)
    return place if match is None else int(match.group(1))


def specs_of(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and spec of each layer of a group. A uniform group has a spec for each."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, each[name] if isinstance(each, Mapping) else group.kv_cache_spec


# --- drafts ---------------------------------------------------------------------------------------
#
# A layer that is taken for a draft is neither stored nor loaded. If it were the model's, each hit
# would compute on whatever its blocks hold. So vLLM must say that it is one, and where it does not,
# all that it shows must agree; in doubt a layer is the model's.


def _drafts(vllm_config: Any, kv_cache_config: Any, modules: Mapping[str, Any]) -> set[str]:
    """Return the names of a drafter's layers.

    vLLM marks them since 0.33, and in its second model runner before. Without marks they are those
    that vLLM, if its configuration names a draft model, made after all others, if they have a name
    or a number that a model's own layers lack. Some models number their own layers so: in Falcon-H1
    the states of layer i are layer `num_hidden_layers + i`.

    Raises:
        ConfigError: a layer that vLLM made earlier has such a name or number, too, so that neither
            says anything of those behind it.
    """
    specs = {
        name: spec for group in kv_cache_config.kv_cache_groups for name, spec in specs_of(group)
    }
    found = {
        name
        for name, spec in specs.items()
        if getattr(spec, "is_draft", False)
        or getattr(modules.get(name), "is_draft_layer", False) is True
    }
    config = getattr(vllm_config, "speculative_config", None)
    drafter = getattr(config, "draft_model_config", None)
    own = getattr(config, "target_model_config", None)  # it stands for none, as for n-grams
    if found or drafter is None or drafter is own:
        return found
    num_layers = num_target_layers(vllm_config.model_config)

    def looks_so(name: str) -> bool:
        is_named_so = not {"draft_model", "mtp"}.isdisjoint(name.split("."))
        is_behind = number_of(name, 0) >= num_layers
        keeps_tokens = type(specs[name]).__name__ in _SERVED
        return keeps_tokens and (is_named_so or is_behind)

    made = [name for name in modules if name in specs]
    # The scheduler's process has no modules; what the workers say of their layers counts there.
    behind = set(takewhile(looks_so, reversed(made)) if made else filter(looks_so, specs))
    for name in made:
        if name not in behind and looks_so(name):
            raise ConfigError(
                f"layer {name} of the model is numbered or named as those of draft models are, so "
                "which layers are drafts is not known; run it without a draft model"
            )
    return behind


# --- one layer ------------------------------------------------------------------------------------


def _kind_of(name: str, number: int, spec: Any, model: Any, tp: int) -> KVGroup:
    """Return the form of a layer's KV, without window; block size 0: all sizes are stored alike."""
    kind, where = type(spec).__name__, f"layer {name}"
    if kind in KV_SPECS.keys() - _SERVED:
        raise ConfigError(
            f"{where} keeps its KV as a {kind}, which kvferry's connector does not store; {_TIER}"
        )
    unserved = unserved_fields(spec, KV_SPECS, where)
    is_halved = _is_halved(spec)
    if is_halved:
        del unserved["num_head_slots"]
    if unserved:
        fields = ", ".join(f"{field}={value!r}" for field, value in unserved.items())
        raise ConfigError(
            f"{where} has {fields}, which kvferry's connector does not store; {_TIER}"
        )
    content, dtype = _content_of(spec, where)
    heads = 1 if kind in _MLA or is_halved else spec.num_kv_heads
    size = content * heads * spec.block_size * (1 if dtype == "uint8" else spec.dtype.itemsize)
    padded = getattr(spec, "page_size_padded", None)
    if spec.page_size_bytes < size or (padded is None and spec.page_size_bytes != size):
        raise ConfigError(
            f"a KV block of {where} has {spec.page_size_bytes} bytes, its keys and values {size}; "
            f"kvferry's connector stores keys and values alone: {_TIER}"
        )
    total = 1 if kind in _MLA else _total_heads(spec.num_kv_heads, number, model, tp)
    return KVGroup(
        num_layers=1,
        # Nothing divides a halved page, so all that a rank holds counts as one head.
        num_kv_heads=total // spec.num_kv_heads if is_halved else total,
        content_size=content,
        dtype=dtype,
        block_size=0,
    )


def _content_of(spec: Any, where: str) -> tuple[int, str]:
    """Return how many elements a token and head has, and of which dtype: bytes, if scales stand
    among the values."""
    mode = _mode_of(spec)
    if _is_halved(spec):
        return spec.num_head_slots * spec.state_content_bytes, "uint8"
    # Other modes have scales elsewhere in the blocks or beside them, or belong to one platform.
    if mode not in ("NONE", "FP8_PER_TENSOR", *_SCALED):
        raise ConfigError(
            f"{where} keeps its KV as {mode}, which kvferry's connector does not store; set "
            f"another --kv-cache-dtype, or {_TIER}"
        )
    sizes = [spec.head_size]
    if type(spec).__name__ not in _MLA:
        sizes.append(getattr(spec, "head_size_v", None) or spec.head_size)
    dtype = str(spec.dtype).removeprefix("torch.")
    packed, ratio = getattr(spec, "state_content_bytes", None), _tokens_per_row(spec)
    if packed is not None or mode in _SCALED:
        expected = _LATENT_BYTES.get(getattr(spec, "cache_dtype_str", None) or "")
        if mode in _SCALED:
            expected = sum(size // _SCALED[mode] for size in sizes) + 2 * 4
        if packed is None or packed != expected or spec.dtype.itemsize != 1 or ratio != 1:
            raise ConfigError(
                f"{where} has state_content_bytes={packed} and keeps its KV as {mode}, which "
                f"kvferry's connector does not store; set another --kv-cache-dtype, or {_TIER}"
            )
        return packed, "uint8"
    if ratio == 1:
        return sum(sizes), dtype
    # One row for several tokens: blocks are stored whole, as if each token had a part of it.
    content, rest = divmod(sizes[0] * spec.dtype.itemsize, ratio)
    if ratio < 1 or rest or spec.block_size % ratio:
        raise ConfigError(
            f"{where} has tokens_per_state={ratio}, which does not divide its {spec.block_size} "
            f"tokens and {sizes[0] * spec.dtype.itemsize} bytes; {_TIER}"
        )
    return int(content), "uint8"


def _mode_of(spec: Any) -> str:
    return str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))


def _is_halved(spec: Any) -> bool:
    """Whether each page of a rank has all keys, their scales, all values, and theirs."""
    slots, row = getattr(spec, "num_head_slots", None), getattr(spec, "state_content_bytes", None)
    is_known = slots == 2 * getattr(spec, "num_kv_heads", 0) and row is not None
    is_of_bytes = is_known and spec.dtype.itemsize == 1 and _tokens_per_row(spec) == 1
    return _mode_of(spec) == "NVFP4" and is_of_bytes and type(spec).__name__ not in _MLA


def _order_of_heads(kv_cache_config: Any) -> str:
    """Return which of heads (H), tokens (N) and content (C) lie outermost in a block; "" if the
    host does not say."""
    return str(getattr(kv_cache_config, "kv_cache_layout", None) or "").strip("LB")


def _tokens_per_row(spec: Any) -> Any:
    """Return how many tokens a row of a layer stands for: a whole number, or part of one."""
    found = getattr(spec, "tokens_per_state", None)
    return 1 if found is None else found


def _values_of(spec: Any, cache_dtype: str, platform: str) -> str:
    """Return the dtype of values that vLLM keeps as bytes; empty if they are not, or not known: an
    indexer's bytes hold scales, too, and devices of AMD may have a float8 of their own."""
    is_plain = type(spec).__name__ in _SERVED - _MLA
    is_known = is_plain and str(spec.dtype) == "torch.uint8" and platform != "rocm"
    return _FLOAT8.get(cache_dtype, "") if is_known else ""


def _window_of(number: int, spec: Any, model: Any) -> int | None:
    """Return the window of a layer. vLLM may keep all tokens of layers with and without a window in
    one group, whose spec does not tell them apart; the model's configuration does."""
    window = getattr(spec, "sliding_window", None)
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if type(spec).__name__ not in _SLIDING and isinstance(kinds, list) and number < len(kinds):
        window = config.sliding_window if kinds[number] == "sliding_attention" else None
    return window if isinstance(window, int) else None


def _is_chunked(spec: Any) -> bool:
    return type(spec).__name__ in _CHUNKED


def _chunk_of(number: int, spec: Any, model: Any) -> int | None:
    """Return the tokens of a layer's attention chunks. As for windows, the model's configuration
    says which layers have them where vLLM keeps all tokens of all layers in one group."""
    chunk = getattr(spec, "attention_chunk_size", None)
    kinds = getattr(text_config(model), "layer_types", None)
    if not _is_chunked(spec) and isinstance(kinds, list) and number < len(kinds):
        chunk = chunk if kinds[number] == "chunked_attention" else None
    return chunk if isinstance(chunk, int) else None


def _table_window(spec: Any) -> int | None:
    """Return how many tokens vLLM keeps of a layer; None if all."""
    if type(spec).__name__ not in _SLIDING:
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))


def _whole_blocks(spec: Any, module: Any, platform: str, order: str) -> str | None:
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
            f"{mode} depend; set another --kv-cache-dtype, or {_TIER}"
        )
    if is_halved:
        return f"{where}, as {order}"
    if by_token and role != "INDEXER" and not is_compressed and not (of_bytes and is_latent):
        return None
    return where


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
