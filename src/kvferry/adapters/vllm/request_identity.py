"""Content identities of a vLLM request's LoRA adapter and multimodal items.

The scheduler half of the connector asks for them. `kvferry.v1.running_model` identifies the model.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvferry.identity import weights_digest
from kvferry.store.io_pool import IOPool, Job

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 5.0
"""How often an adapter's files are hashed again while requests use it."""


class LoraIdentities:
    """Content digests of LoRA adapters. An I/O thread hashes: the scheduler's thread does no I/O.

    Requests with an adapter are not cached until the adapter is hashed, nor ever after its files
    changed or could not be read. Runs in: scheduler, except for the jobs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pool: IOPool | None = None
        self._jobs: dict[tuple[int, str], Job[str]] = {}
        self._digests: dict[tuple[int, str], str | None] = {}
        self._next_check: dict[tuple[int, str], float] = {}

    def __call__(self, lora_request: Any) -> str | None:  # noqa: ANN401 - the host's
        """Return the adapter's identity; None while it is being hashed, or if it has none."""
        path = getattr(lora_request, "lora_path", None) or getattr(
            lora_request, "lora_local_path", None
        )
        if not path or getattr(lora_request, "load_inplace", False):
            return None
        name = (int(lora_request.lora_int_id), str(path))
        self._collect(name)
        if name not in self._jobs and self._clock() >= self._next_check.get(name, 0.0):
            self._pool = self._pool or IOPool(1, "kvferry-lora")
            self._jobs[name] = self._pool.submit(lambda _job: _adapter_digest(Path(path)))
        # While the files are hashed again, they may have changed.
        return None if name in self._jobs else self._digests.get(name)

    def _collect(self, name: tuple[int, str]) -> None:
        job = self._jobs.get(name)
        if job is None or not job.poll():
            return
        del self._jobs[name]
        self._next_check[name] = self._clock() + RECHECK_SECONDS
        digest = job.result
        known = self._digests.setdefault(name, digest)
        if digest is None or digest != known:
            logger.warning("requests of LoRA %s are not cached: its files are unreliable", name[1])
            self._digests[name] = None
            self._next_check[name] = math.inf

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(1.0)


def _adapter_digest(path: Path) -> str:
    """Runs in: I/O thread."""
    config = blake3((path / "adapter_config.json").read_bytes()).hexdigest()
    return f"{weights_digest(path).hex()}-{config}"


# --- multimodal items -----------------------------------------------------------------------------

_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Fields of vLLM's multimodal configuration that decide what the model sees of an item."""

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of the model that say how items are prepared."""


class ItemIdentities:
    """Identities of the multimodal items of one engine: vLLM's hash of an item's content, and a
    digest of how this engine reads items. vLLM's hash covers the item and the request's options,
    but not the operator's options. Runs in: scheduler.
    """

    def __init__(self, vllm_config: Any, source: Path | None) -> None:  # noqa: ANN401 - the host's
        config = getattr(vllm_config.model_config, "multimodal_config", None)
        caches = getattr(vllm_config.cache_config, "enable_prefix_caching", True)
        # With both of its own caches off, vLLM numbers items instead of hashing them, and another
        # process gives the same numbers to other items.
        self._hashed = bool(caches) or getattr(config, "mm_processor_cache_gb", 1) != 0
        self._reading = None if config is None else _reading(config, source)

    def __call__(self, identifier: str) -> str | None:
        """Return the identity of the item that vLLM calls `identifier`; None if that is no hash."""
        if not self._hashed:
            return None
        return identifier if self._reading is None else f"{self._reading}:{identifier}"


def _reading(config: Any, source: Path | None) -> str | None:  # noqa: ANN401 - the host's
    """Return a digest of the settings and files that decide how items are read, if any."""
    found: dict[str, str] = {}
    for name in _SETTINGS:
        value = getattr(config, name, None)
        if value:
            found[name] = json.dumps(value, sort_keys=True, default=repr)
    paths = [] if source is None else [source / name for name in _FILES]
    for path in paths:
        if path.is_file():
            found[path.name] = blake3(path.read_bytes()).hexdigest()
    return blake3(json.dumps(found, sort_keys=True).encode()).hexdigest(16) if found else None
