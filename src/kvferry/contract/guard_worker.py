"""The guard at the host boundary, for the worker role. See `guard_scheduler` for what both do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry.contract.asynchronous import AsyncOwedReports
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, RepairedPlan, WorkerOutput
from kvferry.contract.rules import HookFaults, OwedReports
from kvferry.contract.worker import SupportsLayerwise, WorkerRole
from kvferry.observe import Observer

if TYPE_CHECKING:
    import torch


class GuardedWorker(WorkerRole):
    """A worker role whose faults become failed loads and absent saves.

    When a hook raises:
    - `begin_step`, `start_load`: every block that the plan was to fill is reported as invalid, its
      async loads as failed. Nothing more is loaded or saved in this step.
    - `wait_for_layer_load`: the same blocks are reported as invalid. Nothing is saved, since what
      is computed from them is wrong. The role still reports the end of its async loads.
    - `save_layer`, `save`: nothing more is saved in this step; loads are not affected.
    - `collect`: the blocks of the step's loads are reported as invalid, because the lost report may
      have named them. If the role still knows which async loads and saves ended, it reports them in
      a later step.

    The guard has layer hooks if, and only if, the wrapped role has them.

    Runs in: worker.
    """

    # Set per instance if the role has them, so that `SupportsLayerwise` holds for the guard too.
    wait_for_layer_load: Callable[[str], None]
    save_layer: Callable[[str, torch.Tensor, Any], None]

    def __init__(self, role: WorkerRole, observer: Observer | None = None) -> None:
        """Wrap `role`; `observer` receives `hook_failed...` and `contract_violation` counts."""
        self._role = role
        self._faults = HookFaults(type(role).__name__, observer or Observer())
        self._plan = Plan()
        self._loads_stopped = False  # in this step
        self._saves_stopped = False  # in this step
        self.is_asynchronous = role.is_asynchronous
        self._owed = OwedReports()
        if role.is_asynchronous:
            self._owed = AsyncOwedReports(role, self._faults)
        if isinstance(role, SupportsLayerwise):
            self.wait_for_layer_load = partial(self._wait_for_layer_load, role)
            self.save_layer = partial(self._save_layer, role)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Not guarded: a layout that cannot be served is refused at start-up."""
        self._role.register_kv_caches(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Not guarded: on an error the engine must keep its memory, as copies may be under way."""
        self._role.unregister_kv_caches()

    def planned_blocks(self, plan: Plan) -> frozenset[int]:
        lost: frozenset[int] = frozenset()
        if isinstance(plan, RepairedPlan):
            lost = plan.lost_block_ids
            plan = plan.plan
        then = "failed loads of this plan may go unreported"
        hook = self._role.planned_blocks
        return lost | self._faults.call(hook, plan, otherwise=lost, then=then)

    def planned_recving(self, plan: Plan) -> frozenset[str] | None:
        return self._owed.planned_recving(plan)

    def begin_step(self, plan: Plan) -> None:
        self._plan = plan
        self._loads_stopped = self._saves_stopped = False
        if isinstance(plan, RepairedPlan):
            self._owed.repair(plan)
            # The engine computes from blocks that were never filled.
            self._saves_stopped = bool(plan.lost_block_ids)
            if not self._is_promised(plan):
                return
            plan = plan.plan
        try:
            self._role.begin_step(plan)
        except Exception:
            self._faults.fault("begin_step", "this step loads and saves nothing")
            self._give_up_step()

    def _is_promised(self, plan: RepairedPlan) -> bool:
        """Refuse a plan that fills blocks without a promise: they may belong to other requests.
        True if it is not refused, also where the promised blocks are not known."""
        promised = plan.promised_block_ids
        recving = self._owed.planned_recving(plan.plan) or frozenset()
        if promised is None or (
            self.planned_blocks(plan.plan) <= promised and recving <= plan.promised_request_ids
        ):
            return True
        self._faults.violation(
            "stale_load", "it loads blocks that only a plan which failed was to fill: refused"
        )
        self._loads_stopped = self._saves_stopped = True
        self._owed.refuse(plan)
        return False

    def start_load(self) -> None:
        if self._loads_stopped:
            return
        try:
            self._role.start_load()
        except Exception:
            self._faults.fault("start_load", "this step loads and saves nothing")
            self._give_up_step()

    def _give_up_step(self) -> None:
        self._loads_stopped = self._saves_stopped = True
        self._owed.invalid |= self.planned_blocks(self._plan)
        self._owed.give_up(self._plan)

    def _wait_for_layer_load(self, role: SupportsLayerwise, layer_name: str) -> None:
        if self._loads_stopped:
            return
        try:
            role.wait_for_layer_load(layer_name)
        except Exception:
            self._faults.fault("wait_for_layer_load", "the loads of this step are failed")
            self._loads_stopped = self._saves_stopped = True
            self._owed.invalid |= self.planned_blocks(self._plan)

    def _save_layer(
        self,
        role: SupportsLayerwise,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: object,
    ) -> None:
        if self._saves_stopped:
            return
        try:
            role.save_layer(layer_name, kv_layer, attn_metadata)
        except Exception:
            self._faults.fault("save_layer", "this step saves nothing")
            self._saves_stopped = True

    def save(self) -> None:
        if not self._saves_stopped:
            self._faults.call(self._role.save, otherwise=None, then="this step saves nothing")

    def wait(self, seconds: float) -> None:
        then = "the step goes on without waiting"
        self._faults.call(self._role.wait, seconds, otherwise=None, then=then)

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        try:
            output = self._role.collect(finished_request_ids)
            return self._owed.add_to(output) if self._owed else output
        except Exception:
            self._faults.fault("collect", "the loads of this step are failed")
            self._owed.invalid |= self.planned_blocks(self._plan)
            return self._owed.add_to(EMPTY_OUTPUT)

    @property
    def is_idle(self) -> bool:
        try:
            return not self._owed and self._role.is_idle
        except Exception:
            self._faults.fault("is_idle", "the role is called in every step")
            return False

    def end_step(self) -> None:
        self._faults.call(self._role.end_step, otherwise=None, then="the step is over nevertheless")

    def close(self) -> None:
        self._faults.call(self._role.close, otherwise=None, then="something may be left open")
