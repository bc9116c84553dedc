"""What both guards share: counting and logging of faults, and the plan that carries a repair."""

from __future__ import annotations

import logging

from kvferry.contract.messages import Plan
from kvferry.observe import Observer

logger = logging.getLogger(__name__)


class RepairedPlan(Plan, frozen=True, kw_only=True):
    """A plan, and beside it what the host was told that the role does not know of.

    Attributes:
        plan: what the role built, or its empty plan.
        lost_block_ids: blocks that the host takes for loaded and that nobody may fill.
        lost_request_ids: requests that wait for an async load which may never have been planned,
            or whose end nobody reported in time.
        freed_request_ids: ended requests whose blocks were freed, whatever the role meant to say: a
            delayed free reported for one of them kills the host.
        promised_block_ids: every block that loads of this plan may fill; None: not checked. Set
            once a plan could not be built: what the role meant to load then may still be in its
            mind, and the blocks have other owners now.
        promised_request_ids: the async loads among them.
        overdue_sending: ended requests whose delayed free nobody reported in time.
    """

    plan: Plan
    lost_block_ids: frozenset[int] = frozenset()
    lost_request_ids: frozenset[str] = frozenset()
    freed_request_ids: frozenset[str] = frozenset()
    overdue_sending: frozenset[str] = frozenset()
    promised_block_ids: frozenset[int] | None = None
    promised_request_ids: frozenset[str] = frozenset()


class Faults:
    """Counts every fault of one role, and logs its 1st, 10th, 100th, ... occurrence."""

    def __init__(self, role: object, observer: Observer) -> None:
        self._role = type(role).__name__
        self._observer = observer
        self._seen: dict[str, int] = {}

    def fault(self, hook: str, consequence: str) -> None:
        """A hook raised. Called in an `except` block: the log line carries the traceback."""
        self._observer.count("hook_failed")
        self._observer.count(f"hook_failed_{hook}")
        number = self._note(hook)
        if number:
            logger.exception(  # noqa: LOG004 - every caller is an exception handler
                "%s.%s raised (%d so far): %s", self._role, hook, number, consequence
            )

    def violation(self, rule: str, message: str, *values: object) -> None:
        """The role answered something that the contract forbids."""
        self._observer.count("contract_violation")
        number = self._note(rule)
        if number:
            logger.warning(
                "%s breaks its contract (%s, %d so far): %s",
                self._role,
                rule,
                number,
                message % values,
            )

    def _note(self, name: str) -> int:
        """How often `name` happened if this time is worth a log line, else 0."""
        number = self._seen[name] = self._seen.get(name, 0) + 1
        return number if number == 10 ** (len(str(number)) - 1) else 0
