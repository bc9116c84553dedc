"""Faults of code that must not fail its host, and broken rules: counted, logged now and then."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from kvferry.errors import ContractError
from kvferry.observe import Observer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HookFaults:
    """Counts the faults of one role, or of other code that must not fail its host; logs the 1st,
    10th, 100th, ... of each kind. With `strict`, for tests, it raises them as well."""

    def __init__(self, role: str, observer: Observer, *, strict: bool = False) -> None:
        self._role = role
        self._observer = observer
        self._strict = strict
        self._seen: dict[str, int] = {}

    def call(self, hook: Callable[..., T], *args: object, otherwise: T, then: str) -> T:
        """Call `hook`. If it raises, log what happens `then`, and return `otherwise`."""
        try:
            return hook(*args)
        except Exception:
            self.fault(getattr(hook, "__name__", "unnamed"), then)
            return otherwise

    def run(self, hook: Callable[..., None], *args: object, then: str) -> bool:
        """Call `hook`. False if it raised; then log what happens `then`."""
        try:
            hook(*args)
        except Exception:
            self.fault(getattr(hook, "__name__", "unnamed"), then)
            return False
        return True

    def fault(self, hook: str, consequence: str) -> None:
        """A hook raised. Called in an `except` block: the log line carries the traceback."""
        self._observer.count("hook_failed")
        self._observer.count(f"hook_failed_{hook}")
        if number := self._note(hook):
            logger.exception(  # noqa: LOG004 - every caller is an exception handler
                "%s.%s raised (%d so far): %s", self._role, hook, number, consequence
            )
        if self._strict:
            raise  # noqa: PLE0704 - likewise

    def violation(self, rule: str, message: str) -> None:
        """The role answered something that the contract forbids. Raises ContractError if strict."""
        self._observer.count("contract_violation")
        if number := self._note(rule):
            logger.warning(
                "%s breaks its contract (%s, %d so far): %s", self._role, rule, number, message
            )
        if self._strict:
            raise ContractError(message)

    def _note(self, name: str) -> int:
        """Count `name`. Return how often it happened if this time is worth a log line, else 0."""
        number = self._seen[name] = self._seen.get(name, 0) + 1
        return number if number == 10 ** (len(str(number)) - 1) else 0
