"""What an instance of a one-class connector holds: its role, and what it remembers of the host.

`kvferry.connectors.v1_facade` shows them to the host.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from kvferry.connectors.v1_host import HostRequests, HostStep
from kvferry.contract.abilities import IDLE_WAIT_SECONDS, SupportsLayerwise
from kvferry.contract.guard import GuardedScheduler, GuardedWorker
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerOutput
from kvferry.contract.reports import ReportRules
from kvferry.contract.scheduler import SchedulerRole
from kvferry.contract.v1 import KVConnectorOutput, V1SchedulerOutput
from kvferry.contract.v1_messages import CarriedMeta, PlanMetadata
from kvferry.contract.worker import WorkerRole
from kvferry.observe import Observer

logger = logging.getLogger(__name__)

_LATER_FIELDS = ("failed_recving", "kv_cache_events", "kv_connector_worker_meta")
"""Fields of an output that hosts before 0.13, 0.18 or 0.30 do not have."""


class SchedulerHalf:
    """What an instance in the scheduler's process holds.

    Attributes:
        role: behind its guard.
        requests: what the host said of them.
        quiet: what goes to the workers with a step that brings no news, with tokens and without.
        tells_empty: whether the host's outputs say if there is anything in them.
    """

    def __init__(
        self,
        role: SchedulerRole,
        requests: HostRequests,
        block_size: int,
        observer: Observer | None,
    ) -> None:
        self.role = GuardedScheduler(role, observer, block_size=block_size)
        self.requests = requests
        self._later_fields: frozenset[str] | None = None
        self.tells_empty = False
        empty = self.role.empty_plan()
        self.quiet = (
            PlanMetadata(empty, has_tokens=True, is_quiet=True),
            PlanMetadata(empty, has_tokens=False, is_quiet=True),
        )

    def plan(self, output: V1SchedulerOutput) -> tuple[PlanMetadata, bool]:
        """What goes to the workers with this step; and whether it told the role nothing and nothing
        is under way (`SupportsIdle`): then the role is left out of steps until one brings news."""
        step = self.requests.step(output)
        plan = self.role.build_plan(step)
        # A step that could not be read is no ground to stop reading.
        is_empty = plan is self.quiet[0].plan and isinstance(step, HostStep)
        metadata = PlanMetadata(plan, output.total_num_scheduled_tokens > 0)
        return metadata, is_empty and self.role.is_idle

    def learn(self, output: KVConnectorOutput) -> None:
        """Tell the role what the workers report."""
        self.role.update_output(self.read_output(output))

    def read_output(self, output: KVConnectorOutput) -> WorkerOutput:
        """The host's output as a value of ours. What later hosts have is looked for at the first
        one."""
        if self._later_fields is None:
            self._later_fields = frozenset(name for name in _LATER_FIELDS if hasattr(output, name))
            self.tells_empty = hasattr(output, "is_empty")
        later = {
            name: getattr(output, name) if name in self._later_fields else None
            for name in _LATER_FIELDS
        }
        stats = output.kv_connector_stats
        carried = later["kv_connector_worker_meta"] or getattr(stats, "carried_meta", None)
        return WorkerOutput(
            finished_sending=frozenset(output.finished_sending or ()),
            finished_recving=frozenset(output.finished_recving or ()),
            failed_recving=frozenset(later["failed_recving"] or ()),
            invalid_block_ids=frozenset(output.invalid_block_ids or ()),
            stats=None if stats is None else stats.data,
            events=later["kv_cache_events"],
            meta=carried.meta if isinstance(carried, CarriedMeta) else None,
        )


class WorkerHalf:
    """What an instance in a worker process holds: the role, and its report on the step.

    These hosts ask for the parts of a report one by one; the role gives it once, and it stands
    from the first question to the end of the step.

    Attributes:
        role: behind its guard.
        layers: the role, if it works around layers.
        output: the report on this step.
    """

    def __init__(self, role: WorkerRole, observer: Observer | None) -> None:
        self.role = GuardedWorker(role, observer)
        self.layers = self.role if isinstance(self.role, SupportsLayerwise) else None
        self.output: WorkerOutput = EMPTY_OUTPUT
        self._rules = ReportRules(observer or Observer())
        self._metadata: PlanMetadata | None = None
        self._saved = False
        self._saw_foreign = False

    def begin(self, metadata: object) -> bool:
        """Take a step's plan. A step that somebody else's scheduler half planned is not ours:
        nothing is done in it, what there is to report waits for the next one, and this is False."""
        if not isinstance(metadata, PlanMetadata):
            if not self._saw_foreign:
                self._saw_foreign = True
                logger.warning(
                    "the host bound a %s, which the other half of this connector did not make: "
                    "nothing is loaded or saved in such steps",
                    type(metadata).__name__,
                )
            return False
        self._saved = False
        self.output = EMPTY_OUTPUT
        self._metadata = metadata
        self.role.begin_step(metadata.plan)
        self._rules.begin(self.role.planned_recving(metadata.plan))
        return True

    def save(self) -> None:
        self._saved = True
        self.role.save()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        metadata = self._metadata
        if metadata is None:
            return EMPTY_OUTPUT
        if not self._saved and not metadata.has_tokens:
            # Hosts before 0.30 leave wait_for_save out of steps without tokens. (With tokens, a
            # host that decodes speculatively may ask for results first and save later.)
            self.save()
        if not metadata.has_tokens:
            self.role.wait(IDLE_WAIT_SECONDS)
        output = self.role.collect(finished_request_ids)
        self.output = self._rules.admit(
            output, finished_request_ids, lambda: self.role.planned_blocks(metadata.plan)
        )
        return self.output

    def end(self) -> bool:
        """The step is over. Whether nothing is under way: a step without news can be left out."""
        self._metadata = None
        self.output = EMPTY_OUTPUT
        self.role.end_step()
        return self.role.is_idle and not self._rules.holds_reports
