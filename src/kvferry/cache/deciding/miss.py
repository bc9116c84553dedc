"""Why tokens are no hit."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.contract.messages import LookupMiss


class Miss(NamedTuple):
    """Why a hit is not longer, or a chunk is not there: the reason, and details in words."""

    reason: LookupMiss
    why: str = ""
    kind: str = ""
    """The `FaultKind`, if a store is at fault."""


ABSENT, NOT_LOADING = Miss(LookupMiss.ABSENT), Miss(LookupMiss.NOT_LOADING)
