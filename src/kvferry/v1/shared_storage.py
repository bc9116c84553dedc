"""kvferry's cache as one connector class, under the names of vLLM's shared-storage connector.

Hosts that expect such a class construct `SharedStorageConnector`, once in the scheduler's process
and once per worker. `ReqMeta`, `make_meta`, `SharedStorageConnectorMetadata` and
`align_to_block_size` keep vLLM's arithmetic for code written against them; this connector's own
saves and loads do not use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvferry.cache.build import PrefixCache
from kvferry.contract.spec import EngineSpec
from kvferry.errors import ConfigError
from kvferry.identity import model_identity
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Counters
from kvferry.types import KVGroup
from kvferry.v1.facade import RolesAsV1
from kvferry.v1.running_model import as_written, running_model
from kvferry.v1.types import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    SupportsHMA,
    V1Config,
)

OWN_OPTIONS = {"kv_layout", "shared_storage_path"}
"""Keys of `kv_connector_extra_config` read here; all others are `CacheConfig` fields."""


def align_to_block_size(num_tokens: int, block_size: int) -> int:
    """Return how many of the tokens before the last one are in whole blocks.

    This is vLLM's arithmetic: 0 tokens give a negative size, and a multiple of `block_size` loses a
    block.
    """
    return (num_tokens - 1) // block_size * block_size


@dataclass
class ReqMeta:
    """Tokens of one request, and where the host's KV tensors hold their KV.

    Attributes:
        token_ids: `[num_tokens]`, whole blocks.
        slot_mapping: `[num_tokens]`, slot = block id x block size + offset in the block.
        is_store: True to save, False to load.
    """

    token_ids: torch.Tensor
    slot_mapping: torch.Tensor
    is_store: bool

    @staticmethod
    def make_meta(
        token_ids: Sequence[int], block_ids: Sequence[int], block_size: int, is_store: bool
    ) -> ReqMeta:
        """Keep the tokens of `align_to_block_size` and work out their slots. `block_ids` are in
        token order."""
        num_tokens = align_to_block_size(len(token_ids), block_size)
        blocks = torch.tensor(block_ids, dtype=torch.long)
        slots = (blocks.unsqueeze(1) * block_size + torch.arange(block_size)).flatten()
        return ReqMeta(
            token_ids=torch.tensor(token_ids)[:num_tokens],
            slot_mapping=slots[:num_tokens],
            is_store=is_store,
        )


@dataclass
class SharedStorageConnectorMetadata(KVConnectorMetadata):
    """A list of `ReqMeta`, which vLLM's connector sent to its workers."""

    requests: list[ReqMeta] = field(default_factory=list)

    def add_request(
        self, token_ids: Sequence[int], block_ids: Sequence[int], block_size: int, is_store: bool
    ) -> None:
        """Append `ReqMeta.make_meta` of the arguments."""
        self.requests.append(ReqMeta.make_meta(token_ids, block_ids, block_size, is_store))


class SharedStorageConnector(RolesAsV1, SupportsHMA):
    """A connector that reuses prefixes through a store, for hosts that drive one class.

    Options are in `kv_connector_extra_config`: the fields of `CacheConfig`, and `kv_layout`
    (axes of the host's layer tensors, see `kvferry.layout.spec.LAYOUTS`; default "2BNHD").
    `shared_storage_path` is read as `store=file://<path>` if there is no `store`.

    Hosts must carry worker metadata to the scheduler. If an output shows that a host does not,
    nothing is loaded or saved from then on.

    Raises:
        ConfigError: an unknown option, a store or model directory that cannot be used, or a host
            that is not served: pipeline parallelism, several KV cache groups, sliding windows.
    """

    def __init__(
        self,
        vllm_config: V1Config,
        role: KVConnectorRole,
        kv_cache_config: Any = None,  # noqa: ANN401 - the host's
    ) -> None:
        observer = Counters()
        layout, options = _read_options(vllm_config)
        spec = _describe(vllm_config, layout, options.get("weights_version"))
        _refuse_windows(kv_cache_config, _as_it_runs(spec.identity))
        is_worker = role is KVConnectorRole.WORKER
        self.cache = PrefixCache(spec, options, observer, has_scheduler=not is_worker)
        self.scheduler_role = None if is_worker else self.cache.scheduler()
        super().__init__(
            vllm_config,
            role,
            kv_cache_config,
            scheduler=self.scheduler_role,
            worker=self.cache.worker() if is_worker else None,
            observer=observer,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        if self.scheduler_role is not None and not hasattr(
            connector_output, "kv_connector_worker_meta"
        ):
            self.scheduler_role.expect_no_reports()

    def shutdown(self) -> None:
        super().shutdown()
        self.cache.close()


def _read_options(vllm_config: V1Config) -> tuple[str, dict[str, Any]]:
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kv_transfer_config must be set to use a KV connector")
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
    options = {name: value for name, value in extra.items() if name not in OWN_OPTIONS}
    path = extra.get("shared_storage_path")
    if path is not None and "store" not in options:
        options["store"] = Path(path).absolute().as_uri()
    return str(extra.get("kv_layout", "2BNHD")), options


def _refuse_windows(
    kv_cache_config: Any,  # noqa: ANN401 - the host's
    model_config: Mapping[str, Any],
) -> None:
    """Refuse a host that has several tables, or one that drops tokens. A host without a KV cache
    configuration is assumed to drop the tokens outside of its model's window."""
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    if len(groups) > 1:
        raise ConfigError(
            f"SharedStorageConnector serves one KV cache group, this model has {len(groups)}: use "
            "KVFerryConnector"
        )
    window = None
    if kv_cache_config is None and model_config.get("use_sliding_window", True):
        window = model_config.get("sliding_window")
    for group in groups:
        spec = getattr(group, "kv_cache_spec", None)
        if "FullAttention" not in type(spec).__name__:
            window = getattr(spec, "sliding_window", None)
    if window is not None:
        raise ConfigError(
            f"SharedStorageConnector serves no sliding window, this model has one of {window} "
            "tokens: use KVFerryConnector"
        )


def _describe(vllm_config: V1Config, layout: str, weights_version: str | None) -> EngineSpec:
    """Describe the engine of a host's configuration, with one full-attention group."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not served; set it to 1"
        )
    # Hosts of the seeds' time may show no more of their model than its name.
    says_more = hasattr(model, "hf_config")
    running = running_model(vllm_config) if says_more else as_written(vllm_config)
    identity = model_identity(running, weights_version)
    config = _as_it_runs(identity)
    dtype = vllm_config.cache_config.cache_dtype
    world, rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
    group = KVGroup(
        num_layers=_geometry(config, "num_hidden_layers"),
        num_kv_heads=_geometry(config, "num_key_value_heads"),
        content_size=2 * _geometry(config, "head_dim"),
        dtype=str(model.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
        block_size=vllm_config.cache_config.block_size,
    )
    return EngineSpec(
        identity=identity,
        groups=(group,),
        shard=tensor_parallel_shard((group,), rank, world),
        kv_layout=layout,
    )


def _as_it_runs(identity: ModelIdentity) -> dict[str, Any]:
    """The model's configuration, with the host's overrides in place of the written fields."""
    overrides = identity.config.get("overrides")
    return {**identity.config, **(overrides if isinstance(overrides, Mapping) else {})}


def _geometry(config: Mapping[str, Any], name: str) -> int:
    """Return a number of the model's configuration, or the usual default of decoder models."""
    value = config.get(name)
    if value is None and name == "num_key_value_heads":
        value = config.get("num_attention_heads")
    if value is None and name == "head_dim":
        value = int(config["hidden_size"]) // int(config["num_attention_heads"])
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json of the model has {name}={value!r}, not a positive number")
    return value
