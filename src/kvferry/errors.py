"""Every error kvferry raises on purpose, in one tree under `KVError`.

A cache miss is never an error: it is `None`, a smaller count or a `MissReason`. An error stands for
misuse (configuration, contract), a machine that refuses (store, transfer), or bytes that are not
what they claim to be. Messages say what happened, which two values disagree, and what to do.
"""

from __future__ import annotations


class KVError(Exception):
    """Base of all errors of this package."""


class ConfigError(KVError, ValueError):
    """An option, URL, path or model directory that cannot be used as given."""


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
    """A store could not do what was asked. An absent key is no error."""


class TransferError(KVError):
    """Bytes could not be moved between memory, ranks or peers."""


class RankError(KVError):
    """A process of a tensor-parallel engine died, failed or does not answer."""
