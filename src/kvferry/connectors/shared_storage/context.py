"""What every part of one shared-storage connector is given."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.blocks.tables import Tables

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.config import SharedStorageConfig
    from kvferry.contract.spec import EngineSpec
    from kvferry.observe import Observer
    from kvferry.store.base import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The same for all parts of a role; frozen.

    Attributes:
        spec: the engine.
        config: options.
        store: where records are; closed by whoever built the connector.
        observer: receives counts and events.
        tables: block tables of the host.
        clock: monotonic seconds.
    """

    spec: EngineSpec
    config: SharedStorageConfig
    store: Store
    observer: Observer
    tables: Tables
    clock: Callable[[], float] = time.monotonic

    @property
    def tier(self) -> str:
        """Name of the store in counters and events: the scheme of its URL."""
        return self.store.url.partition(":")[0]
