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
from typing import Any

from sglang.srt import runtime_context
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang.version import __version__

from kvferry.adapters.rows import RowsOptions, adapters_name
from kvferry.adapters.sglang.pages import Pages
from kvferry.adapters.sglang.pool_facts import pool_facts
from kvferry.errors import ConfigError
from kvferry.identity import ModelFiles, RunningModel, model_identity, read_written
from kvferry.keys import JsonValue, Namespace, opaque_namespace
from kvferry.v1.running_model import (
    loads_of,
    numeric_variables,
    read_since,
    uses_modelscope,
)

logger = logging.getLogger("sglang.kvferry")

MAMBA = "mamba"
"""The pool of which each rank has a part of its own, even where KV is the same on all ranks."""

_NUMERIC = (
    "custom_weight_loader",
    "enable_quant_communications",
    "kv_cache_dtype",
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
)
"""Server arguments that change the KV of the same weight files, beside those that `model_identity`
reads and those of which the pool shows what came of them. Draft models count because their layers
may lie in the pages of the model."""

_GONE = "torchao_config"
"""As those of `_NUMERIC`, of releases before 0.5.23."""

_PREFIXES = ("SGLANG_", "FLASHINFER_", "DEEP_NORMAL_MODE_")
"""Of the names of variables that SGLang and its kernels read."""

_VARIABLES = (
    *("QUANT", "FP8", "FP4", "INT8", "INT4", "MXSCALE", "DTYPE"),
    *("LAYOUT", "KVCACHE", "INDEX", "SHUFFLE", "COMPRESS"),
    *("SIMULATE", "SKIP_SOFTMAX", "SAGE", "EXTERNAL_MODEL"),
)
"""Parts of the names of variables that quantise, pack KV, compute something else than the model, or
bring models from elsewhere. A pool shows dtypes and shapes, but not what was packed into bytes."""

_CHANGES = (
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_ipc",
    "update_weights_from_tensor",
)
"""Methods of SGLang's model runners that write weights, or let others write them."""


class ServedModel:
    """The model that this process of SGLang runs.

    Args:
        hashed: see `model_identity`.

    Raises:
        ConfigError: KV that cannot be identified.
    """

    def __init__(
        self, options: RowsOptions, hashed: Callable[[Callable[[], bytes]], bytes]
    ) -> None:
        try:
            arguments = runtime_context.get_context().resolved_server_args_dict()
            model = runtime_context.process_model_config()
        except (ValueError, OSError) as error:
            raise ConfigError(
                "SGLang's arguments or its model's configuration cannot be read in this process, "
                f"so the model cannot be identified: {str(error).partition(chr(10))[0]}"
            ) from error
        self._arguments: Mapping[str, Any] = arguments
        running = _running_model(arguments, model)
        self._identity = model_identity(running, options.weights_version, hashed)
        self._tenant = options.tenant
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
            if variable.startswith(_PREFIXES) and any(part in variable for part in _VARIABLES)
        }
        numeric = {each: _argument(self._arguments, each) for each in _NUMERIC}
        numeric[_GONE] = self._arguments.get(_GONE)
        return opaque_namespace(
            self._identity,
            {
                "name": "sglang",
                "release": str(__version__),
                "pool": name,
                "holds": pool_facts(pool, pages.num_bytes),
                "order": pages.order,
                "ranks": _ranks(storage_config, name),
                "arguments": {each: _plain(value) for each, value in numeric.items()},
                "variables": variables,
                "device": str(_argument(self._arguments, "device")),
                "adapters": self._adapters,
            },
            row_bytes=max(1, pages.num_bytes),
            chunk_tokens=pages.tokens,
            tenant=self._tenant,
        )


def _ranks(storage_config: Any, name: str) -> JsonValue:
    """Return the ranks that say which part of the model a page holds; equal parts share records.

    Raises:
        ConfigError: this SGLang does not say one of them.
    """
    names = ["pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size"]
    if not storage_config.is_mla_model or name == MAMBA:
        names += ["tp_rank", "tp_size"]
    for each in names:
        if not hasattr(storage_config, each):
            raise ConfigError(
                f"this SGLang does not tell its storage {each!r}, so ranks may hold other pages; "
                "use a release of kvferry that knows this SGLang's"
            )
    return {each: int(getattr(storage_config, each)) for each in names}


def _plain(value: Any) -> JsonValue:
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _running_model(arguments: Mapping[str, Any], model: Any) -> RunningModel:
    """Return the model that SGLang runs.

    What the operator set beyond this is in the namespace under SGLang's own names (`_NUMERIC`), and
    so is what its pools hold: SGLang has no options by these names of vLLM's.
    """
    hf_config = model.hf_config
    load_format = str(_argument(arguments, "load_format") or "auto")
    runs_code = bool(_argument(arguments, "trust_remote_code"))
    return RunningModel(
        files=ModelFiles(
            name=str(model.model_path),
            weights="",
            revision=model.revision,
            cache_dir=_argument(arguments, "download_dir"),
            is_on_hugging_face=not uses_modelscope(),
            load_format=load_format.lower(),
            loads=loads_of(load_format),
        ),
        read_since=read_since(),
        dtype=str(model.dtype).removeprefix("torch."),
        running=hf_config.to_dict(),
        written=read_written(
            lambda: get_config(
                str(model.model_path), trust_remote_code=runs_code, revision=model.revision
            )
        ),
        classes=(),  # by `model_impl` and a variable of external models
        max_length=int(model.context_len),
        runs_code=runs_code,
        code_map=hf_config.auto_map if hasattr(hf_config, "auto_map") else None,
        code_revision=None,
        config_path=None,
        quantization=_argument(arguments, "quantization"),
        quantization_options=None,
        is_quantized_in_files=hasattr(hf_config, "quantization_config"),
        quantization_file=None,
        heeds_model_opt=True,
        loader_options=_argument(arguments, "model_loader_extra_config"),
        kv_dtype=str(_argument(arguments, "kv_cache_dtype") or "auto"),
        kv_layers_left_out=(),
        scales_by_requests=False,
        latents_of=None,  # no record is shared with another host
        lora={},  # hashes do not cover adapters: `adapters_name`
        queries={},
        kernels={},
        platform_options=None,
        variables=numeric_variables(),
    )


def _argument(arguments: Mapping[str, Any], name: str) -> Any:
    """Return a server argument. Raises ConfigError if this SGLang has none of that name."""
    if name not in arguments:
        raise ConfigError(
            f"this SGLang has no server argument {name!r}, which decides KV, so the model cannot "
            "be identified; use a release of kvferry that knows this SGLang's"
        )
    return arguments[name]


class Weights:
    """What is known of changes of this process's weights in place.

    SGLang does not tell its storage of them, and its page hashes stay the same. An update may leave
    the cache as it is, for a later flush: until then SGLang hands over pages that the weights
    before computed. So nothing is stored until the flush, and an epoch begins with both.

    Attributes:
        have_changed: whether the weights are not those that the process started with.
        left_old_kv: whether they changed since SGLang last dropped all KV.
    """

    def __init__(self) -> None:
        self.have_changed = self.left_old_kv = False
        self.watchers: list[weakref.WeakMethod[Callable[[], None]]] = []

    def change(self) -> None:
        if not self.left_old_kv:
            self.have_changed = self.left_old_kv = True
            logger.info(
                "kvferry: the weights change in place; what was stored before is not read any "
                "more, and nothing is stored until SGLang flushes its cache"
            )
            self._tell()

    def flushed(self) -> None:
        """SGLang has dropped all KV, and has no page left to store."""
        if self.left_old_kv:
            self._tell()  # so that a store which was under way at the change is not read
            self.left_old_kv = False

    def _tell(self) -> None:
        for watcher in tuple(self.watchers):
            if (begin_epoch := watcher()) is not None:
                begin_epoch()


WEIGHTS = Weights()


def watch_weights(begin_epoch: Callable[[], None]) -> Weights:
    """Call this bound method when the weights change in place, and at the flush that follows.

    This wraps, once per process, the methods with which SGLang writes weights, and the one with
    which each flush ends. It does not keep the object of the bound method alive.
    """
    for name in _CHANGES:
        _wrap(WeightUpdater, name, before=WEIGHTS.change)
    _wrap(HiCacheController, "reset", after=WEIGHTS.flushed)
    alive = [each for each in WEIGHTS.watchers if each() is not None]
    WEIGHTS.watchers[:] = [*alive, weakref.WeakMethod(begin_epoch)]
    return WEIGHTS


def _nothing() -> None:
    pass


def _wrap(
    owner: type,
    name: str,
    before: Callable[[], None] = _nothing,
    after: Callable[[], None] = _nothing,
) -> None:
    """Make a method call `before` and `after`; the latter not if the method raises."""
    method = getattr(owner, name)
    if hasattr(method, "of_kvferry"):
        return

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        before()
        found = method(*args, **options)
        after()
        return found

    call.of_kvferry = True  # type: ignore[attr-defined]  # of this wrapper alone
    setattr(owner, name, call)
