"""What a host must keep to, checked by `GuardedScheduler`.

A cache believes its host: KV that a step says is computed is stored, and served to every engine
that shares the store. A wrong number of tokens is wrong KV for all of them, without an error. So
what a broken rule makes doubtful is refused: the role does not see that request in its steps, until
it gets other blocks, and stores nothing of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.contract.faults import HookFaults
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerOutput
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
        table: its blocks when it got them, if it has one table.
        in_blocks: up to this token, its blocks were looked at since it got them.
        is_refused: whether its blocks may hold something else than the host says.
    """

    promise: tuple[int, int] | None = None
    num_computed: int | None = None
    is_new: bool = False
    start: int = -1
    table: Sequence[int] = ()
    in_blocks: int = 0
    is_refused: bool = False


class CheckedStep(NamedTuple):
    """A step without the requests whose blocks are in doubt."""

    scheduled: Sequence[ScheduledRequest]
    preempted_request_ids: Collection[str]
    finished_request_ids: Collection[str]


class HostRules:
    """The checks. Each broken rule is a `contract_violation` of the host. Runs in: scheduler."""

    def __init__(self, faults: HookFaults, block_size: int | None) -> None:
        self._faults = faults
        self._block_size = block_size
        self._requests: dict[str, _Shown] = {}
        self._last_step: StepView | None = None
        self._has_output = True  # since the last plan
        self._is_second = False  # the step that is looked at has tokens of the last one

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
            shown.num_computed = local + min(num_external_tokens, promised)
            shown.is_refused = False
        shown.promise, shown.is_new, shown.in_blocks = None, True, 0
        shown.table = block_ids[0] if len(block_ids) == 1 else ()

    def build_plan(self, step: StepView) -> StepView | None:
        """Return the step as the role may see it. None: it is a second plan for what the last one
        had, whose loads and saves may be done, or lost."""
        if step is self._last_step:
            self._faults.violation("build_plan", "the host builds a second plan for one step")
            return None
        for name in step.preempted_request_ids:
            shown = self._requests.get(name)
            if shown is not None and not shown.is_new:  # else it has come back already
                shown.num_computed = None
        requests, is_sound = self._requests, True
        for item in step.scheduled:
            start = item.num_computed_tokens
            stop = start + item.num_scheduled_tokens
            shown = requests.get(item.request.request_id)
            # The common step, in few words: a host may run many requests.
            if (
                shown is None
                or shown.num_computed is None
                or not shown.start < start <= shown.num_computed
                or shown.is_refused
                or stop > shown.in_blocks
            ):
                is_sound &= self._is_sound(item, stop)
                shown = requests[item.request.request_id]
            shown.num_computed, shown.start, shown.is_new = stop, start, False
        self._last_step, self._has_output = step, False
        if is_sound:
            return step
        is_second, self._is_second = self._is_second, False
        if is_second:
            return None
        scheduled = [
            item for item in step.scheduled if not requests[item.request.request_id].is_refused
        ]
        return CheckedStep(scheduled, step.preempted_request_ids, step.finished_request_ids)

    def _is_sound(self, scheduled: ScheduledRequest, stop: int) -> bool:
        """Whether the role may see a request in a step. Says what is wrong, if something is."""
        name, start = scheduled.request.request_id, scheduled.num_computed_tokens
        shown = self._shown(name, "scheduled")
        if shown.num_computed is None:
            _, promised = shown.promise or (0, 0)
            self._faults.violation(
                "update_after_alloc",
                f"the host schedules {name!r} without update_after_alloc, which says where its "
                f"blocks are: {promised} tokens were promised for them",
            )
            shown.is_refused = True
        elif start > shown.num_computed:
            self._faults.violation(
                "num_computed_tokens",
                f"the host says that {start} tokens of {name!r} are computed: {shown.num_computed} "
                "were local, loaded or scheduled",
            )
            shown.is_refused = True
        elif start == shown.start < stop and not shown.is_new and not self._has_output:
            self._faults.violation(
                "build_plan",
                f"the host builds a second plan for tokens [{start}, {stop}) of {name!r}: no "
                "output came since the first",
            )
            self._is_second = True
        self._check_table(shown, name, scheduled.block_ids, start, stop)
        return not (shown.is_refused or self._is_second)

    def _check_table(
        self, shown: _Shown, name: str, block_ids: BlockTable, start: int, stop: int
    ) -> None:
        """The null block may stand where a window has passed, never where tokens are computed."""
        size = self._block_size
        if size is None or len(block_ids) != 1:
            shown.in_blocks = _UNKNOWN
            return
        end = -(-stop // size)
        shown.in_blocks = end * size
        if start < stop and NULL_BLOCK in block_ids[0][start // size : end]:
            shown.is_refused = True
            self._faults.violation(
                "null_block",
                f"the host computes tokens [{start}, {stop}) of {name!r} in block {NULL_BLOCK}, "
                "which holds no KV: start to count blocks at 1",
            )

    def update_output(self, output: WorkerOutput) -> None:
        """A load that failed lowers what its requests may count as computed."""
        self._has_output = True
        if output is EMPTY_OUTPUT:
            return
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
