"""Options of the shared-storage connector, and the context that `build` gives to its parts."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.blocks.tables import Tables
from kvferry.cache.epoch import CacheIdentity
from kvferry.config import ChunkOptions
from kvferry.contract.spec import EngineSpec
from kvferry.observe import Observer
from kvferry.store.base import Store

logger = logging.getLogger(__name__)

DEFAULT_MEMORY_BYTES = 1 << 30
"""Host memory for KV of a model of which more holds a few steps anyway."""

POOL_STEPS = 4
"""Steps of the host that the pool holds by default: two that are being saved and two of hits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig(ChunkOptions):
    """The options of an operator, with those of `ChunkOptions`. All but `store` have defaults.

    Attributes:
        store: URL of the store, for example `file:///var/cache/kvferry?max_bytes=200GiB`, or those
            of several tiers, nearest first.
        save_generated: also store chunks that end in confirmed generated tokens. If another engine
            computed the prompt of a request, the answer then names them for the engine of the next
            turn.
        memory_bytes: host memory for KV, all ranks of an engine together; None: what
            `default_memory_bytes` returns. All reads and writes of every store pass through it, so
            it acts as the first tier. Ranks that hold the same kv heads share it.
        start_timeout_seconds: how long an engine's start waits for the store to open. After that
            the engine serves without the store until it is open.
        record: file to which a line for each request is appended, with its keys and its answer.
        serve: address where other engines read what host memory holds, as `host:port` or
            `host:port?key_file=/path&advertise=host:port`, and files for TLS; see
            docs/disaggregation.md, "Peers". A port other than 0 grows by
            `EngineSpec.data_parallel_index`.
        weights_version_file: file whose text names the weights that the engine runs, for programs
            that change them in place or put engines to sleep. As long as it says what it said at
            the start, a reset does not end the use of what was stored.
    """

    store: str | tuple[str, ...] = field(repr=False)  # a URL may hold a password
    save_generated: bool = False
    memory_bytes: int | None = field(default=None, metadata={"unit": "bytes"})
    start_timeout_seconds: float = 10.0
    record: str | None = None
    serve: str | None = None
    weights_version_file: str | None = None


def default_memory_bytes(token_bytes: float, step_tokens: int | None, machine_bytes: int) -> int:
    """Return the host memory for KV where the operator sets none: room for `POOL_STEPS` steps of
    the host, at least `DEFAULT_MEMORY_BYTES`, at most a quarter of the machine.

    All halves of an engine compute this alone and must agree, so it depends on the whole memory of
    the machine or container, never on what is free at the moment.

    Args:
        token_bytes: KV of one token, all ranks together.
        step_tokens: most tokens that the host computes in a step; None if it does not say.
        machine_bytes: memory of the machine or of the container.
    """
    steps = int(POOL_STEPS * (step_tokens or 0) * token_bytes)
    return min(max(DEFAULT_MEMORY_BYTES, steps), machine_bytes // 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBounds:
    """Limits of waits and sizes for the parts that move chunks and that choose which to save.

    Attributes:
        device_seconds: how long to wait for copies that are queued behind the engine's steps, on an
            I/O thread and before the engine's tensors may be freed.
        device_close_seconds: how long `close` waits for copies before the slots may be freed.
        writes_close_seconds: how long `close` waits for writes under way before it abandons them.
        reads_close_seconds: how long `close` waits for cancelled reads and for a wrong record to be
            taken out, which no request needs; what hangs is abandoned.
        saves_seconds: after the last progress of a save or the last end of a request, an idle host
            is stepped for so much longer. So a stalled store does not keep an engine busy.
    """

    device_seconds: float = 60.0
    device_close_seconds: float = 2.0
    writes_close_seconds: float = 10.0
    reads_close_seconds: float = 0.5
    saves_seconds: float = 5.0


class StatePlaces(NamedTuple):
    """Where the records of a model's recurrent states are: behind some chunks, by whose keys they
    are named (`kvferry.keys.state_keys`)."""

    num_parts: int
    """Records of one state."""
    every: int
    """Chunks between two states."""
    record_bytes: int
    """Of each of these records."""

    def is_behind(self, number: int) -> bool:
        """Whether there may be a state behind a chunk, given by its index in the prompt."""
        return (number + 1) % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext:
    """The values that all parts of a role share.

    Attributes:
        chunk_tokens: tokens of a chunk, set or computed.
        store: where records are; the builder of the roles closes it.
        observer: receives counts.
        tables: block tables of the host.
        identity: what is loaded and stored, and whether anything is.
        clock: monotonic seconds.
        draw: makes a random number in [0, 1).
        log: gets a line for each request that another engine prefills or decodes.
        bounds: waits and sizes; tests change them.
        states: where states are; None: the model has none.
    """

    spec: EngineSpec
    config: CacheConfig
    chunk_tokens: int
    store: Store
    observer: Observer
    tables: Tables
    identity: CacheIdentity
    clock: Callable[[], float] = time.monotonic
    draw: Callable[[], float] = random.random
    log: logging.Logger = logger
    bounds: CacheBounds = CacheBounds()
    states: StatePlaces | None = None
