"""Checks the installed vLLM, and the JSON that configures its connector."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvferry.adapters.vllm import CONNECTOR
from kvferry.adapters.vllm.connector import connector_options
from kvferry.adapters.vllm.host import load_host
from kvferry.cache.config import SharedStorageConfig
from kvferry.config import build_config, printable, unknown
from kvferry.doctor.machine import Finding
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue
from kvferry.store.url import parse_store_url

ROLES = ("kv_both", "kv_producer", "kv_consumer")

KEYS = (
    "engine_id", "enable_permute_local_kv", "kv_buffer_device", "kv_buffer_size", "kv_connector",
    "kv_connector_extra_config", "kv_connector_module_path", "kv_ip", "kv_load_failure_policy",
    "kv_parallel_size", "kv_port", "kv_rank", "kv_role",
)  # fmt: skip
"""Fields of vLLM's `KVTransferConfig`, 0.11 to 0.32."""

MODULE = "kvferry.adapters.vllm"

PLUGINS = "VLLM_PLUGINS"
"""Environment variable with the plug-ins that vLLM loads; if unset, vLLM loads all."""

_UNSERVED = ("pipeline_parallel_size", "decode_context_parallel_size")


@dataclass(slots=True)
class VllmConfig:
    """What a configuration says, and what is wrong with it."""

    findings: list[Finding] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    memory_bytes: int = 0
    """Of the host pool; 0: not set, so that it fits this machine."""
    step_tokens: int = 0
    """Most tokens of a step of vLLM; 0: not given."""
    fields: Mapping[str, JsonValue] = field(default_factory=dict)
    """What it decides of a namespace."""

    def add(self, what: str, todo: str) -> None:
        self.findings.append(Finding("config", printable(what), todo))


def check_installed(environment: Mapping[str, str] = os.environ) -> tuple[list[Finding], list[str]]:
    """Return what is wrong with the installed vLLM, and which optional hooks it has. Imports vLLM,
    which takes seconds."""
    if find_spec("vllm") is None:
        todo = "run kvferry in the environment that runs vLLM"
        return [Finding("vllm", "vLLM is not installed in this environment", todo)], []
    findings = []
    plugins = environment.get(PLUGINS)
    if plugins is not None and "kvferry" not in plugins.split(","):
        what = f"{PLUGINS} is set and does not name kvferry, so vLLM does not load it"
        findings.append(Finding("vllm", what, f"add kvferry to {PLUGINS}, or unset it"))
    if "kvferry" not in entry_points(group="vllm.general_plugins").names:
        what = "vLLM does not find kvferry: its entry point is not installed"
        todo = f'install it by pip, or add "kv_connector_module_path": "{MODULE}"'
        findings.append(Finding("vllm", what, todo))
    try:
        host = load_host()
    except ConfigError as error:
        return [*findings, Finding("vllm", str(error), "install a release that is served")], []
    optional = {
        "messages of workers": host.worker_meta,
        "results of transfers": host.results,
        "sources of hits": host.hit_sources,
    }
    return findings, [name for name, hook in optional.items() if hook is not None]


def check_config(given: str) -> VllmConfig:
    """Check the JSON of `--kv-transfer-config`, or an object that has it as `kv_transfer_config`
    beside other options of vLLM.

    Args:
        given: the JSON, or the name of a file with it.

    Raises:
        ConfigError: the file cannot be read.
    """
    found = VllmConfig()
    options = _parse(given, found)
    if options is None:
        return found
    plain = {str(name).replace("-", "_"): value for name, value in options.items()}
    transfer = plain.get("kv_transfer_config", options)
    if transfer is not options:
        _check_engine(plain, found)
    elif not any(str(name).startswith("kv_") for name in options):
        found.add("it has no kv_connector", f'write {{"kv_connector": "{CONNECTOR}", ...}}')
        return found
    ours = 0
    for connector in _connectors(transfer, found):
        ours += _check_connector(connector, found)
    if not ours and not found.findings:
        found.add(f"no connector is {CONNECTOR}", f'set "kv_connector": "{CONNECTOR}"')
    return found


def _parse(given: str, found: VllmConfig) -> Mapping[str, Any] | None:
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --vllm-config {given[:200]}: {error}") from None
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        found.add(f"it is no JSON: {error}", "correct it; strings and keys stand in double quotes")
        return None
    if not isinstance(options, dict):
        found.add(f"it is a {type(options).__name__}, not an object", "write {...}")
        return None
    return options


def _check_engine(options: Mapping[str, Any], found: VllmConfig) -> None:
    """Check options of vLLM other than the connector's."""
    caching = options.get("enable_prefix_caching", not options.get("no_enable_prefix_caching"))
    if caching is False:
        found.add(
            "prefix caching is off: each hit is loaded again, also where vLLM has just had it, and "
            "requests with images may not be cached",
            "leave enable_prefix_caching out, or set it to true",
        )
    step = str(options.get("max_num_batched_tokens"))[:18]
    found.step_tokens = int(step) if step.isdecimal() else 0
    for name in _UNSERVED:
        if options.get(name, 1) not in (1, "1"):
            found.add(f"{name} is {options[name]}, which is not served", "set it to 1")


def _connectors(transfer: object, found: VllmConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the connector, or kvferry's connectors inside a `MultiConnector`."""
    if not isinstance(transfer, dict):
        found.add("kv_transfer_config is no object", "write {...}")
        return
    extra = transfer.get("kv_connector_extra_config")
    if transfer.get("kv_connector") != "MultiConnector" or not isinstance(extra, dict):
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
            fault = unknown("key", str(name)[:100], KEYS)
            found.add(fault, "correct it; options of kvferry go into kv_connector_extra_config")
    role = transfer.get("kv_role")
    if role not in ROLES:
        fault = "kv_role is missing" if role is None else unknown("kv_role", str(role)[:100], ROLES)
        found.add(fault, 'set "kv_role": "kv_both" to store and to read')


def _check_connector(transfer: Mapping[str, Any], found: VllmConfig) -> bool:
    """Check one connector; return whether it is kvferry's."""
    _check_keys(transfer, found)
    name = transfer.get("kv_connector")
    if name != CONNECTOR:
        fault = "kv_connector is missing"
        if name is not None:
            near = unknown("connector", str(name)[:100], [CONNECTOR])
            fault = f"kv_connector is not kvferry's: {near}"
        found.add(fault, f'set "kv_connector": "{CONNECTOR}"')
        return False
    module = transfer.get("kv_connector_module_path")
    if module not in (None, MODULE):
        fault = unknown("kv_connector_module_path", str(module)[:100], [MODULE])
        found.add(fault, f'leave it out, or set it to "{MODULE}"')
    extra = transfer.get("kv_connector_extra_config") or {}
    if not isinstance(extra, dict):
        found.add("kv_connector_extra_config is no object", 'write {"store": "file:///..."}')
        return True
    try:
        config = build_config(
            SharedStorageConfig, connector_options(extra), where="kv_connector_extra_config"
        )
    except ConfigError as error:
        found.add(str(error), "correct the option; docs/vllm.md lists them")
        return True
    stores = (config.store,) if isinstance(config.store, str) else config.store
    # The default store is made by an engine's first start.
    is_default = not extra.keys() & {"store", "shared_storage_path"}
    found.stores += [
        url for url in stores if not is_default or Path(parse_store_url(url).path).exists()
    ]
    found.memory_bytes = config.memory_bytes or 0
    found.fields = {"chunk_tokens": config.chunk_tokens, "tenant": config.tenant}
    return True
