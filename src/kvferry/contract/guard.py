"""The guard at the host boundary: a fault of a role becomes a miss, never a fault of the engine.

`GuardedScheduler` and `GuardedWorker` wrap the two roles and are roles themselves. An `Exception`
of a hook is counted (`hook_failed`, `hook_failed_<hook>`), logged now and then, and answered by
what is safe for that hook. `KeyboardInterrupt` and `SystemExit` pass.

What is safe? Tokens that were promised to the host and will not be brought must reach it as a
failed load. A scheduler role that faults between promise and plan is repaired by its guard with a
`RepairedPlan`, which the guard of every worker role takes apart: wrap both roles or neither.

Construction and registration are not guarded: options or a layout that cannot be used are refused
loudly at start-up, when nothing has been promised yet.
"""

from __future__ import annotations

from kvferry.contract.faults import RepairedPlan
from kvferry.contract.guard_scheduler import ASK_AGAIN_SECONDS, GuardedScheduler
from kvferry.contract.guard_worker import GuardedWorker
from kvferry.contract.promises import OVERDUE_SECONDS

__all__ = [
    "ASK_AGAIN_SECONDS",
    "OVERDUE_SECONDS",
    "GuardedScheduler",
    "GuardedWorker",
    "RepairedPlan",
]
