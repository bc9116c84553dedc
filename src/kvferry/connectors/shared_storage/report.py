"""What a rank gathers between two calls of `collect`."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connectors.shared_storage.messages import (
    Prefetched,
    RankReport,
    Saved,
    SharedStorageMeta,
)
from kvferry.contract.messages import WorkerOutput


@dataclass(slots=True)
class Report:
    """News of one rank; filled by loads and saves, emptied by `take`.

    Attributes:
        prefetched: news of prefetches.
        saved: saves that ended or were refused.
        failed_requests: requests whose load failed after it was promised.
        broken: keys whose load failed after they were promised.
        invalid: ids of blocks that hold nothing right.
        failures: steps so far in which a load failed; never reset.
    """

    prefetched: list[Prefetched] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    failed_requests: set[str] = field(default_factory=set)
    broken: list[bytes] = field(default_factory=list)
    invalid: set[int] = field(default_factory=set)
    failures: int = 0

    def any(self) -> bool:
        return bool(self.prefetched or self.saved or self.broken or self.invalid)

    def take(self, rank: int) -> WorkerOutput:
        """The output of this step; the report is empty afterwards."""
        report = RankReport(
            rank=rank,
            prefetched=tuple(self.prefetched),
            saved=tuple(self.saved),
            failures=self.failures,
            failed_requests=tuple(self.failed_requests),
            broken=tuple(self.broken),
        )
        output = WorkerOutput(
            invalid_block_ids=frozenset(self.invalid), meta=SharedStorageMeta(reports=(report,))
        )
        self.prefetched.clear()
        self.saved.clear()
        self.failed_requests.clear()
        self.broken.clear()
        self.invalid.clear()
        return output
