"""The namespace of SGLang's pages: the model by content, and all that hashes and bytes depend on.

Only this file knows where SGLang keeps these facts, and how it changes weights.
"""

# ruff: noqa: ANN401 - configurations and pools are the host's

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.managers.scheduler_components.weight_updater import (
    SchedulerWeightUpdaterManager as Updater,
)
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang.version import __version__

from kvferry.adapters.rows import RowsModel, RowsOptions, adapters_name
from kvferry.adapters.sglang.pages import Pages
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, Namespace

logger = logging.getLogger("sglang.kvferry")

MAMBA = "mamba"
"""The pool of which each rank has a part of its own, even where KV is the same on all ranks."""

_NUMERIC = (
    "custom_weight_loader",
    "enable_quant_communications",
    "kv_cache_dtype",
    "mamba_ssm_dtype",
    "model_impl",
    "modelopt_quant",
    "prefill_kv_cache_dequant_dtype",
    "qsa_indexer_dtype",
    "quantization_param_path",
    "quantize_and_serve",
    "rl_quant_profile",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "torchao_config",
)
"""Server arguments that change the KV of the same weight files, beside those that `model_identity`
reads. Draft models count because their layers may lie in the pages of the model."""

_VARIABLES = ("QUANT", "FP8", "FP4", "INT8", "INT4", "KV_CACHE_LAYOUT", "KVCACHE", "EXTERNAL_MODEL")
"""Parts of the names of SGLang's environment variables that quantise, order KV in memory, or bring
models from elsewhere."""

_POOL = (
    "layout",
    "dtype",
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
)
"""Attributes of a host pool that say which layers a page holds, and in what order of bytes."""


class ServedModel:
    """The model that this process of SGLang runs.

    Raises:
        ConfigError: KV that cannot be identified.
    """

    def __init__(self, options: RowsOptions) -> None:
        try:
            arguments = runtime_context.get_context().resolved_server_args_dict()
            model = runtime_context.process_model_config()
        except (ValueError, OSError) as error:
            raise ConfigError(
                "SGLang's arguments or its model's configuration cannot be read in this process, "
                f"so the model cannot be identified: {str(error).partition(chr(10))[0]}"
            ) from error
        self._arguments: Mapping[str, Any] = arguments
        self._model = RowsModel(_as_vllm(arguments, model), _read_config, options, logger)
        has_adapters = bool(arguments.get("enable_lora") or arguments.get("lora_paths"))
        self._adapters = adapters_name(options, logger) if has_adapters else None

    def namespace(self, storage_config: Any, pool: Any, name: str, pages: Pages) -> Namespace:
        """Return the namespace of the pages of one pool of this rank.

        Args:
            storage_config: SGLang's `HiCacheStorageConfig`.
            name: SGLang's name of the pool.
        """
        variables = {
            variable: value
            for variable, value in sorted(os.environ.items())
            if variable.startswith("SGLANG_") and any(part in variable for part in _VARIABLES)
        }
        numeric = {each: self._arguments.get(each) for each in _NUMERIC}
        return self._model.namespace(
            {
                "name": "sglang",
                "release": str(__version__),
                "pool": name,
                "class": type(pool).__name__,
                "order": pages.order,
                "attributes": {each: _plain(getattr(pool, each, None)) for each in _POOL},
                "ranks": _ranks(storage_config, name),
                "arguments": {each: _plain(value) for each, value in numeric.items()},
                "variables": variables,
                "device": str(self._arguments.get("device")),
                "adapters": self._adapters,
            },
            row_bytes=max(1, pages.num_bytes),
            chunk_tokens=pages.tokens,
        )


def _ranks(storage_config: Any, name: str) -> JsonValue:
    """Return the ranks that say which part of the model a page holds; equal parts share records."""
    names = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"]
    if not storage_config.is_mla_model or name == MAMBA:
        names += ["tp_rank", "tp_size"]
    return {each: int(getattr(storage_config, each, 0)) for each in names}


def _plain(value: Any) -> JsonValue:
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _as_vllm(arguments: Mapping[str, Any], model: Any) -> Any:
    """Return SGLang's configuration under the names that `model_identity` reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model.model_path),
            revision=getattr(model, "revision", None),
            dtype=model.dtype,
            hf_config=model.hf_config,
            quantization=arguments.get("quantization"),
            trust_remote_code=bool(arguments.get("trust_remote_code")),
            max_model_len=getattr(model, "context_len", 0),
        ),
        load_config=SimpleNamespace(
            load_format=arguments.get("load_format") or "auto",
            download_dir=arguments.get("download_dir"),
            model_loader_extra_config=arguments.get("model_loader_extra_config"),
        ),
        cache_config=SimpleNamespace(cache_dtype=str(arguments.get("kv_cache_dtype") or "auto")),
    )


def _read_config(model: Any, *, trust_remote_code: bool, revision: Any, **_others: Any) -> Any:
    return get_config(model, trust_remote_code=trust_remote_code, revision=revision)


def watch_weights(changed: Callable[[], None]) -> None:
    """Call the bound method `changed` whenever the weights of this process changed in place.

    SGLang does not tell its storage of that, and its page hashes stay the same. So this wraps, once
    per process, the two methods that end an update. It does not keep the watching object alive.
    """
    for name in ("record_weight_version_after_update", "flush_cache_after_weight_update"):
        found = getattr(Updater, name)
        if not hasattr(found, "kvferry_watchers"):
            found = _telling(found)
            setattr(Updater, name, found)
        alive = [watcher for watcher in found.kvferry_watchers if watcher() is not None]
        found.kvferry_watchers[:] = [*alive, weakref.WeakMethod(changed)]


def _telling(method: Callable[..., Any]) -> Any:
    watchers: list[weakref.WeakMethod[Callable[[], None]]] = []

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return method(*args, **options)
        finally:
            for watcher in tuple(watchers):
                if (changed := watcher()) is not None:
                    changed()

    call.kvferry_watchers = watchers  # type: ignore[attr-defined]  # of this wrapper alone
    return call
