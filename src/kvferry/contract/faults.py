"""The parts that both guards use: counts and logs of faults, and the plan that carries a repair."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvferry.contract.messages import Plan
from kvferry.observe import Observer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RepairedPlan(Plan, frozen=True, kw_only=True):
    """A plan, and the promises to the host that the role may not know of.

    Attributes:
        plan: what the role built, or its empty plan.
        lost_block_ids: blocks that the host takes for loaded and that may stay unfilled.
        lost_request_ids: requests that wait for an async load which may never have been planned,
            or whose end was not reported in time.
        freed_request_ids: ended requests whose blocks were freed, whatever the role answered: a
            delayed free reported for one of them kills the host.
        promised_block_ids: every block that loads of this plan may fill; None: not checked. Set
            after the first `build_plan` that failed: the role may still plan its loads later, when
            their blocks have other owners.
        promised_request_ids: the async loads among them.
        overdue_sending: ended requests whose delayed free was not reported in time.
    """

    plan: Plan
    lost_block_ids: frozenset[int] = frozenset()
    lost_request_ids: frozenset[str] = frozenset()
    freed_request_ids: frozenset[str] = frozenset()
    overdue_sending: frozenset[str] = frozenset()
    promised_block_ids: frozenset[int] | None = None
    promised_request_ids: frozenset[str] = frozenset()


class FaultLog:
    """Counts every fault of one role, and logs its 1st, 10th, 100th, ... occurrence."""

    def __init__(self, role: str, observer: Observer) -> None:
        self._role = role
        self._observer = observer
        self._seen: dict[str, int] = {}

    def call(self, hook: Callable[..., T], *args: object, otherwise: T, then: str) -> T:
        """What `hook` returns; if it raises, `otherwise`, and the log says what happens `then`."""
        try:
            return hook(*args)
        except Exception:
            self.fault(getattr(hook, "__name__", "unnamed"), then)
            return otherwise

    def fault(self, hook: str, consequence: str) -> None:
        """A hook raised. Called in an `except` block: the log line carries the traceback."""
        self._observer.count("hook_failed")
        self._observer.count(f"hook_failed_{hook}")
        if number := self._note(hook):
            logger.exception(  # noqa: LOG004 - every caller is an exception handler
                "%s.%s raised (%d so far): %s", self._role, hook, number, consequence
            )

    def violation(self, rule: str, message: str) -> None:
        """The role answered something that the contract forbids."""
        self._observer.count("contract_violation")
        if number := self._note(rule):
            logger.warning(
                "%s breaks its contract (%s, %d so far): %s", self._role, rule, number, message
            )

    def _note(self, name: str) -> int:
        """How often `name` happened if this time is worth a log line, else 0."""
        number = self._seen[name] = self._seen.get(name, 0) + 1
        return number if number == 10 ** (len(str(number)) - 1) else 0
