"""Put the shared-storage connector together from an engine's description and options."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvferry.config import build_config, parse_size, parse_store_url
from kvferry.connectors.registry import EngineSpec, RankWorker, Roles
from kvferry.connectors.shared_storage.config import SharedStorageConfig
from kvferry.connectors.shared_storage.rank_device import DeviceSetup
from kvferry.connectors.shared_storage.rank_rows import RankRows
from kvferry.connectors.shared_storage.reservations import Reservations, find, publish
from kvferry.connectors.shared_storage.scheduler import SharedStorageScheduler
from kvferry.connectors.shared_storage.sessions import SharedWrites
from kvferry.connectors.shared_storage.tables import Tables
from kvferry.connectors.shared_storage.worker import SharedStorageWorker
from kvferry.errors import ConfigError
from kvferry.keys import Namespace
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import (
    Store,
    SupportsProbe,
    SupportsShardedWrite,
    SupportsStamp,
    SupportsWatch,
)
from kvferry.store.late import LateStore
from kvferry.store.staging import Staging
from kvferry.store.url import open_store

logger = logging.getLogger(__name__)


class Parts:
    """What both roles of one process share. Closed once, after both.

    Args:
        spec: the engine.
        options: fields of `SharedStorageConfig`.
        observer: receives counts.
        store: instead of the one the options name; then closed here as if it had been opened here.
        where: what the options belong to, the start of messages about them.
        schedules: whether the scheduler role will be asked for: only it looks keys up.
        engine: a name that no other engine of this process has, for roles that are built apart.

    Raises:
        ConfigError: an option, or a store that cannot hold one chunk of this model.
    """

    def __init__(
        self,
        spec: EngineSpec,
        options: Mapping[str, Any],
        observer: Observer,
        *,
        store: Store | None = None,
        where: str = "shared_storage options",
        schedules: bool = True,
        engine: str | None = None,
    ) -> None:
        self.spec = spec
        self.observer = observer
        self.config = build_config(SharedStorageConfig, options, where=where)
        identity = spec.identity
        if self.config.weights_version is not None:
            identity = replace(identity, weights_version=self.config.weights_version)
        self._identity = identity
        self._check_promise()
        self.schema = RecordSchema.for_groups(
            namespace=self._namespace(identity.weights_version),
            chunk_tokens=self.config.chunk_tokens,
            groups=spec.groups,
        )
        if store is None:
            # Before it is opened: a store opened with such a quota would evict down to it.
            max_bytes = parse_store_url(self.config.store).options.get("max_bytes")
            self._check_quota(None if max_bytes is None else parse_size(max_bytes))
        self.store = store or self._open_store(index=schedules)
        # A host may have two of us in one engine, and let its operator name engines.
        name = engine or secrets.token_hex(16)
        self._engine = f"{name} {self.config.store} {self.namespace.hex()}"
        try:
            self._check_quota(self.store.stat().max_bytes)
            self._rows = RankRows(spec, self.schema)
            self.staging = Staging(
                self.config.staging_bytes, self._rows.slot_bytes, self._keep_bytes()
            )
        except ConfigError:
            self.store.close()
            raise

    def _open_store(self, *, index: bool) -> Store:
        """The store, or its stand-in while it takes long to open.

        Raises:
            ConfigError: it cannot be used.
        """
        url, spec = self.config.store, self.spec
        multi_process = spec.multi_process or spec.shard.world_size > 1
        late = LateStore(
            url,
            lambda: open_store(
                url, observer=self.observer, multi_process=multi_process, index=index
            ),
            self.config.start_timeout_seconds,
        )
        return late.opened or late

    @property
    def namespace(self) -> bytes:
        return self.schema.namespace

    @property
    def record_bytes(self) -> int:
        return self.schema.record_bytes

    @property
    def block_multiple(self) -> int:
        return Tables(self.spec).block_size

    def wait_ready(self, timeout: float) -> bool:
        return not isinstance(self.store, SupportsProbe) or self.store.wait_indexed(timeout)

    def close(self) -> None:
        """Close the store, after the role. Idempotent."""
        self.store.close()

    def _check_promise(self) -> None:
        if self.config.promise == "in_hand" and self.spec.carries_worker_meta:
            return
        if not Tables(self.spec).can_fail_by_block:
            parts = self.spec.table_parts
            windows = [part.window for part in parts if part.window is not None]
            raise ConfigError(
                f"promise='index' serves one block table without a window, not "
                f"{len({part.table for part in parts})} with windows {windows}: use "
                "promise='in_hand', on a host that carries messages from workers (vLLM 0.32)"
            )

    def _keep_bytes(self) -> int:
        """What is promised from the index is read to the blocks; and without stamps nobody can tell
        whether a record is still what was read."""
        in_hand = self.config.promise == "in_hand" and self.spec.carries_worker_meta
        is_used = in_hand and self.spec.loads and isinstance(self.store, SupportsStamp)
        return self.config.keep_bytes if is_used else 0

    def _check_quota(self, limit: int | None) -> None:
        if limit is not None and limit < self.schema.record_bytes:
            raise ConfigError(
                f"max_bytes={limit} is smaller than one chunk of this model "
                f"({self.schema.record_bytes} bytes); raise it or lower chunk_tokens"
            )

    def _namespace(self, weights_version: str | None) -> bytes:
        return Namespace.of(
            replace(self._identity, weights_version=weights_version),
            self.spec.groups,
            self.config.chunk_tokens,
            self.config.tenant,
        ).digest

    def _next_epoch(self) -> bytes:
        """Weights changed under us and nobody named them: nothing stored before is theirs."""
        return self._namespace(f"epoch-{secrets.token_hex(16)}")

    def _warn_of_windows(self) -> None:
        """Chunks that no window holds whole are stored only where one step computes them."""
        windows = [part.window for part in self.spec.table_parts if part.window is not None]
        if self.spec.saves and windows and min(windows) < self.config.chunk_tokens:
            logger.warning(
                "chunk_tokens=%d is more than the smallest attention window, %d: chunks that two "
                "steps compute are not stored; set it to at most %d",
                *(self.config.chunk_tokens, min(windows), min(windows)),
            )

    def scheduler(self) -> SharedStorageScheduler:
        self._warn_of_windows()
        shared_writes = None
        if self.spec.shard.world_size > 1:
            if not isinstance(self.store, SupportsShardedWrite):
                raise ConfigError(
                    f"store {self.store.url} cannot be written by {self.spec.shard.world_size} "
                    "ranks together; use a file:// store"
                )
            shared_writes = SharedWrites(
                self.store, self.schema, self.spec.shard.world_size, self.observer
            )
        return SharedStorageScheduler(
            self.spec,
            self.config,
            self.schema.namespace,
            self.store,
            max(1, self.staging.num_slots - self.staging.num_slots // 4),
            self.observer,
            new_namespace=self._next_epoch,
            shared_writes=shared_writes,
            in_memory=lambda: find(self._engine),
        )

    def _reservations(self) -> Reservations | None:
        if self.spec.shard.world_size > 1 or not self.staging.max_kept:
            return None
        if isinstance(self.store, SupportsWatch) and self.store.watch():
            return Reservations(self.staging, self.store)
        return None

    def worker(self, setup: DeviceSetup | None = None) -> SharedStorageWorker:
        reservations = self._reservations()
        if reservations is not None:
            publish(self._engine, reservations)
        return SharedStorageWorker(
            *(self._rows, self.config, self.store, self.staging, reservations, self.observer),
            setup or DeviceSetup(),
        )


def create(spec: EngineSpec, options: Mapping[str, Any], observer: Observer) -> Roles:
    """Both roles for an engine whose scheduler and only worker share a process.

    Raises:
        ConfigError: see `Parts`.
    """
    parts = Parts(spec, options, observer)
    store = parts.store
    if isinstance(store, SupportsProbe):
        return Roles(parts.scheduler(), parts.worker(), store.close, store.wait_indexed)
    return Roles(parts.scheduler(), parts.worker(), store.close)


def create_worker(spec: EngineSpec, options: Mapping[str, Any], observer: Observer) -> RankWorker:
    """The worker role of one rank, in a process of its own.

    Raises:
        ConfigError: see `Parts`.
    """
    parts = Parts(spec, options, observer, schedules=False)
    return RankWorker(parts.worker(), parts.store.close)
