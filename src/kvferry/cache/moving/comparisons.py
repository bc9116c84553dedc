"""One rank's comparisons of computed chunks with their records.

Runs in: worker, on the model runner's thread; the comparisons run on a thread of their own, so that
none waits for writes to a slow store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import msgspec

from kvferry.blocks.audit import largest_difference, tensors_of
from kvferry.blocks.copies import Gathered
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import Tolerances
from kvferry.cache.messages import Audit, Audited
from kvferry.cache.moving.slot_io import DEVICE_SECONDS, SlotMemory
from kvferry.store.io_pool import IOPool, Job

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 10.0
"""How long a step waits for a comparison that decides whether its tokens are right."""

CLOSE_SECONDS = 0.5
"""How long `close` waits for comparisons, which no request needs then."""


class Comparisons:
    """Comparisons under way.

    Args:
        rows: which bytes of a record this rank holds.
        memory: of the slots.
        tolerances: of the model.
    """

    def __init__(self, rows: RankRows, memory: SlotMemory, tolerances: Tolerances) -> None:
        self._rows = rows
        self._memory = memory
        self._tolerances = tolerances
        self._jobs: list[tuple[Audit, Job[Audited]]] = []
        self._pool = IOPool(1, "kvferry-audit")

    @property
    def are_over(self) -> bool:
        """Whether none is under way."""
        return not self._jobs

    def begin(self, audit: Audit, gathered: Gathered, *, is_held: bool) -> None:
        """A chunk was copied out of the blocks, or will be at the mark. Never blocks.

        Args:
            is_held: whether the slot of the record holds all of it.
        """

        def run(_job: Job[Audited]) -> Audited:
            if not is_held or not gathered.mark.wait(DEVICE_SECONDS):
                return Audited(audit.chunk.slot)
            computed, stored = (
                tensors_of(self._rows, self._memory.slot(slot))
                for slot in (audit.chunk.slot, audit.record)
            )
            found = largest_difference(computed, stored, self._tolerances)
            return Audited(audit.chunk.slot, found.excess, found.describe(self._rows))

        self._jobs.append((audit, self._pool.submit(run)))

    def collect(self, audited: list[Audited]) -> Iterator[Audit]:
        """Append the results of the comparisons that ended. Yields the audits that have not passed,
        or not in time. Waits for those that decide whether the tokens of this step are right."""
        deadline = time.monotonic() + AUDIT_SECONDS
        pending = []
        for audit, job in self._jobs:
            timeout = 0.0 if audit.load is None else deadline - time.monotonic()
            if not job.wait(max(0.0, timeout)):
                if audit.load is not None:
                    yield audit
                # The next steps do not depend on it.
                pending.append((msgspec.structs.replace(audit, load=None), job))
                continue
            if job.error is not None:
                logger.error("a comparison with a record failed", exc_info=job.error)
            result = job.result or Audited(audit.chunk.slot)
            if not result.has_passed:
                yield audit
            audited.append(result)
        self._jobs = pending

    def close(self) -> None:
        """End the thread, in bounded time. Idempotent."""
        if not self._pool.close(CLOSE_SECONDS):
            logger.warning("a comparison did not end in time; left behind at close")
