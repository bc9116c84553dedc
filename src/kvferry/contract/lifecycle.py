"""Runs the parts of a worker's step in order. No other code knows that order.

    begin_step  start_load  [forward, with layer hooks]  save  collect  end_step

In a step without tokens, the worker waits a moment in place of the forward. If the forward raises,
the blocks lack the KV, so `save` is skipped. `collect` and `end_step` still run; then the error is
raised. Errors of a bare worker are raised, too: wrap it in a `GuardedWorker`
(`contract.guard_worker`) to keep them from the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvferry.contract.asynchronous import AsyncReportRules
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.rules import ReportRules
from kvferry.contract.worker import IDLE_WAIT_SECONDS, SupportsLayerwise, WorkerRole
from kvferry.errors import ContractError
from kvferry.observe import Observer


class StepLifecycle:
    """The driver of one worker role, which takes it through its steps and checks its reports.

    Guarantees to the host:
    - Each output obeys the rules of `WorkerOutput` (see `kvferry.contract.rules`), whatever the
      worker reports. An output without a report is `EMPTY_OUTPUT` itself.
    - No step begins while another one is open (ContractError).

    Runs in: worker, on the model runner's thread.

    Attributes:
        layerwise: the worker's layer hooks, for the host to call around each attention layer of the
            open step; None if the worker has none.
        output: the report of the last step, even if its forward raised; empty from `begin` until
            `collect`.
    """

    def __init__(
        self, worker: WorkerRole, *, observer: Observer | None = None, strict: bool = False
    ) -> None:
        """Drive `worker`.

        Args:
            worker: the role, guarded or bare.
            observer: receives `contract_violation` counts.
            strict: also raise ContractError on a violation, for conformance runs. Otherwise the bad
                report is only dropped, counted and logged.
        """
        self.layerwise = worker if isinstance(worker, SupportsLayerwise) else None
        self.output: WorkerOutput = EMPTY_OUTPUT
        self._worker = worker
        rules = AsyncReportRules if worker.is_asynchronous else ReportRules
        self._rules = rules(worker, observer or Observer(), strict=strict)
        self._plan: Plan | None = None  # of the open step

    @contextmanager
    def step(self, plan: Plan, finished_request_ids: Collection[str]) -> Iterator[StepLifecycle]:
        """Run a step around its forward: `with lifecycle.step(plan, finished): forward()`. Yields
        this lifecycle, whose `output` is set when the block is left.

        Args:
            plan: what the scheduler role built for this step.
            finished_request_ids: every request that ended since the last step.
        """
        self.open(plan)
        try:
            yield self
            self.save()
        finally:
            self.finish(finished_request_ids)

    def no_forward(self, plan: Plan, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Run a step without tokens; wait at most `IDLE_WAIT_SECONDS` for something to report. The
        step loads, saves and reports too: an engine that only waits for the cache has no others."""
        with self.step(plan, finished_request_ids):
            self._worker.wait(IDLE_WAIT_SECONDS)
        return self.output

    # The parts of a step, for hosts that cannot wrap the forward in a `with` block.

    def open(self, plan: Plan) -> None:
        """Call `begin`, then `start_load`, before the forward. Raises what they raise."""
        self.begin(plan)
        self.start_load()

    def begin(self, plan: Plan) -> None:
        """Begin a step. If the worker raises, its `end_step` is called and no step is open.

        Raises:
            ContractError: the last step was not ended.
        """
        if self._plan is not None:
            raise ContractError(
                "a step begins while the last one is open: call finish() first, or leave its "
                "`with` block"
            )
        worker = self._worker
        self._plan = plan
        self.output = EMPTY_OUTPUT
        with self._ended_by_an_error():
            worker.begin_step(plan)
            self._rules.begin(plan)

    def start_load(self) -> None:
        """Start the plan's loads, right after `begin` or later in the step. If the worker raises,
        the step is ended.

        Raises:
            ContractError: no step is open.
        """
        self._require_step("loads start")
        with self._ended_by_an_error():
            self._worker.start_load()

    def save(self) -> None:
        """Save after the forward. Do not call it if the forward failed.

        Raises:
            ContractError: no step is open.
        """
        self._require_step("a save")
        self._worker.save()

    def finish(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Call `collect`, then `end` even if `collect` fails. Raises what they raise."""
        try:
            return self.collect(finished_request_ids)
        finally:
            if self._plan is not None:
                self.end()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Return the report of the step, and keep it as `output`.

        Raises:
            ContractError: no step is open; or, when strict, a rule was broken.
        """
        plan = self._require_step("a report")
        output = self._worker.collect(finished_request_ids)
        self.output = self._rules.admit(output, finished_request_ids, plan)
        return self.output

    def end(self) -> None:
        """End the step, even if `collect` was not called.

        Raises:
            ContractError: no step is open.
        """
        self._require_step("an end")
        self._plan = None
        self._worker.end_step()

    @property
    def holds_reports(self) -> bool:
        """Whether a report that came too early waits for a later step. While True, the host must
        not skip steps."""
        return self._rules.holds_reports

    def _require_step(self, what: str) -> Plan:
        if self._plan is None:
            raise ContractError(f"{what} outside of a step, which was not begun: call open() first")
        return self._plan

    @contextmanager
    def _ended_by_an_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.end()
            raise
