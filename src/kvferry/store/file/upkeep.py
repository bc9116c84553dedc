"""The background jobs of one store, and when each is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from kvferry.observe import Observer
from kvferry.store.file.background import Background, Job
from kvferry.store.file.faults import Faults
from kvferry.store.file.fileio import FileIO
from kvferry.store.file.index import KeyIndex
from kvferry.store.file.layout import Layout
from kvferry.store.file.ledger import Net
from kvferry.store.file.membership import Membership
from kvferry.store.file.quota import Quota
from kvferry.store.file.recency import Recency
from kvferry.store.file.reconcile import reconcile
from kvferry.store.file.recovery import Recovery
from kvferry.store.file.refresh import IndexRefresh

HEARTBEAT_SECONDS = 10.0
RECOVER_SECONDS = 60.0
FLUSH_SECONDS = 2.0
RECONCILE_TRIES = 5


class Upkeep:
    """Heartbeat, probes, index, recency, recovery and reconciliation of one store."""

    def __init__(
        self,
        io: FileIO,
        layout: Layout,
        index: KeyIndex,
        *,
        membership: Membership,
        recovery: Recovery,
        quota: Quota,
        faults: Faults,
        rest: Callable[[], None],
        lists: bool,
        clock: Callable[[], float],
        wall: Callable[[], float],
        observer: Observer,
    ) -> None:
        self.recency = Recency(io, layout, wall)
        self.refresh = IndexRefresh(io, layout, index, clock=clock, wall=wall, observer=observer)
        self._io = io
        self._layout = layout
        self._index = index
        self._membership = membership
        self._recovery = recovery
        self._quota = quota
        self._observer = observer
        self._rest = rest
        self._scan: Generator[None, None, Net | None] | None = None
        self._lists = lists
        self._scans_left = RECONCILE_TRIES if lists else 0  # others look, unless counts are wrong
        listing = [
            Job("probe", self._probe, faults.failed, urgent=True),
            Job("index", self.refresh.step, faults.failed),
        ]
        jobs = [
            *(listing if lists else ()),
            Job("heartbeat", self._beat, faults.failed),
            Job("recency", self._flush, faults.failed),
            Job("recover", self._recover, faults.failed),
            Job("reconcile", self._reconcile, faults.failed),
        ]
        self.background = Background(jobs, self._last, clock)
        self._faults = faults

    def recover(self) -> int:
        """Absorb dead writers now; how many there were.

        Raises:
            OSError: the medium failed.
        """
        member = self._membership.current
        num_absorbed = self._recovery.run(member) if member is not None else 0
        if num_absorbed:
            self._observer.count("store_recovered_writers", num_absorbed)
            self._quota.refresh()
        return num_absorbed

    def flush(self) -> None:
        """Write back when records were last used.

        Raises:
            OSError: the medium failed.
        """
        for key in self.recency.flush():
            self._index.discard(key)

    def _probe(self) -> float:
        self.refresh.answer_probes()
        return math.inf

    def _beat(self) -> float:
        if self._membership.rejoin_if_fenced():
            self._observer.count("store_writer_fenced")
        member = self._membership.current
        if member is not None:
            member.writer.beat()
        self._quota.refresh()
        return HEARTBEAT_SECONDS

    def _flush(self) -> float:
        self.flush()
        self._rest()
        return FLUSH_SECONDS

    def _recover(self) -> float:
        self.recover()
        return RECOVER_SECONDS

    def _reconcile(self) -> float:
        """Once after the first fill of the index, and whenever the counts say full but there is
        nothing to evict. One directory per step."""
        member = self._membership.current
        if self._quota.is_stuck:
            self._quota.is_stuck = False
            self._scans_left = max(self._scans_left, 1)
        if member is None or self._scans_left == 0:
            return 1.0
        if self._lists and not self.refresh.is_complete:
            return 1.0
        if self._scan is None:
            member.writer.catch_up()
            self._scan = reconcile(self._io, self._layout, member.writer)
        scan, self._scan = self._scan, None
        try:
            next(scan)
        except StopIteration as end:
            correction: Net | None = end.value
        else:
            self._scan = scan
            return 0.0
        if correction is None:
            self._scans_left -= 1
            return RECOVER_SECONDS
        self._scans_left = 0
        self._observer.count("store_corrected_bytes", abs(correction.num_bytes))
        return 1.0

    def _last(self) -> None:
        self.refresh.close()
        if self._scan is not None:
            self._scan.close()
        try:
            self.recency.flush()
        except OSError as error:
            self._faults.failed("recency", error)
        self._membership.leave(timeout=1.0)
