"""The worker role of the shared-storage connector: does what the plan says, in the plan's order.

Two ways in. In hand: a `Prefetch` reads and verifies chunks into staging on I/O threads; a later
`Load` is a copy from our own memory, on a CPU with a core to spare beside the forward, layer by
layer. From the index: a `Load` without a ticket reads piece by piece through small scratch buffers
and copies each verified piece into the blocks, until the load's deadline. One way out: `save`
copies the chunk out of the blocks at once, so that blocks are never held, and I/O threads hash and
write it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.fetches import Fetches
from kvferry.connectors.shared_storage.kept import PREPARED_BYTES, KeptRecords
from kvferry.connectors.shared_storage.loads import Loads
from kvferry.connectors.shared_storage.messages import EMPTY_PLAN, Saved, SharedStoragePlan
from kvferry.connectors.shared_storage.rank_device import DeviceSetup, RankDevice
from kvferry.connectors.shared_storage.report import Report
from kvferry.connectors.shared_storage.saves import Saves
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ContractError
from kvferry.store.io_pool import IOPool
from kvferry.types import NULL_BLOCK

if TYPE_CHECKING:
    import torch

    from kvferry.connectors.shared_storage.config import SharedStorageConfig
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.connectors.shared_storage.reservations import Reservations
    from kvferry.observe import Observer
    from kvferry.store.base import Store
    from kvferry.store.staging import Staging

logger = logging.getLogger(__name__)

SAVES_CLOSE_SECONDS = 10.0
"""How long `close` lets writes that are under way finish before it leaves them behind."""

LOADS_CLOSE_SECONDS = 0.5
"""Nobody wants what is still being read: time for threads to notice, not for a stalled read."""

DEVICE_CLOSE_SECONDS = 2.0
"""How long copies under way are waited for, before their memory may go."""


class SharedStorageWorker(WorkerRole):
    """One rank's half. Runs in: worker, on the model runner's thread.

    Args:
        rows: what this rank moves.
        config: options.
        store: shared with the scheduler role where both live in one process; not closed here.
        staging: slots of `RankRows.slot_bytes` each.
        reservations: what the scheduler role took of it; None if it cannot.
        observer: receives counts.
        setup: how the device of the engine's tensors is used.
    """

    def __init__(
        self,
        rows: RankRows,
        config: SharedStorageConfig,
        store: Store,
        staging: Staging,
        reservations: Reservations | None,
        observer: Observer,
        setup: DeviceSetup,
    ) -> None:
        self._rank = rows.rank
        self._staging = staging
        self._rows = rows
        self._device = RankDevice(rows, staging, setup)
        self._plan = EMPTY_PLAN
        self._saved = False
        self._load_failed = False  # in this step
        self._report = Report()
        self._load_pool = IOPool(config.io_threads, "kvferry-load")
        self._kept = KeptRecords(rows, store, staging, self._uses_hits, observer)
        self._reservations = reservations
        self._fetches = Fetches(
            *(rows, store, staging, self._kept, reservations),
            *(self._load_pool, self._report, observer),
        )
        self._loads = Loads(
            rows,
            self._device,
            store,
            staging,
            self._fetches,
            self._load_pool,
            timeout_seconds=config.load_timeout_seconds,
            report=self._report,
            observer=observer,
        )
        self._saves = Saves(
            rows,
            self._device,
            store,
            staging,
            num_threads=-(-config.io_threads // 2),
            report=self._report,
            observer=observer,
        )

    def _uses_hits(self) -> bool:
        return self._fetches.under_way or self._loads.in_forward

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._device.register(kv_caches)
        self._loads.register()
        self._staging.prepare(PREPARED_BYTES)
        self._kept.start()

    def planned_blocks(self, plan: Plan) -> frozenset[int]:
        if not isinstance(plan, SharedStoragePlan):
            return frozenset()
        planned = {block for load in plan.loads for part in load.blocks for block in part.ids}
        return frozenset(planned - {NULL_BLOCK})

    def begin_step(self, plan: Plan) -> None:
        self._loads.begin_step()
        self._load_failed = False
        if plan is EMPTY_PLAN:
            return
        if not isinstance(plan, SharedStoragePlan):
            raise ContractError(
                f"plan is a {type(plan).__name__}, this worker needs SharedStoragePlan"
            )
        self._plan = plan
        self._saved = False
        if plan.namespace is not None:
            self._rows.switch_namespace(plan.namespace)
        for ticket in plan.releases:
            self._fetches.release(ticket)
        for prefetch in plan.prefetches:
            self._fetches.begin(prefetch)
        for session in plan.sessions:
            self._saves.write(session)

    def start_load(self) -> None:
        if not self._plan.loads:
            return
        # Counted before, taken back after: an error in between must stop this step's saves too.
        self._load_failed = True
        self._report.failures += 1
        failed = len(self._report.broken)
        unread = [load for load in self._plan.loads if load.ticket is None]
        staged = [load for load in self._plan.loads if load.ticket is not None]
        if unread:
            self._loads.from_store(unread)
        if staged:
            self._loads.from_staging(staged, beside_forward=self._plan.has_forward)
        if len(self._report.broken) == failed:
            self._load_failed = False
            self._report.failures -= 1

    @property
    def needs_layers(self) -> bool:
        """See `kvferry.contract.abilities.SupportsLayerChoice`."""
        return self._loads.needs_layers

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See `kvferry.contract.abilities.SupportsLayerwise`."""
        self._loads.wait_for_layer(layer_name)

    def save_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Nothing: `save` takes whole chunks."""

    def save(self) -> None:
        self._saved = True
        self._end_forward()
        known = self._plan.failures_known
        failures_known = known[self._rank] if known else 0
        if failures_known >= self._report.failures:
            self._saves.start(self._plan.saves)
            return
        # A load failed and this plan was made without knowing it: what the step computed may rest
        # on blocks never filled. Offered again once the host recomputed.
        for save in self._plan.saves:
            self._report.saved.append(Saved(save.chunk.key, stored=False, retry=True))

    def _end_forward(self) -> None:
        failed = len(self._report.broken)
        self._loads.end_forward()
        if len(self._report.broken) > failed and not self._load_failed:
            self._load_failed = True
            self._report.failures += 1

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        self._end_forward()
        self._fetches.collect()
        self._saves.collect()
        return self._report.take(self._rank) if self._report.any() else EMPTY_OUTPUT

    def wait(self, seconds: float) -> None:
        """See `kvferry.contract.abilities.SupportsWait`."""
        self._fetches.wait(seconds)

    @property
    def is_idle(self) -> bool:
        """See `kvferry.contract.abilities.SupportsIdle`."""
        return not (self._fetches.under_way or self._saves.under_way or self._report.any())

    def end_step(self) -> None:
        self._loads.abandon()
        for load in self._plan.loads:
            if load.ticket is not None:  # of a load that an error kept from being begun
                self._fetches.release(load.ticket)
        if not self._saved:
            # The forward failed. The scheduler role must not take these for under way.
            self._report.saved += [
                Saved(save.chunk.key, stored=False, retry=True) for save in self._plan.saves
            ]
        self._plan = EMPTY_PLAN

    def close(self) -> None:
        self._loads.abandon()
        if self._reservations is not None:
            self._reservations.close()
        self._fetches.close()
        self._kept.close(0.0)  # told now, waited for below: what it reads nobody wants either
        loaded = self._load_pool.close(LOADS_CLOSE_SECONDS)
        loaded &= self._kept.close(LOADS_CLOSE_SECONDS)
        saved = self._saves.close(SAVES_CLOSE_SECONDS)
        copied = self._device.close(DEVICE_CLOSE_SECONDS)
        if not copied:
            logger.warning("the device did not end its copies in time; staging stays pinned")
        if not (saved and loaded):
            logger.warning("a store operation did not end in time; left behind at close")
