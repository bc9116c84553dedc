"""Checks the installed vLLM, and the JSON that configures its connector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvferry.adapters.vllm import CONNECTOR
from kvferry.adapters.vllm.connector import WHERE, connector_options, take_rules
from kvferry.adapters.vllm.host import load_host
from kvferry.adapters.vllm.layers import refuse_parallel, refuse_stages_beside_others
from kvferry.adapters.vllm.spec import HostedModel, hosted_model
from kvferry.cache.config import CacheConfig
from kvferry.config import build_config, unknown
from kvferry.doctor.findings import Finding, Problem
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, ModelIdentity
from kvferry.store.url import parse_store_url

ROLES = ("kv_both", "kv_producer", "kv_consumer")

KEYS = (
    "engine_id", "enable_permute_local_kv", "kv_buffer_device", "kv_buffer_size", "kv_connector",
    "kv_connector_extra_config", "kv_connector_module_path", "kv_ip", "kv_load_failure_policy",
    "kv_parallel_size", "kv_port", "kv_rank", "kv_role",
)  # fmt: skip
"""Fields of vLLM's `KVTransferConfig`, 0.11 to 0.32."""

MODULE = "kvferry.adapters.vllm"

WEIGHTS_VERSION = "weights_version"

PLUGINS = "VLLM_PLUGINS"
"""Environment variable with the plug-ins that vLLM loads; if unset, vLLM loads all."""


@dataclass(slots=True)
class VllmConfig:
    """What a configuration says, and what is wrong with it."""

    findings: list[Finding] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    memory_bytes: int | None = None
    """Of the host pool."""
    step_tokens: int = 0
    """Most tokens of a step of vLLM; 0: not given."""
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    """What it decides of a namespace."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Options of vLLM beside the connector's."""

    def add(self, said: object) -> None:
        self.findings.append(Problem.CONFIG.at("config", said=said))


def check_installed(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Return what is wrong with the installed vLLM. Imports it, which takes seconds."""
    if find_spec("vllm") is None:
        return [Problem.NO_VLLM.at("vllm")]
    findings = []
    plugins = environment.get(PLUGINS)
    if plugins is not None and "kvferry" not in plugins.split(","):
        findings.append(Problem.PLUGINS.at("vllm", variable=PLUGINS))
    if "kvferry" not in entry_points(group="vllm.general_plugins").names:
        findings.append(Problem.ENTRY_POINT.at("vllm", module=MODULE))
    try:
        load_host()
    except ConfigError as error:
        findings.append(Problem.RELEASE.at("vllm", said=error))
    return findings


def run_here(directory: Path, written: ModelIdentity, given: VllmConfig) -> HostedModel | Finding:
    """Return a model as this vLLM would run it with these options, or why it would not.

    Args:
        written: its identity as its directory has it, whose digest of the weights is taken.
    """
    version = given.fields.get(WEIGHTS_VERSION)
    try:
        return hosted_model(
            directory, given.engine, None if version is None else str(version), written.weights
        )
    except ConfigError as error:
        return Problem.CONFIG.at("config", said=error)


def check_config(given: str) -> VllmConfig:
    """Check the JSON of `--kv-transfer-config`, or an object that has it as `kv_transfer_config`
    beside other options of vLLM."""
    found = VllmConfig()
    try:
        options = json.loads(given)
    except (ValueError, RecursionError) as error:
        found.add(f"no JSON: {error}")
        return found
    if not isinstance(options, dict):
        found.add(f"a {type(options).__name__}, not an object")
        return found
    plain = {str(name).replace("-", "_"): value for name, value in options.items()}
    transfer = plain.get("kv_transfer_config", options)
    if transfer is not options:
        found.engine = {name: plain[name] for name in plain if name != "kv_transfer_config"}
        _check_engine(plain, found, is_one_of_several=_is_multi(transfer))
    elif not any(str(name).startswith("kv_") for name in options):
        found.add("kv_connector is missing")
        return found
    ours = [_check_connector(connector, found) for connector in _connectors(transfer, found)]
    if not any(ours) and not found.findings:
        found.add(f"none of its connectors is {CONNECTOR}")
    return found


def _is_multi(transfer: object) -> bool:
    return isinstance(transfer, dict) and transfer.get("kv_connector") == "MultiConnector"


def _check_engine(
    options: Mapping[str, Any], found: VllmConfig, *, is_one_of_several: bool
) -> None:
    """Check options of vLLM other than the connector's."""
    caching = options.get("enable_prefix_caching", not options.get("no_enable_prefix_caching"))
    if caching is False:
        found.findings.append(Problem.NO_PREFIX_CACHING.at("config"))
    found.step_tokens = _number(options.get("max_num_batched_tokens"))
    sizes = {name: _number(size) for name, size in options.items() if size is not None}
    try:
        refuse_parallel(SimpleNamespace(**sizes))
        if is_one_of_several:
            refuse_stages_beside_others(SimpleNamespace(**sizes))
    except ConfigError as error:
        found.add(error)


def _number(value: object) -> int:
    """Return an option of vLLM as a number, 0 if it is none."""
    text = str(value)[:18]
    return int(text) if text.isdecimal() else 0


def _connectors(transfer: object, found: VllmConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the connector, or kvferry's connectors inside a `MultiConnector`."""
    if not isinstance(transfer, dict):
        found.add("kv_transfer_config is no object")
        return
    extra = transfer.get("kv_connector_extra_config")
    if not _is_multi(transfer) or not isinstance(extra, dict):
        yield transfer
        return
    _check_keys(transfer, found)
    inner = extra.get("connectors")
    for each in inner if isinstance(inner, list) else ():
        if isinstance(each, dict) and each.get("kv_connector") == CONNECTOR:
            yield each


def _check_keys(transfer: Mapping[str, Any], found: VllmConfig) -> None:
    for name in transfer:
        if name not in KEYS:
            found.add(unknown("key", _cut(name), KEYS))
    _check_value(transfer, "kv_role", ROLES, found)


def _check_value(
    transfer: Mapping[str, Any], name: str, known: Sequence[str], found: VllmConfig
) -> bool:
    """Check that a key has one of the known values."""
    value = transfer.get(name)
    if value is None:
        found.add(f"{name} is missing")
    elif value not in known:
        found.add(unknown(name, _cut(value), known))
    return value in known


def _cut(value: object) -> str:
    return str(value)[:100]


def _check_connector(transfer: Mapping[str, Any], found: VllmConfig) -> bool:
    """Check one connector; return whether it is kvferry's."""
    _check_keys(transfer, found)
    if not _check_value(transfer, "kv_connector", [CONNECTOR], found):
        return False
    if transfer.get("kv_connector_module_path") is not None:
        _check_value(transfer, "kv_connector_module_path", [MODULE], found)
    extra = transfer.get("kv_connector_extra_config") or {}
    try:
        options = connector_options(extra)
        take_rules(options)  # of the connector itself
        config = build_config(CacheConfig, options, where=WHERE)
    except ConfigError as error:
        found.add(error)
        return True
    stores = [config.store] if isinstance(config.store, str) else list(config.store)
    if not extra.keys() & {"store", "shared_storage_path"}:  # an engine's first start makes it
        stores = [url for url in stores if Path(parse_store_url(url).path).exists()]
    found.stores += stores
    found.memory_bytes = config.memory_bytes
    fields = {name: getattr(config, name) for name in ("chunk_tokens", "tenant", WEIGHTS_VERSION)}
    # Unset, the chunks' size depends on the dtype of the KV, which vLLM may change.
    found.fields = {name: value for name, value in fields.items() if value is not None}
    return True
