"""Blocks that no request owns any more but a connector may still read or write."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class LentFor(Enum):
    """Which report gives the blocks back."""

    LOAD = "finished_recving"
    SAVE = "finished_sending"


class _Loan(NamedTuple):
    block_ids: list[int]
    overdue: float


class LentBlocks:
    """Who was lent what, until the connector reports that it is done.

    An overdue loan is not ended, since the connector might still write: it only stops counting as
    something to wait for. One request id may have a loan of each kind.
    """

    def __init__(self) -> None:
        self._loans: dict[tuple[str, LentFor], _Loan] = {}

    def lend(self, request_id: str, reason: LentFor, block_ids: list[int], overdue: float) -> None:
        """Note a loan; `overdue` in seconds of the owner's clock."""
        self._loans[request_id, reason] = _Loan(block_ids, overdue)

    def take_back(self, request_id: str, reason: LentFor) -> list[int] | None:
        """End a loan: its blocks, or None if there is none such."""
        loan = self._loans.pop((request_id, reason), None)
        return None if loan is None else loan.block_ids

    def is_awaited(self, now: float) -> bool:
        """True if blocks are lent that should come back soon."""
        return any(loan.overdue > now for loan in self._loans.values())

    def __contains__(self, request_id: str) -> bool:
        return any((request_id, reason) in self._loans for reason in LentFor)

    def request_ids(self, reason: LentFor) -> set[str]:
        return {request_id for request_id, kind in self._loans if kind is reason}

    def tables(self) -> Iterator[list[int]]:
        return (loan.block_ids for loan in self._loans.values())

    def num_blocks(self) -> int:
        return sum(len(block_ids) for block_ids in self.tables())
