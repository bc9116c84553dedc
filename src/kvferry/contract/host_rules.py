"""What a host must keep to, checked for tests of an engine: see `strict` of `GuardedScheduler`.

A cache believes its host: KV that a step says is computed is stored, and served to every engine
that shares the store. A wrong number of tokens is wrong KV for all of them, without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.contract.messages import WorkerOutput
from kvferry.contract.rules import HookFaults
from kvferry.types import NULL_BLOCK, BlockTable, RequestView, ScheduledRequest, StepView

_UNKNOWN = 1 << 62
"""More tokens than any request has: the host did not look its prompt up."""


@dataclass(slots=True)
class _Shown:
    """What a host has shown of a request.

    Attributes:
        promise: what the last look-up was asked and answered: local tokens, and tokens beyond them;
            None once the host has taken or declined it.
        num_computed: most tokens whose KV can be in the blocks: local, loaded and scheduled ones;
            None while the request has no blocks.
        is_new: whether it got its blocks after the last plan.
        start: its first token in its last step.
        table: its blocks, if it has one table.
    """

    promise: tuple[int, int] | None = None
    num_computed: int | None = None
    is_new: bool = False
    start: int = -1
    table: tuple[int, ...] = ()


class HostRules:
    """The checks. Each broken rule is a `contract_violation` of the host. Runs in: scheduler."""

    def __init__(self, faults: HookFaults, block_size: int | None) -> None:
        self._faults = faults
        self._block_size = block_size
        self._requests: dict[str, _Shown] = {}
        self._last_step: object = None
        self._has_output = True  # since the last plan

    def on_new_request(self, request: RequestView) -> None:
        name = request.request_id
        if name in self._requests:
            self._faults.violation("on_new_request", f"the host shows {name!r} twice")
        self._requests[name] = _Shown()

    def lookup(self, request: RequestView, num_local_tokens: int) -> None:
        self._shown(request.request_id, "looked up").promise = (num_local_tokens, 0)

    def promised(self, request_id: str, num_tokens: int) -> None:
        """The look-up has promised so many tokens."""
        shown = self._shown(request_id, "looked up")
        local, _ = shown.promise or (0, 0)
        shown.promise = local, num_tokens

    def update_after_alloc(
        self, request: RequestView, block_ids: BlockTable, num_external_tokens: int
    ) -> None:
        name = request.request_id
        shown = self._shown(name, "given blocks")
        local, promised = shown.promise or (_UNKNOWN, 0)
        if num_external_tokens > promised:
            self._faults.violation(
                "update_after_alloc",
                f"the host takes {num_external_tokens} tokens for {name!r}: {promised} promised",
            )
        # Without a promise, this is the end of an async load, or the host did not look up.
        if shown.promise is not None or shown.num_computed is None:
            shown.num_computed = local + num_external_tokens
        shown.promise, shown.is_new = None, True
        shown.table = tuple(block_ids[0]) if len(block_ids) == 1 else ()

    def build_plan(self, step: StepView) -> None:
        if step is self._last_step:
            self._faults.violation("build_plan", "the host builds a second plan for one step")
        for name in step.preempted_request_ids:
            shown = self._requests.get(name)
            if shown is not None and not shown.is_new:  # else it has come back already
                shown.num_computed = None
        for scheduled in step.scheduled:
            self._scheduled(scheduled)
        self._last_step, self._has_output = step, False

    def _scheduled(self, scheduled: ScheduledRequest) -> None:
        name, start = scheduled.request.request_id, scheduled.num_computed_tokens
        shown = self._shown(name, "scheduled")
        stop = start + scheduled.num_scheduled_tokens
        if shown.num_computed is None:
            _, promised = shown.promise or (0, 0)
            self._faults.violation(
                "update_after_alloc",
                f"the host schedules {name!r} without update_after_alloc, which says where its "
                f"blocks are: {promised} tokens were promised for them",
            )
        elif start > shown.num_computed:
            self._faults.violation(
                "num_computed_tokens",
                f"the host says that {start} tokens of {name!r} are computed: {shown.num_computed} "
                "were local, loaded or scheduled",
            )
        elif start == shown.start and not shown.is_new and not self._has_output:
            self._faults.violation(
                "build_plan",
                f"the host builds a second plan for tokens [{start}, {stop}) of {name!r}: no "
                "output came since the first",
            )
        self._check_table(name, scheduled.block_ids, start, stop)
        shown.num_computed, shown.start, shown.is_new = stop, start, False
        shown.table = tuple(scheduled.block_ids[0]) if len(scheduled.block_ids) == 1 else ()

    def _check_table(self, name: str, block_ids: BlockTable, start: int, stop: int) -> None:
        """The null block may stand where a window has passed, never where tokens are computed."""
        size = self._block_size
        if size is None or len(block_ids) != 1 or start >= stop:
            return
        if NULL_BLOCK in block_ids[0][start // size : -(-stop // size)]:
            self._faults.violation(
                "null_block",
                f"the host computes tokens [{start}, {stop}) of {name!r} in block {NULL_BLOCK}, "
                "which holds no KV: start to count blocks at 1",
            )

    def update_output(self, output: WorkerOutput) -> None:
        """A load that failed lowers what its requests may count as computed."""
        self._has_output = True
        for name in output.failed_recving:
            if (shown := self._requests.get(name)) is not None:
                shown.num_computed = None
        size, bad = self._block_size, output.invalid_block_ids
        if size is None or not bad:
            return
        for shown in self._requests.values():
            first = next((i for i, block in enumerate(shown.table) if block in bad), None)
            if first is not None and shown.num_computed is not None:
                shown.num_computed = min(shown.num_computed, first * size)

    def request_finished(self, request: RequestView) -> None:
        self._shown(request.request_id, "finished")
        del self._requests[request.request_id]

    def _shown(self, name: str, what: str) -> _Shown:
        if name not in self._requests:
            self._faults.violation(
                "on_new_request",
                f"{name!r} is {what}: the host did not show it by on_new_request, or has ended it",
            )
            self._requests[name] = _Shown()
        return self._requests[name]
