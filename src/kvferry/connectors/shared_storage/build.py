"""Put the shared-storage connector together from an engine's description and options."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvferry.config import build_config, parse_size, parse_store_url
from kvferry.connectors.registry import EngineSpec, Roles
from kvferry.connectors.shared_storage.config import SharedStorageConfig
from kvferry.connectors.shared_storage.rank_rows import RankRows
from kvferry.connectors.shared_storage.scheduler import SharedStorageScheduler
from kvferry.connectors.shared_storage.sessions import SharedWrites
from kvferry.connectors.shared_storage.worker import SharedStorageWorker
from kvferry.errors import ConfigError
from kvferry.keys import Namespace
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Store, SupportsProbe, SupportsShardedWrite
from kvferry.store.staging import Staging
from kvferry.store.url import open_store


class Parts:
    """What both roles of one process share. Closed once, after both.

    Args:
        spec: the engine.
        options: fields of `SharedStorageConfig`.
        observer: receives counts.
        store: instead of the one the options name; then closed here as if it had been opened here.

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
    ) -> None:
        self.spec = spec
        self.observer = observer
        self.config = build_config(SharedStorageConfig, options, where="shared_storage options")
        identity = spec.identity
        if self.config.weights_version is not None:
            identity = replace(identity, weights_version=self.config.weights_version)
        self._identity = identity
        self.schema = RecordSchema.for_groups(
            namespace=self._namespace(identity.weights_version),
            chunk_tokens=self.config.chunk_tokens,
            groups=spec.groups,
        )
        if store is None:
            # Before it is opened: a store opened with such a quota would evict down to it.
            max_bytes = parse_store_url(self.config.store).options.get("max_bytes")
            self._check_quota(None if max_bytes is None else parse_size(max_bytes))
        self.store = store or open_store(
            self.config.store, observer=observer, multi_process=spec.shard.world_size > 1
        )
        try:
            self._check_quota(self.store.stat().max_bytes)
            self.staging = Staging(
                self.config.staging_bytes, RankRows(spec, self.schema).slot_bytes
            )
        except ConfigError:
            self.store.close()
            raise

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

    def scheduler(self) -> SharedStorageScheduler:
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
        )

    def worker(self) -> SharedStorageWorker:
        return SharedStorageWorker(
            self.spec, self.config, self.schema, self.store, self.staging, self.observer
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
