"""Every error kvferry raises on purpose, in one tree under `KVError`.

A cache miss is never an error: it is `None`, a smaller count or a `ReadFault`. An error stands for
misuse (configuration, contract), a machine that refuses (store, transfer), or bytes that are not
what they claim to be. Messages say what happened, which two values disagree, and what to do.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class KVError(Exception):
    """Base of all errors of this package."""


class FaultKind(StrEnum):
    """Why a store did not do what was asked, by what an operator does about it: each
    kind has a row of its own in `kvferry.doctor.findings`. Programs decide by the kind, people read
    the text."""

    AWAY = "away"
    """Nothing answers there: no server, no mount, no network."""
    LATE = "late"
    """What is there gave no answer in time."""
    PROTOCOL = "protocol"
    """What is there speaks another protocol, TLS or release, or sends nonsense."""
    CLUSTER = "cluster"
    """A cluster that is asked as one server, the reverse, or one that is not whole."""
    LOGIN = "login"
    """It refuses user, password or key."""
    RIGHTS = "rights"
    """Its user may not do this."""
    READ_ONLY = "read_only"
    """It takes no changes, or none by this object."""
    REFUSED = "refused"
    """It answers, and fails or refuses for a reason of its own, which the text has."""
    FULL = "full"
    """It has no room, and makes none."""
    INDEXING = "indexing"
    """It takes values once its index is complete, or free."""
    UNLISTED = "unlisted"
    """It cannot say what it holds."""
    UNUSABLE = "unusable"
    """It cannot be used as it was given, or not for this."""
    CLOSED = "closed"
    """This process closed it, or is a fork of the one that opened it."""
    BUG = "bug"
    """The error was not expected, or a store or its client broke its contract."""


class Fault(NamedTuple):
    """Why a store did not do what was asked. Made where that is known, and handed on unchanged."""

    kind: FaultKind
    text: str
    """One line for people, without a credential. No program reads it."""

    def __str__(self) -> str:
        return self.text


class ConfigError(KVError, ValueError):
    """An option, URL, path or model directory that cannot be used as given. If a store said so, a
    `kind` tells what it said."""

    def __init__(self, text: str = "", kind: FaultKind = FaultKind.UNUSABLE) -> None:
        super().__init__(text)
        self.kind = kind

    @property
    def fault(self) -> Fault:
        return Fault(self.kind, str(self))


def install_hint(extra: str) -> str:
    """Say how to install an optional extra, for the message of a ConfigError. It names no package
    of an index: kvferry is on none, so a stranger's could bear its name."""
    return f"run pip install '.[{extra}]' in the clone of kvferry"


class StorePlaceError(ConfigError):
    """What stands where a store should be is none, or is refused to this user. People can mend that
    while an engine runs, so with several tiers only this one is left out until then."""


class ContractError(KVError):
    """A host or a connector broke a rule of the connector contract."""


class LayoutError(KVError):
    """A tensor whose shape, strides or dtype is not what its declared layout says."""


class TopologyError(KVError):
    """Ranks, heads or sizes that cannot be mapped onto each other."""


class StoreError(KVError):
    """A store could not do what was asked: the only error that a store raises once it is open. An
    absent key is no error.

    >>> StoreError(FaultKind.AWAY, "valkey server kv:6379: Connection refused").fault.kind
    <FaultKind.AWAY: 'away'>
    """

    def __init__(self, kind: FaultKind, text: str) -> None:
        super().__init__(kind, text)
        self.fault = Fault(FaultKind(kind), text)  # a store's author may give another word

    def __str__(self) -> str:
        return self.fault.text


class TransferError(KVError):
    """Bytes could not be moved between memory, ranks or peers."""


class RankError(KVError):
    """A process of a tensor-parallel engine died, failed or does not answer."""
