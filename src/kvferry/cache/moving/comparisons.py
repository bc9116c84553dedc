"""One rank's part of audits: compares chunks that the engine computed with their stored records.

The worker role calls it on the model runner's thread. The comparisons run on the thread that hashes
chunks, so none waits for a store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from kvferry.blocks.audit import compare
from kvferry.blocks.copies import Gathered
from kvferry.blocks.rows import RankRows
from kvferry.blocks.tolerance import tolerances_for
from kvferry.cache.config import RoleContext
from kvferry.cache.memory import SlotMemory
from kvferry.cache.messages import Filled, Load, Save
from kvferry.record.check import ReadFault
from kvferry.store.io_pool import IOPool, Job

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 10.0
"""How long a step waits for a comparison that decides whether its tokens are right."""


class Comparisons:
    """The comparisons under way on one rank.

    Args:
        rows: which bytes of a record this rank holds.
        memory: memory of the slots.
        context: model and limits of waits.
        pool: compares.
    """

    def __init__(
        self, rows: RankRows, memory: SlotMemory, context: RoleContext, pool: IOPool
    ) -> None:
        self._rows = rows
        self._memory = memory
        self._bounds = context.bounds
        self._tolerances = tolerances_for(context.spec.identity.config)
        # Slot of the copy, audited load if the tokens of this step depend on it, comparison.
        self._jobs: list[tuple[int, Load | None, Job[Filled]]] = []
        self._pool = pool

    @property
    def is_idle(self) -> bool:
        """Whether no comparison is under way."""
        return not self._jobs

    def begin(self, save: Save, gathered: Gathered, *, is_held: bool) -> None:
        """Start a comparison, to run once the chunk is copied out of the blocks. Never blocks.

        Args:
            is_held: whether the record's slot holds all that this rank needs of it.
        """
        slot, record = save.chunk.slot, save.compare_with

        def run(_job: Job[Filled]) -> Filled:
            if record is None or not is_held or not gathered.mark.wait(self._bounds.device_seconds):
                return Filled(slot, ReadFault.IO_ERROR)
            computed, stored = (self._memory.slot(each) for each in (slot, record.slot))
            if not self._rows.leaves(stored, {}).are_finite:
                return Filled(slot, ReadFault.NOT_FINITE)
            if not self._rows.leaves(computed, {}).are_finite:
                return Filled(slot, ReadFault.CANCELLED)
            found = compare(self._rows, computed, stored, self._tolerances)
            what = found.describe(self._rows)
            return Filled(slot, excess=found.excess, detail=what)

        self._jobs.append((slot, save.checks, self._pool.submit(run)))

    def collect(self, filled: list[Filled]) -> Iterator[Load]:
        """Append the comparisons that ended to `filled`. Yield the loads whose comparison has not
        passed in time. Wait for comparisons that decide whether the tokens of this step are right,
        up to `AUDIT_SECONDS`."""
        deadline = time.monotonic() + AUDIT_SECONDS
        pending: list[tuple[int, Load | None, Job[Filled]]] = []
        for slot, checks, job in self._jobs:
            timeout = 0.0 if checks is None else deadline - time.monotonic()
            result = None
            if not job.wait(max(0.0, timeout)):
                pending.append((slot, None, job))  # later steps do not depend on it
            else:
                if job.error is not None:
                    logger.error("a comparison with a record failed", exc_info=job.error)
                result = job.result or Filled(slot, ReadFault.IO_ERROR)
                filled.append(result)
            if checks is not None and not (result and result.agrees):
                yield checks
        self._jobs = pending
