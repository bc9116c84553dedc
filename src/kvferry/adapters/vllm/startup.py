"""What is said once, when an engine starts: the store, the namespace, the layout, and the speed."""

from __future__ import annotations

import logging
import threading

from kvferry.config import format_size
from kvferry.contract.spec import EngineSpec
from kvferry.store.base import Store
from kvferry.store.speed import measure

logger = logging.getLogger("vllm.kvferry")
"""Below vLLM's own logger, whose handlers and level then hold."""


def log_start(spec: EngineSpec, store: Store, namespace: bytes, record_bytes: int) -> None:
    """Log which records this engine shares. A thread measures the store and logs its speed in a
    line of its own; nothing waits for the thread, since a store can hang."""
    stat = store.stat()
    logger.info(
        "kvferry: store %s with %d records, %s of %s; namespace %s; %s per chunk; %d KV groups in "
        "%d block tables, layout %s",
        stat.url,
        stat.num_records,
        format_size(stat.used_bytes),
        "no quota" if stat.max_bytes is None else format_size(stat.max_bytes),
        namespace.hex()[:16],
        format_size(record_bytes),
        len(spec.groups),
        len({part.table for part in spec.table_parts}),
        spec.kv_layout,
    )
    speed = threading.Thread(target=_log_speed, args=(store,), name="kvferry-speed", daemon=True)
    try:
        speed.start()
    except RuntimeError as error:  # the process has as many threads as it may have
        logger.warning("kvferry: store %s is not measured: %s", stat.url, error)


def warn_not_cached() -> None:
    """Where the KV of this engine is not to be trusted, see `host.computes_like_others`."""
    logger.warning(
        "kvferry: vLLM computes latent attention (MLA) on a CPU otherwise after a prefix hit than "
        "without, so this model is served without the cache"
    )


def _log_speed(store: Store) -> None:
    try:
        speed = measure(store)
    except Exception as error:  # outermost of a thread; nobody waits for the answer
        logger.warning("kvferry: store %s cannot be measured: %r", store.url, error)
        return
    logger.info(
        "kvferry: store %s writes %s, reads %s",
        store.url,
        *("not measured" if rate is None else f"{rate / 1e9:.2f} GB/s" for rate in speed),
    )
