"""Worker roles that record the calls to them, and report what a test sets."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.contract.asynchronous import AsyncReports
from kvferry.contract.messages import EMPTY_OUTPUT, Plan, WorkerOutput
from kvferry.contract.worker import WorkerRole


class LoadPlan(Plan, frozen=True, kw_only=True):
    """A plan that names the blocks and requests that it loads."""

    blocks: frozenset[int] = frozenset()
    recving: frozenset[str] = frozenset()

    def filled_blocks(self) -> frozenset[int]:
        return self.blocks

    def started_loads(self) -> frozenset[str]:
        return self.recving


class RecordingWorker(WorkerRole):
    """A worker role that lists its hooks in `calls` in the order in which they are called. Each
    `collect` returns the next of `outputs`; the hooks in `fail` raise."""

    rules = AsyncReports

    def __init__(self, *outputs: object, fail: Collection[str] = ()) -> None:
        self.calls: list[str] = []
        self.finished: list[Collection[str]] = []
        self.plans: list[Plan] = []
        self.outputs = list(outputs)
        self.fail = set(fail)
        self.num_noted = 0  # of loads that failed

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise OSError(f"{name} failed")

    def register_kv_caches(self, kv_caches) -> None:
        self._note("register_kv_caches")

    def begin_step(self, plan: Plan) -> None:
        self.plans.append(plan)
        self._note("begin_step")

    def start_load(self) -> None:
        self._note("start_load")

    def save(self) -> None:
        self._note("save")

    def note_failed_loads(self) -> None:
        self.num_noted += 1

    def collect(self, finished_request_ids: Collection[str]) -> WorkerOutput:
        self.finished.append(finished_request_ids)
        self._note("collect")
        return self.outputs.pop(0) if self.outputs else EMPTY_OUTPUT

    def end_step(self) -> None:
        self._note("end_step")

    def close(self) -> None:
        self._note("close")


class RecordingLayerwiseWorker(RecordingWorker):
    """A recording worker that has layer hooks, too."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._note(f"wait {layer_name}")

    def save_layer(self, layer_name: str, kv_layer, attn_metadata) -> None:
        self._note(f"save {layer_name}")
