"""The namespace of a tier's rows: the model by content, and all that hashes and bytes depend on.

A row is a chunk of host memory as vLLM's offloading lays it out; block hashes make its key.
`KVFerryTier` calls this in its constructor.
"""

# ruff: noqa: ANN401 - configurations are the host's

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvferry.adapters.rows import RowsOptions
from kvferry.adapters.vllm.host import Host, conv_state_layout, cpu_kernels, device_name
from kvferry.adapters.vllm.kv_specs import describe_groups
from kvferry.identity import model_identity
from kvferry.identity.resolved import describe_value
from kvferry.keys import JsonValue, Namespace, opaque_namespace
from kvferry.v1.running_model import running_model

logger = logging.getLogger("vllm.kvferry")

_PICKLED = ("sha256", "xxhash")
"""Algorithms that hash a pickle, which differs between versions of Python."""

_TOKENS_FIRST = "LBNHC"
"""The layout in which a block's bytes are those of its tokens, one after the other. In others, and
where a kernel packs a block's latents or indices, they depend on the size of the kernel's blocks.
vLLM's workers choose that by device and attention backend, and do not tell its scheduler."""

_PER_RANK = ("num_kv_heads", "page_size_bytes", "page_size_padded")
"""Fields of specs that say which part of a page a rank holds; the size of a row is of all ranks."""

_PLACEMENT = ("layers", "shared_by", "host_resident")
"""Fields of vLLM's KV tensors that say which pages lie in a block, in what order. The others follow
from the specs, the layout and the number of blocks."""


def rows_namespace(
    vllm_config: Any,
    kv_cache_config: Any,
    config: Any,
    host: Host,
    release: str,
    options: RowsOptions,
    *,
    row_bytes: int,
    hashed: Callable[[Callable[[], bytes]], bytes] = lambda read: read(),
) -> Namespace:
    """Return the namespace of the rows that a vLLM hands to its tiers.

    Args:
        vllm_config: the whole configuration of the engine.
        kv_cache_config: what this vLLM made of it, as its scheduler gets it.
        config: the engine's `OffloadingConfig`.
        release: vLLM's version.
        hashed: see `model_identity`.

    Raises:
        ConfigError: KV that cannot be identified.
    """
    model = running_model(vllm_config, host.load_config)
    identity = model_identity(model, options.weights_version, hashed)
    first = config.groups[0].tokens_per_block if config.groups else config.cache.tokens_per_hash
    return opaque_namespace(
        identity,
        {
            "name": "vllm",
            "release": ".".join(release.split(".")[:2]),
            **_hashing(vllm_config),
            **_chunking(config),
            **_layout(vllm_config, config),
            **_states(vllm_config, kv_cache_config, _PER_RANK if _is_portable(config) else ()),
            **_more(vllm_config, options),
        },
        row_bytes=row_bytes,
        chunk_tokens=first * config.cache.blocks_per_chunk,
        tenant=options.tenant,
    )


def values_of_rows(kv_cache_config: Any) -> str:
    """Return the dtype of all values of a row; empty if a row may hold anything else: states of
    another dtype, scales, padding. What vLLM keeps as bytes, as it does with float8, are bytes."""
    found = {
        _values_of(spec)
        for group in kv_cache_config.kv_cache_groups
        for spec in _each_spec(group.kv_cache_spec)
    }
    return found.pop() if len(found) == 1 else ""


def _each_spec(spec: Any) -> list[Any]:
    return list(getattr(spec, "kv_cache_specs", {0: spec}).values())


def _values_of(spec: Any) -> str:
    """Return the dtype of a layer whose pages hold keys and values, or latents, alone."""
    dtype, size = getattr(spec, "dtype", None), getattr(spec, "head_size", None)
    if dtype is None or size is None:
        return ""
    if "MLA" not in type(spec).__name__:
        size += getattr(spec, "head_size_v", None) or size
    num_bytes = spec.block_size * spec.num_kv_heads * size * dtype.itemsize
    return str(dtype).removeprefix("torch.") if spec.page_size_bytes == num_bytes else ""


def _hashing(vllm_config: Any) -> dict[str, JsonValue]:
    """Return what decides vLLM's block hash of given tokens."""
    cache = vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None and algorithm.startswith("xxhash"):
        seed = f"of this process: {secrets.token_hex(16)}"
        logger.warning(
            "kvferry: block hashes by %s have a random seed in each process, so nothing is shared "
            "with another start; set PYTHONHASHSEED, or use sha256",
            algorithm,
        )
    lookahead = [
        getattr(place, "num_hash_lookahead_tokens", None) for place in (cache, vllm_config)
    ]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {
        "hash": algorithm,
        "seed": seed,
        "hash_lookahead_tokens": next((int(each) for each in lookahead if each is not None), 0),
        "python": python if algorithm in _PICKLED else None,
    }


def _chunking(config: Any) -> dict[str, JsonValue]:
    return {
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [
            {"tokens_per_block": group.tokens_per_block, "layer_names": list(group.layer_names)}
            for group in config.groups
        ],
    }


def _layout(vllm_config: Any, config: Any) -> dict[str, JsonValue]:
    """Return what decides the order of bytes in a row.

    The number of ranks does not matter in a canonical layout that vLLM certifies for that, nor
    where all ranks hold the same. vLLM may also certify the direct layout, but there each rank's
    pages of all layers are side by side, so the order of heads and layers depends on that number.
    """
    parallel = config.parallel
    is_canonical = bool(getattr(config, "canonical_layout", False))
    is_replicated = bool(getattr(config, "replicated_layout", False))
    ranks: JsonValue = None
    if not _is_portable(config) and not is_replicated:
        names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        ranks = {name: int(getattr(parallel, name, 1)) for name in names}
    device = getattr(getattr(vllm_config, "device_config", None), "device_type", None)
    sizes = {group.tokens_per_block for group in config.groups}
    layout = str(getattr(config, "kv_cache_layout", None))
    kernels = None
    if device == "cpu":
        kernels = cpu_kernels(vllm_config, sizes) if sizes else None
    elif not is_canonical and (layout != _TOKENS_FIRST or vllm_config.model_config.use_mla):
        kernels = device_name()
    return {
        "dtype": str(config.model.dtype),
        "canonical": is_canonical,
        "layout": layout,
        "replicated": is_replicated,
        "ranks": ranks,
        "device": str(device),
        "kernels": kernels,
    }


def _is_portable(config: Any) -> bool:
    """Whether a row is the same for any number of ranks."""
    return bool(getattr(config, "canonical_layout", False)) and bool(
        config.parallel.is_parallelism_agnostic
    )


def _states(
    vllm_config: Any, kv_cache_config: Any, left_out: Collection[str]
) -> dict[str, JsonValue]:
    """Return what lies in the blocks: each KV group's spec as vLLM made it of options, variables,
    model and backend, and where the layers' pages lie in a block.

    Args:
        left_out: fields that do not count.

    Raises:
        ConfigError: a spec, or a field of one, that is not known.
    """
    return {
        "specs": _without(left_out, describe_groups(kv_cache_config)),
        "tensors": [
            {name: describe_value(getattr(tensor, name, None), name) for name in _PLACEMENT}
            for tensor in kv_cache_config.kv_cache_tensors
        ],
        "conv_state_layout": conv_state_layout(),
        # Which backend is chosen, and what it packs into bytes, is not in the specs.
        "attention": repr(getattr(vllm_config, "attention_config", None)),
        "mamba": repr(getattr(vllm_config, "mamba_config", None)),
    }


def _without(names: Collection[str], value: JsonValue) -> JsonValue:
    if isinstance(value, Mapping):
        return {name: _without(names, each) for name, each in value.items() if name not in names}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without(names, each) for each in value]
    return value


def _scales(items: Any) -> str:
    """Return the digest of the file of scales that the configuration of items names, if any."""
    path = getattr(items, "mm_encoder_fp8_scale_path", None)
    return blake3(Path(path).read_bytes()).hexdigest() if path else ""


def _more(vllm_config: Any, options: RowsOptions) -> dict[str, JsonValue]:
    """Return what a block hash leaves out, or covers by name and not by content."""
    drafts = getattr(vllm_config, "speculative_config", None)
    has_adapters = getattr(vllm_config, "lora_config", None) is not None
    keeps_adapters = options.weights_version is not None
    if has_adapters and not keeps_adapters:
        logger.warning(
            "kvferry: block hashes name LoRA adapters without their content, so the tier neither "
            "stores nor reads rows of requests under an adapter; use KVFerryConnector, or set "
            '"weights_version" to a name that changes whenever an adapter does'
        )
    items = getattr(vllm_config.model_config, "multimodal_config", None)
    return {
        "drafts": None
        if drafts is None
        else [str(getattr(drafts, each)) for each in ("method", "model", "num_speculative_tokens")],
        "keeps_adapters": keeps_adapters if has_adapters else None,
        "items": None if items is None else repr(items) + _scales(items),
    }
