"""What a multimodal item is in a key: vLLM's hash of its content, and how the engine reads items.

vLLM's hash covers an item and what the request says about it, not what the operator does; and it is
made only where vLLM itself has a use for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blake3 import blake3

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
"""Of the model, on how items are prepared."""


class ItemIdentities:
    """Identities of the multimodal items of one engine. Runs in: scheduler.

    Args:
        vllm_config: vLLM's configuration.
        source: where the model lies on this disk; None if it does not.
    """

    def __init__(self, vllm_config: Any, source: Path | None) -> None:  # noqa: ANN401 - the host's
        config = getattr(vllm_config.model_config, "multimodal_config", None)
        caches = getattr(vllm_config.cache_config, "enable_prefix_caching", True)
        # With both of its own caches off, vLLM numbers items instead of hashing them, and another
        # process gives the same numbers to other items.
        self._hashed = bool(caches) or getattr(config, "mm_processor_cache_gb", 1) != 0
        self._reading = None if config is None else _reading(config, source)

    def __call__(self, identifier: str) -> str | None:
        """The identity of an item that vLLM calls `identifier`; None if that says nothing of its
        content."""
        if not self._hashed:
            return None
        return identifier if self._reading is None else f"{self._reading}:{identifier}"


def _reading(config: Any, source: Path | None) -> str | None:  # noqa: ANN401 - the host's
    """Digest of how items are read; None for the way the model's library has without any file."""
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
