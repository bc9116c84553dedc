"""Content identities of a vLLM request's LoRA adapter and multimodal items.

The scheduler half of the connector asks for them. `kvferry.v1.running_model` identifies the model.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from kvferry.adapters.vllm.host import prunes_items
from kvferry.identity import (
    adapter_digest,
    is_in_snapshot,
    newest_change,
    shows_its_changes,
    weights_state,
)
from kvferry.store.io_pool import IOPool, Job
from kvferry.v1.host import UnknownAdapterError, UnreadAdapterError

logger = logging.getLogger(__name__)

RECHECK_SECONDS = 5.0
"""How often an adapter's files are looked at again while requests use it."""


class LoraIdentities:
    """Content digests of LoRA adapters. I/O threads look: the scheduler's thread does no I/O.

    vLLM does not tell connectors when it loads an adapter, nor shows them what it loaded. So an
    adapter has an identity if its files have not changed since the engine started, or lie in a
    snapshot of a hub's cache, whose path names their content: then whatever was loaded, and
    whenever, was these files. It has none before they were looked at, and every
    `RECHECK_SECONDS` they are looked at again: a request that comes then waits for the answer.

    Runs in: scheduler, except for the jobs.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = time.time()
        self._pool: IOPool | None = None
        self._adapters: dict[int, _Adapter] = {}

    def __call__(self, lora_request: Any) -> str:  # noqa: ANN401 - the host's
        """Return the adapter's identity.

        Raises:
            UnreadAdapterError: its files are being looked at; a later call knows more.
            UnknownAdapterError: it has none.
        """
        path = getattr(lora_request, "lora_path", None) or getattr(
            lora_request, "lora_local_path", None
        )
        adapter = self._adapters.setdefault(int(lora_request.lora_int_id), _Adapter(str(path)))
        if not path or getattr(lora_request, "load_inplace", False):
            adapter.refuse("was loaded in place of another")
        elif adapter.path != str(path):
            adapter.refuse(f"has the id of that of {adapter.path}")
        adapter.collect(self._clock())
        if adapter.refused:
            raise UnknownAdapterError(adapter.refused)
        if adapter.job is None and self._clock() >= adapter.next_check:
            self._pool = self._pool or IOPool(_NUM_THREADS, "kvferry-lora")
            look = partial(_look_at, Path(adapter.path), self._started_at, adapter.seen)
            # Adapters that were never read leave threads to those that are looked at again.
            adapter.job = self._pool.submit(lambda _job: look(), can_wait=adapter.seen is None)
        if adapter.job is not None:  # also while they are looked at again: files may differ
            raise UnreadAdapterError("is being hashed")
        if adapter.fault:
            raise UnknownAdapterError(adapter.fault)
        assert adapter.seen is not None, "a look found no fault"
        return adapter.seen.digest

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close(1.0)


class _Seen(NamedTuple):
    """What a look at an adapter's files found: their digest, and their inodes and times."""

    digest: str
    state: object


class _Adapter:
    """What is known of the adapter that has an id in the host.

    Attributes:
        seen: what the first look found that was no fault; None: no look yet.
        fault: why its files could not be read at the last look; or empty.
        refused: why it has no identity and gets none any more; or empty.
        job: looks at its files; None: nothing does.
        next_check: when they are looked at again, in seconds of the clock.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.seen: _Seen | None = None
        self.fault = ""
        self.refused = ""
        self.job: Job[_Seen] | None = None
        self.next_check = -math.inf
        self._is_said = False

    def collect(self, now: float) -> None:
        """Learn what the job found, if it has ended."""
        if self.job is None or not self.job.poll():
            return
        seen, error = self.job.result, self.job.error
        self.job, self.next_check, self.fault = None, now + RECHECK_SECONDS, ""
        if isinstance(error, _OtherFilesError):
            self.refuse(_CHANGED)
        elif seen is None:
            self.fault = f"cannot be hashed: {error}"
            self._say(self.fault)
        elif self.seen is not None and seen.digest != self.seen.digest:
            self.refuse(_CHANGED)
        else:
            self.seen = seen

    def refuse(self, why: str) -> None:
        """Let it have no identity from now on."""
        if not self.refused:
            self._say(why)
            self.refused = why

    def _say(self, why: str) -> None:
        if not self._is_said:
            logger.warning("requests of LoRA %s are not cached: it %s", self.path, why)
        self._is_said = True


_NUM_THREADS = 4
_SETTINGS_FILE = "adapter_config.json"

_CHANGED = "changed on disk after this engine started, which may have loaded it before or after"


class _OtherFilesError(Exception):
    """The files of an adapter changed since the engine started."""


def _look_at(path: Path, started_at: float, known: _Seen | None) -> _Seen:
    """Look at the files of an adapter, of which the last look found what is `known`. Runs in: I/O
    thread.

    Raises:
        ConfigError, OSError: its files cannot be read.
        _OtherFilesError: they changed since the engine started.
    """
    state = weights_state(path, _SETTINGS_FILE)
    # Files are read again if they are others, as after a directory above them was replaced, and
    # where their times may hide a change.
    is_same = known is not None and known.state == state
    if known is None or not (is_same and shows_its_changes(path, _SETTINGS_FILE)):
        known = _Seen(adapter_digest(path), state)
    is_older = newest_change(path, _SETTINGS_FILE) < started_at
    if is_older or is_in_snapshot(path, _SETTINGS_FILE):
        return known
    raise _OtherFilesError


# --- multimodal items -----------------------------------------------------------------------------

_SETTINGS = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)
"""Fields of vLLM's multimodal configuration that decide what the model sees of an item."""

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of the model that say how items are prepared."""


_VIDEO_READER = "VLLM_VIDEO_LOADER_BACKEND"
"""Chooses what reads a video, and so which frames and pixels the model sees of it."""


class ItemIdentities:
    """Identities of the multimodal items of one engine: vLLM's hash of an item's content, and a
    digest of how this engine reads items. vLLM's hash covers the item and the request's options,
    but not the operator's options. Runs in: scheduler.
    """

    def __init__(self, vllm_config: Any, source: Path | None) -> None:  # noqa: ANN401 - the host's
        config = getattr(vllm_config.model_config, "multimodal_config", None)
        caches = getattr(vllm_config.cache_config, "enable_prefix_caching", True)
        self._prunes = prunes_items(vllm_config)
        # With both of its own caches off, vLLM numbers items instead of hashing them, and another
        # process gives the same numbers to other items.
        self._hashed = bool(caches) or getattr(config, "mm_processor_cache_gb", 1) != 0
        self._reading = None if config is None else _reading(config, source)

    def __call__(self, identifier: str) -> str | None:
        """Return the identity of the item that vLLM calls `identifier`; None if that is no hash, or
        if what stands behind an item depends on more than its content."""
        if self._prunes or not self._hashed:
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
    if getattr(config, "mm_encoder_fp8_scale_path", None):
        paths.append(Path(config.mm_encoder_fp8_scale_path))
    for path in paths:
        if path.is_file():
            found[path.name] = blake3(path.read_bytes()).hexdigest()
    if _VIDEO_READER in os.environ:
        found[_VIDEO_READER] = os.environ[_VIDEO_READER]
    return blake3(json.dumps(found, sort_keys=True).encode()).hexdigest(16) if found else None
