"""Drives a worker role through its steps: the only code that knows their order, keeps a fault of
the role from the engine, and admits its reports.

    begin_step  start_load  [forward, with layer hooks]  save  collect  end_step

A step without tokens waits a moment in place of the forward. If the forward raises, the blocks lack
the KV, so `save` is left out; `collect` and `end_step` still run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvferry.contract.faults import HookFaults
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, RepairedPlan, WorkerOutput
from kvferry.contract.worker import IDLE_WAIT_SECONDS, SupportsLayerwise, WorkerRole
from kvferry.errors import ContractError
from kvferry.observe import Observer

if TYPE_CHECKING:
    import torch


class StepDriver:
    """The driver of one worker role. Faults become failed loads and absent saves. Each output obeys
    the rules of `WorkerOutput` (`kvferry.contract.promises`), whatever the role reports; one
    without a report is `EMPTY_OUTPUT` itself.

    An `Exception` of a hook is counted (`hook_failed`, `hook_failed_<hook>`) and logged now and
    then; `KeyboardInterrupt` and `SystemExit` pass. What else happens, by hook:
    - `begin_step`, `start_load`: every block that the plan was to fill is reported as invalid, its
      async loads as failed. Nothing more is loaded or saved in this step.
    - `wait_for_layer_load`: the same blocks are reported as invalid. Nothing is saved, since what
      is computed from them is wrong. The role still reports the end of its async loads.
    - `save_layer`, `save`: nothing more is saved in this step; loads are not affected.
    - `collect`: the blocks of the step's loads are reported as invalid, because the lost report may
      have named them. If the role still knows which async loads and saves ended, it reports them in
      a later step.

    Runs in: worker, on the model runner's thread.

    Attributes:
        role: the worker role. Registration of tensors is between it and the host: a layout that it
            cannot serve is refused at start.
        layerwise: layer hooks for the host to call around each attention layer of the open step;
            None if the role has none.
        output: the report of the last step, even if its forward raised; empty from `begin` until
            `collect`.
    """

    def __init__(
        self, role: WorkerRole, observer: Observer | None = None, *, strict: bool = False
    ) -> None:
        """Drive `role`.

        Args:
            role: a bare role.
            observer: receives `hook_failed...` and `contract_violation` counts.
            strict: also raise what the role raises, and ContractError for a broken rule: for tests.
        """
        self.role = role
        self.layerwise: SupportsLayerwise | None = None
        if isinstance(role, SupportsLayerwise):
            self._layers, self.layerwise = role, self
        self.output: WorkerOutput = EMPTY_OUTPUT
        self._faults = HookFaults(type(role).__name__, observer or Observer(), strict=strict)
        self._reports = role.rules(self._faults)
        self._plan: Plan | None = None  # the role's own, of the open step
        self._has_tokens = True
        # Outside of a step; in one, by a fault or because it was done.
        self._loads_stopped = self._saves_stopped = True

    @contextmanager
    def step(self, plan: Plan, finished_request_ids: Collection[str]) -> Iterator[StepDriver]:
        """Run a step around its forward: `with driver.step(plan, finished): forward()`. Yields this
        driver, whose `output` is set when the block is left.

        Args:
            plan: what the scheduler role's guard built for this step.
            finished_request_ids: every request that ended since the last step.
        """
        if self._plan is not None:
            self._refuse()
        # A Ctrl-C may come anywhere, and the next step must find this one ended.
        try:
            self.begin(plan)
            self.start_load()
            try:
                yield self
                self.save()
            finally:
                self.finish(finished_request_ids)
        finally:
            if self._plan is not None:
                self.end()

    def no_forward(self, plan: Plan, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Run a step without tokens. It loads, saves and reports, too: an engine that only waits
        for the cache has no others."""
        if self._plan is not None:
            self._refuse()
        try:
            self.begin(plan, has_tokens=False)
            self.start_load()
            return self.finish(finished_request_ids)
        finally:
            if self._plan is not None:
                self.end()

    # The parts of a step, for hosts that cannot wrap the forward in a `with` block.

    def begin(self, plan: Plan, *, has_tokens: bool = True) -> None:
        """Begin a step.

        Raises:
            ContractError: the last step was not ended.
        """
        if self._plan is not None:
            self._refuse()
        self._has_tokens, self.output = has_tokens, EMPTY_OUTPUT
        self._loads_stopped = self._saves_stopped = not self._reports.begin(plan)
        if isinstance(plan, RepairedPlan):
            # The engine computes from blocks that were never filled.
            self._saves_stopped |= bool(plan.lost_block_ids)
            plan = plan.plan
        self._plan = plan
        if not self._loads_stopped:
            self._start(self.role.begin_step, plan)

    def start_load(self) -> None:
        """Start the plan's loads, right after `begin` or later in the step.

        Raises:
            ContractError: no step is open.
        """
        self._open_plan("loads start")
        if not self._loads_stopped:
            self._start(self.role.start_load)

    def _start(self, hook: Callable[..., None], *args: object) -> None:
        then = "this step loads and saves nothing"
        try:
            has_started = self._faults.run(hook, *args, then=then)
        except BaseException:
            self.end()
            raise
        if not has_started:
            self._loads_stopped = self._saves_stopped = True
            self._reports.fail(self._open_plan(then))

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._loads_stopped:
            return
        hook, then = self._layers.wait_for_layer_load, "the loads of this step are failed"
        if not self._faults.run(hook, layer_name, then=then):
            self._loads_stopped = self._saves_stopped = True
            self._reports.fail_blocks(self._open_plan("a layer"))

    def save_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        if not self._saves_stopped:
            hook, then = self._layers.save_layer, "this step saves nothing more"
            has_saved = self._faults.run(hook, layer_name, kv_layer, attn_metadata, then=then)
            self._saves_stopped = not has_saved

    def save(self) -> None:
        """Save after the forward, once. Do not call it if the forward failed.

        Raises:
            ContractError: no step is open.
        """
        self._open_plan("a save")
        if not self._saves_stopped:
            self._saves_stopped = True
            self._faults.run(self.role.save, then="this step saves nothing")

    def finish(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Call `collect`, then `end` in any case."""
        try:
            return self.collect(finished_request_ids)
        finally:
            if self._plan is not None:
                self.end()

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        """Return the report of the step, and keep it as `output`. In a step without tokens, save
        before, and wait at most `IDLE_WAIT_SECONDS` for something to report.

        Raises:
            ContractError: no step is open.
        """
        plan = self._open_plan("a report")
        if not self._has_tokens:
            self.save()
            then = "the step goes on without waiting"
            self._faults.run(self.role.wait, IDLE_WAIT_SECONDS, then=then)
        if self._reports.has_failed:
            self._note_failed_loads()
        try:
            output = self.role.collect(finished_request_ids)
        except Exception:
            self._faults.fault("collect", "the loads of this step are failed")
            self._reports.fail_blocks(plan)
            self._note_failed_loads()
            output = EMPTY_OUTPUT
        self.output = self._reports.admit(output, finished_request_ids, plan)
        return self.output

    def _note_failed_loads(self) -> None:
        then = "what is computed next on loads that failed may be saved"
        self._faults.run(self.role.note_failed_loads, then=then)

    def end(self) -> None:
        """End the step, even if `collect` was not called.

        Raises:
            ContractError: no step is open.
        """
        self._open_plan("an end")
        self._plan = None
        self._loads_stopped = self._saves_stopped = True
        self._faults.run(self.role.end_step, then="the step is over nevertheless")

    def _refuse(self) -> None:
        raise ContractError(
            "a step begins while the last one is open: call finish() first, or leave its `with` "
            "block"
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due, and the role has nothing to do without a plan. While False, the
        host must not skip steps."""
        try:
            return self._reports.is_idle and self.role.is_idle
        except Exception:
            self._faults.fault("is_idle", "the role is called in every step")
            return False

    def close(self) -> None:
        """Close the role."""
        self._faults.run(self.role.close, then="something may be left open")

    def _open_plan(self, what: str) -> Plan:
        if self._plan is None:
            raise ContractError(f"{what} outside of a step: it was not begun, call begin() first")
        return self._plan
