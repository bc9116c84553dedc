"""Why tokens are no hit."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.contract.messages import LookupMiss
from kvferry.types import ExtraKeys

_REASONS = frozenset(LookupMiss)


class Miss(NamedTuple):
    """Why a hit is not longer, or a chunk is not there: the reason, and details in words."""

    reason: LookupMiss
    why: str = ""
    kind: str = ""
    """The `FaultKind`, if a store is at fault."""


def refused(extra: ExtraKeys) -> Miss:
    """Return why a request must not be cached. A reason that is none of ours, as an engine of one's
    own may give it, goes into the words."""
    if extra.reason in _REASONS:
        return Miss(LookupMiss(extra.reason), extra.why)
    return Miss(LookupMiss.NOT_CACHEABLE, f"{extra.reason} {extra.why}".strip())


ABSENT, NOT_LOADING = Miss(LookupMiss.ABSENT), Miss(LookupMiss.NOT_LOADING)
