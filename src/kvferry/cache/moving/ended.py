"""What ended on one rank since its last report, and the report that says so."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.cache.messages import CacheMeta, Filled, RankReport, Saved, Sealed, SlotRegion
from kvferry.contract.messages import WorkerOutput


@dataclass(slots=True)
class Ended:
    """What ended since the last report: the content of the next one."""

    pool: int = 0
    failures: int = 0
    num_known: int = 0  # of the failures: in an earlier report
    timed: int = 0
    off: str = ""
    filled: list[Filled] = field(default_factory=list)
    sealed: list[Sealed] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    failed_requests: set[str] = field(default_factory=set)
    failed_keys: list[bytes] = field(default_factory=list)
    received: set[str] = field(default_factory=set)  # whose async load is over, failed or not
    invalid_block_ids: set[int] = field(default_factory=set)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        # Before it knows the pool, the scheduler role would take this for another's report.
        is_off = self.off and self.pool
        has_ended = self.filled or self.sealed or self.saved or self.timed or is_off
        has_loaded = self.received or self.failed_keys or self.invalid_block_ids
        return not (has_ended or has_loaded or self.failures > self.num_known)

    def output(self, region: SlotRegion) -> WorkerOutput:
        report = RankReport(
            rank=region.shard.rank,
            region=region if region.namespace else None,
            pool=self.pool,
            filled=tuple(self.filled),
            sealed=tuple(self.sealed),
            saved=tuple(self.saved),
            timed=self.timed,
            off=self.off,
            failures=self.failures,
            failed_requests=frozenset(self.failed_requests),
            failed_keys=tuple(self.failed_keys),
        )
        return WorkerOutput(
            finished_recving=frozenset(self.received),
            failed_recving=frozenset(self.failed_requests & self.received),
            invalid_block_ids=frozenset(self.invalid_block_ids),
            meta=CacheMeta(reports=(report,)),
        )
