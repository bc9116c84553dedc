"""A worker role that records the calls to it, and reports what the test sets."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole


class LoadPlan(Plan, frozen=True, kw_only=True):
    """A plan that says what it loads."""

    blocks: frozenset[int] = frozenset()
    recving: frozenset[str] = frozenset()


class RecordingWorker(WorkerRole):
    """`calls` is the order of hooks; `outputs` are handed out one per `collect`."""

    def __init__(self, *outputs: object, fail: Collection[str] = ()) -> None:
        self.calls: list[str] = []
        self.finished: list[Collection[str]] = []
        self.plans: list[Plan] = []
        self.outputs = list(outputs)
        self.fail = set(fail)

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise OSError(f"{name} failed")

    def register_kv_caches(self, kv_caches) -> None:
        self._note("register_kv_caches")

    def begin_step(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._note("begin_step")

    def planned_blocks(self, plan: Plan) -> frozenset[int]:
        return plan.blocks if isinstance(plan, LoadPlan) else frozenset()

    def planned_recving(self, plan: Plan) -> frozenset[str]:
        return plan.recving if isinstance(plan, LoadPlan) else frozenset()

    def start_load(self) -> None:
        self._note("start_load")

    def save(self) -> None:
        self._note("save")

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        self.finished.append(finished_request_ids)
        self._note("collect")
        return self.outputs.pop(0) if self.outputs else EMPTY_OUTPUT

    def end_step(self) -> None:
        self._note("end_step")

    def close(self) -> None:
        self._note("close")


class RecordingLayerwiseWorker(RecordingWorker):
    """The same with layer hooks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note(f"wait {layer_name}")

    def save_layer(self, layer_name: str, kv_layer, attn_metadata) -> None:
        self._note(f"save {layer_name}")
