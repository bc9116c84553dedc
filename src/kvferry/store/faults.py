"""The boundary of a store: an error of any operation ends here, as an answer, a count and a line.

`FileStore` guards its operations, `RemoteStore` every call of its client, `open_one` the opening of
any store, and a tier its thread. So no error leaves its operation, also an unexpected one.
The `Health` of a tier says when its store is asked again.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from kvferry import network
from kvferry.errors import ContractError, Fault, FaultKind, KVError, StoreError
from kvferry.filesystem import why_refused
from kvferry.observe import Observer
from kvferry.store.base import NO_DEADLINE, Put

T = TypeVar("T")

logger = logging.getLogger(__name__)

_LOG_EVERY_SECONDS = 60.0
_MAX_REASON = 200


class Faults:
    """The faults of one store. Thread-safe.

    Args:
        name: the store in log lines, without a credential.
        is_of_client: whether a client of a server is guarded. Whatever it raises besides StoreError
            is a BUG, and shown as its type and place in the code: the text may hold a credential.
    """

    def __init__(
        self,
        name: str,
        observer: Observer,
        clock: Callable[[], float],
        *,
        is_of_client: bool = False,
    ) -> None:
        self._name = name
        self.observer = observer
        self.clock = clock
        self._is_of_client = is_of_client
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, object], float] = {}

    @contextmanager
    def guard(
        self,
        what: str,
        said: str = "",
        *,
        passes: type[Exception] | tuple[type[Exception], ...] = KVError,
        is_logged: bool = True,
    ) -> Iterator[None]:
        """Turn every error of the block into a StoreError.

        Args:
            what: name of the operation in counts.
            said: what the message says before the reason; empty: that the operation failed.
            passes: errors that the block raises on purpose; they pass unchanged and uncounted.
            is_logged: False if the caller shows the StoreError to people.
        """
        try:
            yield
        except passes:
            raise
        except Exception as error:
            raise self._translate(what, said, error, is_logged=is_logged) from error

    def write_failed(self, error: Exception) -> Put:
        """Count and log a failed write, and return its answer."""
        return Put.failed(self._translate("put", "", error, is_logged=True).fault)

    def does_not_end(self, what: str, said: str) -> Fault:
        """Count and log a call that does not end, and return the fault that it is."""
        self.observer.count(f"store_{what}_failed")
        fault = Fault(FaultKind.BUG, f"{said} does not end")
        if self._may_log(what, "hangs"):
            logger.warning("store %s: %s; kvferry works without it", self._name, fault)
        return fault

    def _translate(self, what: str, said: str, error: Exception, *, is_logged: bool) -> StoreError:
        """Count and log an error, and return it as callers see it. Every foreign error of a store
        becomes one of ours here, and nowhere else."""
        reason = reason_of(error, shows_text=not self._is_of_client)
        kind = FaultKind.BUG if self._is_of_client else fault_kind(error)
        said = said or f"{'write' if what == 'put' else what} failed"
        is_full = what == "put" and kind is FaultKind.FULL
        self.observer.count("store_put_no_space" if is_full else f"store_{what}_failed")
        number = error.errno if isinstance(error, OSError) else None
        if is_logged and self._may_log(what, number or type(error)):
            logger.warning("store %s: %s: %s; kvferry works without it", self._name, said, reason)
            logger.debug("store %s: %s", self._name, said, exc_info=error)
        return StoreError(kind, f"{self._name}: {said}: {reason}")

    def _may_log(self, what: str, kind: object) -> bool:
        """Whether a line may be logged now: at most one a minute for each operation and kind of
        error."""
        now = self.clock()
        with self._lock:
            logged_at = self._logged.get((what, kind), -_LOG_EVERY_SECONDS)
            if now - logged_at < _LOG_EVERY_SECONDS:
                return False
            self._logged[what, kind] = now
            return True


class Calls:
    """The calls under way of code that a store's author wrote: of the client of one store, and of
    what opens it. Known from any thread, also before there is a store, so that one that does not
    end can be named. Memory only."""

    def __init__(self) -> None:
        # By call: class and method, its name in counts, and when it should have ended.
        self._begun: dict[object, tuple[str, str, float]] = {}

    @contextmanager
    def begun(self, said: str, what: str, until: float) -> Iterator[None]:
        """Context of a call. `until` is in monotonic seconds."""
        call = object()
        self._begun[call] = said, what, until
        try:
            yield
        finally:
            self._begun.pop(call, None)

    def names(self) -> list[str]:
        """Class and method of each call that is under way."""
        return [said for said, *_ in tuple(self._begun.values())]

    def take_late(self, now: float) -> list[tuple[str, str]]:
        """Return class and method, and the name in counts, of the calls that should have ended
        before `now`: each call once."""
        if not self._begun:
            return []
        late = [each for each in tuple(self._begun.items()) if each[1][2] < now]
        return [found[:2] for call, found in late if self._begun.pop(call, None) is not None]


class Guard:
    """The boundary of a client: what it raises besides StoreError is named by class and method, and
    each call is known while it is under way.

    Args:
        seconds: how long a call without a deadline may take.
    """

    def __init__(self, client: object, faults: Faults, calls: Calls, seconds: float) -> None:
        self._name = type(client).__name__
        self._faults = faults
        self._calls = calls
        self._seconds = seconds

    @contextmanager
    def __call__(self, method: str, deadline: float = NO_DEADLINE) -> Iterator[None]:
        said, what = f"{self._name}.{method}", f"client_{method}"
        until = self._faults.clock() + self._seconds if deadline == NO_DEADLINE else deadline
        guard = self._faults.guard(what, f"{said} failed", passes=StoreError)
        with self._calls.begun(said, what, until), guard:
            yield


def checked(is_answer: bool, answer: T) -> T:
    """Return an answer, if it is one; else raise ContractError."""
    if not is_answer:
        shown = type(answer).__name__
        if isinstance(answer, Sized) and not isinstance(answer, str | bytes):
            shown += f" of {len(answer)}"
        raise ContractError(f"it returned a {shown}, which is no answer to it")
    return answer


def is_size(size: object) -> bool:
    return type(size) is int and size >= 0


def fault_kind(error: BaseException) -> FaultKind:
    """What an error of a store means to its operator: BUG for an unexpected one."""
    return FaultKind.REFUSED if isinstance(error, sqlite3.Error) else network.fault_kind(error)


def reason_of(error: Exception, *, shows_text: bool = False) -> str:
    """Return one line about an error. Of an unexpected one, it has the type and the place in
    the code; its text may hold a credential."""
    if isinstance(error, PermissionError) and error.filename:
        return f"{error.strerror}: {why_refused(str(error.filename))}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KVError):  # a text of ours, or of a contract's other side
        return str(error)
    kind = type(error).__name__
    if shows_text or isinstance(error, sqlite3.Error):
        return " ".join(f"{kind}: {error}".removesuffix(": ").split())[:_MAX_REASON]
    return f"{kind} ({_place_of(error)})"


def _place_of(error: Exception) -> str:
    """Where in the code an error was raised: file and line."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "at an unknown place"
    file = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
    return f"{file}, line {trace.tb_lineno}"
